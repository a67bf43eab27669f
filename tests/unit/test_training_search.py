"""The search for a training in what modules and optimizers do."""

from __future__ import annotations

import torch
from torch import nn

from dlperf.runner.training_search import TrainingSearch


def test_a_search_that_begins_anew_waits_for_calls() -> None:
    """Three steps of a critic to one of a generator, until an epoch ends out of turn."""
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    critic, generator = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    search = TrainingSearch()
    for model in models:
        search.enter(model)
        search.leave(model)
    for _ in range(20):  # the watched steps: calls of the models are not followed
        for optimizer in (critic, critic, critic, generator):
            search.note(optimizer)
    search.begin_anew()
    assert search.stepped(critic) is None
    assert not search.is_exhausted
    for _ in range(60):
        search.note(critic)
    assert search.is_exhausted
