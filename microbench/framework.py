"""What PyTorch itself costs: calls, autograd nodes, modules, optimizers, gradients put back to
none.

Every cost is the slope of a time against a count (two counts, so that what is common cancels), on
tensors so small that their kernels cost next to nothing. Two recipes bring the numbers near to what
a training step pays: tensors and modules are distinct (a loop over one tensor keeps everything in
the first cache), and operators alternate.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.modules import container

from dlperf.core.clock import (
    Clock,
    Repeats,
    Samples,
    sample_in_turns,
    take_single,
)
from dlperf.core.code_footprint import code_since, relative_footprint
from dlperf.core.costs import CODE_EVICTION, OPTIMIZER_CALL, OPTIMIZER_TENSOR, Cost, CostKey
from dlperf.core.instructions import InstructionCounter
from dlperf.microbench import cold_start
from dlperf.microbench.cold_work import Call, Operators
from dlperf.microbench.python_code import PythonForward

_FEW, _MANY = 8, 72
_NODES_OF_ROUND, _LEAVES_OF_ROUND = 5, 2
"""Of a linear layer with an activation: those of the product, the transposed weight and the
activation, and two that keep gradients.
"""
_ROOTS = 2**16


def _slope(make: Callable[[int], Call], repeats: Repeats, clock: Clock) -> Samples:
    """Seconds that one more adds: (t(many) - t(few)) / (many - few)."""
    few, many = sample_in_turns([make(_FEW), make(_MANY)], repeats, clock)
    return replace(
        many.minus(few.minimum, _MANY - _FEW), n_disturbed=few.n_disturbed + many.n_disturbed
    )


def _singles(prepare: Sequence[Callable[[], Call]], n_samples: int, clock: Clock) -> list[Samples]:
    """As many single calls of each, in turns: what is told from their differences wants all of them
    from the same moments.
    """
    turns = [[take_single(one, 1, clock) for one in prepare] for _ in range(n_samples)]
    return [
        Samples(
            tuple(value for samples in taken for value in samples.values),
            sum(samples.n_disturbed for samples in taken),
        )
        for taken in zip(*turns)
    ]


def _loop(calls: Sequence[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run


def _cycle(calls: list[Call]) -> Callable[[int], Call]:
    """Loops of a given number of calls, in turns."""
    return lambda n: _loop((calls * n)[:n])


def _calls(repeats: Repeats, clock: Clock) -> dict[CostKey, Samples]:
    """Costs of calling an operator: through torch.ops, from Python, and what that takes more than
    from C++, recorded by autograd.
    """
    ops = torch.ops.aten
    few = [torch.rand(4, 4) for _ in range(3)]
    x, y, z = few

    native: list[Call] = [
        lambda: torch.relu(x),
        lambda: torch.add(x, y),
        lambda: torch.mul(y, z),
        lambda: torch.tanh(z),
    ]
    boxed: list[Call] = [
        lambda: ops.relu.default(x),
        lambda: ops.add.Tensor(x, y),
        lambda: ops.mul.Tensor(y, z),
        lambda: ops.tanh.default(z),
    ]
    weight, bias = torch.rand(4, 4), torch.rand(4)

    def from_python() -> torch.Tensor:
        product = torch.addmm(bias, y, weight.t())
        return torch.tanh(torch.addmm(bias, x, weight.t()).add_(product))

    def from_cpp() -> torch.Tensor:
        return torch.rnn_tanh_cell(x, y, weight, weight, bias, bias)

    cell: tuple[list[Call], list[Call]] = [from_python], [from_cpp]
    with torch.no_grad():
        native_s, boxed_s, python_s, cpp_s = (
            _slope(_cycle(calls), repeats, clock) for calls in (native, boxed, *cell)
        )
    with Operators() as operators:
        from_cpp()
    leaf = torch.rand(4, 4, requires_grad=True)
    recorded: list[Call] = [
        lambda: torch.relu(leaf),
        lambda: torch.add(leaf, y),
        lambda: torch.mul(leaf, z),
        lambda: torch.tanh(leaf),
    ]
    recorded_s = _slope(_cycle(recorded), repeats, clock)
    return {
        CostKey("boxed_call"): boxed_s.minus(native_s.minimum),
        CostKey("native_call"): native_s,
        CostKey("python_call"): python_s.minus(cpp_s.minimum, len(operators.calls) - 1),
        CostKey("autograd_record"): recorded_s.minus(native_s.minimum),
    }


def _backward(call_s: float, repeats: Repeats, clock: Clock) -> dict[CostKey, Samples]:
    """Costs of the engine: a node beyond its kernels, what a node more takes that puts a gradient
    into a parameter, the call of backward. Nodes call operators from C++: `call_s` is what that
    takes less than the calls of their kernels here.
    """
    from scipy.optimize import nnls

    ops = torch.ops.aten
    x, y = torch.rand(4, 8), torch.rand(4, 4)

    def chain(n: int, leaves: bool) -> torch.Tensor:
        out = torch.rand(4, 4, requires_grad=True) * 1.0
        for index in range(n):
            out = torch.tanh(out) if index % 2 else torch.relu(out)
            if leaves:
                out = out + torch.rand(4, 4, requires_grad=True)
        return out.sum()

    def layers(n: int) -> torch.Tensor:
        out = x
        for index in range(n):
            out = F.linear(
                out, torch.rand(8, 8, requires_grad=True), torch.rand(8, requires_grad=True)
            )
            out = torch.tanh(out) if index % 2 else torch.relu(out)
        return out.sum()

    def kernels(root: torch.Tensor) -> list[Call]:
        with Operators() as operators:
            root.backward()  # type: ignore[no-untyped-call]
        calls: list[Call] = operators.calls
        return calls

    def least() -> torch.Tensor:
        return chain(0, leaves=False)

    def least_again() -> Call:
        least().backward()  # type: ignore[no-untyped-call]
        return least().backward

    span = _MANY - _FEW
    few_calls, many_calls, least_calls = map(kernels, (layers(_FEW), layers(_MANY), least()))
    single: list[Call] = [
        lambda: ops.threshold_backward.default(y, y, 0),
        lambda: ops.tanh_backward.default(y, y),
        lambda: ops.detach.default(y),
    ]
    with torch.no_grad():
        relu_s, tanh_s, detach_s = (
            samples.minimum - call_s for samples in sample_in_turns(single, repeats, clock)
        )
        few_kernels, many_kernels, least_kernels = sample_in_turns(
            [_loop(few_calls), _loop(many_calls), _loop(least_calls)], repeats, clock
        )
    # With leaves each round adds the node of an addition (no kernel of its own) and that of one
    # accumulation, whose detach is an operator of the step.
    graphs: list[Callable[[int], torch.Tensor]] = [
        lambda n: chain(n, leaves=False),
        lambda n: chain(n, leaves=True),
        layers,
    ]
    prepared = [
        lambda graph=graph, n=n: graph(n).backward for graph in graphs for n in (_FEW, _MANY)
    ]
    few_bare, many_bare, few_leaved, many_leaved, few, many, bare = _singles(
        [*prepared, least_again], 4 * repeats.n_samples, clock
    )
    bare_s, leaved_s, layer_s = (
        (after.minimum - before.minimum) / span
        for before, after in ((few_bare, many_bare), (few_leaved, many_leaved), (few, many))
    )
    kernels_s = many_kernels.minimum - few_kernels.minimum
    kernels_s -= (len(many_calls) - len(few_calls)) * call_s
    activation_s = (relu_s + tanh_s) / 2
    least_s = least_kernels.minimum - len(least_calls) * call_s
    (node_s, leaf_s), _ = nnls(
        np.array([[1, 0], [2, 1], [_NODES_OF_ROUND, _LEAVES_OF_ROUND]]),
        np.array([bare_s - activation_s, leaved_s - bare_s - detach_s, layer_s - kernels_s / span]),
    )
    # A graph of a product and its sum, with one accumulation, right after another of the same: what
    # the call takes when its code has left the caches is measured apart.
    return {
        CostKey("autograd_node"): Samples((float(node_s),), many.n_disturbed),
        CostKey("accumulate_grad"): Samples((float(leaf_s),), many_leaved.n_disturbed),
        CostKey("backward_call"): Samples(
            (max(0.0, bare.minimum - least_s - 2 * float(node_s) - float(leaf_s)),),
            bare.n_disturbed,
        ),
    }


def _modules(repeats: Repeats, clock: Clock) -> dict[CostKey, Samples]:
    """Costs of a module's call and of each of its parameters' look-up."""
    x = torch.rand(4, 4)

    def modules(make: Callable[[], torch.nn.Module], n: int) -> Call:
        made = [make() for _ in range(n)]

        def run() -> None:
            for module in made:
                module(x)

        return run

    def functionals(n: int) -> Call:
        pairs = [
            (torch.rand(4, 4, requires_grad=True), torch.rand(4, requires_grad=True))
            for _ in range(n)
        ]

        def run() -> None:
            for weight, bias in pairs:
                F.linear(x, weight, bias)

        return run

    call, module, functional = (
        _slope(make, repeats, clock)
        for make in (
            partial(modules, torch.nn.Identity),
            partial(modules, partial(torch.nn.Linear, 4, 4)),
            functionals,
        )
    )
    return {
        CostKey("module_call"): call,
        CostKey("parameter_lookup"): module.minus(functional.minimum + call.minimum, 2),
    }


def _python(repeats: Repeats, clock: Clock) -> dict[CostKey, Samples]:
    """``python_instruction``: seconds of one with warm caches; not where none can be counted."""
    forward = PythonForward()
    if not forward.n_instructions:
        return {}
    (samples,) = sample_in_turns([forward], repeats, clock)
    return {CostKey("python_instruction"): samples.minus(0.0, forward.n_instructions)}


def _in_steps(
    known: dict[CostKey, Samples], mode: str, repeats: Repeats, clock: Clock
) -> dict[CostKey, Samples]:
    """``module_body``: what a leaf module's forward takes in a training step beyond its call, its
    look-ups and the function itself repeated alone.
    """
    modules: list[torch.nn.Module] = []
    for activation in (torch.nn.ReLU(), torch.nn.Tanh(), torch.nn.Sigmoid()):
        modules += [torch.nn.Linear(8, 8), activation]
    modules += [torch.nn.Flatten(), torch.nn.Linear(8, 8)]
    model = torch.nn.Sequential(*modules)
    x = torch.rand(4, 8)
    weight, bias, recorded = (
        torch.rand(8, 8, requires_grad=True),
        torch.rand(8, requires_grad=True),
        torch.rand(4, 8, requires_grad=True),
    )
    functions: list[Call] = [
        lambda: F.linear(recorded, weight, bias),
        lambda: torch.relu(recorded),
        lambda: torch.tanh(recorded),
        lambda: torch.sigmoid(recorded),
        lambda: recorded.view(4, 8),
    ]
    counts = [4, 1, 1, 1, 1]
    alone_s = sum(
        count * samples.minimum
        for count, samples in zip(counts, sample_in_turns(functions, repeats, clock))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    outputs: list[torch.Tensor] = []

    def next_forward() -> Call:
        if outputs:
            outputs.pop().sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        optimizer.zero_grad()
        return lambda: outputs.append(model(x))

    forward = take_single(next_forward, 60 if mode == "quick" else 300, clock)
    n_lookups = sum(len(list(module.parameters(recurse=False))) for module in modules)
    known_s = (
        alone_s
        + (len(modules) + 1) * known[CostKey("module_call")].minimum
        + n_lookups * known[CostKey("parameter_lookup")].minimum
    )
    # The first call of each operator comes after a whole step of others.
    own = InstructionCounter(lambda: "own", lambda code: code.co_filename == container.__file__)
    with Operators() as operators:
        own.start()
        loss = model(x).sum()
        own.stop()
        operators.note("backward")
        loss.backward()  # type: ignore[no-untyped-call]
        operators.note("optimizer")
        optimizer.step()
    code = sum(map(relative_footprint, operators.packets))
    executed, distinct = own.of("own")
    if executed:
        known_s += executed * known[CostKey("python_instruction")].minimum
    for what, count in (("next", 3), ("instruction", distinct), ("aten.addmm", 1)):
        known_s += count * _after_code_s(
            known,
            what,
            code_since(what, tuple(operators.packets)) if what == "aten.addmm" else code,
        )
    return {
        CostKey("module_body"): forward.minus(known_s, len(modules)),
    }


def _after_code_s(known: Mapping[CostKey, Samples], what: str, amount: int) -> float:
    """What a call takes more after so much other code, between the amounts that were measured."""
    taken = sorted(
        (key.at, statistics.median(samples.values))
        for key, samples in known.items()
        if key[:2] == (CODE_EVICTION, what)
    )
    return float(
        np.interp(
            amount,
            [0, *(index for index, _ in taken)],
            [0.0, *itertools.accumulate((seconds for _, seconds in taken), max)],
        )
    )


def with_gradients(n: int, n_elements: int = 4) -> list[torch.Tensor]:
    """Parameters whose gradients are zero."""
    parameters = [torch.rand(n_elements, requires_grad=True) for _ in range(n)]
    for parameter in parameters:
        parameter.grad = torch.zeros(n_elements)
    return parameters


OPTIMIZERS: tuple[tuple[str, dict[str, object]], ...] = (
    ("SGD", {"lr": 0.01}),
    ("SGD", {"lr": 0.01, "momentum": 0.9}),
    ("SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}),
    ("SGD", {"lr": 0.01, "momentum": 0.9, "foreach": True}),
    ("SGD", {"lr": 0.01, "momentum": 0.9, "fused": True}),
    ("Adam", {"lr": 1e-3}),
    ("Adam", {"lr": 1e-3, "amsgrad": True}),
    ("Adam", {"lr": 1e-3, "foreach": True}),
    ("Adam", {"lr": 1e-3, "fused": True}),
    ("AdamW", {"lr": 1e-3}),
    ("AdamW", {"lr": 1e-3, "foreach": True}),
    ("AdamW", {"lr": 1e-3, "fused": True}),
    ("RMSprop", {"lr": 1e-3}),
    ("Adagrad", {"lr": 1e-3}),
    ("Adadelta", {"lr": 1e-3}),
    ("NAdam", {"lr": 1e-3}),
    ("RAdam", {"lr": 1e-3}),
    ("Adamax", {"lr": 1e-3}),
)


def implementation(options: dict[str, object]) -> str:
    """How an optimizer of these options loops over its tensors."""
    return "fused" if options.get("fused") else "foreach" if options.get("foreach") else "for-loop"


def _optimizers(mode: str, repeats: Repeats, clock: Clock) -> dict[CostKey, Samples]:
    """``optimizer_tensor``: seconds per parameter tensor, its tiny kernels included;
    ``optimizer_call``: seconds per step; of each optimizer and implementation.

    Also ``zero_grad_tensor``, ``zero_grad_call``, and ``optimizer_zero_root``: seconds that the
    square root of a zero takes beyond that of another number.
    """
    found: dict[CostKey, Samples] = {}
    for type_name, options in OPTIMIZERS[:: 3 if mode == "quick" else 1]:
        made = []
        for n in (_FEW, _MANY):
            optimizer = getattr(torch.optim, type_name)(with_gradients(n), **options)
            optimizer.step()
            made.append(optimizer)
        with Operators() as operators:
            made[0].step()
        few, many = sample_in_turns([made[0].step, made[1].step], repeats, clock)
        span = _MANY - _FEW
        each = many.minus(few.minimum, span)
        loop = implementation(options)
        n_ops = round(len(operators.calls) / _FEW) if loop == "for-loop" else len(operators.calls)
        found[CostKey(OPTIMIZER_TENSOR, type_name, n_ops, loop)] = each
        found.setdefault(
            CostKey(OPTIMIZER_CALL, type_name, variant=loop), few.minus(each.minimum * _FEW)
        )

    def zero_grad(n: int) -> Call:
        return torch.optim.SGD(with_gradients(n), lr=0.01).zero_grad

    few, many = _singles(
        [partial(zero_grad, n) for n in (_FEW, _MANY)], 4 * repeats.n_samples, clock
    )
    found[CostKey("zero_grad_tensor")] = each = many.minus(few.minimum, _MANY - _FEW)
    found[CostKey("zero_grad_call")] = few.minus(each.minimum * _FEW)
    ones, zeros = sample_in_turns([_roots(1.0), _roots(0.0)], repeats, clock)
    found[CostKey("optimizer_zero_root")] = zeros.minus(ones.minimum, _ROOTS)
    return found


def _roots(value: float) -> Call:
    numbers = torch.full((_ROOTS,), value)
    found = torch.empty_like(numbers)
    return lambda: torch.sqrt(numbers, out=found)


def measure(threads: int, mode: str, clock: Clock = Clock()) -> list[Cost]:
    """Every cost of the framework, in seconds each."""
    repeats = Repeats(
        sample_s=2e-4 if mode == "quick" else 5e-4, n_samples=5 if mode == "quick" else 11
    )
    # Short loops tell these: some tenths of a second in all, which they always get; cold calls take
    # what is left of the time.
    unlimited = replace(clock, until=math.inf)
    found = _calls(repeats, unlimited)
    call_s = sum(found[CostKey(kind)].minimum for kind in ("boxed_call", "python_call"))
    found |= _backward(call_s, repeats, unlimited)
    found |= _modules(repeats, unlimited)
    found |= _python(repeats, unlimited)
    found |= _optimizers(mode, repeats, unlimited)
    found |= cold_start.measure(mode, clock)
    found |= _in_steps(found, mode, repeats, unlimited)
    return [Cost(key, threads, samples) for key, samples in found.items()]
