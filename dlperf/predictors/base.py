"""Interface of a predictor: a name, and the priced items of a trace on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dlperf.core.errors import DlperfError
from dlperf.core.items import Item, Shares
from dlperf.core.machine import Machine
from dlperf.core.prediction import Prices
from dlperf.core.trace import Trace


class Predictor(Protocol):
    """Prices the work of a trace on a machine."""

    name: str

    def price(
        self, trace: Trace, machine: Machine, threads: int, malloc: str = "default"
    ) -> Prices:
        """Priced items under an allocator policy of :mod:`dlperf.predictors.allocator.policies`,
        which a predictor without page faults ignores.

        Raises DlperfError for a machine file that lacks what the predictor needs.
        """
        ...


PREDICTORS: dict[str, type[Predictor]] = {}
"""The predictors that were imported, by name; :mod:`dlperf.predictors.registry` imports all."""


def register(cls: type[Predictor]) -> type[Predictor]:
    """Class decorator that adds a predictor under its name. Raises DlperfError for a name taken."""
    if cls.name in PREDICTORS:
        raise DlperfError(f"predictor {cls.name!r} is registered twice")
    PREDICTORS[cls.name] = cls
    return cls


def op_items(
    trace: Trace,
    seconds: Sequence[float],
    bounds: Sequence[str],
    sources: Sequence[str],
    parts: Sequence[Shares] = (),
    needs: Sequence[Shares] = (),
    responses: Sequence[float | None] = (),
    between: Sequence[float] = (),
) -> list[Item]:
    """Items of a trace's ops, one for each layer that shares an op."""
    return [
        Item(
            layer,
            op.phase,
            share * seconds[index],
            bounds[index],
            sources[index],
            op=index,
            share=share,
            parts=parts[index] if parts else (),
            needs=needs[index] if needs else (),
            response=responses[index] if responses else None,
            response_between=between[index] if between else 0.0,
        )
        for index, op in enumerate(trace.ops)
        for layer, share in op.layer_shares
    ]
