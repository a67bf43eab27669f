"""Predictions of a step beside its measurement."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from dlperf.core.display import Displayed
from dlperf.core.errors import DlperfError, check_type
from dlperf.core.measurement import Measurement
from dlperf.forecast.prediction import Prediction
from dlperf.ops.roofs import LEVELS
from dlperf.report.accuracy import PhaseAccuracy, accuracy_of
from dlperf.report.layer_comparison import (
    MEASURED,
    PREDICTED,
    LayerComparison,
    names_of,
    phases_of,
    root_of,
    rows_of,
)
from dlperf.report.outline import TreeLine, outline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TRIPLE = ("predicted_s", "actual_s", "error_frac")


@dataclass(frozen=True, repr=False)
class Report(Displayed, by="dlperf.report.summaries"):
    """One measured step and what one or several predictors said of it.

    `predictors` are the names under which the predictions go, each once. `created` is the time of
    the comparison (ISO 8601, UTC), `command` the command line that made it, if one did.
    """

    predictions: tuple[Prediction, ...]
    measurement: Measurement
    predictors: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    command: str = ""
    created: str = ""

    @property
    def target(self) -> str:
        """What was predicted and measured."""
        return (
            self.measurement.target
            or self.predictions[0].trace.target
            or root_of(self.predictions[0].trace)
        )

    @property
    def batch_size(self) -> int:
        """Samples a step."""
        return self.measurement.batch_size

    @property
    def inference(self) -> bool:
        """Whether the step is a forward pass alone."""
        return self.measurement.inference

    @property
    def machine(self) -> str:
        """The measuring machine's processor; the predicted one's where the measurement does not
        tell.
        """
        return self.measurement.machine or self.predictions[0].machine.cpu.model

    @cached_property
    def rows(self) -> tuple[tuple[LayerComparison, ...], ...]:
        """The rows of each predictor, aligned with `predictors`."""
        return tuple(
            rows_of(prediction, self.measurement, label)
            for prediction, label in zip(self.predictions, self.predictors)
        )

    @cached_property
    def accuracy(self) -> tuple[PhaseAccuracy, ...]:
        """Each predictor's accuracy by phase, the step last."""
        return tuple(
            entry
            for rows, prediction, label in zip(self.rows, self.predictions, self.predictors)
            for entry in accuracy_of(rows, prediction, self.measurement, label)
        )

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row a layer and predictor, the layers in the order of execution.

        Columns: layer, type, predictor; for each of forward, backward, optimizer (forward alone in
        inference) and total ``*_predicted_s``, ``*_actual_s``, ``*_error_frac`` (predicted / actual
        - 1); bound, flops, bytes, source; ``*_spread_frac`` ((90th - 10th percentile) / median of
        the measured samples); side (``both``, ``predicted only``, ``measured only``); L1_bytes,
        L2_bytes, L3_bytes, DRAM_bytes, which each level of the memory moves in all phases (a model,
        :mod:`dlperf.hierarchy`). NaN where a side does not know; a total lacking a part is NaN.
        """
        return pd.DataFrame(
            [_record(row, self.inference) for rows in self.rows for row in rows],
            columns=_columns(self.inference),
        )

    @cached_property
    def mape(self) -> pd.DataFrame:
        """The accuracy as a table: one row a predictor and phase (``step`` is the whole); see
        :class:`dlperf.report.accuracy.PhaseAccuracy`.

        `mape_frac` is taken over the layers of at least 1 % of their phase, `mape_all_frac` over
        all measured layers; `repeatability_frac` and `spread_frac` say what a repetition would differ by.
        NaN where a side does not know.
        """
        rows = [
            {name: math.nan if value is None else value for name, value in asdict(entry).items()}
            for entry in self.accuracy
        ]
        return pd.DataFrame(rows, columns=[f.name for f in fields(PhaseAccuracy)])

    @property
    def unpredicted(self) -> tuple[str, ...]:
        """Layers that were measured and that no predictor has a row for."""
        missing = [set(names_of(rows, MEASURED)) for rows in self.rows]
        return tuple(
            name
            for name in names_of(self.rows[0], MEASURED)
            if all(name in names for names in missing)
        )

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """Layers that were predicted and that the measurement does not name."""
        return tuple(
            dict.fromkeys(name for rows in self.rows for name in names_of(rows, PREDICTED))
        )

    @cached_property
    def remarks(self) -> tuple[str, ...]:
        """What a reader must know beside the numbers: one-sided layers, unpriced ops, silent
        predictors, warnings, notes.
        """
        from dlperf.report.text import coverage_remarks, some

        found = [f"warning: {text}" for text in self.warnings]
        for rows, prediction, label in zip(self.rows, self.predictions, self.predictors):
            found.extend(f"warning: {label}: {text}" for text in prediction.warnings)
            if names := names_of(rows, MEASURED):
                found.append(
                    f"{label}: {len(names)} measured layers have no predicted row and count as a"
                    f" prediction of 0: {some(names)}"
                )
            found.extend(coverage_remarks(prediction, f"{label}: "))
            if prediction.page_faults is not None:
                found.append(f"{label}: page faults are {prediction.page_faults.sentence()}")
            found.extend(f"{label}: {note}" for note in prediction.prices.notes)
        if self.unmeasured:
            found.append(
                f"{len(self.unmeasured)} predicted layers were not measured:"
                f" {some(self.unmeasured)}"
            )
        for note in (*self.predictions[0].trace.notes, *self.measurement.notes):
            found.append(note)
        disturbed = self.measurement.step["total"].n_disturbed
        if disturbed:
            found.append(
                f"{disturbed} disturbed steps were dropped from"
                f" {disturbed + len(self.measurement.step['total'].values)} measured ones"
            )
        return tuple(dict.fromkeys(found))

    @cached_property
    def provenance(self) -> tuple[str, ...]:
        """Where the numbers come from: versions, machine file, date, command; one line each."""
        lines = []
        if self.measurement.versions:
            lines.append(
                "measured with "
                + ", ".join(
                    f"{name} {version}" for name, version in self.measurement.versions.items()
                )
            )
        for machine in dict.fromkeys(
            (p.machine.cpu.model, p.machine.mode, p.machine.created, p.machine.path)
            for p in self.predictions
        ):
            model, mode, created, path = machine
            lines.append(
                f"predicted for {model} ({mode}"
                f" calibration{', ' + created if created else ''}{', ' + path if path else ''})"
            )
        if self.created:
            lines.append(f"compared {self.created}")
        if self.command:
            lines.append(f"command: {self.command}")
        return tuple(lines)

    def outline(self, predictor: str, max_lines: int | None = None) -> tuple[TreeLine, ...]:
        """One predictor's rows in the shape of the model; see
        :func:`dlperf.report.outline.outline`.
        """
        from dlperf.report.text import types_of

        place = self.predictors.index(predictor)
        trace = self.predictions[place].trace
        return outline(self.rows[place], root_of(trace), types_of(trace), max_lines)

    def to_text(
        self, width: int | None = None, max_lines: int | None = 60, all_columns: bool = False
    ) -> str:
        """Plain text, at most `width` columns wide (default: the terminal's, 120 where there is
        none); layer tables beyond `max_lines` lines are folded.

        What a table has no room for is named below it. With `all_columns` tables are as wide as
        they are.
        """
        from dlperf.report.text import report_to_text

        return report_to_text(self, width, max_lines, all_columns)

    def to_markdown(self, images: Sequence[str] = ()) -> str:
        """Markdown with every layer; `images` are links to the plots, if they lie beside it."""
        from dlperf.report.markdown import report_to_markdown

        return report_to_markdown(self, images)

    def to_csv(self) -> str:
        """The frame as CSV, with target, batch size, threads, machine, versions and date in every
        row.
        """
        from dlperf.report.export import reports_to_csv

        return reports_to_csv([self])

    def to_json(self) -> dict[str, Any]:
        """The report as JSON data (schema ``dlperf.report``); null where a side does not know."""
        from dlperf.report.export import report_to_json

        return report_to_json(self)

    def to_html(self) -> str:
        """One self-contained HTML page, plots included."""
        from dlperf.report.html import reports_to_html

        return reports_to_html([self])

    def figures(self) -> dict[str, Figure]:
        """The plots by name, as matplotlib figures: ``layers``, ``scatter``, ``roofline``,
        ``hierarchy``, ``time``.

        The two rooflines are not there if the machine file lacks what they need.
        """
        from dlperf.report.plots import figures_of

        return figures_of(self)

    @cached_property
    def pngs(self) -> dict[str, bytes]:
        """The plots by name as PNG, drawn once."""
        from dlperf.report.plots import pngs_of

        return pngs_of(self)

    def plot(self, folder: str | Path = ".", prefix: str = "") -> list[Path]:
        """Write the plots as PNG into `folder` (made if missing), ``PREFIXlayers.png`` and so on;
        see :meth:`figures`.

        Raises DlperfError if the folder cannot be made, WorkFailed if the disk refuses.
        """
        from dlperf.report.writing import write_plots

        return write_plots(self, folder, prefix)


def compare(
    prediction: Prediction | Sequence[Prediction],
    measurement: Measurement,
    *,
    command: str = "",
    created: str | None = None,
) -> Report:
    """Put one or several predictions of a step beside its measurement.

    `created` defaults to now. Raises DlperfError for an argument of another type, and where they do
    not speak of the same step: another batch size or thread count, training against inference, or
    no prediction at all. Another target's name is a warning in the report.
    """
    predictions = tuple(prediction) if isinstance(prediction, (list, tuple)) else (prediction,)
    if not predictions:
        raise DlperfError("compare: no prediction given; pass one, or several in a list")
    warnings = []
    for p in predictions:
        check_type("compare", "prediction", p, Prediction, "dlperf.predict makes one")
    check_type(
        "compare",
        "measurement",
        measurement,
        Measurement,
        "dlperf.measure makes one, Measurement.load(path) reads one",
    )
    for p in predictions:
        if p.trace.batch_size != measurement.batch_size:
            raise DlperfError(
                f"compare: the prediction is for batch size {p.trace.batch_size}, the measurement"
                f" for {measurement.batch_size}; give both the same"
            )
        if p.trace.inference != measurement.inference:
            kinds = {True: "inference", False: "training"}
            sides = (
                f"the prediction is of {kinds[p.trace.inference]}, the measurement of"
                f" {kinds[measurement.inference]}"
            )
            raise DlperfError(f"compare: {sides}; give both the same")
        if p.threads != measurement.threads:
            raise DlperfError(
                f"compare: the prediction is for {p.threads} thread(s), the measurement was taken"
                f" with {measurement.threads}; give dlperf.predict or dlperf.measure the other's"
                " threads"
            )
        if p.trace.target and measurement.target and p.trace.target != measurement.target:
            warnings.append(f"predicted target {p.trace.target}, measured {measurement.target}")
    predictors: list[str] = []
    for p in predictions:
        n_before = sum(
            other == p.predictor or other.startswith(f"{p.predictor} #") for other in predictors
        )
        predictors.append(p.predictor if not n_before else f"{p.predictor} #{n_before + 1}")
    if created is None:
        created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return Report(
        predictions,
        measurement,
        tuple(predictors),
        tuple(dict.fromkeys(warnings)),
        command,
        created,
    )


def _columns(inference: bool) -> list[str]:
    phases = phases_of(inference)
    return [
        "layer",
        "type",
        "predictor",
        *(f"{part}_{name}" for part in (*phases, "total") for name in _TRIPLE),
        "bound",
        "flops",
        "bytes",
        "source",
        *(f"{phase}_spread_frac" for phase in phases),
        "side",
        *(f"{level}_bytes" for level in LEVELS),
    ]


def _record(row: LayerComparison, inference: bool) -> dict[str, Any]:
    record: dict[str, Any] = {"layer": row.layer, "type": row.type, "predictor": row.predictor}
    for phase in (*phases_of(inference), "total"):
        times = row.total if phase == "total" else row.phase(phase)
        values = (
            (times.whole_predicted_s, times.whole_actual_s, times.error_frac)
            if times is not None
            else (None, None, None)
        )
        for name, value in zip(_TRIPLE, values):
            record[f"{phase}_{name}"] = math.nan if value is None else value
        if phase != "total":
            record[f"{phase}_spread_frac"] = (
                math.nan if times is None or times.spread_frac is None else times.spread_frac
            )
    flops, n_bytes = (math.nan if count is None else count for count in (row.flops, row.bytes))
    record.update(bound=row.bound, source=row.source, flops=flops, bytes=n_bytes, side=row.side)
    moved = dict(row.level_bytes)
    record.update(
        {f"{level}_bytes": round(moved[level]) if level in moved else math.nan for level in LEVELS}
    )
    return record
