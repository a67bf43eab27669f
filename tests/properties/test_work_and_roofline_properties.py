"""Properties of the counts and of the roofline: torch's counter on random shapes, bounds, scaling,
additivity.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from dlperf import predict
from dlperf.core.clock import Samples
from dlperf.core.machine import Bandwidth, Cpu, Kernel, Machine
from dlperf.core.trace import Op, TensorSpec, Trace
from dlperf.models import roofline as model
from dlperf.ops import counts

SIZE = st.integers(1, 40)
RATE = st.floats(1e3, 1e12)
COUNT = st.floats(0, 1e15)


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tuple(tensor.stride()))


@settings(deadline=None, max_examples=60)
@given(SIZE, SIZE, SIZE, SIZE)
def test_products_as_torch_counts(b: int, m: int, k: int, n: int) -> None:
    with FlopCounterMode(display=False) as counter:
        out = torch.bmm(meta(b, m, k), meta(b, k, n))
        added = torch.addmm(meta(n), meta(m, k), meta(k, n))
    batched = Op(
        "aten.bmm.default", (spec(meta(b, m, k)), spec(meta(b, k, n))), outputs=(spec(out),)
    )
    single = Op(
        "aten.addmm.default",
        (spec(meta(n)), spec(meta(m, k)), spec(meta(k, n))),
        outputs=(spec(added),),
    )
    assert (counts.op_flops(batched) or 0) + (
        counts.op_flops(single) or 0
    ) == counter.get_total_flops()


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_convolutions_as_torch_counts(data: st.DataObject) -> None:
    n_dims = data.draw(st.integers(1, 3))
    transposed = data.draw(st.booleans())
    groups = data.draw(st.integers(1, 4))
    batch, c_in, c_out = (
        data.draw(st.integers(1, 5)),
        groups * data.draw(st.integers(1, 5)),
        groups * data.draw(st.integers(1, 5)),
    )
    kernel = tuple(data.draw(st.integers(1, 4)) for _ in range(n_dims))
    image = tuple(data.draw(st.integers(8, 14)) for _ in range(n_dims))
    stride, padding, dilation = (
        tuple(data.draw(st.integers(low, high)) for _ in range(n_dims))
        for low, high in ((1, 3), (0, 1), (1, 2))
    )
    x = meta(batch, c_in, *image)
    weight = meta(*((c_in, c_out // groups) if transposed else (c_out, c_in // groups)), *kernel)
    arguments = (stride, padding, dilation, transposed, (0,) * n_dims, groups)
    with FlopCounterMode(display=False) as counter:
        out = torch.ops.aten.convolution(x, weight, None, *arguments)
    op = Op(
        "aten.convolution.default", (spec(x), spec(weight), None, *arguments), outputs=(spec(out),)
    )
    assert counts.op_flops(op) == counter.get_total_flops()
    if groups == 1:  # torch's count of the backward is wrong with groups
        with FlopCounterMode(display=False) as counter:
            torch.ops.aten.convolution_backward(
                out, x, weight, None, *arguments, [True, True, False]
            )
        backward = Op(
            "aten.convolution_backward.default",
            (spec(out), spec(x), spec(weight), None, *arguments, (True, True, False)),
        )
        assert counts.op_flops(backward) == counter.get_total_flops()
    else:  # the same work as that many convolutions of one group each
        part = Op(
            "aten.convolution_backward.default",
            (
                spec(meta(batch, c_out // groups, *out.shape[2:])),
                spec(meta(batch, c_in // groups, *image)),
                spec(meta(weight.shape[0] // groups, *weight.shape[1:])),
                None,
                stride,
                padding,
                dilation,
                transposed,
                (0,) * n_dims,
                1,
                (True, True, False),
            ),
        )
        whole = Op(
            "aten.convolution_backward.default",
            (spec(out), spec(x), spec(weight), None, *arguments, (True, True, False)),
        )
        assert counts.op_flops(whole) == groups * (counts.op_flops(part) or 0)


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 20), st.integers(1, 20), st.integers(1, 32)
)
def test_attention_is_its_products_and_softmax(b: int, h: int, t_q: int, t_k: int, d: int) -> None:
    q, k = meta(b, h, t_q, d), meta(b, h, t_k, d)
    with FlopCounterMode(display=False) as counter:
        scores = torch.matmul(q, k.transpose(-1, -2))
        torch.matmul(F.softmax(scores, -1), k)
    whole = Op(
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        (spec(q), spec(k), spec(k)),
        outputs=(spec(q),),
    )
    assert counts.op_flops(whole) == counter.get_total_flops() + 6 * scores.numel()
    causal = Op(whole.name, (*whole.args, 0.0, True), outputs=whole.outputs)
    assert (counts.op_flops(causal) or 0) == sum(min(t_k, i + 1) for i in range(t_q)) * b * h * (
        4 * d + 6
    )


@given(COUNT, COUNT, RATE, RATE)
def test_time_is_at_least_both_bounds_and_no_more(
    flops: float, n_bytes: float, peak: float, bandwidth: float
) -> None:
    seconds = model.time_s(flops, n_bytes, peak, bandwidth)
    assert seconds >= flops / peak
    assert seconds >= n_bytes / bandwidth
    assert seconds in (flops / peak, n_bytes / bandwidth)


@given(COUNT, COUNT, COUNT, RATE, RATE)
def test_more_bytes_never_take_less_time_and_double_rates_halve_it(
    flops: float, n_bytes: float, more: float, peak: float, bandwidth: float
) -> None:
    seconds = model.time_s(flops, n_bytes, peak, bandwidth)
    assert model.time_s(flops, n_bytes + more, peak, bandwidth) >= seconds
    assert model.time_s(flops, n_bytes, 2 * peak, 2 * bandwidth) == pytest.approx(
        float(seconds) / 2
    )


@given(st.floats(1, 1e15), st.floats(1, 1e15), RATE, RATE)
def test_time_and_attainable_rate_are_one_law(
    flops: float, n_bytes: float, peak: float, bandwidth: float
) -> None:
    rate = model.attainable_flops_per_s(
        model.operational_intensity(flops, n_bytes), peak, bandwidth
    )
    assert flops / float(rate) == pytest.approx(
        float(model.time_s(flops, n_bytes, peak, bandwidth))
    )
    assert rate <= peak


@given(COUNT.filter(bool), COUNT, RATE, RATE, RATE)
def test_a_network_never_helps(
    oi: float, cai: float, peak: float, memory: float, network: float
) -> None:
    assert model.attainable_with_network_flops_per_s(
        oi, cai, peak, memory, network
    ) <= model.attainable_flops_per_s(oi, peak, memory)


def _ops() -> st.SearchStrategy[Op]:
    def make(name: str, m: int, k: int, n: int) -> Op:
        a, b, c = (
            TensorSpec.contiguous(m, k),
            TensorSpec.contiguous(k, n),
            TensorSpec.contiguous(m, n),
        )
        return (
            Op("aten.mm.default", (a, b), outputs=(c,), layer="x")
            if name == "mm"
            else Op(f"aten.{name}.default", (a,), outputs=(a,), layer="x")
        )

    return st.builds(make, st.sampled_from(["mm", "relu", "sigmoid"]), SIZE, SIZE, SIZE)


def _machine(gemm_s: float, sweep_s: float) -> Machine:
    a = TensorSpec.contiguous(50, 50)
    product = Kernel(Op("aten.mm.default", (a, a), outputs=(a,)), "gemm", 1, Samples((gemm_s,)))
    return Machine(
        Cpu("test", 1), (product,), (Bandwidth("triad", 1, 10**9, 10**9, Samples((sweep_s,))),)
    )


@settings(deadline=None, max_examples=40)
@given(
    st.lists(_ops(), min_size=1, max_size=5),
    st.lists(_ops(), min_size=1, max_size=5),
    st.sampled_from(["roofline", "gemm-table"]),
)
def test_traces_add_and_a_twice_as_fast_machine_takes_half(
    first: list[Op], second: list[Op], name: str
) -> None:
    def total(ops: list[Op], machine: Machine) -> float:
        seconds = predict(
            Trace("t", 1, (), tuple(ops), inference=True), machine, threads=1, predictor=name
        ).step.total_s
        assert seconds is not None
        return seconds

    slow, fast = _machine(1e-4, 0.1), _machine(0.5e-4, 0.05)
    assert total(first + second, slow) == pytest.approx(total(first, slow) + total(second, slow))
    assert total(first, fast) == pytest.approx(total(first, slow) / 2)
