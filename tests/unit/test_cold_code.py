"""What the code of a step's operators costs for being out of the nearer caches: what all share, and
what convolutions share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from calibrated_cases import T, machine, relu, trace

from dlperf import Trace, predict
from dlperf.core.costs import CostKey
from dlperf.core.trace import Op
from dlperf.microbench.conv import backward_of, convolution

FIRST, NEXT, OF_CONVOLUTIONS, KERNEL = (
    CostKey("instruction_cache_pressure", of, amount)
    for of, amount in (
        ("first", 4),
        ("next", 4),
        ("aten.convolution", 48),
        ("convolution_kernel", 48),
    )
)
OTHERS = tuple(Op(f"mine.number_{number}.default", (T(16),), layer="act") for number in range(48))
"""As much code as the penalties of convolutions were measured after."""


def extra_s(
    step: Trace, costs: Mapping[CostKey, float], known: Mapping[CostKey, float]
) -> list[float]:
    """Seconds that each operator takes more with all of these costs than with the `known` ones."""
    warm, cold = (
        predict(step, machine(held), threads=1).ops["seconds"]
        for held in (known, {**known, **costs})
    )
    return (cold - warm).iloc[: len(step.ops)].tolist()


def small(name: str, phase: str = "forward") -> Op:
    return replace(relu(16, phase=phase), name=f"aten.{name}.default")


def convolved(side: int) -> Op:
    """A convolution of 4 channels to 4, of images of `side` x `side` to as large ones."""
    image = T(2, 4, side, side)
    return replace(convolution(2, 4, 4, (side, side), (3, 3), padding=1), outputs=(image,))


def test_a_steps_first_operator_finds_the_shared_code_as_cold_as_the_whole_step_leaves_it() -> None:
    """Each of four operators touches next to nothing, all have a footprint of 4. In inference the
    operator before the first one is the last one.
    """
    for inference, first_s in ((False, 5e-6 - 2e-6), (True, 0.0)):
        step = trace(*map(small, ("relu", "tanh", "sigmoid", "exp")), inference=inference)
        found = extra_s(step, {FIRST: 5e-6}, {NEXT: 2e-6})
        assert found == pytest.approx([first_s, 0.0, 0.0, 0.0], abs=1e-12)


def test_the_end_of_the_backward_pays_for_the_shared_code_once_more() -> None:
    step = trace(
        small("relu"),
        small("tanh"),
        small("tanh_backward", "backward"),
        small("threshold_backward", "backward"),
        small("mul_", "optimizer"),
        inference=False,
    )
    found = extra_s(step, {FIRST: 5e-6}, {NEXT: 2e-6})
    assert found == pytest.approx([3e-6, 0.0, 0.0, 3e-6, 0.0], abs=1e-12)
    alone = trace(small("threshold_backward", "backward"), *step.ops[:2], inference=False)
    assert extra_s(alone, {FIRST: 5e-6}, {NEXT: 2e-6}) == pytest.approx(
        [3e-6 + 3e-6, 0.0, 0.0], abs=1e-12
    )  # both


def test_each_shape_of_a_convolution_has_a_kernel_of_its_own() -> None:
    """The first convolution comes after 48 others; another shape, and the same once more, right
    after it.
    """
    one, another = convolved(4), convolved(6)
    step = trace(one, another, another, *OTHERS)
    n_others = len(OTHERS)
    known: dict[CostKey, float] = {OF_CONVOLUTIONS: 9e-6}
    assert extra_s(step, known, {}) == pytest.approx([9e-6, 0.0, 0.0] + n_others * [0.0], abs=1e-12)
    found = extra_s(step, {KERNEL: 4e-6}, known)
    # The code of all convolutions was measured with a kernel, too.
    assert found == pytest.approx([0.0, 4e-6, 0.0] + n_others * [0.0], abs=1e-12)


def test_a_convolutions_backward_shares_the_code_of_another_ones_forward() -> None:
    """Only the engine's call, of 10 of the 48, comes between them."""
    backward = replace(backward_of(convolved(6)), phase="backward")
    after = (replace(op, phase="backward") for op in OTHERS)
    step = trace(convolved(4), backward, *after, inference=False)
    known = {OF_CONVOLUTIONS: 9e-6}
    assert extra_s(step, known, {})[:2] == pytest.approx([9e-6, 0.0], abs=1e-12)
    assert extra_s(step, {KERNEL: 4e-6}, known)[:2] == pytest.approx([0.0, 4e-6], abs=1e-12)
