"""A study of trainings as text, and as a folder: training.md, CSV, plots of time over the number of
workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from dlperf.report.document import Column, escape, format_error
from dlperf.report.drawing import (
    ACTUAL_COLOR,
    DIM,
    PHASE_COLORS,
    new_figure,
    plain,
    to_pngs,
)
from dlperf.report.writing import write_files
from dlperf.studies.results import (
    format_amount,
    percent,
    runs_to_csv,
    tables_to_markdown,
    tables_to_text,
)
from dlperf.studies.trainings.cases import KINDS, ForecastTable, TrainingForecast, TrainingStudy
from dlperf.studies.trainings.runs import BATCH_SIZE

NOTE = (
    "Error: predicted / measured - 1, the median over the runs. Delta: |measured - predicted| /"
    " predicted, as in Viebke et al. 2019. Repeatability: (largest - smallest) / median of the"
    " measured runs; no error below it means anything."
)


def summary_columns(study: TrainingStudy) -> list[Column]:
    """One row a kind of case, in percent, beside what must be and what is aimed at."""
    found = study.summaries
    return [
        Column("what", tuple(KINDS[s.kind].text for s in found), align_left=True),
        Column("cases", tuple(str(s.n) for s in found)),
        Column("median", tuple(percent(s.median_frac) for s in found), "|error|"),
        Column("worst", tuple(percent(s.worst_frac) for s in found), "|error|"),
        Column("repeatability", tuple(percent(s.repeatability_frac) for s in found)),
        Column("must", tuple(percent(KINDS[s.kind].threshold_frac) for s in found)),
        Column("aim", tuple(percent(KINDS[s.kind].target_frac) for s in found)),
        Column("within must", tuple(percent(s.within_frac) for s in found)),
    ]


def row_columns(rows: Sequence[TrainingForecast]) -> list[Column]:
    """One row a case."""
    return [
        Column("case", tuple(row.case for row in rows), align_left=True),
        Column("measured", tuple(format_amount(row.measured, row.unit) for row in rows)),
        Column("predicted", tuple(format_amount(row.predicted, row.unit) for row in rows)),
        Column("error", tuple(format_error(row.error_frac) for row in rows)),
        Column("repeatability", tuple(percent(row.repeatability_frac) for row in rows)),
        Column("Delta", tuple(percent(row.delta_frac) for row in rows)),
    ]


def accuracy_columns(study: TrainingStudy) -> list[Column]:
    """The form of the paper's Table IX: the mean error of each network over its numbers of workers,
    as Delta and as MAPE.
    """
    rows = [row for row in study.rows if row.workers is not None]
    networks = list(dict.fromkeys(row.network for row in rows))

    def means(value: str) -> tuple[str, ...]:
        own = [
            [abs(getattr(row, value)) for row in rows if row.network == name] for name in networks
        ]
        return tuple(percent(sum(values) / len(values)) for values in own)

    return [
        Column("network", tuple(networks), align_left=True),
        Column("Delta", means("delta_frac")),
        Column("MAPE", means("error_frac")),
    ]


def forecast_columns(found: ForecastTable) -> list[Column]:
    """A table of forecasts in minutes, as the paper's Tables X and XI have them."""
    cells = [
        tuple(
            "-" if row[index] is None else f"{(row[index] or 0.0) / 60:.1f}"
            for row in found.seconds
        )
        for index in range(len(found.columns))
    ]
    return [
        Column("", found.rows, align_left=True),
        *(Column(title, own) for title, own in zip(found.columns, cells)),
    ]


def _blocks(study: TrainingStudy) -> list[tuple[str, list[Column]]]:
    blocks = [("Summary, %", summary_columns(study))] if study.rows else []
    for kind in KINDS:
        own = [row for row in study.rows if row.kind == kind]
        if own:
            blocks.append(
                (f"{KINDS[kind].text[0].upper()}{KINDS[kind].text[1:]}", row_columns(own))
            )
    if any(row.workers is not None for row in study.rows):
        blocks.append(("Mean errors over the numbers of workers, %", accuracy_columns(study)))
    return [*blocks, *((found.title, forecast_columns(found)) for found in study.tables)]


def study_to_text(study: TrainingStudy, width: int | None = None) -> str:
    """The study for a terminal."""
    failures = (f"failed: {line}" for line in study.failures)
    return tables_to_text(_blocks(study), after=failures, width=width)


def study_to_markdown(study: TrainingStudy, images: Iterable[str] = ()) -> str:
    """The whole study as Markdown; `images` are the file names of its plots."""
    return tables_to_markdown(
        "--training",
        "How right forecasts of trainings are",
        study.provenance,
        _blocks(study),
        after_first=(escape(NOTE), *(f"![{escape(name)}]({name})" for name in images)),
        failures=study.failures,
    )


def scaling_figure(study: TrainingStudy, network: str) -> Figure | None:
    """Predicted and measured total time over the number of workers (the form of the paper's Figures
    5 to 7).
    """
    rows = sorted(
        (row for row in study.rows if row.workers is not None and row.network == network),
        key=lambda row: row.workers or 0,
    )
    if not rows:
        return None
    figure = new_figure(5.6, 3.8)
    ax = figure.subplots()
    x = [row.workers or 0 for row in rows]
    ax.plot(
        x,
        [row.predicted for row in rows],
        marker="o",
        color=PHASE_COLORS["backward"],
        label="predicted",
    )
    spread = [
        [row.measured - row.measured_span[0] for row in rows],
        [row.measured_span[1] - row.measured for row in rows],
    ]
    ax.errorbar(
        x,
        [row.measured for row in rows],
        yerr=spread,
        fmt="s",
        color=ACTUAL_COLOR,
        capsize=3,
        label="measured (all runs)",
    )
    ax.set_xscale("log", base=2)
    ax.set_xticks(x, [str(p) for p in x])
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    ax.set(xlabel="workers p (processes of one thread)", ylabel="total training time, s")
    ax.set_title(
        f"{plain(network)}, one run of networks/train_workers.py, batch size {BATCH_SIZE}\non"
        f" {plain(study.provenance.machine, 60)}",
        fontsize=9,
    )
    ax.grid(True, color=DIM, alpha=0.3)
    ax.legend()
    return figure


def write_study(study: TrainingStudy, folder: str | Path, force: bool = False) -> list[Path]:
    """Write training.md, training.csv and a plot for each network into `folder`, made if missing.
    Plots of an earlier study that this one lacks are removed.

    Raises DlperfError for a folder that cannot be made or holds foreign files (unless `force`);
    WorkFailed if the disk refuses.
    """
    networks = dict.fromkeys(row.network for row in study.rows if row.workers is not None)
    draw = {f"workers-{network}": partial(scaling_figure, study, network) for network in networks}
    pngs = to_pngs(draw, "dlperf validate --training")
    texts = {
        "training.md": study_to_markdown(study, pngs),
        "training.csv": runs_to_csv(study.rows),
    }
    return write_files(folder, {**texts, **pngs}, force, ["workers-*.png"])
