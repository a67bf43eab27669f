"""The layers of a report as a table in the shape of the model: containers with the sums of what
they contain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dlperf.core.text import printable
from dlperf.core.trace import LOSS, Trace
from dlperf.core.units import format_si
from dlperf.report.document import Column, Table, format_error, format_time
from dlperf.report.layer_comparison import (
    BOTH,
    MEASURED,
    PHASES,
    PREDICTED,
    LayerComparison,
    Times,
    add,
    root_of,
)

LAYER, GROUP, OWN, FOLDED, REST, SUM = "layer", "group", "own", "folded", "rest", "sum"
"""Kinds of lines: a layer; a container, with the sums of the lines below it; a container's own work
outside its children; a container without its lines; several small layers of one container in one
line; the sum of all rows.
"""
_FOLDED_MOST_FRAC = 0.3
"""Largest share of the time of a container that is folded into one line."""


@dataclass(frozen=True)
class TreeLine(LayerComparison):
    """The sums over the `n_layers` rows of one line of the tree.

    `label` is the last part of the qualified name `layer`. Lines of kind ``layer``, ``own``,
    ``folded`` and ``rest`` add up to the step less zero_grad.
    """

    kind: str = LAYER
    depth: int = 0
    label: str = ""
    n_layers: int = 1


@dataclass
class _Node:
    """A module: the rows of itself and of all that it contains, its own row, the children with
    lines of their own, and the rows of those that share one line.
    """

    label: str
    name: str
    rows: list[LayerComparison] = field(default_factory=list)
    row: LayerComparison | None = None
    children: dict[str, _Node] = field(default_factory=dict)
    hidden: list[LayerComparison] = field(default_factory=list)

    def n_lines(self) -> int:
        """Lines that the node takes as it is folded now."""
        own = (self.row is not None) + bool(self.hidden) if self.children else 0
        return 1 + own + sum(child.n_lines() for child in self.children.values())

    def weight_s(self) -> float:
        """Seconds, measured where known, by which the first lines to leave out are chosen."""
        return sum(row.total.actual_s or row.total.predicted_s or 0.0 for row in self.rows)


def layer_tree(
    rows: Sequence[LayerComparison], trace: Trace, max_lines: int | None = None
) -> tuple[TreeLine, ...]:
    """The lines of one predictor's rows: the root and all below it, the loss, the sum of all.

    With `max_lines`, the containers that take least time are folded into one line each, then the
    smallest layers of the longest container into one line, until the table fits or nothing is left
    to fold. Sums stay the same.
    """
    root = root_of(trace)
    top = _Node(root, root)
    losses = [row for row in rows if row.layer == LOSS]
    for row in rows:
        if row.layer != LOSS:
            path = row.layer.split(".") if row.layer != root else []
            node = top
            node.rows.append(row)
            for depth, part in enumerate(path, 1):
                node = node.children.setdefault(part, _Node(part, ".".join(path[:depth])))
                node.rows.append(row)
            node.row = row
    if max_lines is not None:
        _fold(top, max(3, max_lines - len(losses) - 1))
    types = {layer.name: layer.type for layer in trace.layers}
    lines = _lines(top, 0, types) if top.rows else []
    lines += [_line(LAYER, 0, LOSS, LOSS, "Loss", [row]) for row in losses]
    if len(lines) > 1:
        lines.append(_line(SUM, 0, "sum", "sum of all rows", "", list(rows)))
    return tuple(lines)


def _walk(node: _Node) -> Iterable[_Node]:
    yield node
    for child in node.children.values():
        yield from _walk(child)


def _fold(top: _Node, max_lines: int) -> None:
    whole_s = top.weight_s()
    while top.n_lines() > max_lines:
        foldable = [
            node
            for child in top.children.values()
            for node in _walk(child)
            if node.children and not any(below.children for below in node.children.values())
        ]
        smallest = min(foldable, key=_Node.weight_s, default=None)
        if smallest is None or smallest.weight_s() > _FOLDED_MOST_FRAC * whole_s:
            break
        smallest.children = {}
    while (excess := top.n_lines() - max_lines) > 0:
        longest = max(_walk(top), key=lambda node: len(node.children))
        if (n_children := len(longest.children)) <= 2:
            break
        hidden_lines = 0  # one line comes back for those left out
        ordered = sorted(longest.children.values(), key=_Node.weight_s)
        for n_hidden, child in enumerate(ordered):
            if n_hidden >= 2 and (hidden_lines > excess or n_hidden >= n_children - 2):
                break
            hidden_lines += child.n_lines()
            longest.hidden += longest.children.pop(child.label).rows


def _lines(node: _Node, depth: int, types: Mapping[str, str]) -> list[TreeLine]:
    type_name = types.get(node.name, node.row.type if node.row is not None else "")
    is_whole = node.row is not None and len(node.rows) == 1
    kind = GROUP if node.children else LAYER if is_whole else FOLDED
    lines = [_line(kind, depth, node.label, node.name, type_name, node.rows)]
    if node.children and node.row is not None:
        lines.append(_line(OWN, depth + 1, "(own ops)", node.name, "", [node.row]))
    for child in node.children.values():
        lines += _lines(child, depth + 1, types)
    if node.children and node.hidden:
        label = f"... {len(node.hidden)} smaller"
        lines.append(_line(REST, depth + 1, label, node.name, "", node.hidden))
    return lines


def _line(
    kind: str, depth: int, label: str, name: str, type_name: str, rows: Sequence[LayerComparison]
) -> TreeLine:
    times: list[Times | None] = []
    for phase in PHASES:
        parts = [own for row in rows if (own := row.phase(phase)) is not None]
        times.append((parts[0] if len(rows) == 1 else add(parts)) if parts else None)
    sides = {row.side for row in rows}
    return TreeLine(
        name,
        type_name,
        rows[0].predictor,
        times[0] or Times(),
        times[1],
        times[2],
        bound=_largest(rows, 0),
        source=_largest(rows, 1),
        flops=_sum(row.flops for row in rows),
        bytes=_sum(row.bytes for row in rows),
        side=sides.pop() if len(sides) == 1 else BOTH,
        kind=kind,
        depth=depth,
        label=label,
        n_layers=len(rows),
    )


def _largest(rows: Sequence[LayerComparison], index: int) -> str | None:
    """The bound (index 0) or source (1) of the rows' largest share of time."""
    seconds: dict[str, float] = defaultdict(float)
    for row in rows:
        for *names, spent in row.shares:
            seconds[str(names[index])] += float(spent)
    return max(seconds, key=lambda name: seconds[name], default=None)


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


# -- columns --------------------------------------------------------------------------------------

_SIDES = {BOTH: "", PREDICTED: "not measured", MEASURED: "not predicted"}


def _cell(title: str, times: Times | None) -> str:
    """The predicted or measured time (``pred``, ``actual``), or predicted / measured - 1 (``err``);
    blank where nothing runs, ``-`` where it is unknown.
    """
    times = times or Times(has_work=False)
    seconds = times.predicted_s if title == "pred" else times.actual_s
    if not seconds and not times.has_work:
        return ""
    if title == "err":
        return format_error(times.error_frac)
    is_part = times.predicted_is_part if title == "pred" else times.actual_is_part
    return format_time(seconds, is_part)


def _cells(title: str, times: Iterable[Times | None]) -> tuple[str, ...]:
    return tuple(_cell(title, own) for own in times)


def _spread(line: TreeLine) -> str:
    """The spread of a layer's forward samples; blank for sums."""
    spread_frac = line.forward.spread_frac
    return "" if spread_frac is None else f"{100 * spread_frac:.0f} %"


def _label(line: TreeLine) -> str:
    folded = f" ({line.n_layers} layers)" if line.kind == FOLDED else ""
    return "  " * line.depth + printable(line.label) + folded


def layer_columns(
    lines: Sequence[TreeLine], phases: Sequence[str], measured: bool
) -> tuple[Column, ...]:
    """The layer table's columns. Those that do not fit 80 columns have a rank above 0."""

    def column(
        title: str, cell: Callable[[TreeLine], str], rank: int = 0, align_left: bool = False
    ) -> Column:
        return Column(title, tuple(map(cell, lines)), rank=rank, align_left=align_left)

    columns = [
        column("layer", _label, align_left=True),
        column("type", lambda line: printable(line.type), 1, True),
    ]
    for phase in (*phases, "total") if len(phases) > 1 else phases:
        times = [line.total if phase == "total" else line.phase(phase) for line in lines]
        rank = {"optimizer": 3, "total": 4}.get(phase, 0)
        if measured:
            titles = ("pred", "actual", "err")
            columns += [Column(title, _cells(title, times), phase, rank) for title in titles]
        else:
            columns.append(Column(phase, _cells("pred", times), "", rank))
    if measured:
        columns.append(column("fwd spread", _spread, 7))
    columns += [
        column("FLOP", lambda line: format_si(line.flops, "").rstrip() if line.flops else "", 5),
        column("bytes", lambda line: format_si(line.bytes, "B") if line.bytes else "", 6),
        column("bound", lambda line: line.bound or "-", 0, True),
        column("source", lambda line: line.source or "-", 2, True),
    ]
    if any(line.side != BOTH for line in lines):
        columns.append(column("one side", lambda line: _SIDES[line.side], 1, True))
    return tuple(columns)


def error_columns(
    lines_by_predictor: Mapping[str, Sequence[TreeLine]], phases: Sequence[str]
) -> tuple[Column, ...]:
    """Each layer's measured time beside the error of each predictor. Rows are those of the first
    one; another may have no time for some.
    """
    first = next(iter(lines_by_predictor.values()))
    columns = [Column("layer", tuple(map(_label, first)), align_left=True)]
    for rank, phase in enumerate(phases):
        for title, name, lines in (
            ("actual", "actual", first),
            *((printable(predictor), "err", own) for predictor, own in lines_by_predictor.items()),
        ):
            known = {(line.layer, line.kind): line.phase(phase) for line in lines}
            cells = _cells(name, (known.get((line.layer, line.kind)) for line in first))
            columns.append(Column(title, cells, phase, rank))
    return tuple(columns)


def marked_table(columns: tuple[Column, ...], lines: Sequence[TreeLine]) -> Table:
    """The table with its containers and one-sided layers marked, and each line's share of the step
    (measured where everything was, else predicted).
    """
    kinds = {GROUP: "group", SUM: "group", OWN: "own"}
    top = [line for line in lines if line.depth == 0 and line.kind != SUM]
    shares: list[float] = []
    for side in ("predicted_s", "actual_s"):
        if whole_s := sum(getattr(line.total, side) or 0.0 for line in top):
            shares = [(getattr(line.total, side) or 0.0) / whole_s for line in lines]
    return Table(
        columns,
        tuple("oneside" if line.side != BOTH else kinds.get(line.kind, "") for line in lines),
        tuple(line.layer for line in lines),
        tuple(shares),
    )
