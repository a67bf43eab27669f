"""Layer times of a step, computed from the events that :mod:`dlperf.profiler.probe` records.

The interval between two events belongs to what ran in it: in the forward to the innermost module,
in the backward to the layer whose forward made the autograd node (by the node's sequence number).
So in-place activations, branches, shared modules and functional calls need no rule of their own. A
gradient accumulation follows the node that produced the gradient and belongs to its layer. A module
that is called again in the backward (checkpointing) gets that time as backward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from dlperf.core.clock import Samples, undisturbed
from dlperf.core.measurement import LayerTimes
from dlperf.core.trace import LOSS

OUTSIDE = -1
"""The index of work outside all modules of the model: the loss."""
FOREIGN = -2
"""The index of a module that is not part of the model: its time belongs to its caller."""
ENTER, EXIT, REACHED, START, PAUSE, RUN, END = range(7)
Event = tuple[int, float, int, int]
"""Kind, time, module index or node number, sequence number or count of disturbances."""
_MOST_COLD = 2.0


@dataclass(frozen=True)
class HookOverhead:
    """The overhead of the hooks, in seconds.

    `inside_s`: between the two time stamps of a module with an empty forward. `outside_s`: the rest
    of a hooked call, which its caller pays. `node_s`: a prehook in the backward.
    """

    inside_s: float = 0.0
    outside_s: float = 0.0
    node_s: float = 0.0

    def to_noise(self, factors: tuple[float, float]) -> dict[str, float]:
        """The overhead in a measured step, given :func:`overhead_factors`."""
        return {
            "hook_inside_s": factors[0] * self.inside_s,
            "hook_outside_s": factors[0] * self.outside_s,
            "prehook_s": factors[1] * self.node_s,
        }


@dataclass
class PhaseTimes:
    """Seconds of a phase by module index (:data:`OUTSIDE`: the loss), hook overhead included.

    `overhead_s`: the part that the hooks took. `disturbed`: the core was lost meanwhile.
    """

    seconds: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    overhead_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    disturbed: bool = False

    def net_s(self, index: int, factor: float = 1.0) -> float:
        """Seconds of a layer less `factor` times the hooks' overhead, at least 0."""
        overhead_s = factor * self.overhead_s.get(index, 0.0)
        return max(0.0, self.seconds.get(index, 0.0) - overhead_s)


@dataclass(frozen=True)
class StepTimes:
    """One instrumented step. `backward` is None where no node of it was seen."""

    forward: PhaseTimes
    backward: PhaseTimes | None


def attribute(events: Sequence[Event], overhead: HookOverhead = HookOverhead()) -> StepTimes:
    """The times of the layers, from the events of a step.

    Frames are a stack: a module in its forward, or a running backward with the owner of its present
    node. Sequence numbers rise with time; bisection finds the innermost module at the creation of a
    node.
    """
    phases = PhaseTimes(), PhaseTimes()
    # from this sequence number on, nodes were made by that module
    numbers, makers = [-1], [OUTSIDE]
    frames: list[tuple[bool, int, int]] = []  # is a backward, owner, module index
    in_backward = nodes_seen = began = 0
    caller = 0  # of the modules that the step calls
    running, since = False, 0.0

    def current() -> int:
        return frames[-1][1] if frames else caller

    for kind, at, key, number in events:
        phase = phases[bool(in_backward)]
        if kind == ENTER and caller == 0 and key != FOREIGN:
            caller = key  # the first call has no caller among the modules: it is its module's own
        if running:
            phase.seconds[current()] += at - since
        since = at
        if kind == ENTER:
            phase.overhead_s[current()] += overhead.outside_s
            caller = OUTSIDE
            frames.append((False, current() if key == FOREIGN else key, key))
            numbers.append(number)
            makers.append(current())
        elif kind == EXIT:
            # a forward that raises exits, too; frames mismatch where an error was swallowed
            depth = _depth_of(frames, key)
            if depth is not None:
                phase.overhead_s[current()] += overhead.inside_s
                del frames[depth:]
                numbers.append(number)
                makers.append(current())
        elif kind == REACHED:
            while frames and not frames[-1][0]:
                frames.pop()
            if frames:
                owner = makers[bisect_right(numbers, key) - 1]
                frames[-1] = (True, owner, OUTSIDE)
                phase.overhead_s[owner] += overhead.node_s
                nodes_seen += 1
        elif kind == START:
            running, began = True, number
        elif kind == PAUSE:
            phase.disturbed |= running and number != began
            running = False
        elif kind == RUN:
            frames.append((True, current(), OUTSIDE))
            in_backward += 1
            running, began = True, number
        elif kind == END:
            phases[1].disturbed |= number != began
            while frames and not frames.pop()[0]:
                pass
            in_backward -= 1
            running = False
    return StepTimes(phases[0], phases[1] if nodes_seen else None)


def _depth_of(frames: list[tuple[bool, int, int]], key: int) -> int | None:
    """The index of module `key` in the stack, above the nearest backward; None where it is not."""
    for depth, (is_backward, _, module) in reversed([*enumerate(frames)]):
        if is_backward:
            return None
        if module == key:
            return depth
    return None


def overhead_factors(
    pairs: Sequence[tuple[Mapping[str, float], StepTimes]],
    least: float = 1.0,
) -> tuple[float, float]:
    """The hooks' overhead in this step over their calibrated one: forward, backward; `least` to 2.

    The calibration runs with warm caches; after a large kernel the hooks' code is cold. A pair is
    the seconds by phase of an uninstrumented step and the instrumented step beside it; their
    difference is the overhead. Where noise hides it, the factor is `least`: 1, but 0 on a device,
    which may compute while the host runs the hooks.
    """

    def factor(name: str) -> float:
        found: list[tuple[float, PhaseTimes]] = [
            (plain.get(name, 0.0), times)
            for plain, step in pairs
            if (times := getattr(step, name)) is not None
        ]
        overhead_s = median([sum(times.overhead_s.values()) for _, times in found] or [0.0])
        if overhead_s <= 0:
            return 1.0
        extra_s = median(sum(times.seconds.values()) - plain_s for plain_s, times in found)
        return min(_MOST_COLD, max(least, extra_s / overhead_s))

    return factor("forward"), factor("backward")


def layer_rows(
    names: Sequence[tuple[str, str]],
    steps: Sequence[StepTimes],
    optimizer: Samples | None,
    shares: Mapping[int, float],
    factors: tuple[float, float],
) -> tuple[LayerTimes, ...]:
    """One row for each module that did work, in the order of first execution, the loss last.

    `names` are the modules' names and types. The samples of the whole optimizer step, `optimizer`,
    are divided by `shares`; None: inference, without a loss. `factors`: :func:`overhead_factors`.
    """
    backwards = [step.backward for step in steps if step.backward is not None]
    order = dict.fromkeys(index for step in steps for index in step.forward.seconds)
    order |= dict.fromkeys(index for phase in backwards for index in phase.seconds)
    order |= dict.fromkeys(shares)
    has_loss = order.pop(OUTSIDE, 0) is None and optimizer is not None

    def samples(phases: Sequence[PhaseTimes], index: int, factor: float) -> Samples:
        return undisturbed([(phase.net_s(index, factor), phase.disturbed) for phase in phases])

    rows = []
    for index in (*order, *([OUTSIDE] if has_loss else [])):
        forward = samples([step.forward for step in steps], index, factors[0])
        backward = own = None
        if optimizer is not None and len(backwards) == len(steps):
            backward = samples(backwards, index, factors[1])
        if optimizer is not None and shares:
            values = tuple(shares.get(index, 0.0) * value for value in optimizer.values)
            own = Samples(values, optimizer.n_disturbed)
        name, kind = (LOSS, "Loss") if index == OUTSIDE else names[index]
        rows.append(LayerTimes(name, kind, forward, backward, own))
    return tuple(rows)


def sum_of_rows_s(layers: Sequence[LayerTimes]) -> float:
    """The sum of the rows' medians over all phases; an unattributed phase counts as 0."""
    return sum(
        samples.median
        for row in layers
        for samples in (row.forward, row.backward, row.optimizer)
        if samples is not None
    )
