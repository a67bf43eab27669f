"""Look-up of predictors by name. A predictor is one module, which this one imports."""

from __future__ import annotations

from dlperf.core.errors import DlperfError
from dlperf.core.machine import Machine
from dlperf.core.measurement import Measurement
from dlperf.predictors import (  # noqa: F401  (their import registers the predictors)
    calibrated,
    data_sheet,
    gemm_table,
    roofline,
    viebke,
)
from dlperf.predictors.base import PREDICTORS, Predictor
from dlperf.predictors.calibrated import Calibrated


def names() -> tuple[str, ...]:
    """Names of the predictors, sorted."""
    return tuple(sorted(PREDICTORS))


def get(
    name: str, point: Measurement | None = None, profiled_on: Machine | None = None
) -> Predictor:
    """The predictor called `name`, fitted to a measured `point` if it has a field of that name, or
    with kernels `profiled_on` another machine, where the `point` was measured then.

    Raises DlperfError that lists the known names, or those that take a point or a machine.
    """
    if name not in PREDICTORS:
        raise DlperfError(f"predictor {name!r} is unknown; known are {', '.join(names())}")
    if profiled_on is not None:
        if name != Calibrated.name:
            raise DlperfError(
                f"predictor {name!r} takes no kernels of another machine (--profiled-on);"
                f" {Calibrated.name} does"
            )
        return Calibrated(profiled_on, point)
    if point is None:
        return PREDICTORS[name]()
    takers = [one for one in names() if hasattr(PREDICTORS[one], "point")]
    if name not in takers:
        raise DlperfError(
            f"predictor {name!r} takes no measured point; those that do are {', '.join(takers)}"
        )
    return PREDICTORS[name](point=point)  # type: ignore[call-arg]


def evaluates_by_forward(name: str) -> bool:
    """Whether validation and tests take the forward pass of the training step, as the predictor's
    paper does.
    """
    return bool(getattr(PREDICTORS.get(name), "evaluates_by_forward", False))
