"""What a predictor is: a name, and a price list for a trace on a machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from dlperf.core.errors import DlperfError
from dlperf.core.machine import Machine
from dlperf.core.measurement import Measurement
from dlperf.core.prediction import Prices
from dlperf.core.trace import Trace


class Predictor(Protocol):
    """Prices the work of a trace on a machine."""

    name: str

    def price(
        self, trace: Trace, machine: Machine, threads: int, malloc: str = "default"
    ) -> Prices:
        """The price list under a policy of malloc
        (:data:`dlperf.predictors.allocator.simulation.POLICIES`), which a predictor without page
        faults ignores.

        Raises DlperfError where the machine file lacks what the predictor lives on.
        """
        ...


_DESCRIPTIONS: dict[str, type[Predictor]] = {}


def register(cls: type[Predictor]) -> type[Predictor]:
    """Class decorator: make a predictor known under its name. A name taken twice is an error."""
    if cls.name in _DESCRIPTIONS:
        raise DlperfError(f"predictor {cls.name!r} is registered twice")
    _DESCRIPTIONS[cls.name] = cls
    return cls


def names() -> Iterable[str]:
    """The known predictors."""
    return tuple(sorted(_DESCRIPTIONS))


def get(name: str, point: Measurement | None = None) -> Predictor:
    """The predictor called `name`, resting on one measured `point` if it can: one that has a field
    of that name.

    Raises DlperfError that lists the known ones, or those that take a point.
    """
    if name not in _DESCRIPTIONS:
        raise DlperfError(f"predictor {name!r} is unknown; known are {', '.join(names())}")
    if point is None:
        return _DESCRIPTIONS[name]()
    if not _takes_point(_DESCRIPTIONS[name]):
        raise DlperfError(
            f"predictor {name!r} takes no measured point; those that do are"
            f" {', '.join(n for n in names() if _takes_point(_DESCRIPTIONS[n]))}"
        )
    return _DESCRIPTIONS[name](point=point)  # type: ignore[call-arg]


def evaluates_by_forward(name: str) -> bool:
    """Whether validation and tests take the training step's forward, as this predictor's authors
    have it, and no pass of their own.
    """
    return bool(getattr(_DESCRIPTIONS.get(name), "evaluates_by_forward", False))


def _takes_point(cls: type[Predictor]) -> bool:
    return "point" in getattr(cls, "__dataclass_fields__", ())
