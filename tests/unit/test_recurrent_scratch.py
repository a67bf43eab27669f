"""What oneDNN allocates for recurrent layers, against what it says itself."""

from __future__ import annotations

import pytest
import torch

from dlperf.core.trace import Op, TensorSpec
from dlperf.predictors.allocator.primitives import primitives
from dlperf.predictors.kernels.mkl import product_buffers
from dlperf.predictors.kernels.recurrent import scratch, workspace_bytes

T = TensorSpec.contiguous
SHAPES = [(40, 32, 64, 128), (10, 8, 24, 24), (13, 8, 16, 48), (30, 20, 100, 150), (5, 4, 32, 256)]
SHAPES += [(40, 24, 224, 112), (20, 12, 512, 130)]


def layer(steps: int, batch: int, inputs: int, hidden: int) -> Op:
    kept = TensorSpec.contiguous(0, dtype="uint8", storage=3)
    state = T(batch, hidden)
    return Op(
        "aten.mkldnn_rnn_layer.default",
        (T(steps, batch, inputs), T(4 * hidden, inputs), T(4 * hidden, hidden)),
        outputs=(T(steps, batch, hidden), state, state, kept),
    )


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="sizes of blocks of 512 bits",
)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_workspace_has_the_size_that_torch_returns(shape: tuple[int, int, int, int]) -> None:
    steps, batch, inputs, hidden = shape
    weights = [torch.zeros(4 * hidden, n) for n in (inputs, hidden)]
    biases = [torch.zeros(4 * hidden) for _ in range(2)]
    states = [torch.zeros(batch, hidden) for _ in range(2)]
    results = torch.ops.aten.mkldnn_rnn_layer(
        torch.zeros(steps, batch, inputs),
        *(*weights, *biases, *states, False, [], 2, hidden, 1, True, False, False, True),
    )
    assert workspace_bytes(layer(*shape)) == (3, results[3].nbytes)


def test_gradients_that_nobody_gave_or_that_lie_otherwise_are_made() -> None:
    forward = layer(40, 32, 64, 128)
    turned = TensorSpec((40, 32, 128), (128, 5120, 1))
    rest = (None,) * 7
    args = (*forward.args, *rest, turned, None, T(32, 128))
    backward = Op("aten.mkldnn_rnn_layer_backward.default", args)
    (stage,) = scratch(backward)
    assert stage.held == (40 * 32 * 128 * 4, 32 * 128 * 4)
    assert scratch(forward)[0].after[1:] == stage.after[2:]  # 64 and 128 columns need no other rows


def test_a_layer_is_kept_once() -> None:
    op = layer(10, 8, 24, 24)
    found = primitives([op, op], [scratch(op)] * 2)
    assert list(found) == [(0, 0)]
    assert sum(map(abs, found[0, 0].last)) > 3e5


def test_a_product_takes_a_buffer_that_is_large_enough() -> None:
    def mm(m: int, k: int, n: int, dtype: str = "float32") -> Op:
        return Op("aten.mm.default", (T(m, k, dtype=dtype), T(k, n, dtype=dtype)))

    large = mm(512, 512, 512)
    assert product_buffers([large, mm(256, 256, 256), large]) == [(0, 1_000_096)]
    assert product_buffers([mm(8, 512, 512), mm(512, 160, 64)]) == [(0, 422_560), (1, 549_536)]
    assert product_buffers([mm(2, 512, 512), mm(512, 512, 8), mm(9, 9, 99, "float64")]) == []
