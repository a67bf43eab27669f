"""Every optimizer of torch.optim that steps without a closure: the same operations as on real
tensors, owned by the right layers.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from recorder_zoo import real_ops
from torch import nn

from dlperf.core.errors import DlperfError
from dlperf.recorder.recording import record

OPTIMIZERS = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam": ("Adam", {}),
    "amsgrad": ("Adam", {"amsgrad": True}),
    "adamw": ("AdamW", {}),
    "nadam": ("NAdam", {}),
    "radam": ("RAdam", {}),
    "rmsprop": ("RMSprop", {"momentum": 0.9, "centered": True}),
    "rprop": ("Rprop", {}),
    "adagrad": ("Adagrad", {}),
    "adadelta": ("Adadelta", {}),
    "adamax": ("Adamax", {}),
    "asgd": ("ASGD", {}),
    "adafactor": ("Adafactor", {}),
    "muon": ("Muon", {}),
}
READS_SCALARS = {"asgd", "adafactor"}
VARIANTS = {"for-loop": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def choices():
    for name, (kind, options) in OPTIMIZERS.items():
        for variant, switch in VARIANTS.items():
            known = (
                inspect.signature(getattr(torch.optim, kind)).parameters
                if hasattr(torch.optim, kind)
                else ()
            )
            if hasattr(torch.optim, kind) and set(switch) <= set(known):
                yield pytest.param(
                    kind, options, variant, name in READS_SCALARS, id=f"{name}-{variant}"
                )


def make(kind, options, variant, bias=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4, bias=bias), nn.Tanh(), nn.Linear(4, 2, bias=bias))
    optimizer = getattr(torch.optim, kind)(
        model.parameters(), lr=0.01, **options, **VARIANTS[variant]
    )
    return model, (torch.randn(3, 6),), lambda y: y.square().mean(), optimizer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "options", "variant", "reads_scalars"), list(choices()))
def test_operations_layers_and_state(kind, options, variant, reads_scalars):
    bias = kind != "Muon"  # it takes matrices only
    model, inputs, loss, optimizer = make(kind, options, variant, bias)
    trace = record(model, inputs, loss=loss, optimizer=optimizer)
    assert [(op.name, tuple(t.shape for t in op.outputs)) for op in trace.ops] == real_ops(
        lambda: make(kind, options, variant, bias)
    )
    assert trace.recorded_on == ("real tensors" if reads_scalars else "fake tensors"), trace.notes
    assert not optimizer.state or kind in (
        "Adagrad",
        "Rprop",
    )  # Adagrad makes its state when it is built
    assert trace.optimizer is not None
    assert (trace.optimizer.type, trace.optimizer.n_tensors) == (kind, 4 if bias else 2)
    if not reads_scalars:  # these fall back to the loop for some of their work
        assert trace.optimizer.implementation == variant

    # each layer's share of the optimizer's bytes is its share of the parameters, 6*4+4 and 4*2+2
    # (24 and 8 without bias)
    work = {"0": 0.0, "2": 0.0}
    for op in trace.ops:
        if op.phase == "optimizer":
            n_bytes = sum(t.nbytes for t in (*op.inputs, *op.outputs) if t.numel > 1)
            for layer, share in op.layer_shares:
                work[layer] += share * n_bytes
    assert set(work) == {"0", "2"}
    if kind not in ("Adafactor", "Muon"):  # those do not work elementwise
        first, second = (28, 10) if bias else (24, 8)
        assert work["0"] / work["2"] == pytest.approx(
            first / second, rel=1e-6 if variant == "for-loop" else 0.05
        )  # the others carry step counters along
    for op in trace.ops:
        assert not op.shares or sum(share for _, share in op.shares) == pytest.approx(1.0)

    # the state that torch itself makes, byte for byte
    loss(model(*inputs)).backward()
    optimizer.step()
    real = sum(
        v.numel() * v.element_size()
        for state in optimizer.state.values()
        for v in state.values()
        if isinstance(v, torch.Tensor)
    )
    assert sum(s.nbytes for s in trace.storages if s.kind == "optimizer") == real
    assert sum(s.nbytes for s in trace.storages if s.kind == "parameter") == 4 * sum(
        p.numel() for p in model.parameters()
    )
    assert sum(s.nbytes for s in trace.storages if s.kind == "gradient" and s.born >= 0) == 4 * sum(
        p.numel() for p in model.parameters()
    )


def test_state_of_a_running_training_is_used_and_kept():
    model, inputs, loss, optimizer = make("Adam", {}, "for-loop")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(3):
        optimizer.zero_grad()
        loss(model(*inputs)).backward()
        optimizer.step()
        scheduler.step()
    before = [
        (key, {name: value.clone() for name, value in state.items()})
        for key, state in optimizer.state.items()
    ]
    grads = [p.grad for p in model.parameters()]
    values = [g.clone() for g in grads]
    trace = record(model, inputs, loss=loss, optimizer=optimizer)
    assert trace.recorded_on == "fake tensors"
    assert [p.grad for p in model.parameters()] == grads or all(
        p.grad is g for p, g in zip(model.parameters(), grads)
    )
    assert all(torch.equal(a, b) for a, b in zip(grads, values))
    for (key, old), (now, state) in zip(before, optimizer.state.items()):
        assert key is now
        assert all(torch.equal(old[name], state[name]) for name in old)
    assert optimizer._opt_called
    assert scheduler.last_epoch == 3


@pytest.mark.parametrize("kind", ["LBFGS"])
def test_an_optimizer_with_a_closure_is_refused(kind):
    model = nn.Linear(2, 2)
    with pytest.raises(DlperfError, match="LBFGS calls a closure"):
        record(model, torch.randn(1, 2), optimizer=getattr(torch.optim, kind)(model.parameters()))


def test_own_optimizer_that_wraps_another():
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner
            super().__init__([p for g in inner.param_groups for p in g["params"]], {})
            self.slow = [p.detach().clone() for g in inner.param_groups for p in g["params"]]

        def step(self, closure=None):
            self.inner.step()
            with torch.no_grad():
                for slow, p in zip(self.slow, (p for g in self.param_groups for p in g["params"])):
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)

    model = nn.Linear(3, 2)
    optimizer = Lookahead(torch.optim.Adam(model.parameters()))
    values = [p.detach().clone() for p in model.parameters()], [t.clone() for t in optimizer.slow]
    trace = record(model, torch.randn(4, 3), optimizer=optimizer)
    assert trace.recorded_on == "fake tensors"
    assert [op.packet for op in trace.ops if op.phase == "optimizer"][-2:] == [
        "aten.lerp_",
        "aten.copy_",
    ]
    assert {op.layer for op in trace.ops if op.phase == "optimizer"} == {"Linear"}
    assert all(torch.equal(p, v) for p, v in zip(model.parameters(), values[0]))
    assert all(torch.equal(p, v) for p, v in zip(optimizer.slow, values[1]))
