"""What calls take more that find their code and data out of the nearer caches, as a step's do, than calls that are repeated.

A step runs every operator's code once between megabytes of data and between other operators' code; the interpreter, the dispatcher and the kernels
come back from farther caches, as data do, and what the core had learnt of their branches is forgotten.
"""

from __future__ import annotations

import mmap
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dlperf.clock import Clock, Samples, take_single, undisturbed
from dlperf.trace import Op, Symbol, TensorSpec
from microbench.replay import build

COLD_BYTES = (2**20, 2**22, 2**24, 2**26)
"""How much memory passes by between two measured calls, so that the code and data of the call have left the nearer caches."""
_WIDTH, _COLUMNS = 1024, 32
_N_OPERANDS, _SMALL, _APART = 16, 256, 4096
"""Pairs of operands, and their elements; each begins so many elements after the one before, on a page of its own."""
Call = Callable[[], object]
_FEW, _N_PARAMETERS = 4, 8
_NODES = 5
"""Operators that the measured backward runs: their own cold calls are told apart from its."""
T = TensorSpec.contiguous


def tiny_operators() -> tuple[Op, ...]:
    """Operators with much code of their own (a library behind them, several kernels) on next to no data, the dearest first."""
    image, channel, row, rows = T(2, 16, 4, 4), T(16), T(8, 1), T(8, 16)
    weight, window = T(16, 16, 3, 3), ((2, 2), (2, 2), (0, 0))
    convolution = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    numbers, chosen, drawn = Symbol("dtype", "float32"), T(8, dtype="int64"), T(8, 16, dtype="bool")
    return (
        Op("aten.mm.default", (rows, T(16, 16))),
        Op("aten.convolution.default", (image, weight, None, *convolution)),
        Op("aten.convolution_backward.default", (image, image, weight, (16,), *convolution, (True, True, True))),
        Op("aten.native_batch_norm.default", (image, channel, channel, channel, channel, True, 0.1, 1e-5)),
        Op("aten.native_batch_norm_backward.default", (image, image, channel, channel, channel, channel, channel, True, 1e-5, (True, True, True))),
        Op("aten.native_layer_norm.default", (rows, (16,), channel, channel, 1e-5)),
        Op("aten.native_layer_norm_backward.default", (rows, rows, (16,), row, row, channel, channel, (True, True, True))),
        Op("aten._log_softmax.default", (rows, 1, False)),
        Op("aten._log_softmax_backward_data.default", (rows, rows, 1, numbers)),
        Op("aten.nll_loss_forward.default", (rows, chosen, None, 1, -100)),
        Op("aten.nll_loss_backward.default", (T(), rows, chosen, None, 1, -100, T())),
        Op("aten.max_pool2d_with_indices.default", (image, *window)),
        Op("aten.max_pool2d_with_indices_backward.default", (T(2, 16, 2, 2), image, *window, (1, 1), False, T(2, 16, 2, 2, dtype="int64"))),
        Op("aten.embedding.default", (rows, chosen)),
        Op("aten.embedding_dense_backward.default", (rows, chosen, 8, -1, False)),
        Op("aten.gelu.default", (rows,)),
        Op("aten.gelu_backward.default", (rows, rows)),
        Op("aten.native_dropout.default", (rows, 0.1, True)),
        Op("aten.native_dropout_backward.default", (rows, drawn, 1.1)),
        Op("aten.sum.dim_IntList", (rows, (0,), True)),
        Op("aten.mean.dim", (rows, (0,), True)),
        Op("aten.cat.default", ((rows, rows),)),
    )


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that are called, and calls of them to be repeated."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.packets: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if not str(func).startswith("profiler."):
            self.calls.append(lambda: func(*args, **(kwargs or {})))
            self.packets.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def _steps() -> tuple[Callable[[bool], None], ...]:
    """Work of ever more different operators: a few, then small training steps, which leave out the optimizer's part unless asked for the whole."""
    images, labels = torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))
    flat: list[nn.Module] = [nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 10)]
    deep: list[nn.Module] = [
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Dropout(0.1),
        nn.Linear(128, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 10),
    ]  # fmt: skip

    def step(modules: list[nn.Module]) -> Callable[[bool], None]:
        model = nn.Sequential(*modules)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        def run(whole: bool) -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            if whole:
                optimizer.step()

        return run

    def few(whole: bool) -> None:
        for name in (torch.add, torch.mul, torch.sub):
            name(images, images)

    return few, step(flat), step(deep)


def measure(mode: str, clock: Clock) -> dict[str, Samples]:
    """``cold/WHAT/BYTES``, ``churn/WHAT/BYTES``, ``varied/WHAT/OPERATORS``: seconds that one call takes more after other work than when it is repeated.

    The other work multiplies a matrix of so many bytes that is there (cold), or writes fresh pages and gives them back (churn), which empties more of
    the core's tables, or is a training step on next to no data with so many different operators (varied), which takes the caches of instructions and
    the predictors of branches.

    ``first`` is the first operator called afterwards, which finds everything cold, ``next`` a second one, which finds only what is its own cold,
    ``aten.NAME`` the same of an operator with more code than an elementwise one; ``operand`` what each of a few operands that lie apart adds; ``module`` is
    a module's call without an operator, after one of another type. ``backward`` is called right after its forward, as in a step, and finds the interpreter
    warm, which a whole backward has driven out before the ``optimizer``; ``zero_grad`` comes after a whole step. Of ``backward`` what its operators take
    more is taken off: a step's are priced one by one.
    """
    bench = _Bench(quick=mode == "quick", n_samples=5 if mode == "quick" else 13, clock=clock)
    for n_bytes in COLD_BYTES[:: 2 if bench.quick else 1]:
        product = _product(n_bytes)
        bench.take_all(_Work("cold", n_bytes, product, product))
        fresh: Call = lambda n_bytes=n_bytes: churn(n_bytes)  # type: ignore[misc]  # noqa: E731
        bench.take_once_a_step(_Work("churn", n_bytes, fresh, fresh))
    for step in _steps():
        with Operators() as operators:
            step(True)
        bench.take_all(_Work("varied", len(operators.packets), lambda: step(True), lambda: step(False)))  # noqa: B023
    return {name: Samples(tuple(values)) for name, values in bench.found.items()}


@dataclass(frozen=True)
class _Work:
    """What passes between two calls: of which kind, how many bytes or operators, the `whole` of it and without an optimizer."""

    kind: str
    amount: int
    whole: Call
    unfinished: Call


@dataclass
class _Bench:
    """Takes samples of calls after other work into `found`."""

    quick: bool
    n_samples: int
    clock: Clock
    found: dict[str, list[float]] = field(default_factory=dict)

    def _add(self, work: _Work, what: str, values: Iterable[float]) -> None:
        self.found.setdefault(f"{work.kind}/{what}/{work.amount}", []).extend(values)

    def take_all(self, work: _Work) -> None:
        """Operators, a module, operands, and what comes once a step."""
        leaf = torch.rand(4, 4, requires_grad=True)
        bare, other_module = nn.Dropout(0.0), nn.ReLU()
        operators: tuple[Call, ...] = (lambda: torch.relu(leaf), lambda: torch.tanh(leaf), lambda: torch.sigmoid(leaf))
        for place, first in enumerate(operators):
            firsts, seconds = _pair_after(first, operators[place - 1], work.whole, self.n_samples, self.clock)
            self._add(work, "first", firsts)
            self._add(work, "next", seconds)
        self._add(work, "module", _pair_after(lambda: other_module(leaf), lambda: bare(leaf), work.whole, self.n_samples, self.clock)[1])
        for op in tiny_operators()[: _FEW if self.quick else None]:
            self._add(work, op.packet, _pair_after(operators[0], build(op), work.whole, 1 + self.n_samples // 4, self.clock)[1])
        if work.kind == "cold":
            self._add(work, "operand", self._operands_s(work.whole))
        self.take_once_a_step(work)

    def take_once_a_step(self, work: _Work) -> None:
        """``backward``, ``optimizer`` and ``zero_grad``."""
        leaf = torch.rand(4, 4, requires_grad=True)
        parameters = [torch.rand(4, requires_grad=True) for _ in range(_N_PARAMETERS)]
        sgd, adam = torch.optim.SGD(parameters, lr=0.01, momentum=0.9), torch.optim.Adam(parameters)

        def with_gradients() -> None:
            for parameter in parameters:
                parameter.grad = torch.zeros(4)

        def root() -> torch.Tensor:
            return torch.relu(torch.tanh(leaf * 1.0)).sum()

        def steps(optimizer: torch.optim.Optimizer, other: Call) -> Call:
            with_gradients()
            optimizer.step()
            other()
            return optimizer.step

        def backward(other: Call) -> Call:
            root().backward()  # type: ignore[no-untyped-call]
            other()
            return root().backward

        def zero_grad(other: Call) -> Call:
            with_gradients()
            sgd.zero_grad()
            with_gradients()
            other()
            return sgd.zero_grad

        nodes_s = _NODES * statistics.median(self.found[f"{'cold' if work.kind == 'churn' else work.kind}/next/{work.amount}"])
        ways: tuple[tuple[str, Callable[[Call], Call], Call, float], ...] = (
            ("optimizer", lambda other: steps(sgd, other), work.unfinished, 0.0),
            ("optimizer", lambda other: steps(adam, other), work.unfinished, 0.0),
            ("backward", backward, work.whole, nodes_s),
            ("zero_grad", zero_grad, work.whole, 0.0),
        )
        for what, prepare, other, known_s in ways:
            self._add(work, what, (max(0.0, value - known_s) for value in self._extra_s(prepare, other)))

    def _operands_s(self, other: Call) -> list[float]:
        """Seconds that an operand adds to a call of two for lying, itself and what torch keeps of it, as far away as after other work."""
        apart = [(torch.rand(_APART), torch.rand(_APART)) for _ in range(_N_OPERANDS)]
        pairs = [(one[:_SMALL], two[:_SMALL]) for one, two in apart]

        def add(count: int) -> Callable[[Call], Call]:
            def run() -> None:
                for one, two in pairs[:count]:
                    one.add_(two, alpha=0.0)

            def prepare(work: Call) -> Call:
                run()
                work()
                return run

            return prepare

        few_s = statistics.median(self._extra_s(add(1), other))  # with the code, which is cold once
        return [max(0.0, value - few_s) / (2 * (_N_OPERANDS - 1)) for value in self._extra_s(add(_N_OPERANDS), other)]

    def _extra_s(self, prepare: Callable[[Call], Call], other: Call) -> list[float]:
        """Seconds that what `prepare` makes takes more after other work than after none."""
        warm, taken = (take_single(lambda: prepare(work), self.n_samples, self.clock) for work in (lambda: None, other))  # noqa: B023
        return [max(0.0, value - warm.minimum) for value in taken.values]


def _pair_after(first: Call, second: Call, other: Call, n_samples: int, clock: Clock) -> tuple[list[float], list[float]]:
    """Seconds that two calls, one right after the other, take more after other work than without it, for each of the two."""
    taken: dict[bool, tuple[list[tuple[float, bool]], list[tuple[float, bool]]]] = {False: ([], []), True: ([], [])}
    for _ in range(2 * n_samples):
        for cold, (firsts, seconds) in taken.items():
            first()
            second()
            before = clock.switches()
            if cold:
                other()
            begin = clock.now()
            first()
            middle = clock.now()
            second()
            end = clock.now()
            disturbed = clock.switches() != before
            firsts.append((middle - begin, disturbed))
            seconds.append((end - middle, disturbed))
    found = []
    for place in (0, 1):
        warm, cold_ones = (undisturbed(taken[cold][place], least_frac=0.0) for cold in (False, True))
        found.append([max(0.0, value - warm.minimum) for value in cold_ones.values])
    return found[0], found[1]


def _product(n_bytes: int) -> Call:
    """A product that passes over so many bytes and computes as it goes; a mere sweep leaves in a shared cache much of what a layer's kernels drive out."""
    matrix, other = torch.zeros(n_bytes // (4 * _WIDTH), _WIDTH), torch.zeros(_WIDTH, _COLUMNS)
    out = torch.empty(len(matrix), _COLUMNS)
    return lambda: torch.mm(matrix, other, out=out)


def churn(n_bytes: int) -> None:
    """Write to fresh pages and give them back."""
    with mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as region:
        torch.frombuffer(region, dtype=torch.float32).fill_(1.0)
