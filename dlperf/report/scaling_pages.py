"""Pages and files of a scaling forecast and of a communication replay."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dlperf.core.text import counted, printable
from dlperf.core.units import format_bytes, format_percent, format_seconds
from dlperf.core.what_if import describe
from dlperf.distributed.scaling import CommunicationReplay, RanksPoint, Scaling, ScalingPoint
from dlperf.report.document import FILE_WIDTH, Block, Column, Heading, Paragraph, Table, to_text
from dlperf.report.writing import write_files

_MOST_BUCKETS = 8
_MOST_ROWS = 16


def one_line(found: Scaling | CommunicationReplay) -> str:
    """The target, the ranks, and the step or the throughput."""
    if isinstance(found, Scaling):
        ranks = ", ".join(str(row.ranks) for row in found.rows)
        best = f"best {found.best.samples_per_s:.4g} samples/s on {found.best.ranks}"
        return f"<Scaling {printable(found.target)}, {found.scaling}, ranks {ranks}: {best}>"
    times = (
        f"{format_seconds(found.recorded_step_s)} recorded, {format_seconds(found.replayed_step_s)}"
        " replayed"
    )
    ranks = counted(len(found.ranks), "rank")
    return f"<CommunicationReplay {printable(found.target)}, {ranks}: step {times}>"


def scaling_to_text(found: Scaling | CommunicationReplay, width: int | None = None) -> str:
    """The forecast or the replay as plain text (default: as wide as the terminal)."""
    return to_text(page(found), width).rstrip("\n")


def page(found: Scaling | CommunicationReplay) -> list[Block]:
    """The forecast or the replay as a page."""
    return _scaling_page(found) if isinstance(found, Scaling) else _replay_page(found)


def _what_if(found: Scaling | CommunicationReplay) -> list[str]:
    return [describe(found.what_if)] if found.what_if else []


def _notes(found: Scaling | CommunicationReplay) -> Paragraph:
    return Paragraph(tuple(f"note: {note}" for note in found.notes))


def _scaling_page(found: Scaling) -> list[Block]:
    per = "per rank" if found.scaling == "weak" else "of all ranks"
    sizes = [format_bytes(size) for size in found.buckets_bytes]
    more = f", ... {sizes[-1]}" if len(sizes) > _MOST_BUCKETS else ""
    title = (
        f"{found.target}: {found.scaling} scaling, batch size {found.batch_size} {per},"
        f" {counted(found.threads, 'thread')} a rank,"
        f" {counted(found.ranks_per_node, 'rank')} a node"
    )
    gradients = (
        f"gradients: {format_bytes(sum(found.buckets_bytes))} in {counted(len(sizes), 'bucket')}"
        f" ({', '.join(sizes[:_MOST_BUCKETS])}{more})"
    )
    best = (
        f"most samples per second: {found.best.samples_per_s:.4g} on"
        f" {counted(found.best.ranks, 'rank')}"
    )
    return [
        Heading(title, 1),
        Paragraph((*_what_if(found), gradients)),
        Table(_scaling_columns(found)),
        Paragraph((best,) if len(found.rows) > 1 else ()),
        _notes(found),
    ]


def _step_columns(rows: Sequence[RanksPoint]) -> list[Column]:
    """The columns that a forecast and a replay share."""

    def seconds(title: str, name: str, rank: int = 0) -> Column:
        return Column(title, tuple(format_seconds(getattr(row, name)) for row in rows), rank=rank)

    intervals = (f"{format_seconds(row.low_s)} .. {format_seconds(row.high_s)}" for row in rows)
    exposed = (row.exposed_communication_s / row.step_s if row.step_s else 0.0 for row in rows)
    gains = (f"-{format_percent(max(0.0, row.network_gain_frac))}" for row in rows)
    return [
        Column("ranks", tuple(str(row.ranks) for row in rows)),
        seconds("step", "step_s"),
        Column("90 %", tuple(intervals), rank=2),
        seconds("computing", "compute_s"),
        seconds("sending", "communication_s", 3),
        seconds("exposed", "exposed_communication_s"),
        Column("share", tuple(map(format_percent, exposed)), rank=1),
        Column("efficiency", tuple(format_percent(row.efficiency) for row in rows)),
        Column("speed-up", tuple(f"{row.speedup:.2f}" for row in rows), rank=1),
        seconds("first step", "first_step_s", 4),
        Column("link x 2", tuple(gains), rank=4),
        Column("bound", tuple(row.bound for row in rows), align_left=True),
    ]


def _scaling_columns(found: Scaling) -> tuple[Column, ...]:
    rows, columns = found.rows, _step_columns(found.rows)

    def intensities(row: ScalingPoint) -> str:
        pair = (row.memory_intensity, row.arithmetic_intensity)
        return " ".join("-" if value is None else f"{value:.3g}" for value in pair)

    if found.scaling == "strong":
        batches = tuple(str(row.batch_size) for row in rows)
        columns.insert(1, Column("batch", batches, rank=1))
    bound = columns.pop()
    rates = tuple(f"{row.samples_per_s:.4g}" for row in rows)
    columns.insert(-2, Column("samples/s", rates))
    if any(row.ridgeline for row in rows):
        regions = tuple(row.ridgeline or "-" for row in rows)
        columns.append(Column("I_M, I_A", tuple(map(intensities, rows)), rank=5))
        columns.append(Column("Ridgeline", regions, align_left=True, rank=5))
    if found.samples is not None:
        columns.append(Column("epoch", tuple(format_seconds(row.epoch_s) for row in rows)))
    return (*columns, bound)


def _replay_page(found: CommunicationReplay) -> list[Block]:
    title = (
        f"{found.target}: recorded on {counted(len(found.ranks), 'rank')},"
        f" {counted(found.n_steps, 'step')}; replayed over {found.cluster or 'a cluster'}"
    )
    where = f"over {found.recorded_on}" if found.recorded_on else "with the calls' own times"
    overhead = (
        f"recorded step {format_seconds(found.recorded_step_s)}, replayed {where}"
        f" {format_seconds(found.replayed_step_s)}: a constant overhead of"
        f" {format_seconds(found.overhead_s)} is carried over"
    )
    waiting = tuple(format_seconds(row.waiting_s) for row in found.rows)
    steps = _step_columns(found.rows)
    steps.insert(4, Column("waiting in it", waiting, rank=2))
    n_more = len(found.calls) - _MOST_ROWS
    more = f"... and {n_more} other sizes; --json has them all"
    return [
        Heading(title, 1),
        Paragraph((*_what_if(found), overhead)),
        Table(tuple(steps)),
        Table(_rank_columns(found)),
        *([Table(_call_columns(found))] if found.calls else []),
        Paragraph((more,) if n_more > 0 else ()),
        _notes(found),
    ]


PARTS = {
    "step": "step_s",
    "computing": "compute_s",
    "exposed": "exposed_communication_s",
    "waiting": "waiting_s",
}
"""The parts of a rank's step, by their names in tables."""


def _rank_columns(found: CommunicationReplay) -> tuple[Column, ...]:
    shown = found.ranks[:_MOST_ROWS]
    columns = [
        Column("rank", tuple(str(one.rank) for one in shown)),
        Column("host", tuple(one.host for one in shown), align_left=True, rank=3),
    ]
    for group, rank in (("recorded", 1), ("replayed", 0)):
        for title, name in PARTS.items():
            seconds = (max(0.0, getattr(getattr(one, group), name)) for one in shown)
            columns.append(Column(title, tuple(map(format_seconds, seconds)), group, rank))
    return tuple(columns)


def _call_columns(found: CommunicationReplay) -> tuple[Column, ...]:
    shown = found.calls[:_MOST_ROWS]
    there = tuple(format_seconds(one.recorded_on_s) for one in shown)
    return (
        Column("call", tuple(one.kind for one in shown), align_left=True),
        Column("bytes", tuple(format_bytes(one.n_bytes) for one in shown)),
        Column("ranks", tuple(str(one.ranks) for one in shown)),
        Column("a step", tuple(f"{one.per_step:.3g}" for one in shown), rank=1),
        Column("recorded", tuple(format_seconds(one.recorded_s) for one in shown)),
        *([Column("forecast there", there, rank=1)] if found.recorded_on else []),
        Column("forecast here", tuple(format_seconds(one.replayed_s) for one in shown)),
    )


def write(
    found: Scaling | CommunicationReplay, folder: str | Path, force: bool = False
) -> list[Path]:
    """Write ``scaling.txt``, ``.csv``, ``.json`` and the plots as PNG into a folder, which is made
    if missing; the files in that order.

    Raises DlperfError for a folder that cannot be made or contains foreign files (unless `force`),
    WorkFailed if the disk refuses.
    """
    from dlperf.report.scaling_plots import pngs_of  # matplotlib, which takes a while to import

    files: dict[str, str | bytes] = {
        "scaling.txt": f"dlperf scale\n\n{scaling_to_text(found, FILE_WIDTH)}\n",
        "scaling.csv": found.to_csv(),
        "scaling.json": json.dumps(found.to_json(), indent=1, allow_nan=False) + "\n",
        **pngs_of(found),
    }
    return write_files(folder, files, force)
