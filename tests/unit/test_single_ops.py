"""Random single ops: what may be made, that torch can run it, and the arithmetic of their errors."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch
from calibrated_cases import PEAK_FLOPS_PER_S, mm_s, relu, relu_s
from calibrated_cases import machine as law_machine
from calibrated_cases import mm as law_mm
from torch.utils.flop_counter import FlopCounterMode

from dlperf.core.clock import Samples
from dlperf.core.errors import DlperfError
from dlperf.core.machine import Kernel
from dlperf.core.trace import Op, TensorSpec
from dlperf.microbench.operator_benchmark import build
from dlperf.predictors.kernel_cost_model import cost_model_of
from dlperf.studies.accuracy.random_ops import MAX_ELEMENTS, MAX_FLOP, log_uniform, size
from dlperf.studies.accuracy.single_ops import (
    PLAN,
    RandomOp,
    kernel_s,
    make_random_ops,
    op_groups,
    score_ops,
)

SEED = 20240229


def test_every_family_has_at_least_sixty_ops() -> None:
    counts = Counter(one.family for one in make_random_ops(SEED))
    assert set(counts) == {"gemm", "convolution forward", "convolution backward", "the rest"}
    assert min(counts.values()) >= 60
    for family, kinds in PLAN.items():
        assert counts[family] == sum(count for _, _, count in kinds)


def test_the_same_seed_draws_the_same_and_another_others() -> None:
    first = [one.op.signature for one in make_random_ops(SEED)]
    assert first == [one.op.signature for one in make_random_ops(SEED)]
    assert len(set(first)) == len(first)
    other = {one.op.signature for one in make_random_ops(SEED + 1)}
    assert len(other & set(first)) < 0.1 * len(first)


def test_what_a_machine_file_holds_is_not_drawn() -> None:
    first = make_random_ops(SEED)
    known = {one.op.signature for one in first[::2]}
    again = make_random_ops(SEED, known)
    assert not known & {one.op.signature for one in again}
    assert Counter(one.family for one in again) == Counter(one.family for one in first)


def test_sizes_are_log_uniform() -> None:
    random = np.random.default_rng(0)
    values = [log_uniform(random, 1, 4096) for _ in range(4000)]
    assert min(values) == 1
    assert 4000 < max(values) <= 4096
    # Half of [0, ln 4096] lies below 64; the standard deviation of the share is 0.5 / sqrt(4000) =
    # 0.008.
    assert np.mean([value < 64 for value in values]) == pytest.approx(0.5, abs=0.04)
    tidy = [size(random, 1, 4096) for _ in range(4000)]
    assert max(tidy) <= 4096
    assert np.mean([value % 8 == 0 for value in tidy if value >= 16]) > 0.5


def as_meta(argument: object) -> object:
    if isinstance(argument, TensorSpec):
        return torch.empty_strided(
            argument.shape, argument.strides, dtype=getattr(torch, argument.dtype), device="meta"
        )
    return [as_meta(a) for a in argument] if isinstance(argument, tuple) else argument


@pytest.mark.parametrize("family", ["gemm", "convolution forward", "convolution backward"])
def test_contractions_are_valid_and_not_too_large(family: str) -> None:
    """torch's own shape functions and its FLOP counter are the oracle."""
    for one in make_random_ops(SEED):
        if one.family != family:
            continue
        function = getattr(
            getattr(torch.ops.aten, one.op.name.split(".")[1]), one.op.name.split(".")[2]
        )
        args = [as_meta(a) for a in one.op.args]
        with FlopCounterMode(display=False) as counter:
            made = function(*args)
        if family == "convolution backward":
            forward = torch.ops.aten.convolution.default(args[1], args[2], None, *args[4:10])
            assert forward.shape == args[0].shape  # type: ignore[attr-defined]
            continue
        assert counter.get_total_flops() <= MAX_FLOP * 1.0001, one.op.signature
        assert made.numel() <= 4 * MAX_ELEMENTS


def test_torch_runs_one_of_each_kind() -> None:
    seen = set()
    for one in make_random_ops(SEED, n_ops=30):
        if one.family == "the rest" and math.prod(one.op.inputs[0].shape) <= 2**20:
            build(one.op)()
            seen.add(one.kind)
    assert len(seen) >= 10


@pytest.mark.parametrize("n_ops", [1, 7, 60])
def test_each_family_gets_as_many_as_asked_for(n_ops: int) -> None:
    random_ops = make_random_ops(SEED, n_ops=n_ops)
    assert Counter(one.family for one in random_ops) == dict.fromkeys(PLAN, n_ops)


@pytest.mark.parametrize(
    ("n_ops", "message"),
    [
        (0, "ops is 0; it must be at least 1"),
        (2001, "ops is 2001; at most 2000"),
        ("60", "ops is '60'"),
    ],
)
def test_a_senseless_number_of_ops_is_refused(n_ops: object, message: str) -> None:
    with pytest.raises(DlperfError, match=message):
        make_random_ops(SEED, n_ops=n_ops)  # type: ignore[arg-type]


# -- prices and scores -----------------------------------------------------------------------------


def test_one_op_is_priced_by_its_curve() -> None:
    cost_model = cost_model_of(law_machine(), 1)
    assert kernel_s(cost_model, relu(1024)) == (pytest.approx(relu_s(1024)), "measured")
    seconds, source = kernel_s(cost_model, relu(5000))
    assert (seconds, source) == (pytest.approx(relu_s(5000), rel=1e-6), "interpolated")
    seconds, source = kernel_s(cost_model, law_mm(100, 30, 200))
    assert (seconds, source) == (pytest.approx(mm_s(100, 30, 200), rel=1e-3), "interpolated")
    assert mm_s(100, 30, 200) > 2 * 100 * 30 * 200 / PEAK_FLOPS_PER_S


def test_an_op_without_a_curve_is_unpriced_but_never_free() -> None:
    cost_model = cost_model_of(law_machine({"native_call": 1e-6, "boxed_call": 2e-6}), 1)
    spec = TensorSpec.contiguous(2**20)
    seconds, source = kernel_s(cost_model, Op("mine.mystery.default", (spec,), outputs=(spec,)))
    assert source == "unpriced"
    assert seconds == pytest.approx(
        3e-6 + 2 * 2**22 / 4e10
    )  # 8 MiB from the level that holds them, L3 at 40 GB/s


def random_ops() -> list[RandomOp]:
    return [RandomOp("gemm", "NN", law_mm(n, n, n)) for n in (20, 30)] + [
        RandomOp("gemm", "TN", law_mm(40, 40, 40)),
        RandomOp("the rest", "elementwise", relu(99)),
    ]


def kernel(op: Op, seconds: float) -> Kernel:
    return Kernel(op, "held-out", 1, Samples((seconds,)))


def test_errors_are_taken_against_the_median_of_the_runs() -> None:
    ops = random_ops()
    one, two, three, four = (each.op for each in ops)
    runs = [
        [kernel(one, 1.0), kernel(two, 2.0), kernel(four, 1.0)],
        [kernel(one, 1.2), kernel(two, 2.0), kernel(four, 1.0)],
    ]
    prices = {
        one.signature: (1.21, "interpolated"),
        two.signature: (1.0, "extrapolated"),
        four.signature: (3.0, "unpriced"),
    }
    found = score_ops(ops, runs, lambda op: prices[op.signature], 1)
    assert found.op.tolist() == [
        one.signature,
        two.signature,
        four.signature,
    ]  # the third was never timed
    assert three.signature not in prices
    assert found.actual_s[0] == pytest.approx(1.1)
    assert found.error_frac[0] == pytest.approx(0.1)
    assert found.repeatability_frac[0] == pytest.approx(0.2 / 1.1)
    groups = {(g.family, g.kind): g for g in op_groups(found).itertuples()}
    assert set(groups) == {
        ("gemm", "all"),
        ("gemm", "NN"),
        ("the rest", "all"),
        ("the rest", "elementwise"),
    }
    gemm = groups["gemm", "all"]
    assert (gemm.n_ops, gemm.n_unpriced) == (2, 0)
    assert gemm.mape_frac == pytest.approx(0.3)  # 0.1 and 0.5
    assert gemm.bias_frac == pytest.approx(-0.2)  # of 0.1 and -0.5
    assert gemm.p90_frac == pytest.approx(0.46)  # nine tenths of the way from 0.1 to 0.5
    assert groups["the rest", "all"].n_unpriced == 1


def test_thread_counts_stand_apart() -> None:
    ops = random_ops()[:1]
    found = pd.concat(
        score_ops(
            ops,
            [[kernel(ops[0].op, 1.0)]],
            lambda op, threads=threads: (float(threads), "interpolated"),
            threads,
        )
        for threads in (1, 2)
    )
    assert [(g.threads, g.mape_frac) for g in op_groups(found).itertuples() if g.kind == "all"] == [
        (1, 0.0),
        (2, 1.0),
    ]
