"""The curves that even a quick calibration has."""

from __future__ import annotations

import functools

from dlperf.core.trace import Op
from dlperf.microbench.worker import planned_groups
from dlperf.predictors.kernels.catalog import describe
from dlperf.predictors.kernels.sub_kernels import sub_kernels


@functools.cache
def quick_keys() -> frozenset[tuple[str, ...]]:
    return frozenset(
        found.variant
        for group in planned_groups("quick", ())
        for point in group.points
        if (found := describe(point.op)) is not None
    )


def assert_has_a_curve(op: Op) -> None:
    """Every part of the op is described, and a quick calibration samples its curve or one to fall
    back to; numbers are real ones.
    """
    for part in sub_kernels(op):
        found = describe(part)
        assert found is not None, f"{part.name} is not described"
        if not any(spec.dtype.startswith("complex") for spec in op.inputs):
            assert any(key in quick_keys() for key in (found.variant, *found.fallbacks)), (
                f"{part.signature}: no curve of {found.variant} in a quick calibration"
            )
