"""Where a calibration measures more."""

from __future__ import annotations

from dataclasses import replace

from calibrated_cases import machine, mm, mm_s, relu

from dlperf.core.clock import Samples
from dlperf.core.machine import Kernel
from dlperf.core.trace import Op
from dlperf.predictors.kernel_fits import least_certain


def uneven() -> list[Kernel]:
    """Products that take twice as long as by the model or half, in turn."""
    sides = [(m, n, k) for m in (16, 64, 256) for n in (16, 64, 256) for k in (16, 64, 256)]
    return [
        Kernel(mm(*side), "gemm", 1, Samples(((0.4, 2.5)[index % 2] * mm_s(*side),)))
        for index, side in enumerate(sides)
    ]


def test_more_is_measured_of_the_kind_whose_points_miss_one_another() -> None:
    made = machine()
    kernels = tuple(kernel for kernel in made.kernels if kernel.family != "gemm")
    pool = {"products": (mm(100, 32, 48),), "elementwise": (relu(3000),)}
    assert least_certain(replace(made, kernels=(*kernels, *uneven())), 1, pool, 1) == {
        "products": [0]
    }


def test_more_is_measured_far_from_what_is_known() -> None:
    assert least_certain(machine(), 1, {"products": (mm(60, 60, 60), mm(1, 9000, 3))}, 1) == {
        "products": [1]
    }


def test_a_kind_without_points_comes_first() -> None:
    unknown = replace(mm(16, 16, 16), name="aten.bmm.default")
    pool = {
        "products": (mm(32, 32, 32),),
        "batched": (
            Op(
                unknown.name,
                tuple(
                    replace(spec, shape=(2, *spec.shape), strides=(256, *spec.strides))
                    for spec in unknown.inputs
                ),
            ),
        ),
    }
    assert least_certain(machine(), 1, pool, 1) == {"batched": [0]}
    assert least_certain(machine(), 1, pool, 9) == {"products": [0], "batched": [0]}


def test_what_no_curve_describes_is_not_asked_for() -> None:
    assert least_certain(machine(), 1, {"some": (Op("aten.no_such.default", ()),)}, 3) == {}
