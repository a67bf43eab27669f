"""FLOPs and bytes of everything that is no contraction, by hand arithmetic; coverage of torch's
operators; the registry.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from dispatched import ops_of
from torch import nn

from dlperf.core.errors import DlperfError
from dlperf.core.trace import Op, TensorSpec, Trace
from dlperf.ops import counts
from dlperf.ops.registry import flop_formula

X = torch.randn(4, 6)


def only(call: Callable[[], object], packet: str) -> Op:
    found = [op for op in ops_of(call) if op.packet == packet]
    assert len(found) == 1, [op.name for op in ops_of(call)]
    return found[0]


IMAGE = torch.randn(2, 3, 8, 8)
TABLE = torch.randn(1000, 16)
LOOKUP = torch.tensor([1, 5, 5])
LOGS = F.log_softmax(torch.randn(4, 10), 1)
TARGET = torch.tensor([1, 2, 3, 4])

# (packet, call, FLOPs, bytes), float32 unless said
CASES: list[tuple[str, Callable[[], object], int, int]] = [
    ("aten.relu", lambda: torch.relu(X), 24, 8 * 24),
    ("aten.relu_", lambda: torch.relu_(X.clone()), 24, 8 * 24),
    ("aten.add", lambda: X + 1, 24, 8 * 24),
    ("aten.mul", lambda: X * torch.randn(6), 24, 4 * (24 + 6 + 24)),
    ("aten.mul", lambda: X * torch.randn(4, 1).expand(4, 6), 24, 4 * (24 + 4 + 24)),
    ("aten.addcmul", lambda: torch.addcmul(X, X, X), 48, 8 * 24),  # one tensor, three times
    ("aten.where", lambda: torch.where(X > 0, X, 0.0), 24, 24 + 4 * 24 + 4 + 4 * 24),
    ("aten.sum", lambda: X.sum(), 24, 4 * 24 + 4),
    ("aten.mean", lambda: X.mean(1), 24, 4 * (24 + 4)),
    ("aten.var", lambda: X.var(), 4 * 24, 4 * 24 + 4),
    ("aten.cumsum", lambda: X.cumsum(0), 24, 8 * 24),
    ("aten.argmax", lambda: X.argmax(1), 24, 4 * 24 + 8 * 4),
    ("aten.max", lambda: X.max(1), 24, 4 * 24 + 12 * 4),
    ("aten.sort", lambda: torch.randn(3, 8).sort(), 24 * 3, 4 * 24 + 12 * 24),
    ("aten.fill_", lambda: torch.empty(24).fill_(1.0), 0, 4 * 24),
    ("aten.zero_", lambda: torch.empty(24).zero_(), 0, 4 * 24),
    ("aten.copy_", lambda: torch.empty(4, 6).copy_(X), 0, 8 * 24),
    ("aten.clone", lambda: X.clone(), 0, 8 * 24),
    ("aten._to_copy", lambda: X.double(), 0, 12 * 24),
    ("aten.cat", lambda: torch.cat([X, X.clone()]), 0, 8 * 48),
    ("aten.zeros_like", lambda: torch.zeros_like(X), 0, 4 * 24),
    ("aten.t", lambda: X.t(), 0, 0),
    ("aten.view", lambda: X.view(24), 0, 0),
    ("aten.expand", lambda: X[:1].expand(4, 6), 0, 0),
    ("aten.unsqueeze_", lambda: X.clone().unsqueeze_(0), 0, 0),
    ("aten.empty", lambda: torch.empty(24), 0, 0),
    ("aten.bernoulli_", lambda: torch.empty(24).bernoulli_(0.5), 24, 4 * 24),
    (
        "aten.native_dropout",
        lambda: torch.ops.aten.native_dropout(X, 0.5, True),
        48,
        4 * 24 + 4 * 24 + 24,
    ),
    ("aten._softmax", lambda: F.softmax(X, 1), 5 * 24, 8 * 24),
    (
        "aten.native_layer_norm",
        lambda: F.layer_norm(X, (6,), torch.ones(6), torch.ones(6)),
        8 * 24,
        4 * (24 + 12 + 24 + 8),
    ),
    (
        "aten.native_batch_norm",
        lambda: F.batch_norm(IMAGE, None, None, None, None, training=True),
        8 * 384,
        4 * (384 + 384 + 6),
    ),
    (
        "aten.max_pool2d_with_indices",
        lambda: F.max_pool2d(IMAGE.clone().requires_grad_(), 2),
        4 * 96,
        4 * 384 + 12 * 96,
    ),
    ("aten.avg_pool2d", lambda: F.avg_pool2d(IMAGE, 3), 9 * 24, 4 * (384 + 24)),
    ("aten._adaptive_avg_pool2d", lambda: F.adaptive_avg_pool2d(IMAGE, 2), 384, 4 * (384 + 24)),
    (
        "aten.upsample_bilinear2d",
        lambda: F.interpolate(IMAGE, scale_factor=2, mode="bilinear"),
        8 * 1536,
        4 * (384 + 1536),
    ),
    (
        "aten.embedding",
        lambda: F.embedding(LOOKUP, TABLE),
        0,
        2 * 4 * 3 * 16 + 8 * 3,
    ),  # three rows, not a thousand
    ("aten.gather", lambda: X.gather(1, torch.zeros(4, 2, dtype=torch.long)), 0, 2 * 4 * 8 + 8 * 8),
    ("aten.index_select", lambda: TABLE.index_select(0, LOOKUP), 0, 2 * 4 * 48 + 8 * 3),
    (
        "aten.scatter_add_",
        lambda: torch.zeros(4, 6).scatter_add_(1, torch.zeros(4, 2, dtype=torch.long), X),
        24,
        8 * 8 + 4 * 8 + 8 * 8,
    ),
    (
        "aten.index_add_",
        lambda: torch.zeros(9, 16).index_add_(0, LOOKUP, torch.ones(3, 16)),
        48,
        8 * 3 + 4 * 48 + 8 * 48,
    ),
    ("aten.nll_loss_forward", lambda: F.nll_loss(LOGS, TARGET), 4, 8 * 4 + 4 * 4 + 4 + 4),
    ("aten.mse_loss", lambda: F.mse_loss(X, X.clone()), 72, 8 * 24 + 4),
]


@pytest.mark.parametrize(
    ("packet", "call", "flops", "n_bytes"),
    CASES,
    ids=[f"{index}-{case[0]}" for index, case in enumerate(CASES)],
)
def test_by_hand(packet: str, call: Callable[[], object], flops: int, n_bytes: int) -> None:
    op = only(call, packet)
    assert (counts.op_flops(op), counts.op_bytes(op)) == (flops, n_bytes)


def test_pooling_backward_reads_no_input() -> None:
    op = only(
        lambda: F.max_pool2d(IMAGE.clone().requires_grad_(), 2).sum().backward(),
        "aten.max_pool2d_with_indices_backward",
    )
    # the gradient of 96 outputs (expanded from one element), 96 indices; 384 gradients written
    assert counts.op_bytes(op) == 4 + 8 * 96 + 4 * 384
    assert counts.op_flops(op) == 96


def test_embedding_backward_touches_rows_and_writes_the_table() -> None:
    table = TABLE.clone().requires_grad_()
    op = only(
        lambda: (F.embedding(LOOKUP, table) * 1.0).sum().backward(), "aten.embedding_dense_backward"
    )
    assert counts.op_flops(op) == 3 * 16
    assert counts.op_bytes(op) == 4 * 48 + 8 * 3 + 4 * 16_000 + 2 * 4 * 48


@pytest.mark.parametrize(
    ("make", "packet", "flops", "n_bytes"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, fused=True), "aten._fused_sgd_", 2, 12),
        (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
            "aten._fused_sgd_",
            6,
            20,
        ),
        (lambda p: torch.optim.Adam(p, fused=True), "aten._fused_adam_", 12, 28),
        (lambda p: torch.optim.AdamW(p, fused=True), "aten._fused_adamw_", 14, 28),
        (lambda p: torch.optim.Adagrad(p, fused=True), "aten._fused_adagrad_", 7, 20),
    ],
)
def test_fused_optimizers(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    packet: str,
    flops: int,
    n_bytes: int,
) -> None:
    parameters = [nn.Parameter(torch.randn(10, 10)), nn.Parameter(torch.randn(7))]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = make(parameters)
    optimizer.step()
    op = only(optimizer.step, packet)
    assert counts.op_flops(op) == flops * 107
    assert abs(counts.op_bytes(op) - n_bytes * 107) <= 16  # the step counters


def test_foreach_operators_read_and_write_every_tensor() -> None:
    first, second = [torch.randn(10), torch.randn(3)], [torch.randn(10), torch.randn(3)]
    op = only(lambda: torch._foreach_add_(first, second), "aten._foreach_add_")
    assert (counts.op_flops(op), counts.op_bytes(op)) == (13, 4 * 3 * 13)
    assert (
        counts.op_bytes(only(lambda: torch._foreach_zero_(first), "aten._foreach_zero_")) == 4 * 13
    )
    assert (
        counts.op_flops(
            only(lambda: torch._foreach_addcdiv_(first, second, second), "aten._foreach_addcdiv_")
        )
        == 26
    )


def test_ctc_and_distances() -> None:
    scores = F.log_softmax(torch.randn(12, 2, 5), 2)
    op = only(
        lambda: torch.ops.aten._ctc_loss(
            scores, torch.ones(2, 3, dtype=torch.long), [12, 12], [3, 3]
        ),
        "aten._ctc_loss",
    )
    assert counts.op_flops(op) == 13 * 2 * 12 * 7  # 2 x 3 + 1 states
    op = only(
        lambda: torch.ops.aten._cdist_forward(torch.randn(4, 3), torch.randn(5, 3), 2.0, 2),
        "aten._cdist_forward",
    )
    assert counts.op_flops(op) == 3 * 4 * 5 * 3


def test_fourier_transform() -> None:
    op = only(lambda: torch.fft.fft(torch.randn(3, 16, dtype=torch.complex64)), "aten._fft_c2c")
    assert counts.op_flops(op) == 5 * 48 * 4


# -- what is covered -------------------------------------------------------------------------------


def overloads() -> list[torch._ops.OpOverload]:
    found = []
    for schema in torch._C._jit_get_all_schemas():
        namespace, name = schema.name.split("::")
        packet = getattr(torch.ops.aten, name, None) if namespace == "aten" else None
        overload = getattr(packet, schema.overload_name or "default", None)
        if isinstance(overload, torch._ops.OpOverload):
            found.append(overload)
    return found


def packet_of(overload: torch._ops.OpOverload) -> str:
    return overload._schema.name.replace("::", ".")


def known(packet: str) -> bool:
    return counts.registry.find(counts.registry.FLOPS, packet) is not None


def test_every_pointwise_operator_of_torch_is_known() -> None:
    missing = {
        packet_of(o)
        for o in overloads()
        if torch.Tag.pointwise in o.tags and not known(packet_of(o))
    }
    assert not missing


def test_every_core_operator_of_torch_is_known() -> None:
    missing = {
        packet_of(o) for o in overloads() if torch.Tag.core in o.tags and not known(packet_of(o))
    }
    assert not missing


def test_views_are_what_torch_says_they_are() -> None:
    # a view returns its argument's memory and does not write to it
    views = {
        packet_of(o)
        for o in overloads()
        if o._schema.returns
        and all(r.alias_info is not None and not r.alias_info.is_write for r in o._schema.returns)
    }
    dispatched = (
        "as_strided detach diagonal expand permute select slice squeeze t transpose unfold"
        " unsqueeze view alias".split()
    )
    assert {f"aten.{name}" for name in dispatched} <= views & counts.elementwise.VIEWS


def test_a_training_step_leaves_nothing_unknown() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.GroupNorm(2, 8),
        nn.GELU(),
        nn.SiLU(),
        nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 16),
        nn.LayerNorm(16),
        nn.Dropout(0.1),
        nn.PReLU(),
        nn.GLU(),
        nn.Linear(8, 4),
        nn.Tanh(),
    )
    names = (
        "SGD",
        "Adam",
        "AdamW",
        "RMSprop",
        "Adagrad",
        "Adadelta",
        "Adamax",
        "NAdam",
        "RAdam",
        "Rprop",
        "ASGD",
    )
    for name in names:
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3)

        def step(optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(IMAGE), torch.tensor([0, 1])).backward()
            optimizer.step()

        unknown = {op.name for op in ops_of(step) if counts.op_flops(op) is None}
        assert not unknown, (name, unknown)


def test_transformers_and_losses_leave_nothing_unknown() -> None:
    encoder = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    losses = [
        nn.MSELoss(),
        nn.L1Loss(),
        nn.SmoothL1Loss(),
        nn.HuberLoss(),
        nn.BCEWithLogitsLoss(),
        nn.KLDivLoss(),
        nn.SoftMarginLoss(),
        nn.PoissonNLLLoss(),
        nn.CosineSimilarity(),
    ]
    calls: list[Callable[[], object]] = [lambda: encoder(torch.randn(2, 5, 16)).sum().backward()]
    for loss in losses:
        calls.append(
            lambda loss=loss: (
                loss(torch.rand(4, 6, requires_grad=True), torch.rand(4, 6)).sum().backward()
            )
        )
    calls.append(
        lambda: nn.BCELoss()(torch.rand(4, 6, requires_grad=True), torch.rand(4, 6)).backward()
    )
    calls.append(lambda: nn.EmbeddingBag(10, 4)(LOOKUP, torch.tensor([0, 2])).sum().backward())
    calls.append(
        lambda: nn.MultiheadAttention(16, 4)(*[torch.randn(5, 2, 16)] * 3)[0].sum().backward()
    )
    calls.append(
        lambda: nn.Upsample(scale_factor=2)(IMAGE.clone().requires_grad_()).sum().backward()
    )
    calls.append(lambda: nn.ReflectionPad2d(1)(IMAGE.clone().requires_grad_()).sum().backward())
    calls.append(
        lambda: (
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))(torch.randn(2, 4))
            .sum()
            .backward()
        )
    )
    for call in calls:
        unknown = {op.name for op in ops_of(call) if counts.op_flops(op) is None}
        assert not unknown


# -- the registry, and totals ----------------------------------------------------------------------


def test_a_second_formula_is_an_error() -> None:
    with pytest.raises(DlperfError, match="two FLOP formulas"):
        flop_formula("aten.mm")(lambda op: 0)


def test_unknown_is_never_zero() -> None:
    x = TensorSpec.contiguous(10)
    mystery = Op("mine.mystery.default", (x,), outputs=(x,))
    assert counts.op_flops(mystery) is None
    assert counts.op_bytes(mystery) == 80


def test_totals_are_aligned_and_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = TensorSpec.contiguous(10)
    relu, mystery = (
        Op("aten.relu.default", (x,), outputs=(x,)),
        Op("mine.mystery.default", (x,), outputs=(x,)),
    )
    trace = Trace("t", 1, (), (relu, mystery, relu))
    assert counts.totals(trace) == ([10, 0, 10], [80, 80, 80])
    assert counts.unknown_ops(trace) == (1,)
    monkeypatch.setattr(counts, "op_flops", lambda op: pytest.fail("counted twice"))
    counts.totals(trace)[0].append(5)  # a caller's list is its own
    assert counts.totals(trace) == ([10, 0, 10], [80, 80, 80])


def test_totals_are_forgotten_with_their_trace() -> None:
    trace = Trace(
        "t",
        1,
        (),
        (
            Op(
                "aten.relu.default",
                (TensorSpec.contiguous(3),),
                outputs=(TensorSpec.contiguous(3),),
            ),
        ),
    )
    counts.totals(trace)
    forgotten = weakref.ref(trace)
    del trace
    gc.collect()
    assert forgotten() is None
