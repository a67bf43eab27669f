"""The rows of a report in the shape of the model: containers as group lines with the sums of what
is in them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dlperf.core.trace import LOSS
from dlperf.report.layer_comparison import BOTH, LayerComparison, Times, add

LAYER, GROUP, OWN, FOLDED, REST, SUM = "layer", "group", "own", "folded", "rest", "sum"
"""Kinds of lines: a layer; a container, with the sums of the lines below it; a container's own work
outside its children; a container whose lines are left out; several small layers of one container in
one line; the sum of all rows.
"""


@dataclass(frozen=True)
class TreeLine:
    """One line of the table: what it stands for, how deep, and the sums over the `n_layers` rows
    behind it.

    `label` is the last part of the qualified `name`. Lines of kind ``layer``, ``own``, ``folded``
    and ``rest``, added up, are the step less zero_grad.
    """

    kind: str
    depth: int
    label: str
    name: str
    type: str
    forward: Times
    backward: Times | None
    optimizer: Times | None
    total: Times
    bound: str | None
    source: str | None
    flops: int | None
    bytes: int | None
    side: str
    n_layers: int

    def phase(self, name: str) -> Times | None:
        """The times of ``forward``, ``backward`` or ``optimizer``."""
        return {"forward": self.forward, "backward": self.backward, "optimizer": self.optimizer}[
            name
        ]


@dataclass
class _Node:
    label: str
    name: str
    row: LayerComparison | None = None
    children: dict[str, _Node] = field(default_factory=dict)
    is_folded: bool = False
    hidden: set[str] = field(default_factory=set)

    def rows(self) -> list[LayerComparison]:
        """The node's own row and those below it."""
        return ([self.row] if self.row is not None else []) + [
            row for child in self.children.values() for row in child.rows()
        ]

    def n_lines(self) -> int:
        """Lines that the node takes as it is folded now."""
        if self.is_folded or not self.children:
            return 1
        shown = sum(
            child.n_lines() for label, child in self.children.items() if label not in self.hidden
        )
        return 1 + (self.row is not None) + shown + bool(self.hidden)

    def weight_s(self) -> float:
        """Seconds, measured where known, that decide which lines are left out first."""
        return sum(row.total.actual_s or row.total.predicted_s or 0.0 for row in self.rows())


def outline(
    rows: Sequence[LayerComparison],
    root: str,
    types: Mapping[str, str],
    max_lines: int | None = None,
) -> tuple[TreeLine, ...]:
    """The lines of one predictor's rows: the root and everything below it by qualified name, then
    the loss, then the sum of all.

    `root` is the name of the root's row, `types` the modules' types by name. With `max_lines`, the
    containers that take the least time are folded into one line each, then the smallest layers of
    the longest container into one line, until the table fits or nothing is left to fold; sums stay
    the same.
    """
    top = _Node(root, root)
    losses = []
    for row in rows:
        if row.layer == LOSS:
            losses.append(row)
            continue
        node = top
        if row.layer != root:
            path: list[str] = []
            for part in row.layer.split("."):
                path.append(part)
                node = node.children.setdefault(part, _Node(part, ".".join(path)))
        node.row = row
    if max_lines is not None:
        _fold(top, max(3, max_lines - len(losses) - 1))
    lines = _lines(top, 0, types) if top.rows() else []
    lines += [_line(LAYER, 0, LOSS, LOSS, "Loss", [row]) for row in losses]
    if len(lines) > 1:
        lines.append(_line(SUM, 0, "sum", "sum of all rows", "", list(rows)))
    return tuple(lines)


def _walk(node: _Node) -> Iterable[_Node]:
    yield node
    if not node.is_folded:
        for child in node.children.values():
            yield from _walk(child)


def _fold(top: _Node, max_lines: int) -> None:
    whole_s = top.weight_s()
    while top.n_lines() > max_lines:
        foldable = [
            node
            for node in _walk(top)
            if node is not top
            and node.children
            and not node.is_folded
            and all(c.is_folded or not c.children for c in node.children.values())
        ]
        node = min(foldable, key=_Node.weight_s, default=None)
        if node is None or node.weight_s() > 0.3 * whole_s:
            break
        node.is_folded = True
    while (excess := top.n_lines() - max_lines) > 0:
        longest = max(
            _walk(top),
            key=lambda node: 0 if node.is_folded else len(node.children) - len(node.hidden),
        )
        shown = [label for label in longest.children if label not in longest.hidden]
        if longest.is_folded or len(shown) <= 2:
            break
        shown.sort(key=lambda label: longest.children[label].weight_s())
        n_hidden, hidden_lines = 0, 0
        for label in shown[:-2]:  # one line comes back for those left out
            if hidden_lines > excess:
                break
            hidden_lines += longest.children[label].n_lines()
            n_hidden += 1
        longest.hidden.update(shown[: max(n_hidden, 2)])


def _lines(node: _Node, depth: int, types: Mapping[str, str]) -> list[TreeLine]:
    kind = types.get(node.name, node.row.type if node.row is not None else "")
    rows = node.rows()
    if not node.children:
        return [_line(LAYER, depth, node.label, node.name, kind, rows)]
    if node.is_folded:
        return [_line(FOLDED, depth, node.label, node.name, kind, rows)]
    lines = [_line(GROUP, depth, node.label, node.name, kind, rows)]
    if node.row is not None:
        lines.append(_line(OWN, depth + 1, "(own ops)", node.name, "", [node.row]))
    for label, child in node.children.items():
        if label not in node.hidden:
            lines.extend(_lines(child, depth + 1, types))
    if node.hidden:
        hidden = [
            row
            for label in node.children
            if label in node.hidden
            for row in node.children[label].rows()
        ]
        lines.append(_line(REST, depth + 1, f"... {len(hidden)} smaller", node.name, "", hidden))
    return lines


def _line(
    kind: str, depth: int, label: str, name: str, type_name: str, rows: Sequence[LayerComparison]
) -> TreeLine:
    single = rows[0] if len(rows) == 1 else None
    phases: dict[str, Times | None] = {}
    for phase in ("forward", "backward", "optimizer"):
        parts = [times for row in rows if (times := row.phase(phase)) is not None]
        phases[phase] = (parts[0] if single is not None else add(parts)) if parts else None
    sides = {row.side for row in rows}
    return TreeLine(
        kind,
        depth,
        label,
        name,
        type_name,
        phases["forward"] or Times(),
        phases["backward"],
        phases["optimizer"],
        add(row.total for row in rows),
        bound=_largest(rows, 0),
        source=_largest(rows, 1),
        flops=_sum(row.flops for row in rows),
        bytes=_sum(row.bytes for row in rows),
        side=sides.pop() if len(sides) == 1 else BOTH,
        n_layers=len(rows),
    )


def _largest(rows: Sequence[LayerComparison], place: int) -> str | None:
    """The bound (place 0) or source (1) of the rows' largest share of time."""
    seconds: dict[str, float] = defaultdict(float)
    for row in rows:
        for bound, source, spent in row.shares:
            seconds[(bound, source)[place]] += spent
    return max(seconds, key=lambda name: seconds[name], default=None)


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
