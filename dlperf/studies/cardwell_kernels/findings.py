"""What was measured on the ranks, how far off each roofline is (Table 2.6, anew), and the page, the
JSON file and the plots of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from dlperf.core.units import format_seconds, format_si
from dlperf.models import ridgeline
from dlperf.report.drawing import SERIES, new_figure, to_pngs
from dlperf.report.ridgeline import (
    MeasuredPoint,
    PlanePoint,
    System,
    pair_figure,
    ridgeline_figure,
    surface_figure,
)
from dlperf.report.writing import write_files
from dlperf.studies.papers.cardwell import TABLE_2_3, TABLE_2_6, mape_percent, percentage_change

SCHEMA, SCHEMA_VERSION = "dlperf.cardwell-kernels", 1
MODELS = ("original", "communication", "combined", "extended")
"""Equation 2.1; equation 2.3; equation 2.5; 2.5 with the latency of every message and no overlap
(beyond the paper).
"""


@dataclass(frozen=True, slots=True)
class Peaks:
    """The rates of the slowest rank while all run: dgemm [FLOP/s], best STREAM kernel, ping-pong at
    its best size [bytes/s], half an empty trip [s].
    """

    dgemm_flops_per_s: float
    stream_bytes_per_s: float
    stream_kernel: str
    ping_pong_bytes_per_s: float
    ping_pong_bytes: int
    latency_s: float

    @property
    def rates(self) -> ridgeline.Rates:
        """The three roofs."""
        return ridgeline.Rates(
            self.dgemm_flops_per_s, self.stream_bytes_per_s, self.ping_pong_bytes_per_s
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One algorithm at one size: Table 2.4's counts of one rank, the median time of the slowest
    rank, and what the meter saw on rank 0 (a mean).
    """

    algorithm: str
    size: int
    flops: float
    memory_bytes: float
    network_bytes: float
    n_messages: float
    metered_bytes: float
    communication_s: float
    samples_s: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median."""
        return median(self.samples_s)

    @property
    def communication_frac(self) -> float:
        """Share of the time that rank 0 spent inside calls of the network."""
        return self.communication_s / fmean(self.samples_s)

    @property
    def flops_per_s(self) -> float:
        """The rate of one rank."""
        return self.flops / self.seconds

    def predicted_flops_per_s(self, peaks: Peaks) -> tuple[float, ...]:
        """The rate that each of :data:`MODELS` predicts."""
        work = (self.flops, self.memory_bytes, self.network_bytes, peaks.rates)
        compute_s, memory_s, network_s = ridgeline.terms_s(*work).tolist()
        times_s = (
            max(compute_s, memory_s),
            max(compute_s, network_s),
            max(compute_s, memory_s, network_s),
            float(ridgeline.projected_s(*work, self.n_messages, peaks.latency_s, 0.0)),
        )
        return tuple(self.flops / seconds for seconds in times_s)


@dataclass(frozen=True, slots=True)
class Comparison:
    """An algorithm's MAPE in percent by each of :data:`MODELS`, over its sizes, and the improvement
    of each over the original.
    """

    algorithm: str
    mape: tuple[float, ...]

    @property
    def changes(self) -> tuple[float, ...]:
        """Percentage change of the models after the first (positive is better)."""
        return tuple(percentage_change(self.mape[0], new) for new in self.mape[1:])


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that was measured."""

    peaks: Peaks
    runs: tuple[Run, ...]
    n_ranks: int
    backend: str
    cpu: str
    versions: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()

    def comparisons(self) -> list[Comparison]:
        """One for each algorithm, in the order of the runs."""
        found = []
        for name in dict.fromkeys(run.algorithm for run in self.runs):
            own = [run for run in self.runs if run.algorithm == name]
            measured = [run.flops_per_s for run in own]
            by_model = zip(*(run.predicted_flops_per_s(self.peaks) for run in own))
            mape = tuple(mape_percent(measured, predicted) for predicted in by_model)
            found.append(Comparison(name, mape))
        return found

    def to_json(self) -> dict[str, Any]:
        """As a dlperf file."""
        compared = [
            {
                "algorithm": c.algorithm,
                "mape_percent": dict(zip(MODELS, c.mape)),
                "percentage_change": dict(zip(MODELS[1:], c.changes)),
            }
            for c in self.comparisons()
        ]
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "n_ranks": self.n_ranks,
            "backend": self.backend,
            "cpu": self.cpu,
            "versions": dict(self.versions),
            "notes": list(self.notes),
            "peaks": asdict(self.peaks),
            "runs": [asdict(run) for run in self.runs],
            "comparisons": compared,
        }


# -- page ------------------------------------------------------------------------------------------

CAPTIONS = {
    "rooflines": (
        "Communication roofline (left) and original roofline (right) of one rank, with the measured"
        " rates (Figures 2.3 to 2.10)."
    ),
    "surface": "The same points and both roofs in one (Figure 2.13).",
    "ridgeline": (
        "The points on the Ridgeline plane, labelled by size: what bounds each, by Table 2.4's"
        " counts."
    ),
    "communication": (
        "Share of the time that rank 0 spent inside calls of the network, waiting for the other"
        " rank included (Figure 2.4)."
    ),
}

_MODELS = (
    "MAPE of the rate that each model predicts, over the sizes below, and the improvement over the"
    " original roofline, 100 (original - new) / original. *Communication* is equation 2.3,"
    " *combined* equation 2.5; *extended*, beyond the paper, adds the latency of every message and"
    " lets nothing overlap. The table's new model is equation 2.3: its -12.9 for DGEMV shows that"
    " it can lie farther above the measured rates than the original, as 2.5 never does. The paper's"
    " own values stand beside for three other machines; the points behind them were not published."
)
_READING = (
    "A roofline is an upper bound, so an error above 100 % says how many times too high it is."
    " Where memory binds, equation 2.3 leaves out what matters and can be worse than the original,"
    " as for DGEMV in the paper. Where messages are short, latency is what the published models"
    " miss."
)


def write_findings(findings: Findings, folder: str | Path) -> list[Path]:
    """Write ``cardwell.md``, ``cardwell.json`` and the plots; the files. Raises DlperfError or
    WorkFailed where that cannot be.
    """
    description = f"dlperf cardwell_kernels, {findings.n_ranks} ranks, {findings.cpu}"
    pngs = to_pngs(_figures(findings), description, 120)
    files: dict[str, str | bytes] = {
        "cardwell.md": to_markdown(findings),
        "cardwell.json": json.dumps(findings.to_json(), indent=1, allow_nan=False),
        **{f"cardwell-{name}": png for name, png in pngs.items()},
    }
    return write_files(folder, files, force=True)


def to_markdown(findings: Findings) -> str:
    """The page."""
    peaks = findings.peaks
    where = f"{findings.n_ranks} ranks, one thread each, {findings.backend}, {findings.cpu}"
    versions = ", ".join(f"{name} {version}" for name, version in findings.versions)
    ridge_memory, ridge_network = peaks.rates.centre[1], peaks.rates.network_balance
    blocks = [
        "<!-- dlperf cardwell_kernels -->\n# The roofline with communication, measured anew",
        (
            f"Cardwell's seven algorithms (2019, chapter 2) on {where};"
            f" {'; '.join(findings.notes)}. {versions}."
        ),
        "## Peaks of one rank while all run (as in Table 2.3)",
        _table(
            ("dgemm", "STREAM", "ping-pong", "half an empty trip", "ridge OI", "ridge CAI"),
            [
                (
                    format_si(peaks.dgemm_flops_per_s, "FLOP/s"),
                    f"{format_si(peaks.stream_bytes_per_s, 'B/s')} ({peaks.stream_kernel})",
                    (
                        f"{format_si(peaks.ping_pong_bytes_per_s, 'B/s')} (at"
                        f" {peaks.ping_pong_bytes:,} B)"
                    ),
                    format_seconds(peaks.latency_s),
                    f"{ridge_memory:.3g}",
                    f"{ridge_network:.3g}",
                )
            ],
        ),
        "## Table 2.6, anew",
        _MODELS,
        _comparisons(findings),
        _READING,
        "## Plots",
        *(f"![{caption}](cardwell-{name}.png)\n\n{caption}" for name, caption in CAPTIONS.items()),
        "## Measurements",
        (
            "F, B_M and B_N by Table 2.4; *metered* is what rank 0's calls moved; seconds are"
            " medians of the slowest rank."
        ),
        _runs(findings),
    ]
    return "\n\n".join(blocks) + "\n"


def _comparisons(findings: Findings) -> str:
    header = (
        "algorithm",
        *MODELS,
        *(f"change, {model}" for model in MODELS[1:]),
        *(f"paper, {system.name}" for system in TABLE_2_3),
    )
    rows = [
        (
            c.algorithm,
            *(f"{value:,.0f} %" for value in c.mape),
            *(f"{value:.1f}" for value in c.changes),
            *TABLE_2_6[c.algorithm],
        )
        for c in findings.comparisons()
    ]
    return _table(header, rows)


def _runs(findings: Findings) -> str:
    header = (
        *("algorithm", "size", "OI", "CAI", "bound", "time", "samples", "in calls", "measured"),
        *MODELS,
        *("B_N", "metered", "messages"),
    )
    return _table(header, [_run_row(run, findings.peaks) for run in findings.runs])


def _run_row(run: Run, peaks: Peaks) -> tuple[str, ...]:
    work = (run.flops, run.memory_bytes, run.network_bytes)
    return (
        run.algorithm,
        f"{run.size:,}",
        f"{run.flops / run.memory_bytes:.3g}",
        f"{ridgeline.network_intensity(run.flops, run.network_bytes):.3g}",
        ridgeline.RESOURCES[int(ridgeline.bounding_resource(*work, peaks.rates))],
        format_seconds(run.seconds),
        str(len(run.samples_s)),
        f"{100 * run.communication_frac:.0f} %",
        format_si(run.flops_per_s, "FLOP/s"),
        *(format_si(rate, "") for rate in run.predicted_flops_per_s(peaks)),
        format_si(run.network_bytes, "B"),
        format_si(run.metered_bytes, "B"),
        f"{run.n_messages:g}",
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}", *cells])


def _figures(findings: Findings) -> dict[str, Callable[[], Figure]]:
    points = [
        MeasuredPoint(
            run.flops / run.memory_bytes,
            float(ridgeline.network_intensity(run.flops, run.network_bytes)),
            run.flops_per_s,
            run.algorithm,
        )
        for run in findings.runs
    ]
    on_plane = [
        PlanePoint(
            float(ridgeline.memory_intensity(run.memory_bytes, run.network_bytes)),
            run.flops / run.memory_bytes,
            _short(run.size),
            run.algorithm,
        )
        for run in findings.runs
    ]
    title = f"Seven algorithms on {findings.n_ranks} ranks, {findings.cpu}"
    system = System(f"{findings.n_ranks} ranks", findings.peaks.rates)
    return {
        "rooflines": partial(pair_figure, [system], points, title),
        "surface": partial(surface_figure, [system], points, title),
        "ridgeline": partial(ridgeline_figure, on_plane, findings.peaks.rates, title),
        "communication": partial(_shares, findings),
    }


def _short(size: int) -> str:
    return f"2^{size.bit_length() - 1}" if size >= 1024 and size & (size - 1) == 0 else str(size)


def _shares(findings: Findings) -> Figure:
    figure = new_figure(7.6, 4.8)
    ax = figure.subplots()
    for number, name in enumerate(dict.fromkeys(run.algorithm for run in findings.runs)):
        mine = [run for run in findings.runs if run.algorithm == name]
        mark, color = SERIES[number % len(SERIES)]
        ax.plot(
            [run.size for run in mine],
            [100 * run.communication_frac for run in mine],
            marker=mark,
            color=color,
            markersize=6,
            linewidth=1.0,
            label=name,
        )
    ax.set_xscale("log", base=2)
    ax.set(
        ylim=(0, 100),
        xlabel="problem size (N, or vertices)",
        ylabel="time in calls of the network (%)",
    )
    ax.xaxis.set_major_formatter(
        FuncFormatter(
            lambda value, _: f"{value:,.0f}" if value < 10_000 else f"2^{math.log2(value):.0f}"
        )
    )
    ax.grid(True)
    figure.legend(loc="outside right upper")
    return figure
