"""Square roots of zero in an optimizer's step: as many as a real step takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dlperf.predictors.zeros import roots_of_zero
from dlperf.recorder.recording import record

ROWS, WIDTH, DRAWS = 1000, 3, 700


class Roots(TorchDispatchMode):
    """Counts the zeros that square roots are taken of."""

    n_zeros = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).split(".")[1] in (
            "sqrt",
            "sqrt_",
            "_foreach_sqrt",
            "_foreach_sqrt_",
        ) and isinstance(args[0], (torch.Tensor, list)):
            self.n_zeros += sum(
                int((numbers == 0).sum())
                for numbers in (args[0] if isinstance(args[0], list) else [args[0]])
                if numbers.dim()
            )
        return func(*args, **(kwargs or {}))


class Tied(nn.Module):
    """An embedding whose weight is also the output's."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)

    def forward(self, chosen):
        vectors = self.table(chosen)
        return vectors @ self.table.weight.t()


def net(kind="Adam", tied=False, bags=False, **options):
    torch.manual_seed(0)
    table = nn.EmbeddingBag(ROWS, WIDTH) if bags else nn.Embedding(ROWS, WIDTH)
    model = Tied() if tied else nn.Sequential(table, nn.Tanh(), nn.Linear(WIDTH, 2))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
    return (
        model,
        (torch.randint(0, ROWS, (DRAWS // 7, 7) if bags else (DRAWS,)),),
        lambda output: output.square().mean(),
        optimizer,
    )


def counted(**choice):
    """(as the trace tells, in a real second step)"""
    model, inputs, loss, optimizer = net(**choice)
    told = sum(roots_of_zero(record(model, inputs, loss=loss, optimizer=optimizer)).values())
    for _ in range(2):
        optimizer.zero_grad()
        loss(model(*inputs)).backward()
        with Roots() as roots:
            optimizer.step()
    return told, roots.n_zeros


@pytest.mark.parametrize(
    "choice",
    [
        {"kind": "Adam"},
        {"kind": "Adam", "foreach": True},
        {"kind": "Adam", "amsgrad": True},
        {"kind": "AdamW"},
        {"kind": "AdamW", "foreach": True},
        {"kind": "Adagrad"},
        {"kind": "Adagrad", "foreach": True},
        {"kind": "RMSprop"},
        {"kind": "RMSprop", "foreach": True},
        {"kind": "NAdam"},
        {"kind": "Adam", "maximize": True},
        {"kind": "Adagrad", "bags": True},
        {"kind": "Adam", "bags": True},
    ],
    ids=str,
)
def test_rows_that_no_index_meets(choice):
    told, real = counted(**choice)
    assert real > ROWS  # several rows' worth: the step does take them
    assert told == pytest.approx(real, rel=0.08)


@pytest.mark.parametrize(
    "choice",
    [
        {"kind": "SGD", "momentum": 0.9},
        {"kind": "Adam", "weight_decay": 0.1},
        {"kind": "Adam", "foreach": True, "weight_decay": 0.1},
        {"kind": "Adadelta"},
        {"kind": "Adamax"},
        {"kind": "Adam", "fused": True},
        {"kind": "Adam", "tied": True},
        {"kind": "Adagrad", "tied": True},
    ],
    ids=str,
)
def test_none_where_every_element_has_a_gradient_or_no_root_is_taken(choice):
    assert counted(**choice) == (0, 0)
