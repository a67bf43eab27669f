"""Bytes by memory level against a simulated cache and a search over tiles; roofs and layers on
made-up machines.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from calibrated_cases import KIB, LEVELS, MIB, PEAK_FLOPS_PER_S, T, machine, mm, relu, trace
from hypothesis import given, settings
from hypothesis import strategies as st

from dlperf import predict
from dlperf.core.clock import Samples
from dlperf.core.costs import Cost, CostKey
from dlperf.core.machine import Bandwidth, Cpu
from dlperf.core.trace import Op, Storage, TensorSpec, Trace
from dlperf.ops.blocking import Product, bound_bytes, products_of
from dlperf.ops.roofs import roofs_of
from dlperf.predictors.analysis import analyse
from dlperf.predictors.kernel_cost_model import cost_model_of
from dlperf.predictors.layer_traffic import layer_traffic, register_bytes, trace_traffic

CPU = Cpu("Made-up CPU", 4, (32 * KIB, MIB, 32 * MIB), flags=("avx2",))
LINE_BYTES = 64


# -- streams: a simulated cache is the oracle ------------------------------------------------------


def chain(sizes: list[int], *, steps: tuple[tuple[int, int], ...]) -> Trace:
    """Ops y = relu(x) between storages of so many float32 elements; all storages outlive the step,
    as parameters do.
    """
    specs = [TensorSpec.contiguous(n, storage=index) for index, n in enumerate(sizes)]
    ops = tuple(
        Op("aten.relu.default", (specs[x],), outputs=(specs[y],), layer=f"l{i}")
        for i, (x, y) in enumerate(steps)
    )
    return Trace("chain", 1, (), ops, tuple(Storage(4 * n) for n in sizes), inference=True)


def simulated_misses(steps: Trace, cache_bytes: int) -> list[int]:
    """Bytes that each op of the second of two steps misses in a fully associative cache of whole
    lines, least recently used first out.
    """
    held: OrderedDict[tuple[int, int], None] = OrderedDict()
    capacity = cache_bytes // LINE_BYTES
    for _ in range(2):
        found = []
        for op in steps.ops:
            missed = 0
            n_lines = [spec.nbytes // LINE_BYTES for spec in (*op.inputs, *op.outputs)]
            for line in range(max(n_lines)):  # the operands are swept side by side
                for spec, most in zip((*op.inputs, *op.outputs), n_lines):
                    if line < most:
                        key = spec.storage, line
                        missed += key not in held
                        held[key] = None
                        held.move_to_end(key)
                        if len(held) > capacity:
                            held.popitem(last=False)
            found.append(missed * LINE_BYTES)
    return found


@pytest.mark.parametrize(
    ("elements", "steps"),
    [
        ([1024, 1024], ((0, 1),)),  # 8 KiB: stays in L1
        ([16384, 16384], ((0, 1),)),  # 128 KiB in turn: L2
        (
            [1024, 1024, 65536, 65536],
            ((0, 1), (2, 3), (0, 1)),
        ),  # a small set washed out of L1 by half a MiB
        ([1024, 1024, 1024, 1024], ((0, 1), (1, 2), (2, 3))),  # producer to consumer
        (
            [1024, 1024, 524288, 524288],
            ((0, 1), (0, 1), (2, 3)),
        ),  # washed out of L2 by 4 MiB, warm at once afterwards
    ],
)
def test_streams_move_what_a_simulated_cache_misses(
    elements: list[int], steps: tuple[tuple[int, int], ...]
) -> None:
    found = trace_traffic(chain(elements, steps=steps), CPU).moved_bytes
    recorded = chain(elements, steps=steps)
    assert found[:, 0].tolist() == [
        8 * elements[x] for x, _ in steps
    ]  # every element read and written: 8 bytes
    for column, size in ((1, CPU.caches_bytes[0]), (2, CPU.caches_bytes[1])):
        assert found[:, column].tolist() == simulated_misses(recorded, size)


def test_threads_bring_caches_of_their_own() -> None:
    one = chain([8192, 8192], steps=((0, 1),))  # 64 KiB: twice a core's L1
    assert trace_traffic(one, CPU, threads=1).moved_bytes[0].tolist() == [65536, 65536, 0, 0]
    assert trace_traffic(one, CPU, threads=2).moved_bytes[0].tolist() == [65536, 0, 0, 0]


def test_where_memory_is_unknown_everything_comes_from_dram() -> None:
    assert trace_traffic(trace(relu(64)), CPU).moved_bytes.tolist() == [[512, 512, 512, 512]]


@pytest.mark.parametrize("is_known", [False, True])
def test_blocks_that_an_op_allocates_within_itself_are_none_of_its_operands(is_known: bool) -> None:
    """A convolution moves all of what it reads and writes from DRAM, where that is larger than the
    caches or unknown, although oneDNN's copies of it are as large again.
    """
    n, channels, side = 64, 16, 64
    storages = range(3) if is_known else 3 * [-1]
    image, weight, result = (
        T(*shape, storage=storage)
        for shape, storage in zip(
            ((n, channels, side, side), (channels, channels, 3, 3), (n, channels, side, side)),
            storages,
        )
    )
    rest = (None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    one = Op("aten.convolution.default", (image, weight, *rest), outputs=(result,))
    step = trace(
        one,
        storages=tuple(
            Storage(spec.nbytes, kind="input") for spec in (image, weight, result) if is_known
        ),
    )
    assert analyse(step, "default").working_bytes[0] >= 2 * image.nbytes
    in_dram = trace_traffic(step, CPU).moved_bytes[0, -1]
    assert in_dram >= 2 * image.nbytes


def test_levels_that_the_processor_is_not_known_to_have_are_left_out() -> None:
    found = trace_traffic(trace(relu(64)), Cpu("two levels", 1, (32 * KIB, MIB, 0)))
    assert found.levels == ("L1", "L2", "DRAM")
    assert found.moved_bytes.shape == (1, 3)
    assert trace_traffic(trace(relu(64)), Cpu("unknown", 1)).levels == ("DRAM",)
    assert [
        register_bytes(Cpu("x", 1, flags=flags)) for flags in (("avx2", "avx512f"), ("avx2",), ())
    ] == [2048, 512, 256]


# -- contractions: a search over tiles is the oracle -----------------------------------------------


def searched(m: int, n: int, k: int, fast: int) -> float:
    """Least traffic in elements over whole tiles of one operand that stays, the ragged last tile
    counted as the part that it is.
    """
    best = float("inf")
    for t in range(1, max(m, n) + 1):
        for u in range(1, min(max(n, k), fast // t) + 1):
            if t <= m and u <= n:
                best = min(best, m * k * n / u + k * n * m / t + m * n)
            if t <= m and u <= k:
                best = min(best, m * k + k * n * m / t + m * n * (2 * k / u - 1))
            if t <= n and u <= k:
                best = min(best, k * n + m * k * n / t + m * n * (2 * k / u - 1))
    return best


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(1, 400))
def test_no_whole_tile_moves_less_and_the_best_moves_little_more(
    m: int, n: int, k: int, fast: int
) -> None:
    product = Product(1, m, n, k, 4 * m * k, 4 * k * n, 4 * m * n, 4)
    model, whole = product.moved_bytes(4 * fast) / 4, searched(m, n, k, fast)
    assert model <= whole * (1 + 1e-9)
    assert whole <= 1.6 * model  # tiles of a few elements cannot be halved
    assert model >= (m * k + k * n + m * n) * (1 - 1e-9)


def test_a_large_square_product_moves_hong_and_kungs_bound() -> None:
    n, fast = 4096, 1024
    product = Product(1, n, n, n, 4 * n * n, 4 * n * n, 4 * n * n, 4)
    assert product.moved_bytes(4 * fast) == pytest.approx(
        4 * (2 * n**3 / 32 + n * n)
    )  # sqrt(1024) = 32
    assert product.moved_bytes(4 * fast) == pytest.approx(
        bound_bytes(2 * n**3, 4, 4 * fast), rel=0.02
    )


def test_a_product_that_fits_moves_once() -> None:
    assert Product(3, 8, 8, 8, 768, 768, 768, 4).moved_bytes(256) == pytest.approx(
        3 * 768
    )  # a 64-element tile holds a whole operand
    assert Product(1, 1, 300, 200, 800, 240_000, 1200, 4).moved_bytes(4096) == pytest.approx(
        242_000
    )  # a vector meets each weight once


@pytest.mark.parametrize("flipped", [False, True])
def test_an_operand_that_almost_fits_stays_and_the_result_is_added_to_twice(flipped: bool) -> None:
    # 8 x 640 on the left, 4096 elements hold a tile of 8 x 512: the right streams once, the result
    # 2 x 640 / 512 - 1 times. With a tile of the result, 8 x 512, the left would stream 4096 / 512
    # = 8 times: 40,960 + 32,768 instead of 5,120 + 49,152.
    m, k, n = 8, 640, 4096
    left, right, out = 4 * m * k, 4 * k * n, 4 * m * n
    product = (
        Product(1, n, m, k, right, left, out, 4)
        if flipped
        else Product(1, m, n, k, left, right, out, 4)
    )
    assert product.moved_bytes(4 * 4096) == pytest.approx(4 * (5_120 + k * n + 49_152))


def conv(n: int, c: int, o: int, side: int, taps: int, stride: int = 1, groups: int = 1) -> Op:
    out = side // stride
    args = (
        T(n, c, side, side),
        T(o, c // groups, taps, taps),
        None,
        (stride, stride),
        (taps // 2,) * 2,
        (1, 1),
        False,
        (0, 0),
        groups,
    )
    return Op("aten.convolution.default", args, outputs=(T(n, o, out, out),), layer="conv")


def test_convolutions_are_products_of_their_sizes() -> None:
    (product,) = products_of(conv(2, 16, 32, 8, 3))
    assert (product.n_products, product.m, product.n, product.k) == (1, 2 * 8 * 8, 32, 16 * 9)
    assert product.left_bytes == 4 * 2 * 16 * 64  # the image, not its ninefold unfolding
    (depthwise,) = products_of(conv(2, 16, 16, 8, 3, groups=16))
    assert (depthwise.n_products, depthwise.m, depthwise.n, depthwise.k) == (16, 128, 1, 9)
    image, weight = T(2, 16, 8, 8), T(32, 16, 3, 3)
    rest = (None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1, (True, True, False))
    backward = Op(
        "aten.convolution_backward.default",
        (T(2, 32, 8, 8), image, weight, *rest),
        outputs=(image, weight),
    )
    for found in products_of(backward):
        assert (
            found.n_products * found.m * found.n * found.k == 2 * 32 * 64 * 16 * 9
        )  # multiply-adds of the forward


def test_taps_are_loaded_anew_from_the_first_cache_alone() -> None:
    found = trace_traffic(trace(conv(1, 1, 1, 64, 3)), CPU).moved_bytes[0]
    once = 4 * (64 * 64 + 9 + 64 * 64)
    assert found[0] >= 4 * 9 * 64 * 64
    assert found[1:] == pytest.approx([once] * 3)


# -- properties over whole traces ------------------------------------------------------------------

SIDE = st.integers(1, 300)
CONVOLUTIONS = st.builds(
    conv,
    st.integers(1, 4),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([1, 16, 48]),
    st.integers(3, 24),
    st.sampled_from([1, 3, 5]),
)
OPS = st.one_of(
    st.builds(mm, SIDE, SIDE, SIDE), st.builds(relu, st.integers(1, 2**20)), CONVOLUTIONS
)


def stored(ops: list[Op]) -> Trace:
    """The ops with memory of their own for every distinct tensor, so that equal ones are used
    again.
    """
    known: dict[TensorSpec, int] = {}

    def place(value: object) -> object:
        if isinstance(value, TensorSpec):
            return replace(value, storage=known.setdefault(value, len(known)))
        return tuple(place(item) for item in value) if isinstance(value, tuple) else value

    placed = [replace(op, args=place(op.args), outputs=place(op.outputs)) for op in ops]
    return Trace(
        "made-up",
        1,
        (),
        tuple(placed),
        tuple(Storage(spec.nbytes) for spec in known),
        inference=True,
    )


@settings(deadline=None, max_examples=60)
@given(
    st.lists(OPS, min_size=1, max_size=6),
    st.integers(1, 4),
    st.sampled_from([(32, 1024, 32768), (48, 2048, 0), (32, 0, 0), (16, 512, 256)]),
)
def test_never_more_bytes_farther_out(
    ops: list[Op], threads: int, caches_kib: tuple[int, int, int]
) -> None:
    recorded = stored(ops)
    found = trace_traffic(
        recorded, Cpu("any", 4, tuple(KIB * size for size in caches_kib)), threads
    )
    assert np.all(found.moved_bytes[:, :-1] >= found.moved_bytes[:, 1:] * (1 - 1e-9))
    assert np.all(found.moved_bytes >= 0)
    assert np.all(found.fma_flops <= found.flops)


@settings(deadline=None, max_examples=40)
@given(st.lists(OPS, min_size=1, max_size=6))
def test_larger_caches_never_move_more(ops: list[Op]) -> None:
    recorded = stored(ops)
    small, large = (
        trace_traffic(recorded, Cpu("any", 1, sizes)).moved_bytes
        for sizes in ((16 * KIB, 256 * KIB, 4 * MIB), (64 * KIB, MIB, 64 * MIB))
    )
    assert np.all(large <= small * (1 + 1e-9))


@settings(deadline=None, max_examples=40)
@given(st.lists(OPS, min_size=1, max_size=5))
def test_the_layers_add_up_to_the_trace(ops: list[Op]) -> None:
    recorded, measured = stored(ops), machine()
    found = layer_traffic(recorded, measured, 1, roofs_of(measured, 1))
    traffic = trace_traffic(recorded, measured.cpu)
    assert sum(entry.flops for entry in found) == pytest.approx(traffic.flops.sum())
    assert np.sum([entry.level_bytes for entry in found], axis=0) == pytest.approx(
        traffic.moved_bytes.sum(axis=0)
    )
    for entry in found:
        least = entry.least_s(roofs_of(measured, 1))
        assert least is not None
        assert least >= entry.fma_flops / PEAK_FLOPS_PER_S * (
            1 - 1e-2
        )  # the made-up peak is reached but for the call


# -- roofs -----------------------------------------------------------------------------------------


def test_roofs_of_a_file_without_ceilings_say_so() -> None:
    roofs = roofs_of(machine(), 1)
    assert {roof.level: roof.bytes_per_s for roof in roofs.bandwidths} == pytest.approx(LEVELS)
    assert {roof.kernel for roof in roofs.bandwidths} == {"triad"}
    (ceiling,) = roofs.ceilings
    assert ceiling.other_flops_per_s == ceiling.fma_flops_per_s / 2
    assert (ceiling.is_measured, ceiling.other_source) == (False, "half of FMA")


def test_measured_ceilings_take_the_place_of_stream_in_the_caches() -> None:
    sets = ((16 * KIB, 150e9), (512 * KIB, 120e9), (8 * MIB, 60e9), (256 * MIB, 9e9))
    sums = tuple(Bandwidth("sum", 1, size, size, Samples((size / rate,))) for size, rate in sets)
    costs = (
        Cost(CostKey("arithmetic", "add", variant="float32"), 1, Samples((1 / 3e9, 1 / 2e9))),
        Cost(CostKey("arithmetic", "mul", variant="float32"), 1, Samples((1 / 2.5e9,))),
    )
    plain = machine()
    roofs = roofs_of(replace(plain, bandwidths=(*plain.bandwidths, *sums), costs=costs), 1)
    # L1: 150 of the sum, though STREAM's short sweep says 200; DRAM: 10 of STREAM, which is more
    # than 9
    assert [(roof.level, roof.kernel) for roof in roofs.bandwidths] == [
        ("L1", "sum"),
        ("L2", "sum"),
        ("L3", "sum"),
        ("DRAM", "triad"),
    ]
    assert [roof.bytes_per_s for roof in roofs.bandwidths] == pytest.approx(
        [150e9, 120e9, 60e9, 10e9]
    )
    assert (roofs.ceilings[0].other_flops_per_s, roofs.ceilings[0].other_source) == (
        pytest.approx(3e9),
        "add",
    )


def test_predictors_and_plots_rest_on_the_same_roofs() -> None:
    sets = ((16 * KIB, 150e9), (512 * KIB, 120e9), (8 * MIB, 60e9), (256 * MIB, 9e9))
    sums = tuple(Bandwidth("sum", 1, size, size, Samples((size / rate,))) for size, rate in sets)
    measured = replace(machine(), bandwidths=(*machine().bandwidths, *sums))
    roofs, cost_model = roofs_of(measured, 1), cost_model_of(measured, 1)
    assert cost_model.caches.bytes_per_s == {
        roof.level: roof.bytes_per_s for roof in roofs.bandwidths
    }
    assert cost_model.caches.bytes_per_s["L1"] == pytest.approx(150e9)  # not STREAM's 200
    assert cost_model.peak_flops_per_s == {"float32": roofs.ceilings[0].fma_flops_per_s}
    unknown = replace(
        measured, cpu=replace(measured.cpu, caches_bytes=(0, 0, 0))
    )  # nothing lies well inside a cache of unknown size
    assert (
        cost_model_of(unknown, 1).caches.bytes_per_s["L1"]
        == cost_model_of(unknown, 1).caches.bytes_per_s["DRAM"]
    )


def test_no_level_is_slower_than_the_next_one_outwards() -> None:
    sets = ((16 * KIB, 150e9), (512 * KIB, 50e9), (8 * MIB, 60e9), (256 * MIB, 9e9))
    sums = tuple(Bandwidth("sum", 1, size, size, Samples((size / rate,))) for size, rate in sets)
    roofs = roofs_of(replace(machine(), bandwidths=sums), 1)
    assert [roof.bytes_per_s for roof in roofs.bandwidths] == pytest.approx(
        [150e9, 60e9, 60e9, 9e9]
    )


def test_roofs_of_an_empty_file() -> None:
    roofs = roofs_of(replace(machine(), kernels=(), bandwidths=()), 1)
    assert (roofs.bandwidths, roofs.ceilings, roofs.ceiling("float32")) == ((), (), None)


# -- predictions -----------------------------------------------------------------------------------


def test_a_prediction_shows_what_its_layers_move() -> None:
    shared = Op(
        "aten.add_.Tensor",
        (T(300), T(300)),
        outputs=(T(300),),
        phase="optimizer",
        shares=(("fc", 2 / 3), ("act", 1 / 3)),
    )
    prediction = predict(trace(mm(64, 64, 64), relu(1000), shared), machine(), threads=1)
    frame = prediction.traffic.set_index(["layer", "phase"])
    assert list(frame.index) == [
        ("fc", "forward"),
        ("act", "forward"),
        ("fc", "optimizer"),
        ("act", "optimizer"),
    ]
    assert frame.loc[("fc", "forward"), "flops"] == 2 * 64**3
    assert frame.loc[("fc", "forward"), "fma_frac"] == 1.0
    assert frame.loc[("act", "forward"), "fma_frac"] == 0.0
    assert (
        list(frame.loc[("act", "forward"), ["L1_bytes", "L2_bytes", "L3_bytes", "DRAM_bytes"]])
        == [8000.0] * 4
    )
    # 3 x 1200 bytes read, read, written; two thirds are the layer's
    assert frame.loc[("fc", "optimizer"), "L1_bytes"] == pytest.approx(2400)
    # 8000 bytes at 10 GB/s of DRAM take 0.8 us, 1000 FLOP at half of 10 GFLOP/s 0.2 us
    assert frame.loc[("act", "forward"), "roof"] == "DRAM"
    assert frame.loc[("act", "forward"), "least_s"] == pytest.approx(0.8e-6, rel=1e-3)
    assert frame.loc[("fc", "forward"), "roof"] == "compute"
    assert frame.loc[("fc", "forward"), "least_s"] == pytest.approx(
        2 * 64**3 / PEAK_FLOPS_PER_S, rel=0.05
    )
