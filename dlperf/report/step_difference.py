"""Two steps side by side: what was added, removed, changed, and by how much the step grew.

Both sides are data (:mod:`dlperf.report.step_times`): nothing is run.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from dlperf.core.display import Displayed
from dlperf.core.errors import DlperfError
from dlperf.core.prediction import PHASES
from dlperf.core.units import format_percent, format_seconds
from dlperf.report.document import Block, Bullets, Column, Heading, Paragraph, Table, format_error
from dlperf.report.step_times import LayerTimes, StepTimes

SCHEMA, SCHEMA_VERSION = "dlperf.comparison", 1
SHOWN_FRAC = 0.005
"""Share of the first step from which on a layer's difference has a row of its own."""


@dataclass(frozen=True)
class LayerDifference:
    """A layer of both sides, or of one: `first` or `second` is None where the layer was added or
    removed.
    """

    first: LayerTimes | None
    second: LayerTimes | None

    @property
    def change(self) -> str:
        """``same``, ``added``, ``removed``, ``renamed`` (the same work under another name) or
        ``changed`` (another type, or other FLOPs or bytes).
        """
        if self.first is None or self.second is None:
            return "added" if self.first is None else "removed"
        works = self.first.work, self.second.work
        is_other = works[0] != works[1] and (None, None) not in works  # measurements have none
        if is_other or self.first.type != self.second.type:
            return "changed"
        return "same" if self.first.layer == self.second.layer else "renamed"

    @property
    def layer(self) -> str:
        """Its name; both names of a renamed one."""
        names = dict.fromkeys(side.layer for side in (self.first, self.second) if side is not None)
        return " -> ".join(names)

    @property
    def difference_s(self) -> float:
        """Seconds that the second side takes more."""
        first_s, second_s = (
            0.0 if side is None else side.total_s for side in (self.first, self.second)
        )
        return second_s - first_s

    def to_json(self) -> dict[str, Any]:
        """The layer as JSON data; null for the side that lacks it."""
        return {
            "layer": self.layer,
            "change": self.change,
            "difference_s": self.difference_s,
            "a": None if self.first is None else asdict(self.first),
            "b": None if self.second is None else asdict(self.second),
        }


@dataclass(frozen=True, repr=False)
class StepDifference(Displayed, by="dlperf.report.summaries"):
    """A step compared with another one."""

    first: StepTimes
    second: StepTimes

    @property
    def growth_frac(self) -> float:
        """second / first - 1."""
        return self.second.total_s / self.first.total_s - 1

    @property
    def exceeds_intervals(self) -> bool | None:
        """Whether the intervals are disjoint; None where a side has none."""
        ends = (self.first.low_s, self.first.high_s, self.second.low_s, self.second.high_s)
        if None in ends:
            return None
        first_low, first_high, second_low, second_high = ends
        return bool(first_high < second_low or second_high < first_low)  # type: ignore[operator]

    @cached_property
    def layers(self) -> tuple[LayerDifference, ...]:
        """The layers of both sides, in the order of the second; removed ones follow."""
        pairs = _paired(self.first.layers, self.second.layers)
        found = [LayerDifference(pairs.get(layer.layer), layer) for layer in self.second.layers]
        kept = {layer.layer for layer in pairs.values()}
        gone = (layer for layer in self.first.layers if layer.layer not in kept)
        return (*found, *(LayerDifference(layer, None) for layer in gone))

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What differs besides the network: kind of times, batch size, threads, machine."""
        words = {"how": "", "batch_size": "batch size ", "threads": "threads ", "machine": ""}
        sides = self.first, self.second
        return tuple(
            f"the sides differ in more than the network: {word}{a}, {word}{b}"
            for name, word in words.items()
            if (a := getattr(sides[0], name)) != (b := getattr(sides[1], name))
        )

    @property
    def verdict(self) -> str:
        """The step's change in one sentence."""
        a, b = self.first, self.second
        text = f"step {format_seconds(a.total_s)} -> {format_seconds(b.total_s)}"
        text += f" ({format_percent(self.growth_frac, signed=True)})"
        if self.exceeds_intervals is None:
            return f"{text}; a side has no interval"
        allowed = (
            "more than both intervals allow" if self.exceeds_intervals else "intervals overlap"
        )
        return f"{text}; {allowed}"

    def page(self) -> list[Block]:
        """Step, phases, and the layers that differ."""
        a, b = self.first, self.second
        page: list[Block] = [
            Heading(f"{a.name} -> {b.name}", 2),
            Paragraph((f"a: {a.title}", f"b: {b.title}", self.verdict)),
            Table(_phase_columns(a, b)),
        ]
        least_s = SHOWN_FRAC * a.total_s
        shown = [
            row
            for row in self.layers
            if abs(row.difference_s) >= least_s or row.change not in ("same", "renamed")
        ]
        if shown:
            page += [Heading("Layers that differ"), Table(_layer_columns(shown))]
        if n_others := len(self.layers) - len(shown):
            others_s = math.fsum(row.difference_s for row in self.layers if row not in shown)
            least = f"by less than {format_percent(SHOWN_FRAC)} of the step"
            line = f"{n_others} other layers differ {least} each, by {_signed(others_s)} together"
            if n_others == 1:
                line = f"1 other layer differs {least}, by {_signed(others_s)}"
            page.append(Paragraph((line,), is_small=True))
        return [*page, *([Bullets(self.notes)] if self.notes else [])]

    def to_json(self) -> dict[str, Any]:
        """The difference as JSON data."""
        sides = [asdict(side) for side in (self.first, self.second)]
        for side in sides:
            del side["layers"]
        return {
            "a": sides[0],
            "b": sides[1],
            "growth_frac": self.growth_frac,
            "exceeds_intervals": self.exceeds_intervals,
            "layers": [row.to_json() for row in self.layers],
            "notes": list(self.notes),
        }


def compare_steps(
    first: Sequence[StepTimes], second: Sequence[StepTimes]
) -> tuple[StepDifference, ...]:
    """The differences of two sides. Sides of several steps are paired by target, batch size and
    threads.

    Raises DlperfError where no step has a partner, and for training against inference.
    """
    if len(first) == len(second) == 1:
        pairs = [(first[0], second[0])]
    else:
        partners = {_case(step): step for step in first}
        pairs = [(partners[_case(step)], step) for step in second if _case(step) in partners]
    if not pairs:
        raise DlperfError(
            f"{first[0].name} and {second[0].name} have no step in common (target, batch size,"
            " threads)"
        )
    for a, b in pairs:
        if a.inference != b.inference:
            kinds = {True: "inference", False: "a training step"}
            raise DlperfError(
                f"{a.name} is {kinds[a.inference]}, {b.name} {kinds[b.inference]}; give two of a"
                " kind"
            )
    return tuple(StepDifference(a, b) for a, b in pairs)


def _case(step: StepTimes) -> tuple[str, int, int, bool]:
    return step.target, step.batch_size, step.threads, step.inference


_LIKENESS: tuple[Callable[[LayerTimes], Hashable], ...] = (
    lambda layer: (layer.layer, layer.type, layer.work),
    lambda layer: (layer.type, layer.work),
    lambda layer: (layer.layer, layer.type),
    lambda layer: layer.layer,
)
"""In what two layers are one, closest first: all; the same work under another name; a layer of
other sizes; another layer in its place.
"""


def _paired(first: Sequence[LayerTimes], second: Sequence[LayerTimes]) -> dict[str, LayerTimes]:
    """The first side's layer for each name of the second that has one."""
    pairs: dict[str, LayerTimes] = {}
    for likeness in _LIKENESS:
        taken = {layer.layer for layer in pairs.values()}
        free = defaultdict[Hashable, deque[LayerTimes]](deque)
        for layer in first:
            if layer.layer not in taken:
                free[likeness(layer)].append(layer)
        for layer in second:
            if layer.layer not in pairs and (like := free.get(likeness(layer))):
                pairs[layer.layer] = like.popleft()
    return pairs


def _phase_columns(a: StepTimes, b: StepTimes) -> tuple[Column, ...]:
    rows = [
        (phase, a.phases.get(phase), b.phases.get(phase))
        for phase in ("zero_grad", *PHASES)
        if phase in a.phases or phase in b.phases
    ]
    rows = [row for row in rows if row[1] is not None or row[2] is not None]
    rows.append(("step", a.total_s, b.total_s))
    return (
        Column("phase", tuple(row[0] for row in rows), align_left=True),
        Column("a", tuple(format_seconds(row[1]) for row in rows)),
        Column("b", tuple(format_seconds(row[2]) for row in rows)),
        Column("difference", tuple(_signed((row[2] or 0.0) - (row[1] or 0.0)) for row in rows)),
        Column(
            "",
            tuple(
                format_error(row[2] / row[1] - 1 if row[1] and row[2] is not None else None)
                for row in rows
            ),
        ),
    )


def _layer_columns(rows: Sequence[LayerDifference]) -> tuple[Column, ...]:
    def cells(of: Callable[[LayerTimes], str]) -> list[tuple[str, ...]]:
        sides = (tuple(row.first for row in rows), tuple(row.second for row in rows))
        return [tuple("-" if layer is None else of(layer) for layer in side) for side in sides]

    def joined(pair: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        return tuple(" -> ".join(dict.fromkeys((a, b))) for a, b in zip(*pair))

    a_s, b_s = cells(lambda layer: format_seconds(layer.total_s))
    return (
        Column("layer", tuple(row.layer for row in rows), align_left=True),
        Column("type", joined(cells(lambda layer: layer.type)), align_left=True, rank=1),
        Column("change", tuple(row.change for row in rows), align_left=True),
        Column("a", a_s),
        Column("b", b_s),
        Column("difference", tuple(_signed(row.difference_s) for row in rows)),
        Column("bound", joined(cells(lambda layer: layer.bound or "-")), align_left=True, rank=2),
    )


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"
