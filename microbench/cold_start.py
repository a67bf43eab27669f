"""What calls take more that find their code and data out of the nearer caches, as a step's do, than
calls that are repeated.

A step runs every operator's code once between megabytes of data and between other operators' code;
the interpreter, the dispatcher and the kernels come back from farther caches, as data do, and what
the core had learnt of their branches is forgotten.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from dlperf.core.clock import LEAST_TURNS, Clock, Samples, take_single, undisturbed
from dlperf.core.code_footprint import CONVOLUTION, CONVOLUTION_KERNEL, LONG_OPTIMIZER, codes_of
from dlperf.core.costs import (
    CACHE_MISS,
    COLD_START,
    LONG_ROW_BYTES,
    PAGE_EVICTION,
    SHORT_ROW_BYTES,
    SHORT_ROWS,
    Cost,
    CostKey,
)
from dlperf.core.trace import Argument, Op, Symbol, TensorSpec
from dlperf.core.units import MIB
from dlperf.microbench import operator_benchmark
from dlperf.microbench.cold_work import (
    Call,
    PassThrough,
    Work,
    passing_bytes,
    passing_code,
    steps,
)
from dlperf.microbench.python_code import PythonForward

COLD_BYTES, FAR_BYTES = (2**23, 2**25, 2**26, 2**27), (2**20, 2**22)
"""How much memory passes by between two measured calls, so that the code and data of the call have
left the nearer caches; of :data:`FAR_BYTES` data alone. Where a shared cache ends, penalties rise
tenfold within an octave, and co-tenants move that end by as much from minute to minute: two octaves
without a measurement give the mean. Less than 8 MiB drive out as much code as other operators do,
which is measured by itself; operands are as far after 64 MiB as after 128.
"""
_N_OPERANDS, _SMALL, _APART = 16, 256, 4096
"""Pairs of operands, and their elements; each begins so many elements after the one before, on a
page of its own.
"""
_FEW, _N_PARAMETERS, _N_SAMPLES = 5, 8, 5
_ROUNDS = 4
"""How often calls are repeated before they are timed."""
_TINY = (8, 16)
"""Rows and columns of operands that cost next to nothing."""
_CONVOLUTION = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
_NODES = 5
"""Operators that the measured backward runs: their own cold calls are distinguished from its."""
T = TensorSpec.contiguous


def tiny_operators() -> tuple[Op, ...]:
    """Operators with much code of their own on next to no data."""
    n_rows, n_columns = _TINY
    image, channel, row, rows = T(2, 16, 4, 4), T(16), T(n_rows, 1), T(*_TINY)
    weight, window, column = T(16, 16, 3, 3), ((2, 2), (2, 2), (0, 0)), T(n_columns)
    pooled = (2, 16, 2, 2)
    numbers, chosen, drawn = (
        Symbol("dtype", "float32"),
        T(n_rows, dtype="int64"),
        T(n_rows, n_columns, dtype="bool"),
    )
    return (
        Op("aten.mm.default", (rows, T(n_columns, n_columns))),
        Op(
            "aten.addmm.default", (column, rows, TensorSpec((n_columns, n_columns), (1, n_columns)))
        ),
        Op("aten.convolution.default", (image, weight, None, *_CONVOLUTION)),
        Op(
            "aten.native_batch_norm.default",
            (image, channel, channel, channel, channel, True, 0.1, 1e-5),
        ),
        Op(
            "aten.native_batch_norm_backward.default",
            (
                image,
                image,
                channel,
                channel,
                channel,
                channel,
                channel,
                True,
                1e-5,
                (True, True, True),
            ),
        ),
        Op("aten.native_layer_norm.default", (rows, (n_columns,), column, column, 1e-5)),
        Op(
            "aten.native_layer_norm_backward.default",
            (rows, rows, (n_columns,), row, row, column, column, (True, True, True)),
        ),
        Op("aten._log_softmax.default", (rows, 1, False)),
        Op("aten._log_softmax_backward_data.default", (rows, rows, 1, numbers)),
        Op("aten.nll_loss_forward.default", (rows, chosen, None, 1, -100)),
        Op("aten.nll_loss_backward.default", (T(), rows, chosen, None, 1, -100, T())),
        Op("aten.max_pool2d_with_indices.default", (image, *window)),
        Op(
            "aten.max_pool2d_with_indices_backward.default",
            (T(*pooled), image, *window, (1, 1), False, T(*pooled, dtype="int64")),
        ),
        Op("aten.embedding.default", (rows, chosen)),
        Op("aten.embedding_dense_backward.default", (rows, chosen, n_rows, -1, False)),
        Op("aten.gelu.default", (rows,)),
        Op("aten.gelu_backward.default", (rows, rows)),
        Op("aten.native_dropout.default", (rows, 0.1, True)),
        Op("aten.native_dropout_backward.default", (rows, drawn, 1.1)),
        Op("aten.sum.dim_IntList", (rows, (0,), True)),
        Op("aten.mean.dim", (rows, (0,), True)),
        Op("aten.cat.default", ((rows, rows),)),
    )


def further_operators() -> tuple[Op, ...]:
    """Operators with code of their own that a quick calibration leaves out: losses and other chains
    of loops, attention, copies, views.
    """
    rows, image, heads = T(*_TINY), T(2, 16, 4, 4), T(2, 2, 8, 8)
    return (
        Op("aten.binary_cross_entropy_with_logits.default", (rows, rows)),
        Op("aten.mse_loss.default", (rows, rows)),
        Op("aten.mse_loss_backward.default", (T(), rows, rows, 1)),
        Op("aten._scaled_dot_product_flash_attention_for_cpu.default", (heads, heads, heads)),
        Op("aten.avg_pool2d.default", (image, (2, 2), (2, 2))),
        Op(
            "aten.avg_pool2d_backward.default",
            (T(2, 16, 2, 2), image, (2, 2), (2, 2), (0, 0), False, True, None),
        ),
        Op("aten.upsample_nearest2d.default", (image, (8, 8))),
        Op("aten.var_mean.correction", (rows, (1,))),
        Op("aten.where.self", (T(*_TINY, dtype="bool"), rows, rows)),
        Op("aten.pow.Tensor_Scalar", (rows, 2)),
        Op("aten.rsub.Scalar", (rows, 1)),
        Op("aten.select_backward.default", (T(_TINY[1]), _TINY, 0, 0)),
        Op("aten.clone.default", (rows,)),
        Op("aten.transpose.int", (rows, 0, 1)),
    )


def elementwise_operators() -> tuple[Op, ...]:
    """Operators with next to no code of their own."""
    rows = T(*_TINY)
    return (
        Op("aten.relu.default", (rows,)),
        Op("aten.threshold_backward.default", (rows, rows, 0)),
        Op("aten.add.Tensor", (rows, rows)),
        Op("aten.mul_.Tensor", (rows, 0.5)),
        Op("aten.addcdiv_.default", (rows, rows, rows)),
    )


def passing_operators() -> tuple[tuple[str, Op, Op, int], ...]:
    """Operators by the order in which they touch their operands: what each is called, its call on
    next to no data, that on some MiB, and the bytes that it touches. Those of a convolution contain
    oneDNN's copies of its operands in blocks of channels, which are as far away here; a step's next
    convolution finds them where the last one left them.
    """

    def image(n: int, size: int) -> tuple[Argument, ...]:
        return T(n, 64, size, size), T(64, 64, 3, 3), None, *_CONVOLUTION

    def normalized(n: int) -> tuple[Argument, ...]:
        return T(n, 32, 32, 32), *4 * (T(32),), True, 0.1, 1e-5

    def normalized_back(n: int, n_channels: int, row_bytes: int) -> tuple[Argument, ...]:
        images, channel = T(n, n_channels, row_bytes // 4), T(n_channels)
        return *2 * (images,), *5 * (channel,), True, 1e-5, 3 * (True,)

    def looked_up(n_rows: int, n: int) -> tuple[Argument, ...]:
        return T(n_rows, 32), T(n, dtype="int64")

    calls: tuple[tuple[str, str, tuple[Argument, ...], tuple[Argument, ...], int], ...] = (
        ("next", "aten.relu.default", (T(*_TINY),), (T(512, 512),), 2 * MIB),
        ("aten.mm", "aten.mm.default", 2 * (T(8, 8),), (T(256, 1024), T(1024, 256)), 9 * MIB // 4),
        ("aten.convolution", "aten.convolution.default", image(1, 4), image(4, 32), 4 * MIB),
        (
            "aten.native_batch_norm",
            "aten.native_batch_norm.default",
            normalized(1),
            normalized(8),
            2 * MIB,
        ),
        (
            "aten.native_batch_norm_backward",
            "aten.native_batch_norm_backward.default",
            normalized_back(1, 32, LONG_ROW_BYTES),
            normalized_back(8, 32, LONG_ROW_BYTES),
            3 * MIB,
        ),
        (
            SHORT_ROWS,
            "aten.native_batch_norm_backward.default",
            normalized_back(1, 32, LONG_ROW_BYTES),
            normalized_back(32, 256, SHORT_ROW_BYTES),
            3 * 32 * 256 * SHORT_ROW_BYTES,
        ),
        ("aten.sum", "aten.sum.dim_IntList", (T(*_TINY), (0,)), (T(512, 1024), (0,)), 2 * MIB),
        (
            "aten.embedding",
            "aten.embedding.default",
            looked_up(8, 8),
            looked_up(2**15, 2**13),
            2 * MIB,
        ),
    )
    return tuple((what, Op(name, few), Op(name, far), size) for what, name, few, far, size in calls)


def _others(op: Op) -> list[Op]:
    """Two operators that leave the code warm that all operators share, and not this one's own."""
    tiny = {one.packet: one for one in tiny_operators()}
    others = (tiny[f"aten.{name}"] for name in ("native_layer_norm", "addmm", "cat"))
    return [one for one in others if not {*codes_of(one.packet)} & {*codes_of(op.packet)}][:2]


def _recorded(op: Op) -> Call:
    """A call as a step makes it: a forward's is recorded by autograd, a backward's and one in place
    are not.
    """
    return operator_benchmark.build(
        op, grad="backward" not in op.packet and not op.packet.endswith("_")
    )


def measure(mode: str, clock: Clock) -> dict[CostKey, Samples]:
    """Cold-start penalties: extra seconds of a call after other work, over the same call repeated.
    Cache-miss penalty: extra seconds per byte of the operands of an operator whose code is warm. A
    processor fetches ahead what passes in order (``next``: an elementwise operator's operands), and
    less of what a product or a convolution touches block by block (``aten.NAME``).

    The other work determines the kind. ``cold_start``: a product passes over a number of bytes.
    ``page_allocation_eviction``: a number of bytes of fresh pages are written and given back, which
    also empties address-translation tables. ``instruction_cache_pressure``: a training step on next
    to no data runs so much code (:mod:`dlperf.core.code_footprint`), which evicts instructions and
    branch predictions; of an operator, the code since its own last ran.

    ``first`` is the first operator afterwards, which finds everything cold, ``next`` one after
    others, which finds only its own code cold, ``aten.NAME`` the same of an operator with more code
    than an elementwise one, ``convolution_kernel`` that of a convolution after another shape's.
    ``operand``: each of a few operands that lie apart. ``module``: a module's call and its Python
    code without the operator, after one of another type. ``instruction``: each place in Python code
    that runs after an operator. ``backward`` comes right after its forward and finds the
    interpreter warm; its operators' penalties are subtracted. ``optimizer`` comes after a whole
    backward, ``zero_grad`` right after such an optimizer.
    """
    bench = _Bench(mode == "quick", clock)
    # Of fresh pages, which come second, what comes once a step is measured alone.
    ways: tuple[Callable[[Work], None], ...] = (bench.take_all, bench.take_once_a_step)
    amounts = COLD_BYTES[: -1 if bench.quick else None]
    makes = [(partial(passing_bytes, amount), ways) for amount in amounts]
    makes += [(partial(passing_bytes, amount), (bench.take_operands,)) for amount in FAR_BYTES]
    makes += [(partial(passing_code, step), ways) for step in steps()]
    for number, (make, takes) in enumerate(makes):
        bench.clock = clock.part(1 / (len(makes) - number))
        for take, work in zip(takes, make()):
            take(work)
    return {name: Samples(tuple(values)) for name, values in bench.found.items()}


def joined(
    costs: Sequence[Cost], more: Mapping[CostKey, Samples], readings: Sequence[int] = ()
) -> list[Cost]:
    """Costs joined with samples of another moment, in which co-tenants leave another part of a
    shared cache, and with the numbers of the `readings` around them.
    """
    return [
        replace(
            cost,
            samples=cost.samples.joined(more[cost.key]),
            readings=(*cost.readings, *readings),
        )
        if cost.key in more
        else cost
        for cost in costs
    ]


@dataclass
class _Bench:
    """Takes samples of calls after other work into `found`."""

    quick: bool
    clock: Clock
    found: dict[CostKey, list[float]] = field(default_factory=dict)
    forward: PythonForward = field(default_factory=PythonForward)

    def _add(self, work: Work, what: str, values: Iterable[float], kind: str = "") -> None:
        if amount := work.since(what):
            self.found.setdefault(CostKey(kind or work.kind, what, amount), []).extend(values)

    def take_all(self, work: Work) -> None:
        """Operators, a module, operands of bytes, and what comes once a step."""
        leaf = torch.rand(4, 4, requires_grad=True)
        bare, other_module = PassThrough(), nn.ReLU()
        operators: tuple[Call, ...] = (
            lambda: torch.relu(leaf),
            lambda: torch.tanh(leaf),
            lambda: torch.sigmoid(leaf),
        )
        for number, first in enumerate(operators):
            firsts, seconds = _after(
                (first, operators[number - 1]), work.whole, _N_SAMPLES, self.clock
            )
            self._add(work, "first", firsts)
            self._add(work, "next", seconds)
        modules: tuple[Call, ...] = (lambda: other_module(leaf), lambda: bare(leaf))
        self._add(work, "module", _after(modules, work.whole, _N_SAMPLES, self.clock)[1])
        forward = self.forward
        if forward.n_distinct:
            _, extra_s = _after((operators[0], forward), work.whole, _N_SAMPLES, self.clock)
            self._add(work, "instruction", (value / forward.n_distinct for value in extra_s))
        first = _recorded(Op("aten.sigmoid.default", (T(4, 4),)))  # called as they are
        for what, others, op, n_samples in self._operators(work):
            calls = (first, *map(_recorded, others), _recorded(op))
            self._add(work, what, _after(calls, work.whole, n_samples, self.clock)[-1])
        if work.kind == COLD_START and work.amount < COLD_BYTES[-1]:
            self.take_operands(work)
        if not work.packets or "backward" in work.packets:
            self.take_once_a_step(work)

    def take_operands(self, work: Work) -> None:
        """Operands, and the cache misses of one."""
        self._add(work, "operand", self._operands_s(work.whole))
        for what, few, far, n_bytes in passing_operators():
            calls = [*2 * [_recorded(few)], _recorded(far)]
            extra_s = _after(calls, work.whole, _N_SAMPLES, self.clock)[-1]
            self._add(work, what, (value / n_bytes for value in extra_s), CACHE_MISS)

    def _operators(self, work: Work) -> Iterator[tuple[str, Sequence[Op], Op, int]]:
        """What the code of each operator is called, which others come right before it, and how
        often it is measured.

        A convolution is not measured after work whose last one was a backward's, which leaves some
        of a forward's code cold.
        """
        few = 1 + _N_SAMPLES // 4
        for op in elementwise_operators():
            yield "next", _others(op), op, few
        tiny = tiny_operators()[: _FEW if self.quick else None]
        for op in (*tiny, *(() if self.quick else further_operators())):
            if op.packet != CONVOLUTION or "aten.convolution_backward" not in work.packets:
                yield op.packet, _others(op), op, few
        one, another = (
            Op("aten.convolution.default", (T(*image), T(*weight), None, *_CONVOLUTION))
            for image, weight in (((2, 16, 4, 4), (16, 16, 3, 3)), ((2, 8, 6, 6), (8, 8, 3, 3)))
        )
        yield CONVOLUTION_KERNEL, (one,), another, _N_SAMPLES

    def take_once_a_step(self, work: Work) -> None:
        """``backward``, ``optimizer`` (SGD, of one operator), ``long_optimizer`` (Adam, of
        many), and ``zero_grad``, which comes right after an optimizer.
        """
        leaf = torch.rand(4, 4, requires_grad=True)
        parameters = [torch.rand(4, requires_grad=True) for _ in range(_N_PARAMETERS)]
        sgd, adam = torch.optim.SGD(parameters, lr=0.01), torch.optim.Adam(parameters)

        def with_gradients() -> None:
            for parameter in parameters:
                parameter.grad = torch.zeros(4)

        def root() -> torch.Tensor:
            return torch.relu(torch.tanh(leaf * 1.0)).sum()

        def step(optimizer: torch.optim.Optimizer, other: Call) -> Call:
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
            sgd.step()
            return sgd.zero_grad

        nodes_s = _NODES * statistics.median(
            self.found[
                CostKey(
                    COLD_START if work.kind == PAGE_EVICTION else work.kind, "next", work.amount
                )
            ]
        )
        ways: tuple[tuple[str, Callable[[Call], Call], Call, float], ...] = (
            ("optimizer", partial(step, sgd), work.unfinished, 0.0),
            (LONG_OPTIMIZER, partial(step, adam), work.unfinished, 0.0),
            ("backward", backward, work.whole, nodes_s),
            ("zero_grad", zero_grad, work.unfinished, 0.0),
        )
        for what, prepare, other, known_s in ways:
            self._add(
                work, what, (max(0.0, value - known_s) for value in self._extra_s(prepare, other))
            )

    def _operands_s(self, other: Call) -> list[float]:
        """Seconds that an operand adds to a call of two for lying, itself and what torch keeps of
        it, as far away as after other work.
        """
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
        return [
            max(0.0, value - few_s) / (2 * (_N_OPERANDS - 1))
            for value in self._extra_s(add(_N_OPERANDS), other)
        ]

    def _extra_s(self, prepare: Callable[[Call], Call], other: Call) -> list[float]:
        """Seconds that what `prepare` makes takes more after other work than after none."""
        warm, taken = (
            take_single(lambda: prepare(work), _N_SAMPLES, self.clock)  # noqa: B023
            for work in (lambda: None, other)
        )
        return [max(0.0, value - warm.median) for value in taken.values]


def _after(calls: Sequence[Call], other: Call, n_samples: int, clock: Clock) -> list[list[float]]:
    """Seconds that calls, one right after the other, take more after other work than they usually
    take without it, for each of them. Over the least of them, interference would count as well.

    Both come after the same few rounds of the calls. After one alone, operands of some MiB that the
    other work drove out are not yet as near as where calls are repeated, as kernels are measured.
    """
    taken: tuple[list[list[tuple[float, bool]]], ...] = ([], [])  # warm and cold, by turn and call
    for turn in range(2 * n_samples):
        if turn >= LEAST_TURNS and clock.is_late:
            break
        for is_cold, found in enumerate(taken):
            for call in _ROUNDS * tuple(reversed(calls)):
                call()  # each then finds itself the warmer the sooner it is called
            before = clock.switches()
            if is_cold:
                other()
            times = [clock.now()]
            for call in calls:
                call()
                times.append(clock.now())
            disturbed = clock.switches() != before
            found.append([(end - begin, disturbed) for begin, end in itertools.pairwise(times)])
    warm, cold = ([undisturbed(pairs, least_frac=0.0) for pairs in zip(*found)] for found in taken)
    return [
        [max(0.0, value - without.median) for value in after.values]
        for without, after in zip(warm, cold)
    ]
