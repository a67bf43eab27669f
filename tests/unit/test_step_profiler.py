"""Measuring: exact under a fake clock, and the model unchanged to the bit."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dlperf.profiler.step_profiler as step_profiler
from dlperf.core.clock import Clock, CoreSpeed
from dlperf.core.errors import DlperfError, WorkFailed
from dlperf.core.measurement import Measurement
from dlperf.profiler.layer_times import (
    ENTER,
    EXIT,
    OUTSIDE,
    PAUSE,
    START,
    HookOverhead,
    attribute,
)
from dlperf.profiler.probe import LayerProbe
from dlperf.profiler.step_profiler import measure, measure_target
from dlperf.recorder.targets import resolve


class FakeTime:
    """A clock that moves only when told. Amounts are dyadic, so that sums of them are exact in
    floating point.
    """

    def __init__(self) -> None:
        self.t = 0.0
        self.lost = 0

    def clock(self) -> Clock:
        return Clock(now=lambda: self.t, switches=lambda: self.lost)


class _Spend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, time: FakeTime, forward_s: float, backward_s: float
    ) -> torch.Tensor:
        time.t += forward_s
        ctx.time, ctx.backward_s = time, backward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.time.t += ctx.backward_s
        return gradients[0], None, None, None


class Slow(nn.Module):
    """Takes known times forward and backward, and owns a parameter."""

    def __init__(self, time: FakeTime, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.time, self.forward_s, self.backward_s = time, forward_s, backward_s
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Spend.apply(x * self.weight, self.time, self.forward_s, self.backward_s)


class FakeSGD(torch.optim.SGD):
    """Takes a second for each parameter that has a gradient, and half a one for the rest of its
    work.
    """

    def __init__(self, parameters: Any, time: FakeTime) -> None:
        super().__init__(parameters, lr=0.0)
        self.time = time

    def step(self, closure: Any = None) -> None:
        self.time.t += 0.5 + sum(
            p.grad is not None for group in self.param_groups for p in group["params"]
        )
        super().step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.time.t += 0.125
        super().zero_grad(set_to_none)


class Branching(nn.Module):
    """Functional work of its own, a residual branch, a module used twice, and a container inside."""

    def __init__(self, time: FakeTime) -> None:
        super().__init__()
        self.time = time
        self.stem = Slow(time, 1.0, 2.0)
        self.block = nn.Sequential(
            Slow(time, 4.0, 8.0), nn.ReLU(inplace=True), Slow(time, 16.0, 32.0)
        )
        self.twice = Slow(time, 0.5, 0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.block(x)
        x = _Spend.apply(x, self.time, 64.0, 128.0)
        return self.twice(self.twice(x))


def rows(measurement: Measurement) -> dict[str, tuple[float | None, ...]]:
    return {
        r.layer: tuple(
            None if s is None else s.median for s in (r.forward, r.backward, r.optimizer)
        )
        for r in measurement.layers
    }


def test_known_times_come_out_exactly() -> None:
    time = FakeTime()
    model = Branching(time)
    loss = lambda output: _Spend.apply(output.sum(), time, 0.0625, 0.03125)  # noqa: E731
    got = measure(
        model,
        (torch.ones(3, 2),),
        loss=loss,
        optimizer=FakeSGD(model.parameters(), time),
        clock=time.clock(),
        seconds=1.0,
    )
    # four parameters with a gradient: 0.5 + 4 s a step, a quarter each, whatever the common half
    # second is
    assert rows(got) == {
        "Branching": (64.0, 128.0, 0.0),
        "stem": (1.0, 2.0, 1.125),
        "block": (0.0, 0.0, 0.0),
        "block.0": (4.0, 8.0, 1.125),
        "block.1": (0.0, 0.0, 0.0),
        "block.2": (16.0, 32.0, 1.125),
        "twice": (1.0, 0.5, 1.125),
        "(loss)": (0.0625, 0.03125, 0.0),
    }
    assert list(rows(got)) == [
        "Branching",
        "stem",
        "block",
        "block.0",
        "block.1",
        "block.2",
        "twice",
        "(loss)",
    ]
    forward_s, backward_s = 64 + 1 + 4 + 16 + 1 + 0.0625, 128 + 2 + 8 + 32 + 0.5 + 0.03125
    assert {name: samples.median for name, samples in got.step.items()} == {
        "zero_grad": 0.125,
        "forward": forward_s,
        "backward": backward_s,
        "optimizer": 4.5,
        "total": 0.125 + forward_s + backward_s + 4.5,
    }
    assert got.repeatability_frac == 0.0
    assert got.noise["layer_sum_frac"] == 1.0
    assert got.batch_size == 3


def test_the_optimizer_is_shared_by_what_each_layer_adds() -> None:
    class Offset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.ones(2)) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.a + self.b + self.c

    time = FakeTime()
    model = nn.Sequential(Slow(time, 1.0, 1.0), Offset())
    got = rows(
        measure(
            model,
            (torch.ones(3, 2),),
            optimizer=FakeSGD(model.parameters(), time),
            clock=time.clock(),
            seconds=1.0,
        )
    )
    # one and three parameters of a second each; the common half second goes with them: 4.5 s x 1/4
    # and 3/4
    assert (got["0"][2], got["1"][2]) == (1.125, 3.375)


def test_inference_is_forward_only() -> None:
    time = FakeTime()
    got = measure(
        Branching(time), {"x": torch.ones(3, 2)}, inference=True, clock=time.clock(), seconds=1.0
    )
    assert set(got.step) == {"forward", "total"}
    assert rows(got)["Branching"] == (64.0, None, None)
    assert "(loss)" not in rows(got)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_backward_of_the_layer_recomputed(reentrant: bool) -> None:
    time = FakeTime()

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Slow(time, 1.0, 2.0), Slow(time, 4.0, 8.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(
                lambda t: self.second(self.first(t)),
                x,
                use_reentrant=reentrant,
                preserve_rng_state=False,
            )
            return x * 1.0

    got = measure(
        Checkpointed(), (torch.ones(3, 2, requires_grad=True),), clock=time.clock(), seconds=1.0
    )
    # the forward runs once more in the backward; without reentry torch may stop it as soon as it
    # has what was saved
    assert rows(got)["first"][:2] == (1.0, 2.0 + 1.0)
    assert rows(got)["second"][0] == 4.0
    assert rows(got)["second"][1] in ((8.0 + 4.0,) if reentrant else (8.0, 8.0 + 4.0))


def test_samples_of_a_lost_core_are_dropped() -> None:
    time = FakeTime()

    class Losing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.n = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n += 1
            lost = self.n % 4 == 0
            time.lost += lost
            return _Spend.apply(x * self.weight, time, 100.0 if lost else 1.0, 1.0)

    got = measure(Losing(), (torch.ones(3, 2),), clock=time.clock(), seconds=100.0)
    assert set(got.step["forward"].values) == {1.0}
    assert got.step["forward"].n_disturbed > 0
    assert set(got.layers[0].forward.values) == {1.0}  # type: ignore[union-attr]


def test_hook_costs_are_taken_off_owner_and_caller() -> None:
    # start, root enters at 1, child enters at 3, leaves at 6, root leaves at 7; then a backward
    # over two nodes
    start, enter, leave, reached, run, end, pause = 3, 0, 1, 2, 5, 6, 4
    events = [
        (start, 0.0, 0, 0),
        (enter, 1.0, 0, 0),
        (enter, 3.0, 1, 0),
        (leave, 6.0, 1, 5),
        (leave, 7.0, 0, 7),
        (pause, 8.0, 0, 0),
        (run, 10.0, 0, 0),
        (reached, 11.0, 6, 0),
        (reached, 14.0, 2, 0),
        (end, 20.0, 0, 0),
        (pause, 21.0, 0, 0),
    ]
    times = attribute(events, HookOverhead(inside_s=0.5, outside_s=0.25, node_s=0.125))
    assert times.backward is not None
    assert times.forward.seconds == {0: 1.0 + 2.0 + 1.0, 1: 3.0, -1: 1.0}
    # root: its own pair inside, its own call (it has no caller) and the child's; child: its own
    # pair
    assert times.forward.overhead_s == {0: 0.5 + 0.25 + 0.25, 1: 0.5}
    assert times.backward.seconds == {-1: 1.0, 0: 3.0, 1: 6.0}
    assert times.backward.overhead_s == {0: 0.125, 1: 0.125}
    assert times.forward.net_s(1) == 2.5
    assert times.forward.net_s(1, factor=2.0) == 2.0
    assert times.forward.net_s(1, factor=20.0) == 0.0


# -- the model is unchanged to the bit -------------------------------------------------------------


class Everything(nn.Module):
    """Dropout, batch statistics, in-place activations, Python state, a plain tensor, a generator, a
    shared module.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)
        self.act, self.out = nn.ReLU(inplace=True), nn.Linear(4 * 36, 3)
        self.frozen = nn.BatchNorm1d(3).eval()
        self.unused = nn.Linear(2, 2)
        self.calls, self.history, self.settings = 0, [], {"seen": [0]}
        self.running = torch.zeros(2)
        self.generator = torch.Generator().manual_seed(3)
        self.hooked = 0
        self.conv.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.hooked += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history.append(self.calls)
        self.settings["seen"][0] += 1
        self.running += 1
        noise = (
            torch.rand(1, generator=self.generator).item()
            + random.random()
            + float(np.random.rand())  # noqa: NPY002
        )
        x = self.act(self.norm(self.conv(x)))
        return self.frozen(self.out(self.drop(x.flatten(1)))) + 0 * noise


def _fingerprint(model: Everything, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "values": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": {
            name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
        },
        "gradient identities": [id(p.grad) for p in model.parameters() if p.grad is not None],
        "identities": [id(t) for t in (*model.parameters(), *model.buffers())],
        "requires": [p.requires_grad for p in model.parameters()],
        "optimizer": [
            {
                key: v.clone() if isinstance(v, torch.Tensor) else v
                for key, v in optimizer.state.get(p, {}).items()
            }
            for p in model.parameters()
        ],
        "groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
        "optimizer attributes": sorted(vars(optimizer)),
        "n states": len(optimizer.state),
        "random": (
            torch.get_rng_state(),
            np.random.get_state(),  # noqa: NPY002
            random.getstate(),
            model.generator.get_state(),
        ),
        "flags": [module.training for module in model.modules()],
        "python": (
            model.calls,
            list(model.history),
            model.settings["seen"][0],
            model.hooked,
            model.running.clone(),
        ),
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in model.modules()
        ],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "global hooks": (
            len(nn.modules.module._global_forward_hooks),
            len(nn.modules.module._global_forward_pre_hooks),
            torch.autograd.backward,
        ),
        "grad mode": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
    }


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and torch.equal(
                a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b
            )
        )
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b))
    return bool(a == b)


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [key for key in before if not _same(before[key], after[key])]


def _ready(
    optimizer_type: type[torch.optim.Optimizer], stepped: bool
) -> tuple[Everything, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model = Everything()
    optimizer = optimizer_type(model.parameters(), lr=0.01)
    x = torch.randn(5, 1, 8, 8)
    if stepped:
        model(x).pow(2).sum().backward()
        optimizer.step()
    return model, optimizer, x


def _squares(output: torch.Tensor) -> torch.Tensor:
    return output.pow(2).sum()


@pytest.mark.parametrize("optimizer_type", [torch.optim.Adam, torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_nothing_is_changed(
    optimizer_type: type[torch.optim.Optimizer], stepped: bool, inference: bool
) -> None:
    model, optimizer, x = _ready(optimizer_type, stepped)
    before, kept = _fingerprint(model, optimizer), x.clone()
    got = measure(model, (x,), loss=_squares, optimizer=optimizer, seconds=0.2, inference=inference)
    assert _differences(before, _fingerprint(model, optimizer)) == []
    assert torch.equal(x, kept)
    assert {"conv", "norm", "out"} <= set(rows(got))
    assert "unused" not in rows(got)


@pytest.mark.parametrize("inference", [False, True])
def test_a_graph_that_is_alive_meanwhile_still_runs_backward(inference: bool) -> None:
    """Autograd refuses a backward whose saved tensors were written; the measurement's steps write
    parameters, buffers and inputs' versions.
    """
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    x = torch.randn(5, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(_squares(copy.deepcopy(model)(x)), x)
    alive = _squares(model(x))
    versions = [tensor._version for tensor in (*model.parameters(), *model.buffers())]
    measure(
        model,
        (x.detach(),),
        loss=_squares,
        optimizer=torch.optim.Adam(model.parameters()),
        seconds=0.1,
        inference=inference,
    )
    assert [tensor._version for tensor in (*model.parameters(), *model.buffers())] == versions
    alive.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_training_goes_on_to_the_bit() -> None:
    """Ten steps with a measurement after the third end where ten steps without one end."""
    ends = []
    for measured in (False, True):
        model, optimizer, x = _ready(torch.optim.Adam, stepped=False)
        for step in range(10):
            if measured and step == 3:
                measure(model, (x,), loss=_squares, optimizer=optimizer, seconds=0.1)
            optimizer.zero_grad()
            _squares(model(x)).backward()
            optimizer.step()
        ends.append(_fingerprint(model, optimizer))
    unequal = _differences(ends[0], ends[1])
    assert [key for key in unequal if "identities" not in key] == []


@pytest.mark.parametrize("error", [RuntimeError("it broke\nbadly"), KeyboardInterrupt()])
@pytest.mark.parametrize("at_call", [1, 3, 30])
def test_interrupted_measurements_restore_too(error: BaseException, at_call: int) -> None:
    model, optimizer, x = _ready(torch.optim.Adam, stepped=True)
    before = _fingerprint(model, optimizer)
    calls = 0

    def failing(output: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == at_call:
            raise error
        return _squares(output)

    with pytest.raises(
        KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else WorkFailed
    ) as caught:
        measure(model, (x,), loss=failing, optimizer=optimizer, seconds=0.5, target="net.py:net")
    if isinstance(error, RuntimeError):
        assert str(caught.value) == "net.py:net: RuntimeError: it broke"
    assert _differences(before, _fingerprint(model, optimizer)) == []


def test_an_error_in_the_forward_under_hooks_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.fail = nn.Linear(2, 2), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fail:
                raise ValueError("no")
            return self.inner(x)

    model = nn.Sequential(Fragile())
    probe = LayerProbe(model)
    model[0].fail = True
    probe.start()
    probe.resume()
    with pytest.raises(ValueError, match="no"), probe:
        model(torch.ones(1, 2))
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks
    probe.stop()
    assert set(probe.finish().forward.seconds) >= {0, 1}


# -- what can be measured --------------------------------------------------------------------------


class Unattributable(nn.Module):
    """Nested outputs, keyword-only inputs, a parameter of its own, a module called in a list that
    is not registered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.hidden = [nn.Linear(4, 4)]
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, *, x: torch.Tensor, twice: bool) -> dict[str, Any]:
        y = self.hidden[0](x * self.scale)
        y, _ = self.attention(y, y, y)
        y, state = self.lstm(y)
        return {"out": [y, (y * 2,)], "state": state, "twice": twice}


def test_odd_models_are_measured() -> None:
    got = measure(Unattributable(), {"x": torch.randn(2, 3, 4), "twice": True}, seconds=0.1)
    assert {"Unattributable", "attention", "lstm", "(loss)"} <= set(rows(got))
    assert all(row.backward is not None for row in got.layers)


def test_shared_modules_stand_under_their_first_name() -> None:
    shared = nn.Linear(3, 3)
    got = measure(nn.Sequential(shared, nn.Tanh(), shared), (torch.randn(2, 3),), seconds=0.1)
    assert set(rows(got)) == {"Sequential", "0", "1", "(loss)"}


def test_the_call_of_one_of_several_models_is_its_own() -> None:
    """Module 0 is the container, which is never called."""
    events = [(START, 0.0, 0, 0), (ENTER, 1.0, 2, 0), (EXIT, 3.0, 2, 0), (PAUSE, 4.0, 0, 0)]
    assert dict(attribute(events).forward.seconds) == {2: 3.0, OUTSIDE: 1.0}


def test_a_root_that_is_a_leaf_is_named_by_its_type() -> None:
    assert list(rows(measure(nn.Linear(3, 3), (torch.randn(2, 3),), seconds=0.1))) == [
        "Linear",
        "(loss)",
    ]


@pytest.mark.parametrize(
    "name", ["SGD", "Adagrad", "RMSprop", "NAdam", "Adafactor", "Rprop", "ASGD"]
)
@pytest.mark.parametrize("foreach", [False, True])
def test_optimizers(name: str, foreach: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = getattr(torch.optim, name)(model.parameters(), foreach=foreach)
    before = copy.deepcopy(optimizer.state_dict())
    got = measure(model, (torch.randn(2, 8),), optimizer=optimizer, seconds=0.1)
    shares = [row.optimizer.median for row in got.layers if row.optimizer is not None]
    assert sum(shares) == pytest.approx(
        got.step["optimizer"].median
    )  # medians of one series times fractions that add up to 1
    assert _same(before, optimizer.state_dict())


def test_an_optimizer_that_wants_every_gradient_is_shared_by_bytes() -> None:
    class Strict(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            assert all(p.grad is not None for group in self.param_groups for p in group["params"])
            super().step()

    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 24, bias=False))
    got = measure(
        model, (torch.randn(2, 8),), optimizer=Strict(model.parameters(), lr=0.1), seconds=0.1
    )
    total = got.step["optimizer"].median
    assert rows(got)["0"][2] == pytest.approx(total * 0.25)  # 64 of 256 parameters
    assert any("bytes" in note for note in got.notes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: measure(nn.ReLU(), (torch.ones(1),)), "no parameters"),
        (
            lambda: measure(nn.Linear(2, 2).requires_grad_(False), (torch.ones(1, 2),)),
            "requires grad",
        ),
        (
            lambda: measure(nn.Linear(2, 2), (torch.ones(1, 2),), loss=lambda y: y),
            r"shape \(1, 2\)",
        ),
        (
            lambda: measure(nn.Linear(2, 2), (torch.ones(1, 2),), loss=lambda y: y.sum().item()),
            "float",
        ),
        (
            lambda: measure(nn.Linear(2, 2), (torch.ones(1, 2),), loss=lambda y: y.detach().sum()),
            "requires grad",
        ),
        (lambda: measure(nn.Linear(2, 2), (torch.ones(1, 2),), seconds=0), "seconds"),
        (
            lambda: measure(nn.Linear(2, 2), (torch.ones(1, 2),), seconds="4"),
            "seconds is '4' \\(of type str\\)",
        ),
        (
            lambda: measure(nn.Linear(2, 2), (torch.ones(1, 2),), seconds=float("nan")),
            "seconds is nan",
        ),
        (lambda: measure(nn.Linear, (torch.ones(1, 2),)), "measure: the model is <class"),
        (
            lambda: measure(nn.Linear(2, 2), (torch.ones(1, 2),), loss="mse"),
            "the loss is of type str",
        ),
        (
            lambda: measure(nn.Linear(2, 2), (torch.ones(1, 2),), optimizer=torch.optim.SGD),
            "the optimizer is the class SGD",
        ),
        (
            lambda: measure(nn.Linear(2, 2), (torch.ones(1, 2),), optimizer="sgd"),
            "the optimizer is of type str",
        ),
        (
            lambda: measure(nn.Linear(2, 2), (torch.ones(1, 2),), batch_size="1"),
            "batch_size is '1'",
        ),
        (lambda: measure(nn.LazyLinear(2), (torch.ones(1, 2),)), "lazy"),
        (
            lambda: measure(
                m := nn.Linear(2, 2),
                (torch.ones(1, 2),),
                optimizer=torch.optim.LBFGS(m.parameters()),
            ),
            "closure",
        ),
    ],
)
def test_unfit_input_is_named(call: Any, message: str) -> None:
    with pytest.raises(DlperfError, match=message):
        call()


def test_a_model_that_raises_is_failed_work() -> None:
    with pytest.raises(
        WorkFailed, match=r"Linear: RuntimeError: (addmm: )?mat1 and mat2"
    ) as caught:
        measure(nn.Linear(2, 2), (torch.ones(1, 3),))
    assert "\n" not in str(caught.value)


def test_measurement_survives_its_file(tmp_path: Any) -> None:
    got = measure(nn.Sequential(nn.Linear(3, 3)), (torch.randn(2, 3),), seconds=0.1)
    got.save(tmp_path / "m.json")
    again = Measurement.load(tmp_path / "m.json")
    assert [row.layer for row in again.layers] == [row.layer for row in got.layers]


def test_denormal_numbers_are_left_as_they_are() -> None:
    measure(nn.Linear(2, 2), (torch.randn(2, 2),), seconds=0.05)
    assert torch.tensor([1e-40]).mul(1.0).item() != 0.0


def test_no_backward_without_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlperf.profiler.probe.graph_nodes", lambda roots: [])
    got = step_profiler.measure(nn.Linear(2, 2), (torch.randn(2, 2),), seconds=0.05)
    assert all(row.backward is None for row in got.layers)
    assert any("could not be attributed" in note for note in got.notes)


def test_steps_on_a_slow_core_count_and_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shared(CoreSpeed):
        def settle(self, seconds: float) -> None:
            self.best_s = 1e-12  # of a core that was quicker than this one ever is

    monkeypatch.setattr("dlperf.profiler.step_profiler.CoreSpeed", Shared)
    found = measure_target(resolve("mlp", 4), seconds=0.2)
    assert found.noise["core_slowdown"] == pytest.approx(2.5)
    assert any("2.50 times its best" in note for note in found.notes)
