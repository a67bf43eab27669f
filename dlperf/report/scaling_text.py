"""A scaling forecast as a page to read, and as files in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from dlperf.core.files import write_bytes, write_text
from dlperf.core.text import fit, printable, text_width
from dlperf.core.units import format_bytes, format_percent, format_seconds
from dlperf.distributed.scaling import CommunicationReplay, Scaling
from dlperf.report.scaling_plots import pngs_of
from dlperf.report.table import Column, format_table
from dlperf.report.writing import check_folder, make_folder

FILE_WIDTH = 160
_MOST_BUCKETS = 8


def one_line(found: Scaling) -> str:
    """The target, the numbers of ranks, and the one with most samples per second."""
    ranks = ", ".join(str(row.ranks) for row in found.rows)
    best = f"best {found.best.samples_per_s:.4g} samples/s on {found.best.ranks}"
    return f"<Scaling {printable(found.target)}, {found.scaling}, ranks {ranks}: {best}>"


def page(found: Scaling) -> str:
    """The step and its parts over the number of ranks."""
    return scaling_to_text(found)


def scaling_to_text(found: Scaling, width: int | None = None) -> str:
    """The forecast as wide as the terminal."""
    width = text_width() if width is None else width
    per = "per rank" if found.scaling == "weak" else "of all ranks"
    threads = (
        f"{found.threads} thread{'s' * (found.threads != 1)} a rank, {found.ranks_per_node}"
        f" rank{'s' * (found.ranks_per_node != 1)} a node"
    )
    lines = [
        f"{found.target}: {found.scaling} scaling, batch size {found.batch_size} {per}, {threads}"
    ]
    if found.what_if:
        lines.append(
            "what if: "
            + ", ".join(f"{name} x {factor:g}" for name, factor in found.what_if.items())
        )
    sizes = [format_bytes(size) for size in found.buckets_bytes]
    shown = ", ".join(sizes[:_MOST_BUCKETS]) + (
        f", ... {sizes[-1]}" if len(sizes) > _MOST_BUCKETS else ""
    )
    lines += [
        (
            f"gradients: {format_bytes(sum(found.buckets_bytes))} in {len(sizes)}"
            f" bucket{'s' * (len(sizes) != 1)} ({shown})"
        ),
        "",
    ]
    lines.append(format_table(_columns(found), width))
    best = found.best
    if len(found.rows) > 1:
        lines += [
            "",
            (
                f"most samples a second: {best.samples_per_s:.4g} on {best.ranks}"
                f" rank{'s' * (best.ranks != 1)}"
            ),
        ]
    return fit("\n".join([*lines, *(f"note: {note}" for note in found.notes)]), width)


def _columns(found: Scaling) -> list[Column]:
    rows = found.rows

    def seconds(title: str, name: str, rank: int = 0) -> Column:
        return Column(title, tuple(format_seconds(getattr(row, name)) for row in rows), rank=rank)

    columns = [
        Column("ranks", tuple(str(row.ranks) for row in rows)),
        seconds("step", "step_s"),
        Column(
            "90 %",
            tuple(f"{format_seconds(row.low_s)} .. {format_seconds(row.high_s)}" for row in rows),
            rank=2,
        ),
        seconds("computing", "compute_s"),
        seconds("sending", "communication_s", 3),
        seconds("exposed", "exposed_communication_s"),
        Column(
            "share",
            tuple(
                format_percent(row.exposed_communication_s / row.step_s if row.step_s else 0.0)
                for row in rows
            ),
            rank=1,
        ),
        Column("efficiency", tuple(format_percent(row.efficiency) for row in rows)),
        Column("speed-up", tuple(f"{row.speedup:.2f}" for row in rows), rank=1),
        Column("samples/s", tuple(f"{row.samples_per_s:.4g}" for row in rows)),
        seconds("first step", "first_step_s", 4),
        Column(
            "link x 2",
            tuple(f"-{format_percent(max(0.0, row.network_gain_frac))}" for row in rows),
            rank=4,
        ),
    ]
    if any(row.ridgeline for row in rows):
        places = tuple(
            " ".join(
                f"{value:.3g}" if value is not None else "-"
                for value in (row.memory_intensity, row.arithmetic_intensity)
            )
            for row in rows
        )
        columns += [
            Column("I_M, I_A", places, rank=5),
            Column(
                "Ridgeline", tuple(row.ridgeline or "-" for row in rows), align_left=True, rank=5
            ),
        ]
    if found.scaling == "strong":
        columns.insert(1, Column("batch", tuple(str(row.batch_size) for row in rows), rank=1))
    if found.samples is not None:
        columns.append(seconds("epoch", "epoch_s"))
    return [*columns, Column("bound", tuple(row.bound for row in rows), align_left=True)]


def write(found: Scaling, folder: str | Path, force: bool = False) -> list[Path]:
    """Write ``scaling.txt``, ``.csv``, ``.json`` and the plots as PNG into a folder, which is made
    if missing; the files in that order.

    Raises DlperfError for a folder that cannot be made or holds foreign files (unless `force`),
    WorkFailed if the disk refuses.
    """
    return write_files(
        found, scaling_to_text(found, FILE_WIDTH), lambda: pngs_of(found), folder, force
    )


def write_files(
    found: Scaling | CommunicationReplay,
    text: str,
    draw: Callable[[], dict[str, bytes]],
    folder: str | Path,
    force: bool,
) -> list[Path]:
    """Write ``scaling.txt``, ``.csv``, ``.json`` and the PNGs that `draw` gives by name into a
    folder, which is made if missing; the files in that order.

    Raises as :func:`write`.
    """
    check_folder(folder, force)
    place = make_folder(folder)
    texts = {
        "scaling.txt": f"dlperf scale\n\n{text}\n",
        "scaling.csv": found.to_csv(),
        "scaling.json": json.dumps(found.to_json(), indent=1, allow_nan=False) + "\n",
    }
    for name, content in texts.items():
        write_text(place / name, content)
    images = {f"{name}.png": png for name, png in draw().items()}
    for name, png in images.items():
        write_bytes(place / name, png)
    return [place / name for name in (*texts, *images)]
