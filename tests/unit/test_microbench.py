"""What a calibration covers, and calls of every kind of kernel on real tensors."""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from calibrated_cases import mm, relu, trace

from dlperf.core.clock import Clock, Repeats, Sampler, Samples
from dlperf.core.costs import CostKey
from dlperf.core.state_probe import ParallelRegion
from dlperf.core.trace import Op, Symbol, TensorSpec
from dlperf.microbench import conv, gemm, memory, pointwise, stream, threads
from dlperf.microbench.kernel_samples import KernelSamples, RawSample
from dlperf.microbench.operator_benchmark import Unplayable, build
from dlperf.microbench.plan import (
    MODES,
    Group,
    Point,
    design,
    halton,
    log_pick,
    log_sizes,
    pick,
    turn,
)
from dlperf.microbench.timing import Timing, time_group
from dlperf.microbench.worker import (
    FURTHER,
    environment,
    further_points,
    planned_groups,
    trace_group,
)
from dlperf.predictors.kernels.catalog import describe

T = TensorSpec.contiguous
FLAGS = ("avx512f", "avx512_bf16")


def points(mode: str, flags: tuple[str, ...] = FLAGS) -> list[Point]:
    return [point for group in planned_groups(mode, flags) for point in group.points]


# -- the plan --------------------------------------------------------------------------------------


def test_deeper_modes_measure_more() -> None:
    counts = [len(points(mode)) for mode in MODES]
    assert counts == sorted(counts)
    assert 500 < counts[0] < 1500  # a quick one is to take seconds
    assert counts[1] > 2 * counts[0]


@pytest.mark.parametrize("mode", MODES)
def test_groups_have_names_of_their_own_and_points(mode: str) -> None:
    groups = planned_groups(mode, FLAGS)
    assert len({group.name for group in groups}) == len(groups)
    assert all(group.points for group in groups)


@pytest.mark.parametrize("mode", MODES)
def test_products_cover_batch_one_skinny_and_square_in_every_orientation(mode: str) -> None:
    groups = {group.name: group for group in gemm.groups(mode, ("float32",))}
    for orientation in gemm.ORIENTATIONS:
        shapes = {
            (op.inputs[-2].shape, op.inputs[-1].shape)
            for op in (point.op for point in groups[f"gemm float32 {orientation}"].points)
        }
        sizes = {(a[0], b[1], a[1]) for a, b in shapes}
        assert {
            (1, 64, 512),
            (64, 64, 64),
            (512, 1, 64),
            (64, 512, 1),
            (1, 1, 1),
        } <= sizes  # m, n, k
    assert {point.op.packet for point in groups["gemm float32 NT"].points} == {
        "aten.addmm",
        "aten.mm",
    }


def test_operands_lie_in_memory_as_torch_lays_them() -> None:
    weight = torch.empty(4, 16)
    assert gemm.linear(8, 4, 16).inputs[2].strides == weight.t().stride()
    left, right = gemm.product(8, 4, 16, "TN").inputs
    assert (left.shape, left.strides) == ((8, 16), torch.empty(16, 8).t().stride())
    assert right.is_contiguous
    assert (
        gemm.batched(3, 8, 4, 16, "NT").inputs[1].strides
        == torch.empty(3, 4, 16).transpose(1, 2).stride()
    )


def test_bfloat16_is_measured_where_the_processor_has_it() -> None:
    def dtypes(mode: str, flags: tuple[str, ...]) -> set[str]:
        return {point.op.inputs[0].dtype for point in points(mode, flags) if point.family == "gemm"}

    assert dtypes("full", FLAGS) == {"float32", "bfloat16", "float64"}
    assert dtypes("full", ()) == {"float32", "float64"}


def test_convolutions_cover_their_kinds() -> None:
    ops = [point.op for point in points("full") if point.family == "conv"]
    kernels = {op.inputs[1].shape[2:] for op in ops}
    assert {(1, 1), (3, 3), (5, 5), (7, 7), (3, 3, 3)} <= kernels
    assert any(len(kernel) == 1 for kernel in kernels)
    assert any(op.args[6] for op in ops)  # transposed
    assert any(op.args[8] == op.inputs[0].shape[1] > 1 for op in ops)  # depthwise
    assert any(op.inputs[0].shape[1] in (1, 3) for op in ops)  # a first layer
    assert any(op.args[3][0] == 2 for op in ops)  # type: ignore[index]
    strided = [op for op in ops if op.args[6] and op.args[3][0] == 2]  # type: ignore[index]
    # The results are twice as large as what they read.
    n_whole = sum(op.inputs[1].shape[2] % 2 == op.args[7][0] for op in strided)  # type: ignore[index]
    assert len(strided) / 2 < n_whole < len(strided)
    masks = {point.op.args[10] for point in points("full") if point.family == "conv_backward"}
    assert {mask[:2] for mask in masks} == {(True, False), (False, True)}  # type: ignore[index]


@pytest.mark.slow
def test_no_calibration_calls_what_writes_over_memory_of_others() -> None:
    for mode in MODES:
        assert not any(conv.corrupts(point.op) for point in points(mode))
        assert not any(
            conv.corrupts(point.op)
            for more in further_points(mode, FLAGS).values()
            for point in more
        )
    backward = conv.backward_of(
        conv.convolution(2, 4, 8, (8, 8), (1, 1), 2, channels_last=True), (False, True)
    )
    with pytest.raises(Unplayable, match="oneDNN writes past its workspace"):
        build(backward)


def test_a_backward_fits_its_forward() -> None:
    forward = conv.convolution(2, 4, 6, (9, 9), (3, 3), 2, 1)
    image, weight = (torch.rand(spec.shape, requires_grad=True) for spec in forward.inputs[:2])
    out = torch.ops.aten.convolution(image, weight, None, *forward.args[3:])
    assert conv.backward_of(forward).inputs[0].shape == tuple(out.shape)


def test_every_prefix_of_a_design_covers_the_space() -> None:
    """Of the first n points of a van der Corput sequence in base 2, every interval of length 1/n
    holds one, up to a factor of two.
    """
    for n in (8, 16, 64):
        cells = {int(halton(index, 2) * n) for index in range(1, n + 1)}
        assert len(cells) >= n - 1
    columns = list(zip(*[point for point, _ in zip(design(4), range(30))]))
    assert all(min(column) < 0.2 and max(column) > 0.8 for column in columns)


def test_quick_convolutions_are_the_first_of_the_full_ones_that_are_small() -> None:
    dense = "convolution dense forward"
    quick, full = (
        [
            point.op.signature
            for group in planned_groups(mode, ())
            if group.name == dense
            for point in group.points
        ]
        for mode in ("quick", "full")
    )
    order = {signature: index for index, signature in enumerate(full)}
    indices = [order[signature] for signature in quick if signature in order]
    assert len(indices) == len(quick)
    assert indices == sorted(indices)


@pytest.mark.parametrize(
    "packet", ["aten.native_batch_norm_backward", "aten.native_group_norm", "aten._softmax"]
)
def test_layers_are_measured_with_as_many_elements_as_networks_have(packet: str) -> None:
    sizes = [point.op.inputs[0].numel for point in points("full") if point.op.packet == packet]
    assert sum(size > 2**18 for size in sizes) >= 2
    assert 2**20 < max(sizes) <= 2**22


def test_sizes_and_picks() -> None:
    assert [log_pick(u, 4, 64) for u in (0.0, 0.5, 0.999999)] == [4, 16, 64]
    assert [pick(u, (1, 2)) for u in (0.0, 0.49, 0.5, 1.0)] == [1, 1, 2, 2]
    sizes = log_sizes(64, 2**20, 0.2)
    assert (sizes[0], sizes[-1]) == (64, 2**20)
    assert sizes == sorted(sizes)


def test_stream_reaches_four_times_the_last_cache() -> None:
    for mode in MODES:
        sets = stream.working_sets(mode, 2**25)
        assert sets[-1] >= 4 * 2**25
        assert sets[0] <= 32 * 2**10
    assert stream.working_sets("quick", 0)[-1] == 2**26


def test_the_sweep_has_points_on_both_sides_of_a_part_of_the_last_cache() -> None:
    """A virtual machine's part of 256 MiB ends anywhere; with an octave at most between two points
    it is known where.
    """
    sets = stream.working_sets("full", 2**28)
    assert max(larger / smaller for smaller, larger in itertools.pairwise(sets)) < 2


def test_a_cache_that_forgets_is_told_by_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a made-up cache whose sweeps take twice as long after a pause as at once, in a clock that
    only they and looks at it move.
    """
    monkeypatch.setattr(stream, "_SIDE", 2)  # what it computes takes no time
    now = [0.0]

    def pass_time(seconds: float) -> float:
        now[0] += seconds
        return now[0]

    last_end = [0.0]

    def sweep() -> None:
        pass_time(1e-2 if now[0] - last_end[0] < 1e-3 else 2e-2)
        last_end[0] = now[0]

    clock = Clock(now=lambda: pass_time(1e-4), switches=lambda: 0)
    found = stream.measure_residency(1, "quick", (2**15, 2**20, 2**25), clock, sweep)
    assert [cost.key for cost in found] == [
        CostKey("cache_residency", at=ms) for ms in stream.PAUSES_MS["quick"]
    ]
    assert [round(cost.value, 1) for cost in found] == [2.0, 2.0]
    assert (
        stream.measure_residency(1, "quick", (2**15, 2**20, 2**20), clock, sweep) == []
    )  # no cache beyond a core's own
    assert stream.measure_residency(1, "quick", (0, 0, 0), clock, sweep) == []


def test_a_worker_keeps_its_memory() -> None:
    settings = environment(3)
    assert settings["OMP_NUM_THREADS"] == "3"
    assert int(settings["MALLOC_MMAP_THRESHOLD_"]) > 2**30


RESULTS = """
import resource, torch
from dlperf.microbench import worker
rows, columns, kept = torch.rand(1024, 8), torch.rand(8, 256), []
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept.append(rows @ columns)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
alone = [faults() for _ in range(6)]
worker.touch_heap(2**30)
print(max(alone[1:]), max(faults() for _ in range(20)))
"""


@pytest.mark.process
def test_results_lie_on_pages_that_a_worker_has_written_to() -> None:
    """Results of a MiB, which is 256 pages, up the heap."""
    done = subprocess.run(
        [sys.executable, "-c", RESULTS],
        env={**os.environ, **environment(1)},
        capture_output=True,
        text=True,
        check=True,
    )
    alone, touched = map(int, done.stdout.split())
    assert touched < 64 < 256 <= alone


# -- calls on real tensors -------------------------------------------------------------------------


def smallest() -> dict[str, Op]:
    """The smallest kernel of every operator in a quick plan."""
    found: dict[str, Op] = {}
    for point in points("quick"):
        kept = found.get(point.op.name)
        if kept is None or sum(one.nbytes for one in point.op.inputs) < sum(
            one.nbytes for one in kept.inputs
        ):
            found[point.op.name] = point.op
    return found


SMALLEST = smallest()


def floats(result: object) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result] if result.dtype.is_floating_point else []
    return (
        [tensor for item in result for tensor in floats(item)]
        if isinstance(result, (tuple, list))
        else []
    )


@pytest.mark.parametrize("name", SMALLEST)
def test_every_kernel_can_be_repeated(name: str) -> None:
    call = build(SMALLEST[name])
    with torch.no_grad():
        for _ in range(
            100 if name.split(".")[1].endswith("_") else 2
        ):  # in-place ones must neither blow up nor fade into denormals
            result = call()
    if name.startswith(("aten.empty", "aten.mkldnn_rnn_layer", "aten._ctc_loss.")):
        # memory as it comes; a workspace, or logarithms of what cannot be, among the results
        return
    for tensor in floats(result):
        assert torch.isfinite(tensor).all()
        tiny = torch.finfo(tensor.dtype).tiny
        assert ((tensor == 0) | (tensor.abs() >= tiny)).all()


def test_values_are_valid_for_what_looks_things_up() -> None:
    (rows,) = floats(build(Op("aten.embedding.default", (T(3, 4), T(100, dtype="int64"))))())
    assert rows.shape == (100, 4)
    assert (
        len(rows.unique(dim=0)) == 3
    )  # all rows of the table are looked up, not one that stays in the cache
    lines, target = T(6, 5), T(6, dtype="int64")
    build(Op("aten.nll_loss_forward.default", (lines, target, None, 1, -100)))()
    build(Op("aten.index_select.default", (T(3, 4), 1, T(7, dtype="int64"))))()


def test_tensors_are_laid_out_as_asked() -> None:
    (copy,) = floats(build(Op("aten.alias.default", (TensorSpec((4, 3), (1, 4), "float64"),)))())
    assert (copy.shape, copy.stride(), copy.dtype) == ((4, 3), (1, 4), torch.float64)
    cast = build(
        Op(
            "aten._to_copy.default",
            (T(4),),
            (("dtype", Symbol("dtype", "bfloat16")), ("device", Symbol("device", "cpu"))),
        )
    )()
    assert cast.dtype == torch.bfloat16  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (Op("mine.mystery.default", (T(2),)), "this torch has no such operator"),
        (Op("aten.relu.nonsense", (T(2),)), "this torch has no such operator"),
        (Op("aten.relu", (T(2),)), "this torch has no such operator"),
        (Op("aten.mm.default", (T(2, 3), T(2, 3))), r"aten.mm.default: "),
        (Op("aten.relu.default", (T(2, dtype="float3"),)), "no dtype float3"),
        (Op("aten.relu.default", ("text",)), "aten.relu.default: "),
    ],
)
def test_what_cannot_be_called_is_refused_in_one_line(op: Op, message: str) -> None:
    with pytest.raises(Unplayable, match=message) as error:
        build(op)
    assert "\n" not in str(error.value)


# -- timing ----------------------------------------------------------------------------------------


class Ticks:
    """A clock that moves by one step a look."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def clock(self) -> Clock:
        return Clock(self.look, lambda: 0)

    def look(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def test_a_group_is_timed_point_by_point_and_the_unplayable_are_named() -> None:
    group = Group(
        "some",
        (
            Point("pointwise", Op("aten.relu.default", (T(8),))),
            Point("odd", Op("mine.odd.default", (T(8),))),
        ),
        Repeats(1e-9, 4),
    )
    seen: list[int] = []
    found = time_group(group, 2, seen.append, Ticks(1e-3).clock())
    (kernel,) = found.kernels
    assert (kernel.family, kernel.threads, kernel.samples.values) == (
        "pointwise",
        2,
        pytest.approx((1e-3,) * 2),
    )  # they agree
    assert found.refused == ("mine.odd.default: this torch has no such operator",)
    assert sum(seen) == 2
    assert found.n_unsteady == 0


def relus(count: int, n_samples: int, sample_s: float = 1e-9) -> Group:
    return Group(
        "some",
        tuple(
            Point("pointwise", Op("aten.relu.default", (T(n),)), n % 2) for n in range(8, 8 + count)
        ),
        Repeats(sample_s, n_samples),
    )


def test_a_pass_samples_short_kernels_in_turns_and_long_ones_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks, called = Ticks(0.0), list[int]()
    steps_s = itertools.count(1e-5, 1e-6)  # no two samples agree

    def build(op: Op) -> Callable[[], object]:
        (operand,) = op.inputs

        def call() -> None:
            called.append(operand.numel)
            ticks.now_s += next(steps_s) if operand.numel < 10 else 6e-3

        return call

    monkeypatch.setattr("dlperf.microbench.operator_benchmark.build", build)
    monkeypatch.setattr("dlperf.microbench.timing._LEAST_ROUND_S", 0.0)
    timing = Timing(relus(3, 9), 1, ticks.clock())
    timing.take([0, 1, 2], lambda _: None)
    # One call of each tells how long it takes, and each sample of a short one follows two others,
    # of which the second is no shorter.
    assert [called.count(n) for n in (8, 9, 10)] == [1 + 3 * 3] * 2 + [2]
    assert called[-6:] in ([*3 * [8], *3 * [9]], [*3 * [9], *3 * [8]])
    assert [len(timing._taken[index].raw) for index in range(3)] == [3, 3, 1]


@pytest.mark.parametrize(
    ("calls_s", "n_warm"),
    [
        ((1.2, 0.68, 0.53, 0.52, 0.40), 4),  # 0.52 is no more than 3 % shorter
        ((1.2, 1.3, 0.5), 2),
        ((1.2, 1.0, 0.8, 0.6, 0.4, 0.2), 5),  # no more than five
    ],
)
def test_calls_are_repeated_until_they_get_no_shorter(
    calls_s: tuple[float, ...], n_warm: int
) -> None:
    """What a shared cache holds it gets over several calls."""
    ticks, left = Ticks(0.0), [*calls_s]

    def call() -> None:
        ticks.now_s += 1e-3 * left.pop(0)

    Timing(relus(1, 1), 1, ticks.clock())._warm_up(call)
    assert len(calls_s) - len(left) == n_warm


def test_kernels_that_never_had_the_whole_core_are_counted() -> None:
    losses = iter(range(1000))
    found = time_group(
        relus(1, 4), 1, lambda _: None, replace(Ticks(1e-3).clock(), switches=lambda: next(losses))
    )
    assert found.n_unsteady == 1
    assert (
        len(found.kernels[0].samples.values) == 2 * 4
    )  # twice the wanted passes, and all samples are kept


def test_where_time_is_short_points_are_left_out_in_the_order_of_their_rank() -> None:
    whole = time_group(relus(40, 4), 1, lambda _: None, Ticks(1e-3).clock())
    assert (len(whole.kernels), whole.n_left_out) == (40, 0)
    timing = Timing(relus(40, 4), 1, Ticks(1e-3).clock())
    timing.take(timing.lacking, lambda _: None, allowance_s=0.0)  # some points are always measured
    assert (len(timing.result().kernels), timing.result().n_left_out) == (12, 28)
    timing = Timing(relus(40, 4), 1, Ticks(1e-3).clock())
    timing.take(timing.lacking, lambda _: None, allowance_s=0.05)
    short = timing.result()
    assert 12 <= len(short.kernels) < 20
    assert {kernel.op.inputs[0].numel % 2 for kernel in short.kernels} == {0}


def test_elementwise_kernels_that_stand_for_others_come_first() -> None:
    first = {
        point.op.packet.removeprefix("aten.")
        for group in pointwise.groups("quick", low_precision=False)
        for point in group.points
        if point.rank < 0
    }
    for name, arity in (("isnan", 1), ("fmod", 2), ("addcdiv", 3), ("lgamma", 1), ("glu", 2)):
        description = describe(Op(f"aten.{name}.default", (T(64),) * arity))
        assert description is not None
        assert first & {variant[0] for variant in description.fallbacks[:3]}


def test_every_pass_adds_a_sample_to_what_the_first_had_time_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dlperf.microbench.timing._EXTRA", 0)
    ticks = Ticks(1e-3)
    timing = Timing(relus(40, 3), 1, ticks.clock())
    timing.take(timing.lacking, lambda _: None, 0.05)
    first = timing.result()
    ticks.step_s = 2e-3  # later somebody else has the core
    while timing.lacking:
        timing.take(timing.lacking, lambda _: None)
    whole = timing.result()
    early = {kernel.op for kernel in first.kernels}
    assert all(kernel.samples.values == pytest.approx((1e-3,)) for kernel in first.kernels)
    for kernel in whole.kernels:  # what there was no time for at first is taken later
        values_s = (
            (1e-3, 2e-3, 2e-3) if kernel.op in early else (2e-3, 2e-3)
        )  # two that agree are enough
        assert kernel.samples.values == pytest.approx(values_s)
    assert (0 < len(early) < 40, len(whole.kernels), whole.n_left_out) == (True, 40, 0)


def test_points_on_top_are_taken_by_the_next_pass_and_missed_by_nobody() -> None:
    timing = Timing(
        Group(
            "some",
            tuple(Point("one", relu(64 + n)) for n in range(13)),
            Repeats(sample_s=1e-5, n_samples=1),
        ),
        1,
        Clock(switches=lambda: 0),
    )
    timing.take(timing.lacking, lambda _: None)
    timing.extend([Point("one", relu(200)), Point("one", Op("aten.no_such.default", ()))])
    assert list(timing.lacking) == [13, 14]
    assert timing.result().n_left_out == 0
    timing.take(timing.lacking, lambda _: None)
    assert not timing.lacking
    assert (len(timing.result().kernels), len(timing.result().refused)) == (14, 1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "thorough"])
def test_further_points_are_none_of_the_planned_ones(mode: str) -> None:
    planned = {
        group.name: {point.op.signature for point in group.points}
        for group in planned_groups(mode, ())
    }
    further = further_points(mode, ())
    assert sum(map(len, further.values())) > FURTHER[mode]
    for name, points in further.items():
        assert not {point.op.signature for point in points} & planned[name]


def test_kernels_that_branch_by_their_values_meet_others_each_time() -> None:
    seen = []
    image = T(1, 4, 8, 8)
    call = build(Op("aten.max_pool2d_with_indices.default", (image, (2, 2), (2, 2), (0, 0))))
    for _ in range(3):
        values, _ = call()  # type: ignore[misc]
        seen.append(values.sum().item())
    assert len(set(seen)) == 3
    call = build(Op("aten.relu.default", (image,)))
    assert torch.equal(call(), call())  # type: ignore[arg-type]


def taken(*pairs: tuple[float, bool], best_s: float = 0.0) -> KernelSamples:
    """Raw samples of a kernel, in seconds and whether disturbed, of a call and a pass each."""
    raw = [RawSample(*pair, None, best_s, number) for number, pair in enumerate(pairs)]
    return KernelSamples(raw, [], 1)


def test_disturbed_kernels_get_further_passes_and_they_alone() -> None:
    lost = [0]
    timing = Timing(relus(2, 4), 1, replace(Ticks(1e-3).clock(), switches=lambda: lost[0]))
    # Of the first kernel three samples are lost, of the second one.
    timing._taken[0] = taken(*[(2e-3, True)] * 3)
    timing._taken[1] = taken((1e-3, True), (1e-3, False), (2e-3, False))
    timing._n_passes = 3
    assert list(timing.lacking) == [0, 1]
    timing.take(timing.lacking, lambda _: None)
    assert list(timing.lacking) == [0]
    timing.take(timing.lacking, lambda _: None)
    assert list(timing.lacking) == []
    samples = timing.result().kernels[0].samples
    assert (samples.values, samples.n_disturbed) == (pytest.approx((1e-3, 1e-3)), 3)


@pytest.mark.parametrize(
    ("second_s", "n_samples", "wanted"),
    [(1.01e-3, 5, False), (1.03e-3, 5, True), (1.01e-3, 3, False), (1.01e-3, 9, True)],
)
def test_half_the_samples_are_enough_where_they_agree(
    second_s: float, n_samples: int, wanted: bool
) -> None:
    found = taken((1e-3, False), (second_s, False), (9e-3, True))
    assert found.wants(n_samples, 0.0) is wanted


def test_where_time_is_short_kernels_without_an_undisturbed_sample_come_first() -> None:
    timing = Timing(relus(40, 4), 1, Ticks(1e-3).clock())
    for index in range(40):
        timing._taken[index] = taken((1e-3, index % 5 == 0))
    timing._n_passes = 1
    timing.take(timing.lacking, lambda _: None, allowance_s=0.005)
    again = [index for index, found in timing._taken.items() if len(found.raw) > 1]
    assert 0 < len(again) <= 8
    assert {index % 5 for index in again} == {0}


@pytest.mark.parametrize("n_both", [4, 5, 40])
def test_a_kernel_that_was_always_disturbed_takes_what_it_would_without(n_both: int) -> None:
    """Kernels of about its length take 1.5 times as long when disturbed, longer ones 1.2 times."""
    timing = Timing(relus(60, 3), 1)
    for index in range(n_both):
        best_s, factor = (1e-3, 1.5) if index < 20 else (1.0, 1.2)
        timing._taken[index] = taken((best_s, False), (factor * best_s, True))
    timing._taken[59] = taken((3e-3, True), (2.7e-3, True), (3.3e-3, True))
    samples = timing.result().kernels[-1].samples
    if n_both < 5:
        assert samples == Samples((3e-3, 2.7e-3, 3.3e-3))
    else:
        assert (samples.values, samples.n_disturbed) == ((pytest.approx(1.8e-3),), 3)
    assert timing.result().n_unsteady == 1


@pytest.mark.parametrize(
    ("partly", "throughout", "expected_s"),
    [
        ((), (4.5e-3, 5e-3), 3e-3),
        # Of the least of four one fifth of the time is expected to be disturbed, of one alone half.
        ((3.3e-3, 3.9e-3, 4.2e-3, 4e-3), (), 3e-3),
        ((3.75e-3,), (4.5e-3,), 3e-3),
        ((3.0e-3,), (4.5e-3,), 2.7e-3),  # two estimates, and their mean
    ],
)
def test_a_call_with_a_co_tenant_at_one_end_was_disturbed_for_a_part_of_it(
    partly: tuple[float, ...], throughout: tuple[float, ...], expected_s: float
) -> None:
    timing = Timing(relus(9, 3), 1)
    timing._taken = {n: taken((1e-3, False), (1.5e-3, True)) for n in range(8)}
    found = taken(*((seconds, True) for seconds in (*partly, *throughout)))
    found.raw = [
        replace(one, throughout=index >= len(partly)) for index, one in enumerate(found.raw)
    ]
    timing._taken[8] = found
    assert timing.result().kernels[8].seconds == pytest.approx(expected_s)


def test_a_long_call_tells_at_how_many_ends_the_core_was_slow() -> None:
    ends = iter((0, 1, 1, 3))
    clock = replace(Ticks(1e-3).clock(), switches=lambda: next(ends))
    timing = Timing(relus(1, 3), 1, clock)
    timing._taken[0] = replace(taken(), is_long=True)
    for _ in range(2):
        timing.take([0], lambda _: None)
    assert [(one.disturbed, one.throughout) for one in timing._taken[0].raw] == [
        (True, False),
        (True, True),
    ]


def test_slowdowns_elsewhere_serve_a_group_that_was_disturbed_throughout() -> None:
    timing = Timing(relus(1, 3), 1)
    timing._taken[0] = taken((3e-3, True))
    assert timing.result([(3e-3, 1.5)] * 4).kernels[0].samples == Samples((3e-3,))
    # The 15 that take about as long count.
    (value,) = timing.result([(3e-3, 1.5)] * 15 + [(3.0, 9.0)] * 50).kernels[0].samples.values
    assert value == pytest.approx(2e-3)


def test_kernels_are_corrected_by_what_few_samples_exceed_many_by() -> None:
    timing = Timing(relus(13, 3), 1)
    for index in range(12):
        timing._taken[index] = taken((1.2e-3, False))
    usual = RawSample(1.2e-3, False, None, 0.0, 1)
    extra = replace(usual, seconds=1e-3, is_extra=True)
    timing._taken[12] = KernelSamples([usual, extra], [], 1)
    *others, repeated = timing.result().kernels
    assert [one.samples.minimum for one in others] == [pytest.approx(1e-3)] * 12
    assert repeated.samples == Samples((1.2e-3, 1e-3))
    # Of all groups those kernels count that take about as long.
    known = [(1e-5, 0.0)] * 25 + [(1e-3, math.log(1.1))] * 25
    first = timing.result(excesses=known).kernels[0]
    assert first.samples.values == (pytest.approx(1.2e-3 / 1.1),)


def test_a_disturbed_sample_counts_where_it_is_the_shortest() -> None:
    timing = Timing(relus(1, 3), 1)
    timing._taken[0] = taken((2e-3, False), (1e-3, True), (3e-3, True))
    assert timing.result().kernels[0].samples == Samples((2e-3, 1e-3), 1)


def test_parts_of_a_sample_tell_how_much_longer_a_disturbed_call_takes() -> None:
    """A co-tenant that comes in the middle of each sample: in the part in which it comes nobody
    knows for how long.
    """
    lost, calls = [0], [0]
    ticks = Ticks(0.0)

    def call() -> None:
        calls[0] += 1
        n_slow_ends = (0, 0, 0, 1, 2, 2, 2, 2)[calls[0] - 1]
        ticks.now_s += (1e-4, 1.2e-4, 1.5e-4)[n_slow_ends]
        lost[0] += n_slow_ends

    sampler = Sampler(call, Repeats(1e-3, 1), Clock(ticks.look, lambda: lost[0]), 8)
    sampler.take()
    assert sampler.pairs == [(pytest.approx(1e-4), False)]
    assert sampler.slowed == [(pytest.approx(1.5e-4), pytest.approx(1.5))]
    assert sampler.slow_s == [pytest.approx(1.5e-4)]


def test_a_kernel_keeps_how_much_longer_it_takes_on_a_shared_core() -> None:
    timing = Timing(relus(3, 3), 1)
    timing._taken = {index: taken((1e-3, False), (1.4e-3, True)) for index in range(3)}
    timing._taken[0].slow_s += [1.5e-3, 1.6e-3, 1.7e-3, 9e-3]  # at last it waited for a core
    timing._taken[1].raw = [one for one in timing._taken[1].raw if one.disturbed]
    timing._taken[1].slow_s += [1.5e-3]
    found = [kernel.shared_core for kernel in timing.result().kernels]
    assert found == [1.6, 0.0, 0.0]


class Regions(ParallelRegion):
    """Regions of so many seconds, in turns."""

    def __init__(self, *taken_s: float) -> None:
        super().__init__()
        self._taken_s = iter(taken_s)
        self.least_s = min(taken_s)

    def seconds(self, n_before: int = 0, count: int = 0) -> float:
        return next(self._taken_s)


def test_samples_of_near_cores_count_and_those_of_far_ones_tell_the_response() -> None:
    """A region takes 2 us, or 3 where cores are far apart. Seven kernels were sampled in both
    states, of which the first takes 1.1 times as long, another less; two with far cores alone.
    """
    near, far, between = (2e-6, 2.2e-6), (3e-6, 3e-6), (2e-6, 3e-6)
    timing = Timing(relus(9, 3), 2, region=Regions(2e-6))

    def sampled(*samples: tuple[float, tuple[float, float]]) -> KernelSamples:
        raw = [RawSample(seconds, False, None, 0.0, 1, regions_s=at) for seconds, at in samples]
        return KernelSamples(raw, n_calls=1)

    timing._taken = {n: sampled((1e-3, near), (1.1e-3, far), (0.5e-3, between)) for n in range(7)}
    timing._taken[1] = sampled((1e-3, near), (0.9e-3, far), (0.8e-3, far))
    timing._taken[7] = sampled((2.2e-3, far), (2.3e-3, far))
    timing._taken[8] = sampled((2.4e-3, (3e-6, 2e-6)))
    found = timing.result().kernels
    assert [one.core_to_core for one in found[:2]] == [pytest.approx(0.2), pytest.approx(-0.4)]
    assert [one.samples.values for one in found[:2]] == [(1e-3,)] * 2
    assert (found[7].core_to_core, found[8].core_to_core) == (None, None)
    assert found[7].seconds == pytest.approx(2e-3)  # as the others would say
    assert found[8].seconds == 2.4e-3  # the state changed meanwhile
    timing._taken = {0: timing._taken[7]}
    assert timing.result().kernels[0].seconds == pytest.approx(2.2e-3)  # nothing tells how much
    alone = timing.result(responses=[(2e-3, 0.2)] * 5).kernels[0]
    assert alone.seconds == pytest.approx(2e-3)


def test_a_sample_is_taken_between_two_regions() -> None:
    timing = Timing(relus(1, 1), 2, Ticks(1e-3).clock(), region=Regions(2e-6, 3e-6))
    timing.take([0], lambda _: None)
    (raw,) = timing._taken[0].raw
    assert raw.regions_s == (2e-6, 3e-6)


def test_waits_for_a_core_correct_no_kernel_that_was_always_disturbed() -> None:
    """Beside eight kernels whose threads waited 99 ms for a core, and eight on a shared one."""
    timing = Timing(relus(17, 3), 2)
    slow_s = [0.1] * 8 + [1.5e-3] * 8
    timing._taken = {n: taken((1e-3, False), (slow_s[n], True)) for n in range(16)}
    timing._taken[16] = taken((1.5e-3, True))
    assert timing.result().kernels[16].seconds == pytest.approx(1e-3)
    timing._taken = {n: taken((1e-3, False), (0.1, True)) for n in range(16)}
    timing._taken[16] = taken((1.5e-3, True))
    assert timing.result().kernels[16].seconds == pytest.approx(1.5e-3)  # nothing corrects it


def test_a_sample_that_a_slow_core_judged_is_disturbed() -> None:
    """The core was slow from the start on: nothing showed it until it was fast for once."""
    best_s = [1.5]
    clock = replace(Ticks(1e-3).clock(), best_s=lambda: best_s[0])
    timing = Timing(relus(1, 3), 1, clock)
    timing._taken[0] = taken((3e-3, False), best_s=1.5)
    assert timing.unsteady == []
    best_s[0] = 1.3
    assert timing.unsteady == []  # the core's own variation
    best_s[0] = 1.0
    assert timing.unsteady == timing.lacking == [0]
    timing.take(timing.lacking, lambda _: None)
    assert timing.unsteady == []
    samples = timing.result().kernels[0].samples
    assert (samples.values, samples.n_disturbed) == (pytest.approx((1e-3,)), 1)


def test_what_memory_runs_out_for_later_is_not_wanted_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timing = Timing(relus(2, 3), 1, Ticks(1e-3).clock())
    timing.take(timing.lacking, lambda _: None)

    def build(op: Op) -> None:
        raise MemoryError(op.name)

    monkeypatch.setattr("dlperf.microbench.operator_benchmark.build", build)
    n_passes = 1
    while timing.lacking:
        timing.take(timing.lacking, lambda _: None)
        n_passes += 1
    assert n_passes == 2 * 3
    assert [len(kernel.samples.values) for kernel in timing.result().kernels] == [1, 1]


@pytest.mark.parametrize(("wanted", "taken"), [(9, 5), (5, 3), (3, 2)])
def test_long_calls_are_sampled_every_other_time(wanted: int, taken: int) -> None:
    ticks = Ticks(1.0)
    timing = Timing(relus(1, wanted, 1e-3), 1, ticks.clock())
    while timing.lacking:
        timing.take(timing.lacking, lambda _: None)
        ticks.step_s *= 1.1  # no two agree
    assert len(timing.result().kernels[0].samples.values) == taken


def test_a_traces_ops_are_taken_once_each() -> None:
    group = trace_group(trace(mm(8, 8, 8, "a"), mm(8, 8, 8, "b"), mm(8, 8, 16, "c")), "quick")
    assert re.fullmatch(r"for made-up@1 \(forward pass, ops [0-9a-f]{8}\)", group.name)
    assert [point.family for point in group.points] == ["exact", "exact"]


def test_one_thread_wakes_nobody() -> None:
    (cost,) = threads.measure(1, "quick")
    assert (cost.key, cost.samples.values) == (CostKey("fork_join"), (0.0,))


def test_a_page_costs_something() -> None:
    found = {cost.key.kind: cost.samples.median for cost in memory.measure(1, "quick")}
    assert found.keys() - {"huge_page_fault"} == {"page_fault", "page_release"}
    assert found["page_fault"] > 0
    assert found["page_release"] > 0
    # A page of 2 MiB has to be zeroed, like 512 of 4 KiB, but trapped into and accounted for once.
    assert found.get("huge_page_fault", 1e-6) > 0


def test_touching_and_giving_back_are_told_apart() -> None:
    """Mapping and writing 4 ticks, writing again 1, unmapping 2: with 256 pages in 1 MiB a fault is
    3 / 256, a release 2 / 256.
    """
    ticks = iter([0.0, 4.0, 4.0, 5.0, 5.0, 7.0])
    touch = memory._touch(2**20, Clock(now=lambda: next(ticks), switches=lambda: 0))
    assert (touch.first_s, touch.again_s, touch.release_s) == (4 / 256, 1 / 256, 2 / 256)
    assert memory._faults_s([touch]) == [3 / 256]
    assert touch.faults >= 256


def test_a_slow_second_writing_makes_no_page_fault_cheaper() -> None:
    """Of each size by itself: in most touches writing again takes longer than the first time."""
    small, large = (
        [memory._Touch(size, first_s, again_s, 0.0, 1, False) for again_s in (9.0, 1.0, 9.0, 1.0)]
        for size, first_s in ((2**20, 4.0), (2**22, 3.0))
    )
    mixed = [touch for pair in zip(small, large) for touch in pair]
    assert memory._faults_s(mixed) == [3.0, 2.0] * 4


def test_kinds_of_patterns_and_layers_are_all_there() -> None:
    found = {point.op.packet for point in points("quick")}
    for packet in (
        "native_batch_norm native_layer_norm native_group_norm max_pool2d_with_indices avg_pool2d"
        " _log_softmax _softmax nll_loss_forward embedding cat"
        " _scaled_dot_product_flash_attention_for_cpu mkldnn_rnn_layer mkldnn_rnn_layer_backward"
        " bmm view relu add_ _fused_adam_ native_dropout"
    ).split():
        assert f"aten.{packet}" in found
    assert len(pointwise.UNARY) > 30


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_cases_come_evenly_and_in_no_step_with_a_coordinate(n: int, which: int) -> None:
    cases = [turn(index, n, which) for index in range(1000)]
    assert set(cases) == set(range(n))
    for case in range(n):
        assert abs(cases.count(case) - 1000 / n) < 12
        # the base-n coordinate of the points of one case fills the whole interval: its mean is a
        # half, not (case + 1/2) / n
        own = [halton(index + 1, n) for index in range(1000) if cases[index] == case]
        assert abs(sum(own) / len(own) - 0.5) < 0.05
