"""The columns of the layer table, for text and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dlperf.core.text import printable
from dlperf.core.units import format_si
from dlperf.report.layer_comparison import BOTH, MEASURED, PREDICTED, Times
from dlperf.report.outline import FOLDED, TreeLine
from dlperf.report.table import Column, format_error, format_time


def predicted_cell(times: Times | None) -> str:
    """The predicted time; blank where nothing runs, ``-`` where the predictor does not speak."""
    if times is None or (not times.predicted_s and not times.has_work):
        return ""
    return format_time(times.predicted_s, times.predicted_is_part)


def actual_cell(times: Times | None) -> str:
    """The measured time; blank where nothing runs, ``-`` where it was not measured."""
    if times is None or (not times.actual_s and not times.has_work):
        return ""
    return format_time(times.actual_s, times.actual_is_part)


def error_cell(times: Times | None) -> str:
    """predicted / actual - 1; blank where nothing runs."""
    if times is None or (not times.has_work and not times.actual_s):
        return ""
    return format_error(times.error_frac)


def spread_cell(times: Times | None) -> str:
    """How far the measured samples of a layer spread; blank for sums."""
    return "" if times is None or times.spread_frac is None else f"{100 * times.spread_frac:.0f} %"


def label_of(line: TreeLine, indent: str = "  ") -> str:
    """A line's name, indented by its depth, with what is behind it if its lines are left out."""
    folded = f" ({line.n_layers} layers)" if line.kind == FOLDED else ""
    return indent * line.depth + printable(line.label) + folded


def side_cell(line: TreeLine) -> str:
    """Why a line has only one side; blank when it has both."""
    return {BOTH: "", PREDICTED: "not measured", MEASURED: "not predicted"}[line.side]


def layer_columns(lines: Sequence[TreeLine], phases: Sequence[str], measured: bool) -> list[Column]:
    """The table's columns, the name first; those that an 80 column terminal has no room for carry a
    rank.
    """

    def cells(cell: Callable[[TreeLine], str]) -> tuple[str, ...]:
        return tuple(cell(line) for line in lines)

    columns = [Column("layer", cells(label_of), align_left=True)]
    columns.append(
        Column("type", cells(lambda line: printable(line.type)), rank=1, align_left=True)
    )
    for phase in phases:
        rank = 3 if phase == "optimizer" else 0
        columns.extend(_triple(phase, [line.phase(phase) for line in lines], measured, rank))
    if len(phases) > 1:
        columns.extend(_triple("total", [line.total for line in lines], measured, 4))
    if measured:
        columns.append(Column("fwd spread", cells(lambda line: spread_cell(line.forward)), rank=7))
    columns.append(
        Column(
            "FLOP",
            cells(lambda line: format_si(line.flops, "").rstrip() if line.flops else ""),
            rank=5,
        )
    )
    columns.append(
        Column(
            "bytes", cells(lambda line: format_si(line.bytes, "B") if line.bytes else ""), rank=6
        )
    )
    columns.append(Column("bound", cells(lambda line: line.bound or "-"), rank=0, align_left=True))
    columns.append(
        Column("source", cells(lambda line: line.source or "-"), rank=2, align_left=True)
    )
    if any(line.side != BOTH for line in lines):
        columns.append(Column("one side", cells(side_cell), rank=1, align_left=True))
    return columns


def _triple(title: str, times: Sequence[Times | None], measured: bool, rank: int) -> list[Column]:
    predicted = tuple(predicted_cell(t) for t in times)
    if not measured:
        return [Column(title, predicted, "", rank)]
    return [
        Column("pred", predicted, title, rank),
        Column("actual", tuple(actual_cell(t) for t in times), title, rank),
        Column("err", tuple(error_cell(t) for t in times), title, rank),
    ]


def error_columns(
    lines_by_predictor: Sequence[tuple[str, Sequence[TreeLine]]], phases: Sequence[str]
) -> list[Column]:
    """One line a layer, for several predictors at once: the measured time, and each predictor's
    error.
    """
    _, first = lines_by_predictor[0]
    columns = [Column("layer", tuple(label_of(line) for line in first), align_left=True)]
    for phase in phases:
        rank = {"forward": 0, "backward": 1, "optimizer": 2}[phase]
        columns.append(
            Column("actual", tuple(actual_cell(line.phase(phase)) for line in first), phase, rank)
        )
        for predictor, lines in lines_by_predictor:
            columns.append(
                Column(
                    printable(predictor),
                    tuple(error_cell(line.phase(phase)) for line in lines),
                    phase,
                    rank,
                )
            )
    return columns
