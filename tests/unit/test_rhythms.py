"""The step of a training is one period of its loop, whatever calls, optimizers and models it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dlperf.core.errors import DlperfError
from dlperf.core.trace import BY_HAND
from dlperf.report.layer_comparison import root_of
from dlperf.runner.findings import Findings
from dlperf.runner.training_search import TrainingSearch, find_period
from dlperf.runner.watcher import DONE, Watcher

N_SAMPLES, BATCH = 240, 2


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.body(z)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).squeeze(1)


def batches() -> Iterator[torch.Tensor]:
    loader = DataLoader(TensorDataset(torch.randn(N_SAMPLES, 6)), batch_size=BATCH)
    for (x,) in loader:
        yield x


Loop = Callable[[Any], Iterator[float]]
bce = nn.functional.binary_cross_entropy_with_logits


def plain() -> Iterator[torch.Tensor]:
    model = Critic()
    optimizer = torch.optim.Adam(model.parameters())
    for x in batches():
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        yield loss


def accumulation() -> Iterator[torch.Tensor]:
    model = Critic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, x in enumerate(batches()):
        loss = model(x).pow(2).mean() / 4
        loss.backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        yield loss


def gan() -> Iterator[torch.Tensor]:
    """As in the DCGAN example: the generator runs once, in the discriminator's turn."""
    generator, critic = Generator(), Critic()
    for_critic = torch.optim.Adam(critic.parameters())
    for_generator = torch.optim.Adam(generator.parameters())
    for x in batches():
        critic.zero_grad()
        real = bce(critic(x), torch.ones(len(x)))
        real.backward()
        fake = generator(torch.randn(len(x), 3))
        loss = bce(critic(fake.detach()), torch.zeros(len(x)))
        loss.backward()
        for_critic.step()
        generator.zero_grad()
        fooled = bce(critic(fake), torch.ones(len(x)))
        fooled.backward()
        for_generator.step()
        yield fooled + loss


def wasserstein() -> Iterator[torch.Tensor]:
    """Five steps of the critic for one of the generator, with one batch each."""
    generator, critic = Generator(), Critic()
    for_critic = torch.optim.RMSprop(critic.parameters())
    for_generator = torch.optim.RMSprop(generator.parameters())
    for number, x in enumerate(batches()):
        for_critic.zero_grad()
        with torch.no_grad():
            fake = generator(torch.randn(len(x), 3))
        loss = critic(fake).mean() - critic(x).mean()
        loss.backward()
        for_critic.step()
        if number % 5 == 4:
            for_generator.zero_grad()
            loss = -critic(generator(torch.randn(len(x), 3))).mean()
            loss.backward()
            for_generator.step()
        yield loss


def sharpness_aware() -> Iterator[torch.Tensor]:
    """SAM: two passes over one batch, one step of the inner optimizer."""
    model = Critic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in batches():
        loss = model(x).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            moved = [(p, 0.05 * p.grad) for p in model.parameters() if p.grad is not None]
            for parameter, shift in moved:
                parameter.add_(shift)
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        with torch.no_grad():
            for parameter, shift in moved:
                parameter.sub_(shift)
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def closure() -> Iterator[torch.Tensor]:
    """As automatic optimization in Lightning does it."""
    model = Critic()
    optimizer = torch.optim.AdamW(model.parameters())
    for x in batches():

        def compute(x: torch.Tensor = x) -> torch.Tensor:
            loss = model(x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            return loss

        yield optimizer.step(compute)


def lbfgs() -> Iterator[torch.Tensor]:
    model = nn.Sequential(nn.Linear(6, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, lr=0.01)
    x, y = torch.randn(20, 6), torch.randn(20, 1)
    for _ in range(40):

        def compute() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - y).pow(2).mean()
            loss.backward()
            return loss

        yield optimizer.step(compute)


def two_in_turns() -> Iterator[torch.Tensor]:
    """Two optimizers of one model, a batch each."""
    model = Generator()
    parts = [torch.optim.SGD(model.body[n].parameters(), lr=0.01) for n in (0, 2)]
    for number, x in enumerate(batches()):
        optimizer = parts[number % 2]
        optimizer.zero_grad()
        loss = model(x[:, :3]).pow(2).mean()
        loss.backward()
        optimizer.step()
        yield loss


def by_hand() -> Iterator[torch.Tensor]:
    model = Critic()
    for x in batches():
        loss = model(x).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
        yield loss


def by_hand_after_zero_grad() -> Iterator[torch.Tensor]:
    """As in the word language model example."""
    model = Critic()
    for x in batches():
        model.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.01)
        yield loss


def replay_buffer() -> Iterator[torch.Tensor]:
    """As DQN does: acting without gradients, a target network, no loader."""
    model, target = Critic(), Critic()
    optimizer = torch.optim.Adam(model.parameters())
    for number in range(60):
        model.eval()
        with torch.no_grad():
            model(torch.randn(1, 6))
            aim = target(torch.randn(BATCH, 6))
        model.train()
        loss = (model(torch.randn(BATCH, 6)) - aim).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number % 10 == 9:
            target.load_state_dict(model.state_dict())
        yield loss


def irregular() -> Iterator[torch.Tensor]:
    model = Generator()
    parts = [torch.optim.SGD(model.body[n].parameters(), lr=0.01) for n in (0, 2)]
    order = torch.randint(2, (N_SAMPLES // BATCH,), generator=torch.Generator().manual_seed(1))
    for which, x in zip(order.tolist(), batches()):
        model.zero_grad()
        loss = model(x[:, :3]).pow(2).mean()
        loss.backward()
        parts[which].step()
        yield loss


@dataclass(frozen=True)
class Rhythm:
    """What a period has: optimizer steps, passes, batches; steps of an epoch; the models."""

    n_optimizer_steps: int
    n_passes: int
    n_batches: int
    n_steps: int | None
    models: tuple[str, ...] = ("Critic",)


EPOCH = N_SAMPLES // BATCH
RHYTHMS = {
    plain: Rhythm(1, 1, 1, EPOCH),
    accumulation: Rhythm(1, 4, 4, EPOCH // 4),
    gan: Rhythm(2, 3, 1, EPOCH, ("Critic", "Generator")),
    wasserstein: Rhythm(6, 6, 5, EPOCH // 5, ("Critic", "Generator")),
    sharpness_aware: Rhythm(1, 2, 1, EPOCH),
    closure: Rhythm(1, 1, 1, EPOCH),
    lbfgs: Rhythm(1, 3, 3, None, ("Sequential",)),
    two_in_turns: Rhythm(2, 2, 2, EPOCH // 2, ("Generator",)),
    by_hand: Rhythm(0, 1, 1, EPOCH),
    by_hand_after_zero_grad: Rhythm(0, 1, 1, EPOCH),
    replay_buffer: Rhythm(1, 1, 1, None),
}


def watched(loop: Callable[[], Iterator[torch.Tensor]]) -> tuple[list[str], Watcher]:
    """The losses of a loop that is watched."""
    torch.manual_seed(0)
    watcher = Watcher()
    watcher.install()
    try:
        losses = [float(loss.detach()).hex() for loss in loop()]
    finally:
        watcher.remove()
    assert watcher.error is None, watcher.error
    return losses, watcher


@pytest.mark.parametrize("loop", list(RHYTHMS), ids=lambda loop: loop.__name__)
def test_one_period_is_watched_recorded_and_counted(
    loop: Callable[[], Iterator[torch.Tensor]],
) -> None:
    rhythm = RHYTHMS[loop]
    torch.manual_seed(0)
    alone = [float(loss.detach()).hex() for loss in loop()]
    losses, watcher = watched(loop)
    assert losses == alone
    assert watcher.stage == DONE
    findings = Findings(watcher)
    training = findings.watched
    assert len(training.optimizers) == rhythm.n_optimizer_steps
    assert (training.n_passes, training.n_batches) == (rhythm.n_passes, rhythm.n_batches)
    assert tuple(sorted(type(root).__name__ for root in training.roots)) == rhythm.models
    forecast = findings.forecast
    if rhythm.n_steps is not None:
        n_counted = rhythm.n_steps - (not rhythm.n_optimizer_steps)  # the last one has no successor
        assert abs(watcher.epochs.epochs[0].n_steps - n_counted) <= 1
        assert abs(watcher.epochs.n_steps - n_counted) <= 1
        assert forecast is not None
        assert forecast.n_steps == rhythm.n_steps
    trace = findings.trace
    assert trace is not None, findings.notes
    assert not [note for note in findings.notes if "no prediction" in note]
    timed = {row.layer for row in findings.measurement.layers}
    assert timed >= {layer.name for layer in trace.layers if layer.callers}
    assert "Models" not in timed
    assert root_of(trace) == (rhythm.models[0] if len(rhythm.models) == 1 else "Models")
    assert any(op.phase == "optimizer" for op in trace.ops)
    n_backwards = sum(op.name == "aten.ones_like.default" for op in trace.ops)
    assert n_backwards == rhythm.n_passes
    assert trace.optimizer is not None
    assert (trace.optimizer.type == BY_HAND) == (not rhythm.n_optimizer_steps)
    assert trace.optimizer.zero_grad == any(step.zero_grad_s for step in training.plain)
    for step in training.plain:
        assert step.optimizer_s > 0
        assert step.own_s <= (step.interval_s or step.own_s)


def test_steps_in_no_regular_order_end_with_the_largest_optimizers() -> None:
    _, watcher = watched(irregular)
    findings = Findings(watcher)
    assert not watcher.error
    assert len(findings.watched.optimizers) == 1
    assert any("no regular order" in note for note in findings.notes)


def test_the_second_optimizer_may_come_late() -> None:
    """A rhythm that was taken for a shorter one is searched for anew."""
    a, b = (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(2))
    module = nn.Module()
    for number, optimizer in enumerate((a, b)):
        module.register_parameter(f"p{number}", optimizer.param_groups[0]["params"][0])
    search = TrainingSearch()
    search.enter(module)
    found = [search.stepped(one) for one in (a, a, a, b, a, a, a, b)]
    assert [one is not None and len(one.optimizers) for one in found] == [
        False,
        1,
        1,
        False,
        False,
        False,
        False,
        4,
    ]


def test_a_period_begins_with_the_loaders_batch() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    a, b = (torch.optim.SGD([parameter], lr=0.1) for parameter in parameters)
    module = nn.Module()
    for number, parameter in enumerate(parameters):
        module.register_parameter(f"p{number}", parameter)
    search = TrainingSearch()
    search.enter(module)
    ends = []
    for optimizer in (a, b, a, b, a, b, a):
        if optimizer is b:
            search.load()
        found = search.stepped(optimizer)
        ends.append(None if found is None else found.optimizers)
    assert ends == [None] * 4 + [(b, a), None, (b, a)]


@pytest.mark.parametrize(
    ("ids", "period"),
    [([1], None), ([1, 1], 1), ([1, 1, 2], None), ([1, 2, 2, 1, 2, 2], 3), ([1] * 15 + [2], None)],
)
def test_periods(ids: list[int], period: int | None) -> None:
    assert find_period(ids) == period


def distillation() -> Iterator[torch.Tensor]:
    """A frozen teacher, in training mode, between the student's forward and its backward."""
    student, teacher, criterion = Critic(), Generator(), nn.MSELoss()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.01)
    for x in batches():
        output = student(x)
        with torch.no_grad():
            aim = teacher(x[:, :3]).mean(1)
        loss = criterion(output, aim)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


def test_a_model_beside_the_trained_one_is_remarked_on() -> None:
    for loop, expected in ((distillation, ["Generator"]), (gan, []), (plain, [])):
        _, watcher = watched(loop)
        notes = [note for note in Findings(watcher).notes if "without being trained" in note]
        assert [note.partition(": ")[2].partition(";")[0] for note in notes] == expected


def test_backwards_that_update_nothing_are_no_training() -> None:
    def only_backwards() -> Iterator[torch.Tensor]:
        model = Critic()
        for x in batches():
            loss = model(x).pow(2).mean()
            loss.backward()
            yield loss

    _, watcher = watched(only_backwards)
    with pytest.raises(DlperfError, match="nothing changed a parameter"):
        Findings(watcher)
