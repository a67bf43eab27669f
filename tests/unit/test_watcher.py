"""Watching a loop from inside the same process: `dlperf.profile`, the loss written down, the
forecast's arithmetic.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from report_cases import machine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dlperf.core.clock import Clock
from dlperf.core.errors import DlperfError
from dlperf.runner.findings import TRACED, Findings, inputs_of
from dlperf.runner.step_rate import typical_s
from dlperf.runner.training_search import TrainingSearch
from dlperf.runner.watcher import DONE, Watcher
from dlperf.runner.wrapping import profile


def hooks() -> tuple[Any, ...]:
    module = nn.modules.module
    optimizer = __import__("sys").modules["torch.optim.optimizer"]
    return (
        dict(module._global_forward_hooks),
        dict(module._global_forward_pre_hooks),
        dict(optimizer._global_optimizer_pre_hooks),
        dict(optimizer._global_optimizer_post_hooks),
        torch.autograd.backward,
        torch.optim.Optimizer.zero_grad,
        nn.Module.zero_grad,
        DataLoader.__iter__,
        torch.utils.data.dataloader._BaseDataLoaderIter.__next__,
        torch._C._len_torch_function_stack(),
    )


@pytest.fixture(autouse=True)
def _no_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("DLPERF_MACHINE", str(tmp_path / "unmeasured.json"))


@pytest.fixture(autouse=True)
def _no_hook_stays() -> Iterator[None]:
    before = hooks()
    yield
    assert hooks() == before


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.last(self.act(self.first(x * scale)))


def train(
    model: nn.Module,
    n: int,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    call: Any = None,
    accumulate: int = 1,
) -> list[str]:
    optimizer = torch.optim.Adam(model.parameters())
    seen = []
    for step in range(n):
        x, y = torch.randn(5, 6), torch.randint(0, 3, (5,))
        value = loss((call or model)(x), y)
        value.backward()
        if (step + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        seen.append(value.item().hex())
    return seen


def test_profile_measures_and_records_the_users_own_loop() -> None:
    model = Net()
    with profile(model) as watching:
        train(model, 40, nn.CrossEntropyLoss())
    assert [row.layer for row in watching.measurement.layers] == [
        "Net",
        "first",
        "act",
        "last",
        "(loss)",
    ]
    assert all(row.backward is not None for row in watching.measurement.layers)
    trace = watching.trace
    assert trace is not None
    assert trace.batch_size == 5
    assert "aten.nll_loss_forward.default" in [op.name for op in trace.ops if op.layer == "(loss)"]
    assert trace.optimizer is not None
    assert trace.optimizer.type == "Adam"


def test_hooks_are_gone_while_the_loop_goes_on() -> None:
    model = Net()
    watcher = Watcher()
    before = hooks()
    watcher.install()
    try:
        train(model, 40, nn.CrossEntropyLoss())
        assert watcher.stage == DONE
        changed = [index for index, (a, b) in enumerate(zip(before, hooks())) if a != b]
        assert changed == [3, 7]  # the counter of steps and the start of epochs
    finally:
        watcher.remove()


def test_training_is_the_same_to_the_bit() -> None:
    ends = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Net(), nn.Dropout(0.3))
        if watched:
            with profile(model) as watching:
                seen = train(model, 40, nn.CrossEntropyLoss())
            _ = watching.measurement, watching.trace
        else:
            seen = train(model, 40, nn.CrossEntropyLoss())
        ends.append((seen, [p.detach().clone() for p in model.parameters()], torch.rand(1)))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1]))
    assert torch.equal(ends[0][2], ends[1][2])


def test_keyword_inputs_and_a_model_inside_another() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x, scale=0.5) * 2

    wrapper = Wrapper()
    with profile(wrapper.net) as watching:
        train(wrapper, 40, nn.CrossEntropyLoss())
    assert [row.layer for row in watching.measurement.layers][:2] == ["Net", "first"]


def test_evaluation_between_steps_is_no_training() -> None:
    model = Net()
    calls = 0

    def call(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
        return model(x)

    with profile(model) as watching:
        train(model, 60, nn.CrossEntropyLoss(), call)
    steps = watching.findings.watched.plain
    assert {step.n_passes for step in steps} == {1}
    assert sum(step.interval_s is None for step in steps) in (
        2,
        3,
    )  # of eight steps in a row, those with an evaluation before


def test_accumulation_counts_passes() -> None:
    model = Net()
    with profile(model) as watching:
        train(model, 120, nn.CrossEntropyLoss(), accumulate=3)
    assert watching.findings.n_passes == 3
    assert any(
        "a step has 3 forward and backward passes" in note for note in watching.measurement.notes
    )


def test_under_a_tracer_the_core_speed_is_not_sampled() -> None:
    """A tracer slows the samples' own work, which other programs do not."""
    model, before = Net(), sys.gettrace()
    with profile(model) as watching:
        sys.settrace(lambda *_: None)
        try:
            train(model, 40, nn.CrossEntropyLoss())
        finally:
            sys.settrace(before)
    findings = watching.findings
    assert TRACED in findings.notes
    assert findings.disturbance.slowdown == 1.0


def test_a_loop_that_raises_raises_its_own_error() -> None:
    with pytest.raises(ValueError, match="mine"), profile(Net()):
        raise ValueError("mine")


@pytest.mark.parametrize("n", [0, 1, 2, 5, 6])
def test_too_short_a_loop_says_how_many_steps_were_seen_and_are_needed(n: int) -> None:
    model = Net()
    with profile(model, machine()) as watching:
        train(model, n, nn.CrossEntropyLoss())
    seen = (
        f"{n} optimizer step{'s were' if n != 1 else ' was'} seen, at least 7 are needed, 19 with"
        " the times of layers"
    )
    with pytest.raises(DlperfError, match=rf"(no training was found|too early).*{seen}"):
        watching.report()
    assert seen in str(watching)


def test_a_training_in_another_thread_is_said_to_be_there() -> None:
    model = Net()
    with profile(model) as watching:
        thread = threading.Thread(target=train, args=(model, 30, nn.CrossEntropyLoss()))
        thread.start()
        thread.join()
    with pytest.raises(DlperfError) as raised:
        watching.report()
    assert str(raised.value) == (
        "no training was found: it trains in another thread, which is not watched (30 optimizer"
        " steps were seen there)"
    )


def test_where_no_step_was_seen_other_processes_are_named() -> None:
    model = Net()
    with profile(model) as watching:
        pass
    with pytest.raises(DlperfError, match="in processes of its own, they are not watched"):
        watching.report()
    with profile(model) as watching:
        train(model, 1, nn.CrossEntropyLoss())
    with pytest.raises(DlperfError, match="1 optimizer step was seen, at least 7") as raised:
        watching.report()
    assert "processes" not in str(raised.value)


@pytest.mark.parametrize("n", [1, 2])
def test_closures_are_no_optimizer_steps(n: int) -> None:
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=20, lr=0.1)
    x, y = torch.randn(20, 6), torch.randint(0, 3, (20,))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    with profile(model) as watching:
        for _ in range(n):
            optimizer.step(closure)
    with pytest.raises(DlperfError, match=rf"\W{n} optimizer steps? w\w+ seen, at least 7"):
        watching.report()


def test_steps_that_make_no_training_are_counted_without_a_number_that_is_needed() -> None:
    model, other = Net(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([other], lr=0.1)
    with profile(model) as watching:
        for _ in range(20):
            model(torch.randn(5, 6))
            other.sum().backward()
            optimizer.step()
    with pytest.raises(DlperfError, match=r"20 optimizer steps were seen\)$"):
        watching.report()


@pytest.mark.parametrize(("n", "timed"), [(7, 0), (12, 0), (16, 3), (18, 5), (19, 6)])
def test_a_loop_that_ends_early_says_what_the_layers_lack(n: int, timed: int) -> None:
    model = Net()
    with profile(model, machine()) as watching:
        train(model, n, nn.CrossEntropyLoss())
    notes = [note for note in watching.findings.notes if "ended early" in note]
    assert len(watching.findings.watched.layered) == timed
    assert [
        f"layers were timed in {timed} of 6 steps: {n} optimizer steps were seen" in note
        for note in notes
    ] == [True] * (timed < 6)
    assert "19 with the times of layers" in "".join(notes) or timed == 6
    assert len(watching.measurement.layers) == (3 if timed else 0) or timed


def test_a_profile_shows_itself() -> None:
    model = Net()
    watching = profile(model, machine())
    assert (
        repr(watching)
        == str(watching)
        == "<profile of Net: nothing was watched; use it in a with statement>"
    )
    shown = []

    def call(x: torch.Tensor) -> torch.Tensor:
        shown.append(str(watching))
        return model(x)

    with watching:
        train(model, 23, nn.CrossEntropyLoss(), call)
    assert shown[3] == "<profile of Net: 3 optimizer steps seen>"
    assert repr(watching) == "<profile of Net: 23 optimizer steps seen>"
    assert "watched Net with " in str(watching)
    assert "watched Net with " in watching._repr_html_()


def test_a_model_on_an_accelerator_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dlperf.recorder.accelerator.CPU_DEVICES", ("meta",)
    )  # as if the CPU were an accelerator
    model = Net()
    with profile(model, machine()) as watching:
        train(model, 25, nn.CrossEntropyLoss())
    with pytest.raises(
        DlperfError,
        match=(
            "no training to watch: Net: lies on cpu; dlperf records, measures and predicts steps on"
            " the CPU"
        ),
    ):
        watching.report()


def test_a_machine_file_that_is_not_there_is_noticed_before_the_loop_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    with pytest.raises(
        DlperfError,
        match=(
            r"none\.json: there is no such machine file; dlperf calibrate -o .*none\.json makes it"
        ),
    ):
        profile(Net(), tmp_path / "none.json")
    monkeypatch.setenv("DLPERF_MACHINE", str(tmp_path / "absent.json"))
    with pytest.warns(UserWarning, match=r"no machine file .*absent\.json"), profile(Net()):
        pass


def test_report_without_a_machine_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("DLPERF_MACHINE", str(tmp_path / "absent.json"))
    model = Net()
    with profile(model) as watching:
        train(model, 30, nn.CrossEntropyLoss())
    with pytest.raises(DlperfError, match="dlperf calibrate"):
        watching.report()


def test_epochs_are_passes_of_the_training_loader() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(50, 6), torch.randint(0, 3, (50,))), batch_size=2)
    checks = DataLoader(TensorDataset(torch.randn(10, 6)), batch_size=5)
    with profile(model) as watching:
        for _ in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            with torch.no_grad():
                for (x,) in checks:
                    model(x)
    forecast = watching.findings.forecast
    assert forecast is not None
    assert forecast.n_steps == 25  # 50 samples in batches of 2
    assert len(forecast.measured_s) == 3
    assert forecast.is_epoch
    assert 0 < (watching.findings.loading_frac or 0) < 1


def test_forecast_is_steps_times_interval() -> None:
    """Every reading of the clock is a second later: a step has as many seconds as readings, each
    step the same.
    """
    ticks = iter(range(10**9))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(60, 6), torch.randint(0, 3, (60,))), batch_size=2)
    watcher = Watcher(clock=Clock(now=lambda: float(next(ticks)), switches=lambda: 0))
    watcher.install()
    try:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    finally:
        watcher.remove()
    findings = Findings(watcher)
    (interval_s,) = set(findings.intervals_s)
    forecast = findings.forecast
    assert forecast is not None
    assert forecast.from_steps_s == 30 * interval_s
    # between two steps: one reading before and one after the loader's next, the same for zero_grad,
    # forward from enter to backward, and so on
    assert {
        (s.zero_grad_s, s.loading_s, s.forward_s, s.backward_s) for s in findings.watched.plain
    } == {(1.0, 1.0, 1.0, 1.0)}


@pytest.mark.parametrize(("passes", "batches"), [(1, 1), (2, 1), (2, 2)])
def test_an_epoch_has_as_many_steps_as_batches_allow(passes: int, batches: int) -> None:
    """Two passes over one batch (SAM) make a step for each batch; accumulation makes fewer."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(80, 6), torch.randint(0, 3, (80,))), batch_size=2)
    with profile(model) as watching:
        for number, (x, y) in enumerate(loader):
            for _ in range(passes // batches):
                nn.functional.cross_entropy(model(x), y).backward()
            if (number + 1) % batches == 0:
                optimizer.step()
                model.zero_grad()
    findings = watching.findings
    assert findings.n_passes == passes
    assert findings.forecast is not None
    assert findings.forecast.n_steps == 40 // batches
    assert all(step.zero_grad_s > 0 for step in findings.watched.plain)


def test_typical_leaves_out_what_happens_once() -> None:
    assert typical_s([1.0, 1.0, 1.0, 1.0, 50.0]) == 1.0
    assert typical_s([]) is None
    assert typical_s([2.0, 4.0]) == 3.0


def test_positional_and_keyword_inputs_become_one() -> None:
    net = Net()
    x = torch.ones(1, 6)
    assert inputs_of(net, ((x,), {})) == (x,)
    assert inputs_of(net, ((x,), {"scale": 2.0})) == {"x": x, "scale": 2.0}
    assert inputs_of(net, ((), {"x": x})) == {"x": x}


def test_a_loss_module_with_parameters_of_its_own_is_beside_the_model() -> None:
    class Centre(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centre = nn.Parameter(torch.zeros(1, 3))

        def forward(self, output: torch.Tensor) -> torch.Tensor:
            return (output - self.centre).pow(2).mean()

    model, loss = Net(), Centre()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    seeker = TrainingSearch()
    found = None
    for _ in range(2):
        for module in (model, loss):
            seeker.enter(module)
            seeker.leave(module)
        found = seeker.stepped(optimizer)
    assert found is not None
    assert found.roots == (model, loss)


def test_what_cannot_be_watched_is_named_at_once() -> None:
    with pytest.raises(DlperfError, match="profile: the model is 'net'"):
        profile("net")  # type: ignore[arg-type]
    with pytest.raises(
        DlperfError,
        match=r"profile: the machine is 3 \(of type int\); expected a Machine or str or Path",
    ):
        profile(Net(), machine=3)  # type: ignore[arg-type]


def test_a_machine_file_that_cannot_be_used_is_noticed_before_the_loop(
    tmp_path, monkeypatch
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for path, why in (
        (tmp_path / "none.json", "there is no such machine file; dlperf calibrate"),
        (broken, "is truncated"),
    ):
        with pytest.raises(DlperfError, match=why):
            profile(Net(), machine=path)
    monkeypatch.setenv("DLPERF_MACHINE", str(broken))
    with pytest.raises(DlperfError, match="is truncated"):
        profile(Net())
    monkeypatch.setenv("DLPERF_MACHINE", str(tmp_path / "unmeasured.json"))
    with (
        pytest.warns(
            UserWarning,
            match="the loop is measured, and predicted once dlperf calibrate has made it",
        ),
        profile(Net()),
    ):
        pass
