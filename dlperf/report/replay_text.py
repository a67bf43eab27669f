"""A replayed trace as a page to read, as a plot, and as files in a folder."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from dlperf.core.text import fit, printable, text_width
from dlperf.core.units import format_bytes, format_percent, format_seconds
from dlperf.distributed.scaling import CommunicationReplay
from dlperf.report.drawing import DIM, INK, new_figure, own_style, plain, seconds_axis, to_png
from dlperf.report.scaling_plots import COMPUTE, EXPOSED
from dlperf.report.scaling_text import FILE_WIDTH, write_files
from dlperf.report.table import Column, format_table

_MOST_ROWS = 16
WAITING = "#8a8f98"


def one_line(found: CommunicationReplay) -> str:
    """The recorded step and the replayed one."""
    times = (
        f"{format_seconds(found.recorded_step_s)} recorded, {format_seconds(found.replayed_step_s)}"
        " replayed"
    )
    return (
        f"<CommunicationReplay {printable(found.target)}, {len(found.ranks)} rank(s): step {times}>"
    )


def page(found: CommunicationReplay) -> str:
    """The replayed step and its parts, by rank and by call."""
    return replay_to_text(found)


def replay_to_text(found: CommunicationReplay, width: int | None = None) -> str:
    """The replay as wide as the terminal."""
    width = text_width() if width is None else width
    n = len(found.ranks)
    recorded = (
        f"recorded on {n} rank{'s' * (n != 1)}, {found.n_steps} step{'s' * (found.n_steps != 1)}"
    )
    lines = [f"{found.target}: {recorded}; replayed over {found.cluster or 'a cluster'}"]
    if found.what_if:
        lines.append(
            "what if: "
            + ", ".join(f"{name} x {factor:g}" for name, factor in found.what_if.items())
        )
    where = f"over {found.recorded_on}" if found.recorded_on else "with the calls' own times"
    lines.append(
        f"recorded step {format_seconds(found.recorded_step_s)}, replayed {where}"
        f" {format_seconds(found.replayed_step_s)}: a constant overhead of"
        f" {format_seconds(found.overhead_s)} is carried over"
    )
    lines += [
        "",
        format_table(_row_columns(found), width),
        "",
        format_table(_rank_columns(found), width),
    ]
    if found.calls:
        lines += ["", format_table(_call_columns(found), width)]
    if len(found.calls) > _MOST_ROWS:
        lines.append(f"... and {len(found.calls) - _MOST_ROWS} other sizes; --json has them all")
    return fit("\n".join([*lines, *(f"note: {note}" for note in found.notes)]), width)


def _row_columns(found: CommunicationReplay) -> list[Column]:
    rows = found.rows

    def seconds(title: str, name: str, rank: int = 0) -> Column:
        return Column(
            title,
            tuple(
                "-" if getattr(row, name) is None else format_seconds(getattr(row, name))
                for row in rows
            ),
            rank=rank,
        )

    return [
        Column("ranks", tuple(str(row.ranks) for row in rows)),
        seconds("step", "step_s"),
        Column(
            "90 %",
            tuple(f"{format_seconds(row.low_s)} .. {format_seconds(row.high_s)}" for row in rows),
            rank=2,
        ),
        seconds("computing", "compute_s"),
        seconds("waiting in it", "waiting_s", 2),
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
        seconds("first step", "first_step_s", 4),
        Column(
            "link x 2",
            tuple(f"-{format_percent(max(0.0, row.network_gain_frac))}" for row in rows),
            rank=4,
        ),
        Column("bound", tuple(row.bound for row in rows), align_left=True),
    ]


def _rank_columns(found: CommunicationReplay) -> list[Column]:
    shown = found.ranks[:_MOST_ROWS]
    columns = [
        Column("rank", tuple(str(one.rank) for one in shown)),
        Column("host", tuple(one.host for one in shown), align_left=True, rank=3),
    ]
    for group, rank in (("recorded", 1), ("replayed", 0)):
        shares = [getattr(one, group) for one in shown]
        columns += [
            Column(
                title,
                tuple(format_seconds(max(0.0, getattr(share, name))) for share in shares),
                group,
                rank,
            )
            for title, name in (
                ("step", "step_s"),
                ("computing", "compute_s"),
                ("exposed", "exposed_communication_s"),
                ("waiting", "waiting_s"),
            )
        ]
    return columns


def _call_columns(found: CommunicationReplay) -> list[Column]:
    shown = found.calls[:_MOST_ROWS]
    columns = [
        Column("call", tuple(one.kind for one in shown), align_left=True),
        Column("bytes", tuple(format_bytes(one.n_bytes) for one in shown)),
        Column("ranks", tuple(str(one.ranks) for one in shown)),
        Column("a step", tuple(f"{one.per_step:.3g}" for one in shown), rank=1),
        Column("recorded", tuple(format_seconds(one.recorded_s) for one in shown)),
    ]
    if found.recorded_on:
        columns.append(
            Column(
                "forecast there",
                tuple(
                    "-" if one.recorded_on_s is None else format_seconds(one.recorded_on_s)
                    for one in shown
                ),
                rank=1,
            )
        )
    return [
        *columns,
        Column("forecast here", tuple(format_seconds(one.replayed_s) for one in shown)),
    ]


def replay_figure(found: CommunicationReplay) -> Figure:
    """Two bars for each rank, as recorded and as replayed (overhead included), of computing,
    waiting for slower ranks and exposed communication.
    """
    shown = found.ranks[:_MOST_ROWS]
    figure = new_figure(max(5.0, 2.2 + 1.3 * len(shown)), 4.4)
    ax = figure.subplots()
    style = {"edgecolor": INK, "linewidth": 0.4, "width": 0.36}
    kinds = (
        ("computing", "compute_s", COMPUTE, ""),
        ("waiting for slower ranks", "waiting_s", WAITING, "...."),
        ("exposed communication", "exposed_communication_s", EXPOSED, "////"),
    )
    for group, shift in (("recorded", -0.2), ("replayed", 0.2)):
        bottoms = [0.0] * len(shown)
        for title, name, color, hatch in kinds:
            heights = [max(0.0, getattr(getattr(one, group), name)) for one in shown]
            label = title if group == "recorded" else None
            ax.bar(
                [one.rank + shift for one in shown],
                heights,
                bottom=bottoms,
                color=color,
                hatch=hatch,
                label=label,
                **style,  # type: ignore[arg-type]
            )
            bottoms = [a + b for a, b in zip(bottoms, heights)]
        if group == "replayed" and found.overhead_s > 0:
            ax.bar(
                [one.rank + shift for one in shown],
                [found.overhead_s] * len(shown),
                bottom=bottoms,
                color="white",
                label="constant overhead",
                **style,  # type: ignore[arg-type]
            )
    ax.set_xticks(
        [one.rank + shift for one in shown for shift in (-0.2, 0.2)],
        ["recorded", "replayed"] * len(shown),
        fontsize=7.5,
        color=DIM,
    )
    for one in shown:
        ax.annotate(
            f"rank {one.rank}",
            (one.rank, 0),
            (0, -22),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            va="top",
        )
    seconds_axis(ax.yaxis)
    ax.set_ylabel("step")
    ax.set_title(
        f"{plain(found.target, 60)} on {plain(Path(found.cluster).name or 'another cluster', 40)}"
    )
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def write_replay(found: CommunicationReplay, folder: str | Path, force: bool = False) -> list[Path]:
    """Write ``scaling.txt``, ``.csv``, ``.json`` and ``replay.png`` into a folder, which is made if
    missing; the files in that order.

    Raises DlperfError for a folder that cannot be made or holds foreign files (unless `force`),
    WorkFailed if the disk refuses.
    """

    def draw() -> dict[str, bytes]:
        with own_style():
            return {
                "replay": to_png(replay_figure(found), 130, f"dlperf scale replay: {found.target}")
            }

    return write_files(found, replay_to_text(found, FILE_WIDTH), draw, folder, force)
