"""What passes between two measured calls, so that the code and data of the second have left the
nearer caches: large products, fresh pages, training steps of much code on next to no data.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dlperf.core.code_footprint import code_since, relative_footprint
from dlperf.core.costs import CODE_EVICTION, COLD_START, PAGE_EVICTION

Call = Callable[[], object]
_WIDTH, _COLUMNS = 1024, 32


@dataclass(frozen=True)
class Work:
    """What passes between two calls: of which kind, how many bytes or how much code, the `whole` of
    it and without an optimizer; its operators, in the order of their last calls, where their code
    is what counts.
    """

    kind: str
    amount: int
    whole: Call
    unfinished: Call
    packets: tuple[str, ...] = ()

    def since(self, what: str) -> int:
        """How much passes after the work itself last ran the code of `what`, if that is an
        operator.
        """
        if self.packets and what.startswith("aten."):
            return code_since(what, self.packets)
        return self.amount


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that are called, and calls of them to be repeated."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.packets: dict[str, None] = {}
        """Each once, in the order of their last calls; calls of phases among them, where they are
        noted.
        """

    def note(self, name: str) -> None:
        """`name` is what was called last."""
        self.packets.pop(name, None)
        self.packets[name] = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if not str(func).startswith("profiler."):
            self.calls.append(lambda: func(*args, **(kwargs or {})))
            self.note(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


class PassThrough(nn.Module):
    """A module of Python code alone, such as stands around an operator: options, checks, a
    function.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.inplace = 0.5, False

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """The input, unchanged."""
        return _checked(state, self.rate, self.training, inplace=self.inplace)


def _checked(
    state: torch.Tensor, rate: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"rate is {rate}; expected a fraction")
    return state if training or inplace else state.detach()


def passing_bytes(n_bytes: int) -> tuple[Work, ...]:
    """A product that passes over a given number of bytes, and as many bytes of fresh pages."""
    product = _product(n_bytes)
    fresh = partial(churn, n_bytes)
    return Work(COLD_START, n_bytes, product, product), Work(PAGE_EVICTION, n_bytes, fresh, fresh)


def _product(n_bytes: int) -> Call:
    """A product that passes over so many bytes and computes as it goes; a mere sweep leaves in a
    shared cache much of what a layer's kernels drive out.
    """
    matrix, other = torch.zeros(n_bytes // (4 * _WIDTH), _WIDTH), torch.zeros(_WIDTH, _COLUMNS)
    out = torch.empty(len(matrix), _COLUMNS)
    return lambda: torch.mm(matrix, other, out=out)


def churn(n_bytes: int) -> None:
    """Write to fresh pages and give them back."""
    with mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as region:
        torch.frombuffer(region, dtype=torch.float32).fill_(1.0)


Step = Callable[[bool, Callable[[str], None]], None]


def passing_code(step: Step) -> tuple[Work, ...]:
    """A step; `unfinished` leaves out the optimizer's part."""
    with Operators() as operators:
        step(True, operators.note)
    packets = tuple(operators.packets)
    whole, unfinished = (partial(step, is_whole, lambda _name: None) for is_whole in (True, False))
    amount = sum(map(relative_footprint, packets))
    return (Work(CODE_EVICTION, amount, whole, unfinished, packets),)


def steps() -> list[Step]:
    """Work of ever more code: elementwise operators, a forward pass, then small training steps, one
    without convolutions, one without products. Each is called with whether an optimizer takes part,
    and reports when a phase's call comes.
    """
    images, labels = torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))
    row = torch.rand(4, 16, requires_grad=True)
    forward = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 16),
        nn.LayerNorm(16),
        nn.GELU(),
    )
    flat = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 10))
    dense = nn.Sequential(
        nn.Flatten(),
        nn.Linear(192, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Linear(16, 32),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.LayerNorm(32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )
    convolutional = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 10, 3, padding=1),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.LayerNorm(4),
        nn.Tanh(),
        nn.AvgPool2d(4),
        nn.Flatten(),
    )
    deep = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(128, 32),
        nn.LayerNorm(32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )

    def elementwise(_whole: bool, _note: Callable[[str], None]) -> None:
        out = ((row + 1.0) * row - row).exp().div(row + 2.0).abs()
        for name in (torch.neg, torch.sqrt, torch.cos, torch.square, torch.floor, torch.erf):
            out = name(out)

    def forward_pass(_whole: bool, _note: Callable[[str], None]) -> None:
        forward(images)

    def step(model: nn.Module) -> Step:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        def run(whole: bool, note: Callable[[str], None]) -> None:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            note("backward")
            loss.backward()  # type: ignore[no-untyped-call]
            if whole:
                note("optimizer")
                optimizer.step()

        return run

    return [elementwise, forward_pass, *map(step, (flat, dense, convolutional, deep))]
