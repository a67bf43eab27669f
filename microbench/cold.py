"""What calls take more that find their code and data out of the nearer caches, as a step's do, than calls that are repeated.

A step runs every operator's code once between megabytes of data; the interpreter, the dispatcher and the kernels come
back from farther caches, as data do.
"""

from __future__ import annotations

import mmap
import statistics
from collections.abc import Callable

import torch

from dlperf.clock import Clock, Samples, take_single, undisturbed
from dlperf.trace import Op, Symbol, TensorSpec
from microbench.replay import build

COLD_BYTES = (2**20, 2**22, 2**24, 2**26, 2**27)
"""How much memory passes by between two measured calls, so that the code and data of the call have left the nearer caches."""
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
        Op("aten.cat.default", ((rows, rows),)),
    )


def measure(mode: str, clock: Clock) -> dict[str, Samples]:
    """``cold/WHAT/BYTES``, ``churn/WHAT/BYTES``: seconds that one call takes more after so many bytes of other work than when it is repeated.

    ``first`` is the first operator called afterwards, which finds everything cold, ``next`` a second one, which finds only what is its own cold,
    ``aten.NAME`` the same of an operator with more code than an elementwise one; ``module`` is a module's call without an operator, after one of another
    type. The other work streams through memory that is there (cold), or writes fresh pages and gives them back (churn), which empties more of
    the core's tables. ``backward`` is called right after its forward, as in a step, and finds the interpreter warm, which a whole
    backward has driven out before the ``optimizer``. Of ``backward`` what its operators take more is taken off: a step's are priced one by one.
    """
    leaf = torch.rand(4, 4, requires_grad=True)
    parameters = [torch.rand(4, requires_grad=True) for _ in range(_N_PARAMETERS)]
    for parameter in parameters:
        parameter.grad = torch.zeros(4)
    sgd, adam = torch.optim.SGD(parameters, lr=0.01, momentum=0.9), torch.optim.Adam(parameters)
    bare, other_module = torch.nn.Dropout(0.0), torch.nn.ReLU()

    def backward() -> Call:
        root = torch.relu(torch.tanh(leaf * 1.0)).sum()
        return root.backward

    quick = mode == "quick"
    operators: tuple[Call, ...] = (lambda: torch.relu(leaf), lambda: torch.tanh(leaf), lambda: torch.sigmoid(leaf))
    own = {op.packet: build(op) for op in tiny_operators()[: _FEW if quick else None]}
    makes: tuple[tuple[str, Callable[[], Call]], ...] = (("optimizer", lambda: sgd.step), ("optimizer", lambda: adam.step), ("backward", backward))
    found: dict[str, list[float]] = {}
    n_samples = 5 if quick else 13
    for n_bytes in COLD_BYTES[:: 2 if quick else 1]:
        memory = torch.zeros(n_bytes // 4)
        stream: Call = lambda memory=memory: memory.add_(1.0)  # type: ignore[misc]  # noqa: E731
        for place, first in enumerate(operators):
            second = operators[place - 1]
            for name, values in zip(("first", "next"), _pair_after(first, second, stream, n_samples, clock)):
                found.setdefault(f"cold/{name}/{n_bytes}", []).extend(values)
        found.setdefault(f"cold/module/{n_bytes}", []).extend(_pair_after(lambda: other_module(leaf), lambda: bare(leaf), stream, n_samples, clock)[1])
        for packet, call in own.items():
            found[f"cold/{packet}/{n_bytes}"] = _pair_after(operators[0], call, stream, 1 + n_samples // 4, clock)[1]
        others = {"": lambda: None, "cold": stream, "churn": lambda n_bytes=n_bytes: churn(n_bytes)}  # type: ignore[misc]
        for name, make in makes:
            taken = {kind: take_single(lambda: _after(make, other), n_samples, clock) for kind, other in others.items()}  # noqa: B023
            warm_s = taken.pop("").minimum
            if name == "backward":
                warm_s += _NODES * statistics.median(found[f"cold/next/{n_bytes}"])
            for kind, samples in taken.items():
                found.setdefault(f"{kind}/{name}/{n_bytes}", []).extend(max(0.0, value - warm_s) for value in samples.values)
    return {name: Samples(tuple(values)) for name, values in found.items()}


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


def _after(make: Callable[[], Call], other: Call) -> Call:
    """A call that was made before, other work, and what makes it again."""
    make()()
    other()
    return make()


def churn(n_bytes: int) -> None:
    """Write to fresh pages and give them back."""
    with mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as region:
        torch.frombuffer(region, dtype=torch.float32).fill_(1.0)
