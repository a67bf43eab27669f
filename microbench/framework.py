"""What PyTorch itself costs: calls, autograd nodes, modules, optimizers, gradients put back to none.

Every cost is the slope of a time against a count (two counts, so that what is common cancels), on tensors so small
that their kernels cost next to nothing. Two recipes bring the numbers near to what a training step pays: tensors
and modules are distinct (a loop over one tensor keeps everything in the first cache), and operators alternate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dlperf.clock import Clock, Repeats, Sampler, Samples, take_single, take_turns
from dlperf.machine import Cost
from microbench import cold

_FEW, _MANY = 8, 72
_ROOTS = 2**16
Call = Callable[[], object]


def _samples(calls: list[Call], repeats: Repeats, clock: Clock) -> list[Samples]:
    """The calls sampled in turn, so that drift meets all of them alike."""
    samplers = [Sampler(call, repeats, clock) for call in calls]
    take_turns(samplers)
    return [sampler.result() for sampler in samplers]


def _slope(make: Callable[[int], Call], repeats: Repeats, clock: Clock) -> Samples:
    """Seconds that one more adds: (t(many) - t(few)) / (many - few)."""
    few, many = _samples([make(_FEW), make(_MANY)], repeats, clock)
    return Samples(tuple(max(0.0, value - few.minimum) / (_MANY - _FEW) for value in many.values), few.n_disturbed + many.n_disturbed)


def _less(samples: Samples, amount_s: float) -> Samples:
    return Samples(tuple(max(0.0, value - amount_s) for value in samples.values), samples.n_disturbed)


def _loop(calls: Sequence[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run


def _calls(repeats: Repeats, clock: Clock) -> dict[str, Samples]:
    """Costs of calling an operator: through torch.ops, from Python, recorded by autograd, run by the engine."""
    ops = torch.ops.aten
    few = [torch.rand(4, 4) for _ in range(3)]
    x, y, z = few

    def native(n: int) -> Call:
        return _loop(([lambda: torch.relu(x), lambda: torch.add(x, y), lambda: torch.mul(y, z), lambda: torch.tanh(z)] * n)[:n])

    def boxed(n: int) -> Call:
        return _loop(([lambda: ops.relu.default(x), lambda: ops.add.Tensor(x, y), lambda: ops.mul.Tensor(y, z), lambda: ops.tanh.default(z)] * n)[:n])

    with torch.no_grad():
        native_s, boxed_s = _slope(native, repeats, clock), _slope(boxed, repeats, clock)
    leaf = torch.rand(4, 4, requires_grad=True)

    def recorded(n: int) -> Call:
        return _loop(([lambda: torch.relu(leaf), lambda: torch.add(leaf, y), lambda: torch.mul(leaf, z), lambda: torch.tanh(leaf)] * n)[:n])

    recorded_s = _slope(recorded, repeats, clock)
    return {
        "boxed_call": _less(boxed_s, native_s.minimum),
        "native_call": native_s,
        "autograd_record": _less(recorded_s, native_s.minimum),
    }


def _backward(repeats: Repeats, clock: Clock) -> dict[str, Samples]:
    """Costs of the engine: a node beyond its kernel, a gradient put into a parameter, the call of backward."""
    ops = torch.ops.aten
    y = torch.rand(4, 4)

    def graph(n: int, leaves: bool) -> torch.Tensor:
        out = torch.rand(4, 4, requires_grad=True) * 1.0
        for index in range(n):
            out = torch.tanh(out) if index % 2 else torch.relu(out)
            if leaves:
                out = out + torch.rand(4, 4, requires_grad=True)
        return out.sum()

    def backward_s(n: int, leaves: bool) -> Samples:
        return take_single(lambda: graph(n, leaves).backward, 4 * repeats.n_samples, clock)

    few, many, few_leaves, many_leaves = backward_s(_FEW, False), backward_s(_MANY, False), backward_s(_FEW, True), backward_s(_MANY, True)
    span = _MANY - _FEW
    with torch.no_grad():
        kernels = _samples([lambda: ops.threshold_backward.default(y, y, 0), lambda: ops.tanh_backward.default(y, y)], repeats, clock)
        boxed, native = _samples([lambda: ops.relu.default(y), lambda: torch.relu(y)], repeats, clock)
    kernel_s = sum(k.minimum for k in kernels) / 2 - (boxed.minimum - native.minimum)
    node_s = (many.minimum - few.minimum) / span
    # With leaves each round adds the node of an addition (no kernel of its own) and one accumulation.
    leaf_s = (many_leaves.minimum - few_leaves.minimum) / span - node_s - (node_s - kernel_s)
    return {
        "autograd_node": Samples(tuple(max(0.0, (value - few.minimum) / span - kernel_s) for value in many.values), many.n_disturbed),
        "accumulate_grad": Samples((max(0.0, leaf_s),)),
        # The root's sum is one node more, and fills a gradient with ones. The least of the samples, because what a call
        # costs when its code has left the caches is measured apart.
        "backward_call": Samples((max(0.0, few.minimum - node_s * (_FEW + 1) - kernel_s),), few.n_disturbed),
    }


def _modules(repeats: Repeats, clock: Clock) -> dict[str, Samples]:
    """Costs of a module's call and of each of its parameters' look-up."""
    x = torch.rand(4, 4)

    def identities(n: int) -> Call:
        modules = [torch.nn.Identity() for _ in range(n)]

        def run() -> None:
            for module in modules:
                module(x)

        return run

    def linears(n: int) -> Call:
        modules = [torch.nn.Linear(4, 4) for _ in range(n)]

        def run() -> None:
            for module in modules:
                module(x)

        return run

    def functionals(n: int) -> Call:
        pairs = [(torch.rand(4, 4, requires_grad=True), torch.rand(4, requires_grad=True)) for _ in range(n)]

        def run() -> None:
            for weight, bias in pairs:
                F.linear(x, weight, bias)

        return run

    call, module, functional = (_slope(make, repeats, clock) for make in (identities, linears, functionals))
    lookup = tuple(max(0.0, value - functional.minimum - call.minimum) / 2 for value in module.values)
    return {"module_call": call, "parameter_lookup": Samples(lookup, module.n_disturbed)}


def _module_bodies(call_s: float, lookup_s: float, mode: str, repeats: Repeats, clock: Clock) -> Samples:
    """What a leaf module's forward takes in a training step beyond its call, its look-ups and the function itself repeated alone.

    That is its body's Python, and what alternating with other modules, a backward and an optimizer costs the caches.
    """
    modules: list[torch.nn.Module] = []
    for activation in (torch.nn.ReLU(), torch.nn.Tanh(), torch.nn.Sigmoid()):
        modules += [torch.nn.Linear(8, 8), activation]
    modules += [torch.nn.Flatten(), torch.nn.Linear(8, 8)]
    model = torch.nn.Sequential(*modules)
    x = torch.rand(4, 8)
    weight, bias, recorded = torch.rand(8, 8, requires_grad=True), torch.rand(8, requires_grad=True), torch.rand(4, 8, requires_grad=True)
    functions: list[Call] = [
        lambda: F.linear(recorded, weight, bias), lambda: torch.relu(recorded), lambda: torch.tanh(recorded), lambda: torch.sigmoid(recorded),
        lambda: recorded.view(4, 8),
    ]  # fmt: skip
    counts = [4, 1, 1, 1, 1]
    alone_s = sum(count * samples.minimum for count, samples in zip(counts, _samples(functions, repeats, clock)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    outputs: list[torch.Tensor] = []

    def forward_of_next_step() -> Call:
        if outputs:
            outputs.pop().sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        optimizer.zero_grad()
        return lambda: outputs.append(model(x))

    inside = take_single(forward_of_next_step, 60 if mode == "quick" else 300, clock)
    known_s = alone_s + (len(modules) + 1) * call_s + sum(len(list(m.parameters(recurse=False))) for m in modules) * lookup_s
    return Samples(tuple(max(0.0, value - known_s) / len(modules) for value in inside.values), inside.n_disturbed)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators of an optimizer's step."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.n += not str(func).startswith("profiler.")
        return func(*args, **(kwargs or {}))


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


def _optimizers(mode: str, repeats: Repeats, clock: Clock) -> dict[str, Samples]:
    """``optimizer_tensor/TYPE/IMPLEMENTATION/OPS`` seconds a parameter tensor, its tiny kernels included, and ``optimizer_call/...`` seconds a step.

    Also ``zero_grad_tensor``, ``zero_grad_call``, and ``optimizer_zero_root``: seconds that the square root of a zero takes beyond that of another number.
    """
    found: dict[str, Samples] = {}
    for type_name, options in OPTIMIZERS[:: 3 if mode == "quick" else 1]:
        made = []
        for n in (_FEW, _MANY):
            parameters = [torch.rand(4, requires_grad=True) for _ in range(n)]
            for parameter in parameters:
                parameter.grad = torch.zeros(4)
            optimizer = getattr(torch.optim, type_name)(parameters, **options)
            optimizer.step()
            made.append(optimizer)
        with _Counter() as counter:
            made[0].step()
        few, many = _samples([made[0].step, made[1].step], repeats, clock)
        span = _MANY - _FEW
        each = Samples(tuple(max(0.0, value - few.minimum) / span for value in many.values), many.n_disturbed)
        kind = f"{type_name}/{implementation(options)}"
        n_ops = round(counter.n / _FEW) if implementation(options) == "for-loop" else counter.n
        found[f"optimizer_tensor/{kind}/{n_ops}"] = each
        found.setdefault(f"optimizer_call/{kind}", _less(few, each.minimum * _FEW))

    def with_gradients(n: int) -> Call:
        parameters = [torch.rand(4, requires_grad=True) for _ in range(n)]
        for parameter in parameters:
            parameter.grad = torch.zeros(4)
        return torch.optim.SGD(parameters, lr=0.01).zero_grad

    few, many = (take_single(lambda n=n: with_gradients(n), 4 * repeats.n_samples, clock) for n in (_FEW, _MANY))  # type: ignore[misc]
    each = Samples(tuple(max(0.0, value - few.minimum) / (_MANY - _FEW) for value in many.values))
    found["zero_grad_tensor"] = each
    found["zero_grad_call"] = _less(few, each.minimum * _FEW)
    ones, zeros = _samples([_roots(1.0), _roots(0.0)], repeats, clock)
    found["optimizer_zero_root"] = Samples(tuple(max(0.0, value - ones.minimum) / _ROOTS for value in zeros.values), zeros.n_disturbed)
    return found


def _roots(value: float) -> Call:
    numbers = torch.full((_ROOTS,), value)
    found = torch.empty_like(numbers)
    return lambda: torch.sqrt(numbers, out=found)


def measure(threads: int, mode: str, clock: Clock = Clock()) -> list[Cost]:
    """Every cost of the framework, in seconds each."""
    repeats = Repeats(sample_s=2e-4 if mode == "quick" else 5e-4, n_samples=5 if mode == "quick" else 11)
    found = _calls(repeats, clock)
    found |= _backward(repeats, clock)
    found |= _modules(repeats, clock)
    found["module_body"] = _module_bodies(found["module_call"].minimum, found["parameter_lookup"].minimum, mode, repeats, clock)
    found |= _optimizers(mode, repeats, clock)
    found |= cold.measure(mode, clock)
    return [Cost(name, threads, samples) for name, samples in found.items()]
