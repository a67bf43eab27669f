"""FLOPs of contractions: torch's own counter where it is right, hand arithmetic where it is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from dispatched import ops_of, torch_flops
from torch import nn

from dlperf.core.trace import Op
from dlperf.ops.counts import op_bytes, op_flops


def named(call: Callable[[], object], packet: str) -> Op:
    """The one op of a call that carries this name."""
    found = [op for op in ops_of(call) if op.packet == packet]
    assert len(found) == 1, [op.name for op in found]
    return found[0]


def contraction_flops(call: Callable[[], object]) -> int:
    names = (
        "aten.mm",
        "aten.addmm",
        "aten.bmm",
        "aten.baddbmm",
        "aten.convolution",
        "aten.convolution_backward",
    )
    return sum(op_flops(op) or 0 for op in ops_of(call) if op.packet in names)


def step(model: nn.Module, *inputs: torch.Tensor) -> Callable[[], object]:
    return lambda: model(*inputs).sum().backward()


LIKE_TORCH: dict[str, Callable[[], object]] = {
    "linear": step(nn.Linear(7, 5), torch.randn(3, 7)),
    "linear without bias": step(nn.Linear(7, 5, bias=False), torch.randn(3, 7, requires_grad=True)),
    "linear on three dimensions": step(nn.Linear(7, 5), torch.randn(2, 3, 7)),
    "matmul": lambda: torch.randn(4, 3, 7) @ torch.randn(4, 7, 5),
    "baddbmm": lambda: torch.baddbmm(
        torch.randn(4, 3, 5), torch.randn(4, 3, 7), torch.randn(4, 7, 5)
    ),
    "einsum": lambda: torch.einsum("bij,bjk->bik", torch.randn(4, 3, 7), torch.randn(4, 7, 5)),
    "conv1d": step(nn.Conv1d(3, 8, 5, stride=2), torch.randn(2, 3, 33)),
    "conv2d": step(
        nn.Conv2d(3, 8, (3, 5), stride=2, padding=1, dilation=2),
        torch.randn(2, 3, 19, 21, requires_grad=True),
    ),
    "conv2d of data": step(nn.Conv2d(3, 8, 3), torch.randn(2, 3, 9, 9)),
    "conv3d": step(nn.Conv3d(2, 4, 3), torch.randn(1, 2, 5, 6, 7, requires_grad=True)),
    "transposed": step(
        nn.ConvTranspose2d(6, 4, 3, stride=2), torch.randn(2, 6, 5, 5, requires_grad=True)
    ),
    "lenet": step(
        nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.Flatten(),
            nn.Linear(1600, 10),
        ),
        torch.randn(2, 1, 28, 28),
    ),
    "grouped forward": lambda: nn.Conv2d(8, 12, 3, groups=4)(torch.randn(2, 8, 9, 9)),
    "depthwise forward": lambda: nn.Conv2d(8, 8, 3, groups=8)(torch.randn(2, 8, 9, 9)),
}


@pytest.mark.parametrize("case", LIKE_TORCH)
def test_as_torch_counts(case: str) -> None:
    assert contraction_flops(LIKE_TORCH[case]) == torch_flops(LIKE_TORCH[case]) > 0


def test_vector_products() -> None:
    a, v = torch.randn(6, 5), torch.randn(5)
    assert op_flops(named(lambda: torch.mv(a, v), "aten.mv")) == 2 * 6 * 5
    assert op_flops(named(lambda: torch.addmv(torch.randn(6), a, v), "aten.addmv")) == 2 * 6 * 5
    assert op_flops(named(lambda: torch.dot(v, v), "aten.dot")) == 2 * 5
    assert op_flops(named(lambda: torch.addr(a, torch.randn(6), v), "aten.addr")) == 2 * 6 * 5
    assert (
        op_flops(
            named(
                lambda: torch.addbmm(torch.randn(3, 4), torch.randn(2, 3, 5), torch.randn(2, 5, 4)),
                "aten.addbmm",
            )
        )
        == 2 * 2 * 3 * 5 * 4
    )


def test_linear_where_autograd_is_off() -> None:
    x, weight = torch.randn(2, 3, 7), torch.randn(5, 7)
    with torch.inference_mode():
        ops = ops_of(lambda: F.linear(x, weight))
    assert sum(op_flops(op) or 0 for op in ops) == 2 * 2 * 3 * 7 * 5


@pytest.mark.parametrize(("groups", "c_in", "c_out"), [(2, 8, 12), (8, 8, 8), (8, 8, 16)])
def test_grouped_backward(groups: int, c_in: int, c_out: int) -> None:
    # each multiply-add of the forward stands once in the input's and once in the weight's gradient
    call = step(
        nn.Conv2d(c_in, c_out, 3, padding=1, groups=groups),
        torch.randn(2, c_in, 9, 9, requires_grad=True),
    )
    forward = 2 * (2 * c_out * 9 * 9) * (c_in // groups) * 3 * 3
    ops = {op.packet: op_flops(op) for op in ops_of(call)}
    assert ops["aten.convolution"] == forward
    assert ops["aten.convolution_backward"] == 2 * forward


def test_torch_overcounts_depthwise_backward() -> None:
    # the reason why this formula is not torch's: 32 channels, 16.5 times too much
    call = step(
        nn.Conv2d(32, 32, 3, padding=1, groups=32), torch.randn(1, 32, 8, 8, requires_grad=True)
    )
    assert torch_flops(call) > 5 * contraction_flops(call)


def test_backward_follows_its_output_mask() -> None:
    x = torch.randn(2, 3, 9, 9)
    conv = nn.Conv2d(3, 4, 3)
    for parameter in conv.parameters():
        parameter.requires_grad_(False)
    backward = named(step(conv, x.clone().requires_grad_()), "aten.convolution_backward")
    assert op_flops(backward) == 2 * (2 * 4 * 7 * 7) * 3 * 3 * 3


def test_transposed_grouped() -> None:
    # 2 x 6 x 5 x 5 input elements, each meets (4 / 2) x 3 x 3 weights
    op = named(
        lambda: nn.ConvTranspose2d(6, 4, 3, groups=2)(torch.randn(2, 6, 5, 5)), "aten.convolution"
    )
    assert op_flops(op) == 2 * (2 * 6 * 5 * 5) * (2 * 3 * 3)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_on_the_cpu(causal: bool) -> None:
    b, h, t, d = 2, 3, 8, 16
    q, k, v = (torch.randn(b, h, t, d, requires_grad=True) for _ in range(3))
    call = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward()  # noqa: E731
    ops = {op.packet: op_flops(op) for op in ops_of(call)}
    scores = b * h * (t * (t + 1) // 2 if causal else t * t)
    # two products of d multiply-adds a score, scaling 1, softmax 5; backward five products, and 5
    assert ops["aten._scaled_dot_product_flash_attention_for_cpu"] == scores * (4 * d + 6)
    assert ops["aten._scaled_dot_product_flash_attention_for_cpu_backward"] == scores * (10 * d + 5)
    # why these formulas exist: torch counts nothing, or (from 2.15 on) seven products of all scores
    assert torch_flops(call) in (0, b * h * t * t * 14 * d)


def test_attention_with_fewer_queries_and_grouped_heads() -> None:
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 7, 8)
    op = named(
        lambda: F.scaled_dot_product_attention(q, k, k),
        "aten._scaled_dot_product_flash_attention_for_cpu",
    )
    assert op_flops(op) == 4 * 3 * 7 * (4 * 8 + 6)
    from dlperf.core.trace import TensorSpec

    many, few = TensorSpec.contiguous(1, 8, 5, 16), TensorSpec.contiguous(1, 2, 5, 16)
    grouped = Op(
        "aten._scaled_dot_product_flash_attention.default",
        (many, few, few, 0.0, True),
        outputs=(many,),
    )
    assert op_flops(grouped) == 8 * 15 * (4 * 16 + 6)  # 15 = 1 + 2 + 3 + 4 + 5


@pytest.mark.parametrize(("layer", "n_gates", "cell"), [(nn.LSTM, 4, 13 + 8), (nn.LSTM, 4, 13)])
def test_recurrent_layer(layer: type[nn.LSTM], n_gates: int, cell: int) -> None:
    t, b, i, hidden = 5, 3, 4, 6
    rnn = layer(i, hidden, bias=cell > 13)
    call = lambda: rnn(torch.randn(t, b, i, requires_grad=True))[0].sum().backward()  # noqa: E731
    ops = {op.packet: op_flops(op) for op in ops_of(call)}
    forward = t * b * (2 * n_gates * hidden * (i + hidden) + cell * hidden)
    if "aten.mkldnn_rnn_layer" not in ops:
        pytest.skip("this torch runs the LSTM step by step")
    assert ops["aten.mkldnn_rnn_layer"] == forward
    assert ops["aten.mkldnn_rnn_layer_backward"] == 2 * forward
    assert torch_flops(call) == 0


def test_gru_contractions() -> None:
    t, b, i, hidden = 5, 3, 4, 6
    rnn = nn.GRU(i, hidden)
    ops = ops_of(lambda: rnn(torch.randn(t, b, i)))
    products = sum(op_flops(op) or 0 for op in ops if op.packet in ("aten.mm", "aten.addmm"))
    assert products == 2 * t * b * 3 * hidden * (i + hidden)
    assert all(op_flops(op) is not None for op in ops), [
        op.name for op in ops if op_flops(op) is None
    ]


def test_transformer_encoder_layer_fast_path_equals_its_parts() -> None:
    b, t, d, heads, hidden = 2, 5, 16, 4, 24
    layer = nn.TransformerEncoderLayer(d, heads, hidden, batch_first=True).eval()
    with torch.inference_mode():
        op = named(lambda: layer(torch.randn(b, t, d)), "aten._transformer_encoder_layer_fwd")
    rows = b * t
    products = 2 * rows * (4 * d * d + 2 * d * hidden)
    attention = b * heads * t * t * (4 * (d // heads) + 6)
    assert op_flops(op) == products + attention + 2 * rows * d * (8 + 1) + rows * hidden


def test_bilinear() -> None:
    op = named(
        lambda: nn.Bilinear(3, 4, 5)(torch.randn(2, 3), torch.randn(2, 4)), "aten._trilinear"
    )
    assert op_flops(op) == 3 * 2 * 5 * 3 * 4


def test_bytes_of_a_linear_layer() -> None:
    ops = ops_of(lambda: nn.Linear(7, 5)(torch.randn(3, 7)))
    addmm = next(op for op in ops if op.packet == "aten.addmm")
    assert op_bytes(addmm) == 4 * (5 + 3 * 7 + 7 * 5 + 3 * 5)
    assert all(op_bytes(op) == 0 for op in ops if op.packet == "aten.t")


@pytest.mark.parametrize(
    ("make", "n_gates", "cell"), [(nn.LSTM, 4, 21), (nn.GRU, 3, 16), (nn.RNN, 1, 4)]
)
def test_recurrent_modules_where_autograd_is_off(
    make: type[nn.Module], n_gates: int, cell: int
) -> None:
    # two layers, both directions: (4, 6), (6, 6) and then (12, 6), (6, 6) in each direction
    rnn, x = make(4, 6, 2, bidirectional=True), torch.randn(5, 3, 4)
    with torch.inference_mode():
        ops = ops_of(lambda: rnn(x))
    weights = 2 * n_gates * 6 * (4 + 6 + 12 + 6)
    units = 2 * 2 * 6
    whole = [op for op in ops if op.packet in ("aten.lstm", "aten.gru", "aten.rnn_tanh")]
    assert [op_flops(op) for op in whole] == [5 * 3 * (2 * weights + units * cell)] * len(whole)


def test_einsum_where_autograd_is_off() -> None:
    x, y = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    with torch.inference_mode():
        ops = ops_of(
            lambda: (torch.einsum("bij,bkj->bik", x, y), torch.einsum("...ij,...kj->...ik", x, y))
        )
    assert [op_flops(op) for op in ops if op.packet == "aten.einsum"] in (
        [2 * 2 * 3 * 4 * 5] * 2,
        [],
    )


def test_cells() -> None:
    # hidden size 6, batch 3: two products, and 21 (LSTM) or 16 (GRU) FLOP a unit
    for make, n_gates, cell in ((nn.LSTMCell, 4, 21), (nn.GRUCell, 3, 16)):
        module, x = make(4, 6), torch.randn(3, 4)
        with torch.inference_mode():
            found = [
                op_flops(op)
                for op in ops_of(lambda module=module, x=x: module(x))
                if op.packet in ("aten.lstm_cell", "aten.gru_cell")
            ]
        assert found in ([3 * (2 * n_gates * 6 * (4 + 6) + 6 * cell)], [])
