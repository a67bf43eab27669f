"""A study of data-parallel steps as text, and as a folder: distributed.md, CSV, JSON and plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from dlperf.core.units import MIB, UNSHAPED, format_bytes, format_seconds, format_si
from dlperf.report.document import Column, escape, format_error
from dlperf.report.drawing import (
    ACTUAL_COLOR,
    BLUE,
    DIM,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    new_figure,
    plain,
    seconds_axis,
    to_pngs,
)
from dlperf.report.writing import write_files
from dlperf.studies.distributed.cases import (
    KINDS,
    LINK_BOUND_FRAC,
    DistributedForecast,
    DistributedStudy,
    ThresholdCheck,
)
from dlperf.studies.distributed.runs import ALL_REDUCE_BYTES
from dlperf.studies.results import (
    format_amount,
    percent,
    runs_to_csv,
    tables_to_markdown,
    tables_to_text,
)

NOTE = (
    "Error: predicted / measured - 1, of shares and gains predicted - measured (in points), the"
    " median over the runs. Repeatability: (largest - smallest) / median of the runs, fresh"
    " starts of all ranks (of shares and gains without the division); a smaller error is noise."
    " Unshaped links repeat only to a factor, hence no threshold. Seconds of a step are those"
    " of the slowest rank, the median over steps that all ranks begin together."
)
_COLORS = (ORANGE, BLUE, GREEN, PURPLE, SKY)


def _yes(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "NO"


def _threshold(check: ThresholdCheck) -> str:
    return (
        "-"
        if check.threshold is None
        else f"{'>=' if check.statistic == 'right' else '<='} {percent(check.threshold)}"
    )


def check_columns(study: DistributedStudy) -> list[Column]:
    """One row a threshold, in percent (of shares and gains: points)."""
    found = study.checks
    return [
        Column("what", tuple(KINDS[v.kind].text for v in found), align_left=True),
        Column("where", tuple(v.where for v in found), align_left=True),
        Column("cases", tuple(str(v.n) for v in found)),
        Column("statistic", tuple(_statistic(v) for v in found), align_left=True),
        Column("value", tuple(percent(v.value) for v in found)),
        Column("repeatability", tuple(percent(v.repeatability) for v in found)),
        Column("threshold", tuple(map(_threshold, found))),
        Column("met", tuple(_yes(v.met) for v in found)),
    ]


def _statistic(check: ThresholdCheck) -> str:
    return "right" if check.statistic == "right" else f"{check.statistic} |error|"


def _error(row: DistributedForecast) -> str:
    if row.right is not None:
        return "right" if row.right else "WRONG"
    return format_error(row.error_frac) if row.is_relative else f"{100 * row.error_frac:+.1f}"


def row_columns(rows: Sequence[DistributedForecast]) -> list[Column]:
    """One row a case and pair of rates."""
    columns = [
        Column("case", tuple(row.case for row in rows), align_left=True),
        Column("ranks", tuple(str(row.ranks) for row in rows)),
        Column("rate", tuple(row.rate for row in rows)),
        Column(
            "recorded at" if rows[0].kind == "replay" else "calibrated at",
            tuple(row.calibrated_at for row in rows),
        ),
        Column("measured", tuple(format_amount(row.measured, row.unit) for row in rows)),
        Column("predicted", tuple(format_amount(row.predicted, row.unit) for row in rows)),
        Column("error", tuple(map(_error, rows))),
        Column(
            "repeatability",
            tuple(
                "-" if row.kind == "buckets" else percent(row.repeatability_frac) for row in rows
            ),
        ),
        Column(
            "threshold",
            tuple(
                "-"
                if row.threshold is None
                else "right"
                if row.right is not None
                else percent(row.threshold)
                for row in rows
            ),
        ),
        Column("met", tuple(_yes(row.met) for row in rows)),
    ]
    if any(row.inside is not None for row in rows):
        columns.append(Column("in interval", tuple(_yes(row.inside) for row in rows)))
    if any(row.remark for row in rows):
        columns.append(Column("remark", tuple(row.remark for row in rows), align_left=True))
    return columns


def link_columns(study: DistributedStudy) -> list[Column]:
    """One row a calibration."""
    found = study.links
    return [
        Column("rate", tuple(link.rate for link in found), align_left=True),
        Column("ranks", tuple(str(link.ranks) for link in found)),
        Column("latency", tuple(format_seconds(link.latency_s) for link in found)),
        Column("bandwidth", tuple(format_si(link.bytes_per_s, "B/s") for link in found)),
    ]


def _blocks(study: DistributedStudy) -> Iterator[tuple[str, list[Column]]]:
    if study.rows:
        yield "Every threshold, %", check_columns(study)
    if study.links:
        yield "Links as calibrated", link_columns(study)
    for kind, what in KINDS.items():
        own = [row for row in study.rows if row.kind == kind]
        if own:
            yield f"{what.text[0].upper()}{what.text[1:]}", row_columns(own)


def _sentences(study: DistributedStudy) -> list[str]:
    n_link_bound, n_steps = study.n_link_bound
    found = [f"Ranks of one thread, {study.hosts}."]
    if n_steps:
        share = percent(LINK_BOUND_FRAC)
        found.append(
            f"In {n_link_bound} of the {n_steps} measured steps behind shaped links, exposed"
            f" communication is more than {share} % of the step."
        )
    return found


def study_to_text(study: DistributedStudy, width: int | None = None) -> str:
    """The study for a terminal."""
    failures = (f"failed: {line}" for line in study.failures)
    return tables_to_text(tuple(_blocks(study)), " ".join(_sentences(study)), failures, width)


def study_to_markdown(study: DistributedStudy, images: Iterable[str] = ()) -> str:
    """Markdown page of the study; `images` are the file names of its plots."""
    captions = {f"{name}.png": escape(caption) for name, (_, caption) in PLOTS.items()}
    return tables_to_markdown(
        "--distributed",
        "How right forecasts of data-parallel steps are",
        study.provenance,
        tuple(_blocks(study)),
        before=" ".join(_sentences(study)),
        after_first=(
            escape(NOTE),
            *(f"![{captions[name]}]({name})\n\n{captions[name]}" for name in images),
        ),
        failures=study.failures,
    )


# -- plots -----------------------------------------------------------------------------------------


def _rates(study: DistributedStudy) -> list[str]:
    """All rates of the study, links as they are last: a rate has one color in every plot."""
    return sorted(dict.fromkeys(row.rate for row in study.rows), key=lambda rate: rate == UNSHAPED)


def _title(study: DistributedStudy, what: str) -> str:
    return f"{what}\non {plain(study.provenance.machine, 60)}"


def _scatter(
    study: DistributedStudy, kind: str, scale: float, changed_how: str = ", what if"
) -> Figure | None:
    """Predicted over measured of each case; full marks where the link was calibrated at that rate,
    open ones where its rate was changed on paper.
    """
    rows = [row for row in study.rows if row.kind == kind]
    if not rows:
        return None
    figure = new_figure(5.4, 4.8)
    ax = figure.subplots()
    for number, rate in enumerate(_rates(study)):
        color = _COLORS[number % len(_COLORS)]
        for changed in (False, True):
            own = [row for row in rows if (row.rate, row.changed) == (rate, changed)]
            if own:
                spread = [
                    [scale * (row.measured - row.measured_span[0]) for row in own],
                    [scale * (row.measured_span[1] - row.measured) for row in own],
                ]
                label = ("links as they are" if rate == UNSHAPED else rate) + (
                    changed_how if changed else ""
                )
                ax.errorbar(
                    [scale * row.measured for row in own],
                    [scale * row.predicted for row in own],
                    xerr=spread,
                    fmt="o",
                    color=color,
                    markersize=5,
                    markerfacecolor="white" if changed else color,
                    elinewidth=0.8,
                    label=label,
                )
    ax.grid(True, color=DIM, alpha=0.3)
    ax.legend(loc="upper left")
    return figure


def steps_figure(study: DistributedStudy) -> Figure | None:
    """Predicted against measured steps; the lines are the thresholds of the median and of the worst
    case."""
    return _seconds_figure(
        study, "step", "predicted step", "Steps of DistributedDataParallel", ", what if"
    )


def replay_figure(study: DistributedStudy) -> Figure | None:
    """Steps replayed from recordings behind links of another rate against those recorded there; the
    lines as in :func:`steps_figure`.
    """
    return _seconds_figure(study, "replay", "replayed step", "Steps replayed from another rate", "")


def _seconds_figure(
    study: DistributedStudy, kind: str, what: str, title: str, changed_how: str
) -> Figure | None:
    figure = _scatter(study, kind, 1.0, changed_how)
    if figure is None:
        return None
    ax = figure.axes[0]
    ax.set_xscale("log")
    ax.set_yscale("log")
    ends = np.array([min(*ax.get_xlim(), *ax.get_ylim()), max(*ax.get_xlim(), *ax.get_ylim())])
    for factor, style in (
        (1.0, "-"),
        *(
            (1 + sign * threshold, line)
            for (_, threshold), line in zip(KINDS[kind].thresholds, ("--", ":"))
            for sign in (1, -1)
        ),
    ):
        ax.plot(ends, factor * ends, style, color=ACTUAL_COLOR, linewidth=0.8, zorder=1)
    ax.set(xlim=ends, ylim=ends, xlabel="measured step", ylabel=what)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_minor_formatter(NullFormatter())
        seconds_axis(axis)
    ax.set_title(_title(study, title), fontsize=9)
    return figure


def shares_figure(study: DistributedStudy) -> Figure | None:
    """Predicted against measured shares of exposed communication, in percent of the step."""
    figure = _scatter(study, "share", 100.0)
    if figure is None:
        return None
    ax = figure.axes[0]
    (_, threshold), *_ = KINDS["share"].thresholds
    ends = np.array([min(0.0, ax.get_xlim()[0]), 100.0])
    for shift, style in ((0.0, "-"), (100 * threshold, ":"), (-100 * threshold, ":")):
        ax.plot(ends, ends + shift, style, color=ACTUAL_COLOR, linewidth=0.8, zorder=1)
    ax.set(
        xlim=ends,
        ylim=ends,
        xlabel="measured share of exposed communication, %",
        ylabel="predicted share, %",
    )
    ax.set_title(_title(study, "Exposed communication"), fontsize=9)
    return figure


def all_reduce_figure(study: DistributedStudy) -> Figure | None:
    """Times over sizes: every run as a mark, forecasts as lines, dashed from another rate's
    calibration.
    """
    rows = [row for row in study.rows if row.kind == "all-reduce"]
    if not rows:
        return None
    sizes = {format_bytes(size): size for size in ALL_REDUCE_BYTES}
    counts = sorted({row.ranks for row in rows})
    figure = new_figure(4.6 * len(counts), 4.0)
    for ax, n in zip(np.atleast_1d(figure.subplots(1, len(counts), sharey=True)), counts):
        for number, rate in enumerate(_rates(study)):
            color = _COLORS[number % len(_COLORS)]
            own = [row for row in rows if (row.ranks, row.rate) == (n, rate)]
            for at in dict.fromkeys(row.calibrated_at for row in own):
                line = sorted(
                    (sizes[row.case] / MIB, row)
                    for row in own
                    if row.calibrated_at == at and row.case in sizes
                )
                x, found = [size for size, _ in line], [row for _, row in line]
                label = "links as they are" if rate == UNSHAPED else rate
                label += f" from {at}" if at != rate else ""
                ax.plot(
                    x,
                    [row.predicted for row in found],
                    "--" if at != rate else "-",
                    color=color,
                    linewidth=1.2,
                    label=label,
                )
                if at == rate:
                    for run in range(max(len(row.pairs) for row in found)):
                        ax.plot(
                            x,
                            [row.pairs[min(run, len(row.pairs) - 1)].measured for row in found],
                            "o",
                            color=color,
                            markersize=4,
                            mfc="white",
                        )
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        seconds_axis(ax.yaxis)
        ax.set(xlabel="vector, MiB", ylabel="all-reduce" if n == counts[0] else "")
        ax.set_title(f"{n} ranks", fontsize=9)
        ax.grid(True, color=DIM, alpha=0.3)
        ax.legend(fontsize=7.5)
    figure.suptitle(
        _title(study, "All-reduces: measured (marks) and predicted (lines)"), fontsize=9
    )
    return figure


PLOTS: dict[str, tuple[Callable[[DistributedStudy], Figure | None], str]] = {
    "steps": (
        steps_figure,
        (
            "Predicted against measured steps: full marks from a calibration at the same rate, open"
            " ones from another rate by --what-if. Dashed: the threshold of the median error;"
            " dotted: that of the worst."
        ),
    ),
    "shares": (
        shares_figure,
        (
            "Exposed communication as a share of the step, predicted against measured; dotted: the"
            " threshold."
        ),
    ),
    "replay": (
        replay_figure,
        (
            "Recordings replayed behind links of another rate, against the step recorded there."
            " Dashed and dotted: as above."
        ),
    ),
    "all-reduce": (
        all_reduce_figure,
        "All-reduces of sizes that no calibration measured: every run, and what is predicted.",
    ),
}
"""The plots by name, each with its caption."""


def write_study(study: DistributedStudy, folder: str | Path, force: bool = False) -> list[Path]:
    """Write distributed.md, .csv, .json and the plots into `folder`, made if missing. Those of an
    earlier study that this one lacks are removed.

    Raises DlperfError for a folder that cannot be made or holds foreign files (unless `force`);
    WorkFailed if the disk refuses.
    """
    draw = {name: partial(figure, study) for name, (figure, _) in PLOTS.items()}
    pngs = to_pngs(draw, "dlperf validate --distributed")
    files: dict[str, str | bytes] = {
        "distributed.md": study_to_markdown(study, pngs),
        "distributed.json": json.dumps(study.to_json(), indent=1, allow_nan=False) + "\n",
    }
    if study.rows:
        files["distributed.csv"] = runs_to_csv(
            study.rows,
            ("ranks", "rate", "calibrated_at"),
            {
                "error": "error_frac",
                "repeatability": "repeatability_frac",
                **{name: name for name in ("threshold", "right", "met", "inside")},
            },
        )
    earlier = ["distributed.csv", *(f"{name}.png" for name in PLOTS)]
    return write_files(folder, {**files, **pngs}, force, earlier)
