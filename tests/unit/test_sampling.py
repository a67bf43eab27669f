"""Where a calibration measures more."""

from __future__ import annotations

from dataclasses import replace

from calibrated_cases import machine, mm, mm_s

from dlperf.clock import Samples
from dlperf.machine import Kernel
from dlperf.predictors.sampling import where_curves_err
from dlperf.trace import Op


def uneven(bad_side: int) -> list[Kernel]:
    """Products by a law but for those with one side, which take twice as long or half every other time."""
    found = []
    for place, (m, n, k) in enumerate((m, n, k) for m in (16, 64, 256) for n in (16, 64, 256) for k in (16, 64, 256)):
        factor = (0.4, 2.5)[place % 2] if m == bad_side else 1.0
        found.append(Kernel(mm(m, n, k), "gemm", 1, Samples((factor * mm_s(m, n, k),))))
    return found


def test_more_is_measured_near_the_points_that_the_others_miss() -> None:
    made = machine()
    kernels = tuple(kernel for kernel in made.kernels if kernel.family != "gemm")
    for bad_side, wanted in ((16, 0), (256, 1)):
        pool = {"products": (mm(16, 32, 48), mm(256, 32, 48))}
        assert where_curves_err(replace(made, kernels=(*kernels, *uneven(bad_side))), 1, pool, 1) == {"products": [wanted]}


def test_a_kind_without_points_comes_first() -> None:
    unknown = replace(mm(16, 16, 16), name="aten.bmm.default")
    pool = {"products": (mm(32, 32, 32),), "batched": (Op(unknown.name, tuple(replace(spec, shape=(2, *spec.shape), strides=(256, *spec.strides))
                                                                              for spec in unknown.inputs)),)}  # fmt: skip
    assert where_curves_err(machine(), 1, pool, 1) == {"batched": [0]}
    assert where_curves_err(machine(), 1, pool, 9) == {"products": [0], "batched": [0]}


def test_what_no_curve_describes_is_not_asked_for() -> None:
    assert where_curves_err(machine(), 1, {"some": (Op("aten.no_such.default", ()),)}, 3) == {}
