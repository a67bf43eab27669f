"""The roofline and gemm-table predictors on hand-made machines and traces."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dlperf import Machine, Prediction, Trace, predict
from dlperf.core.clock import Samples
from dlperf.core.errors import DlperfError
from dlperf.core.machine import Bandwidth, Cpu, Kernel
from dlperf.core.trace import LOSS, Layer, Op, TensorSpec
from dlperf.predictors.gemm_table import gemm_size

STREAM = Bandwidth("triad", 1, 10**9, 10**9, Samples((0.1,)))  # 10 GB/s


def gemm(
    m: int,
    k: int,
    n: int,
    *seconds: float,
    dtype: str = "float32",
    threads: int = 1,
    orientation: str = "NN",
) -> Kernel:
    right = (
        TensorSpec.contiguous(k, n, dtype=dtype)
        if orientation[1] == "N"
        else TensorSpec((k, n), (1, k), dtype)
    )
    op = Op(
        "aten.mm.default",
        (TensorSpec.contiguous(m, k, dtype=dtype), right),
        outputs=(TensorSpec.contiguous(m, n, dtype=dtype),),
    )
    return Kernel(op, "gemm", threads, Samples(seconds))


def machine(*kernels: Kernel) -> Machine:
    return Machine(Cpu("test", 2), kernels, (STREAM,))


def linear(
    layer: str, m: int, k: int, n: int, dtype: str = "float32", phase: str = "forward"
) -> Op:
    x, out = TensorSpec.contiguous(m, k, dtype=dtype), TensorSpec.contiguous(m, n, dtype=dtype)
    return Op(
        "aten.addmm.default",
        (TensorSpec.contiguous(n, dtype=dtype), x, TensorSpec((k, n), (1, k), dtype)),
        outputs=(out,),
        layer=layer,
        phase=phase,
    )


def unary(name: str, layer: str, *shape: int, phase: str = "forward") -> Op:
    x = TensorSpec.contiguous(*shape)
    return Op(f"{name}.default", (x,), outputs=(x,), layer=layer, phase=phase)


def trace(*ops: Op, inference: bool = True) -> Trace:
    layers = tuple(
        Layer(name, "X", True, (("", 1),))
        for name in dict.fromkeys(op.layer for op in ops)
        if name != LOSS
    )
    return Trace("t", ops[0].inputs[0].shape[0] if ops else 1, layers, ops, inference=inference)


def row(prediction: Prediction, layer: str) -> dict[str, object]:
    return dict(prediction.layers.set_index("layer").loc[layer])


# -- roofline --------------------------------------------------------------------------------------


def test_roofline_takes_the_larger_of_both_times() -> None:
    # the fastest product: 2 x 100^3 = 2e6 FLOP in 1e-3 s at best = 2 GFLOP/s; the slower one does
    # not count
    cpu = machine(gemm(100, 100, 100, 2e-3, 1e-3), gemm(10, 10, 10, 1e-3))
    prediction = predict(
        trace(linear("fc", 64, 64, 64), unary("aten.relu", "relu", 64, 64)),
        cpu,
        threads=1,
        predictor="roofline",
    )
    fc, relu = row(prediction, "fc"), row(prediction, "relu")
    assert fc["forward_s"] == pytest.approx(2 * 64**3 / 2e9)
    assert (fc["bound"], fc["source"]) == ("compute", "interpolated")
    assert relu["forward_s"] == pytest.approx(8 * 64 * 64 / 10e9)
    assert relu["bound"] == "DRAM"
    assert prediction.step.total_s == pytest.approx(2 * 64**3 / 2e9 + 8 * 64 * 64 / 10e9)


def test_roofline_knows_dtypes_and_falls_back_to_float32() -> None:
    cpu = machine(gemm(100, 100, 100, 1e-3), gemm(100, 100, 100, 0.5e-3, dtype="bfloat16"))
    step = trace(linear("a", 64, 64, 64, "bfloat16"), linear("b", 64, 64, 64, "float64"))
    prediction = predict(step, cpu, threads=1, predictor="roofline")
    assert row(prediction, "a")["forward_s"] == pytest.approx(2 * 64**3 / 4e9)
    assert row(prediction, "b")["forward_s"] == pytest.approx(2 * 64**3 / 2e9)
    assert "no float64 matrix product" in " ".join(prediction.prices.notes)


def test_roofline_uses_the_nearest_threads() -> None:
    cpu = machine(gemm(100, 100, 100, 1e-3), gemm(100, 100, 100, 0.25e-3, threads=4))
    step = trace(linear("fc", 64, 64, 64))
    assert predict(step, cpu, threads=4, predictor="roofline").step.total_s == pytest.approx(
        2 * 64**3 / 8e9
    )
    assert predict(step, cpu, threads=1, predictor="roofline").step.total_s == pytest.approx(
        2 * 64**3 / 2e9
    )


def test_roofline_names_what_it_does_not_know() -> None:
    prediction = predict(
        trace(unary("mine.mystery", "x", 100)),
        machine(gemm(9, 9, 9, 1e-3)),
        threads=1,
        predictor="roofline",
    )
    assert prediction.unpriced == {"mine.mystery": 1}
    assert prediction.step.total_s == pytest.approx(800 / 10e9)
    assert prediction.priced_time_frac == 0.0


def test_roofline_shares_an_op_among_its_layers() -> None:
    shared = replace(
        unary("aten.relu", "", 100, phase="optimizer"), shares=(("a", 0.25), ("b", 0.75))
    )
    prediction = predict(
        trace(shared, inference=False),
        machine(gemm(100, 100, 100, 1e-3)),
        threads=1,
        predictor="roofline",
    )
    assert row(prediction, "b")["optimizer_s"] == pytest.approx(0.75 * 800 / 10e9)
    assert prediction.step.optimizer_s == pytest.approx(800 / 10e9)


@pytest.mark.parametrize("name", ["roofline", "gemm-table"])
def test_without_products_there_is_no_prediction(name: str) -> None:
    with pytest.raises(DlperfError, match="no matrix products; run dlperf calibrate"):
        predict(trace(linear("fc", 2, 3, 4)), machine(), threads=1, predictor=name)


@pytest.mark.parametrize("name", ["roofline", "gemm-table"])
def test_without_bandwidth_there_is_no_prediction(name: str) -> None:
    with pytest.raises(DlperfError, match="no memory bandwidth"):
        predict(
            trace(linear("fc", 2, 3, 4)),
            replace(machine(gemm(2, 3, 4, 1.0)), bandwidths=()),
            threads=1,
            predictor=name,
        )


# -- gemm-table ------------------------------------------------------------------------------------


def test_table_prices_the_published_layers() -> None:
    cpu = machine(gemm(32, 784, 50, 1e-4, 3e-4, 2e-4))
    relu, sigmoid = unary("aten.relu_", "relu", 32, 50), unary("aten.sigmoid", "sigmoid", 32, 50)
    step = trace(unary("aten.view", "flatten", 32, 784), linear("fc", 32, 784, 50), relu, sigmoid)
    prediction = predict(step, cpu, threads=1, predictor="gemm-table")
    assert row(prediction, "fc")["forward_s"] == pytest.approx(1e-4)  # the least of the samples
    assert row(prediction, "relu")["forward_s"] == pytest.approx(4 * 1600 / 10e9)
    assert row(prediction, "sigmoid")["forward_s"] == pytest.approx(30 * 4 * 1600 / 10e9)
    assert row(prediction, "flatten")["forward_s"] == 0.0
    assert prediction.step.total_s == pytest.approx(1e-4 + 31 * 4 * 1600 / 10e9)


def test_memory_wins_where_the_table_is_too_fast() -> None:
    # (1 x 1000)(1000 x 1000) moves 4 x 1,002,000 bytes: at 10 GB/s 0.4008 ms, more than the 0.1 ms
    # of the table
    prediction = predict(
        trace(linear("fc", 1, 1000, 1000)),
        machine(gemm(1, 1000, 1000, 1e-4)),
        threads=1,
        predictor="gemm-table",
    )
    fc = row(prediction, "fc")
    assert fc["forward_s"] == pytest.approx(4 * 1_002_000 / 10e9)
    assert fc["bound"] == "DRAM"


def test_other_layers_are_named_and_other_phases_null() -> None:
    cpu = machine(gemm(32, 784, 50, 1e-4))
    step = trace(
        linear("fc", 32, 784, 50),
        unary("aten.tanh", "tanh", 32, 50),
        unary("aten.mean", LOSS, 32, 50),
        unary("aten.relu", "fc", 32, 50, phase="backward"),
        inference=False,
    )
    prediction = predict(step, cpu, threads=1, predictor="gemm-table")
    assert prediction.prices.unsupported == ("tanh", LOSS)
    assert prediction.to_json()["coverage"]["unsupported"] == ["tanh", LOSS]
    assert prediction.step.forward_s is None
    assert prediction.step.total_s is None
    assert math.isnan(row(prediction, "tanh")["forward_s"])  # type: ignore[arg-type]
    assert math.isnan(row(prediction, "fc")["backward_s"])  # type: ignore[arg-type]
    assert row(prediction, "fc")["forward_s"] == pytest.approx(1e-4)


def test_a_layer_that_does_anything_else_is_not_half_priced() -> None:
    step = trace(linear("block", 32, 784, 50), unary("aten.gelu", "block", 32, 50))
    prediction = predict(step, machine(gemm(32, 784, 50, 1e-4)), threads=1, predictor="gemm-table")
    assert prediction.prices.unsupported == ("block",)


def test_sizes_between_measured_ones() -> None:
    # both neighbours at 1 GFLOP/s, so every size between them is as well
    cpu = machine(gemm(32, 32, 32, 2 * 32**3 / 1e9), gemm(128, 128, 128, 2 * 128**3 / 1e9))
    between = predict(trace(linear("fc", 64, 64, 64)), cpu, threads=1, predictor="gemm-table")
    outside = predict(trace(linear("fc", 256, 64, 64)), cpu, threads=1, predictor="gemm-table")
    assert row(between, "fc")["source"] == "interpolated"
    assert row(between, "fc")["forward_s"] == pytest.approx(2 * 64**3 / 1e9)
    assert row(outside, "fc")["source"] == "extrapolated"


def test_halfway_in_logarithms_is_the_geometric_mean() -> None:
    cpu = machine(
        gemm(32, 64, 64, 2 * 32 * 64 * 64 / 1e9), gemm(128, 64, 64, 2 * 128 * 64 * 64 / 4e9)
    )
    prediction = predict(trace(linear("fc", 64, 64, 64)), cpu, threads=1, predictor="gemm-table")
    assert row(prediction, "fc")["forward_s"] == pytest.approx(
        2 * 64**3 / 2e9
    )  # sqrt(1 x 4) = 2 GFLOP/s


def test_the_ops_own_orientation_comes_first() -> None:
    cpu = machine(gemm(32, 784, 50, 1e-4), gemm(32, 784, 50, 7e-4, orientation="NT"))
    assert row(
        predict(trace(linear("fc", 32, 784, 50)), cpu, threads=1, predictor="gemm-table"), "fc"
    )["forward_s"] == pytest.approx(7e-4)
    size = gemm_size(linear("fc", 32, 784, 50))
    assert size is not None
    assert (size.m, size.k, size.n, size.orientation) == (32, 784, 50, "NT")
