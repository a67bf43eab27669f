"""Reports and predictions as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dlperf.core.text import fit, printable, text_width
from dlperf.core.trace import Trace
from dlperf.core.units import format_bytes, format_percent, format_seconds
from dlperf.report.accuracy import PhaseAccuracy
from dlperf.report.layer_comparison import phases_of, root_of, rows_of
from dlperf.report.layers import error_columns, layer_columns
from dlperf.report.outline import FOLDED, REST, TreeLine, outline
from dlperf.report.table import Column, format_error, format_table

if TYPE_CHECKING:
    from dlperf.core.measurement import Measurement
    from dlperf.forecast.epoch import Epoch
    from dlperf.forecast.prediction import Prediction, Step
    from dlperf.report.comparison import Report

MAX_LINES = 60
"""Lines of a layer table in text; longer ones are folded."""


def report_to_text(
    report: Report,
    width: int | None = None,
    max_lines: int | None = MAX_LINES,
    all_columns: bool = False,
) -> str:
    """The report as plain text, at most `width` columns wide (default: the terminal's, 120 where
    there is none).

    With `all_columns` tables are as wide as they are, whatever the width.

    With several predictors, the first one's layers in full, then all predictors' errors side by
    side. A table of more than `max_lines` lines is folded (None: never); the sums stay whole.
    """
    width = text_width() if width is None else width
    room = None if all_columns else width
    phases = phases_of(report.inference)
    blocks = [wrap(heading(report), width), _summary(report, width)]
    outlines = [(label, report.outline(label, max_lines)) for label in report.predictors]
    label, lines = outlines[0]
    title = f"layers, {printable(label)}" + (
        " (times of forward, backward and optimizer)" if not report.inference else ""
    )
    blocks.append(
        f"{title}\n{format_table(layer_columns(lines, phases, measured=True), room)}{_folding_note(lines)}"
    )
    if len(outlines) > 1:
        blocks.append(
            "layers, error of each"
            f" predictor\n{format_table(error_columns(outlines, phases), room)}"
        )
    blocks.append(f"accuracy\n{format_table(accuracy_columns(report.accuracy), room)}")
    blocks.append(wrap(ACCURACY_NOTE, min(width, 120)))
    blocks += _remarks(report.remarks, width)
    blocks.append("\n".join(wrap(line, width) for line in report.provenance))
    text = "\n\n".join(blocks) + "\n"
    return text if all_columns else fit(text, width)


ACCURACY_NOTE = (
    "err: predicted / actual - 1. MAPE: mean |err| over the layers that take >= 1 % of their phase"
    " (in brackets how many), and over all measured layers. floor: what a repeated measurement of"
    " the step differed by. spread: mean (90th - 10th percentile) / median of those layers'"
    " samples. weighted: sum |predicted - actual| / sum actual. seen: share of the phase that the"
    " measurement attributes to layers."
)


def wrap(text: str, width: int, indent: str = "") -> str:
    """The text in lines of at most `width` characters; later lines are indented."""
    return textwrap.fill(printable(text), width, subsequent_indent=indent, break_on_hyphens=False)


def _remarks(remarks: Sequence[str], width: int) -> list[str]:
    return ["\n".join(wrap(f"- {remark}", width, "  ") for remark in remarks)] if remarks else []


def heading(report: Report) -> str:
    """What was compared, in one line."""
    what = "inference" if report.inference else "training step"
    threads = report.measurement.threads
    return (
        f"{printable(report.target)}: {what}, batch size {report.batch_size}, {threads}"
        f" thread{'s' if threads != 1 else ''}, on {report.machine}"
    )


def _summary(report: Report, width: int) -> str:
    lines = []
    for prediction, label in zip(report.predictions, report.predictors):
        sentence = step_sentence(
            prediction.step,
            report.measurement.step["total"].median,
            report.measurement.repeatability_frac,
        )
        lines.append(wrap(f"{label}: {sentence}", width, "  "))
    return "\n".join(lines)


def step_sentence(step: Step, actual_s: float, repeatability_frac: float | None) -> str:
    """The step predicted and measured, in words."""
    measured = f"measured {format_seconds(actual_s)}" + (
        f" (repeats within {format_percent(repeatability_frac)})"
        if repeatability_frac is not None
        else ""
    )
    if step.total_s is None:
        return f"no whole step predicted; {measured}"
    text = f"step predicted {format_seconds(step.total_s)}"
    if step.low_s is not None and step.high_s is not None:
        inside = "inside" if step.low_s <= actual_s <= step.high_s else "outside"
        text += f" (90 %: {format_seconds(step.low_s)} .. {format_seconds(step.high_s)})"
        return (
            f"{text}, {measured}: {format_error(step.total_s / actual_s - 1)}, {inside} the"
            " interval"
        )
    return f"{text}, {measured}: {format_error(step.total_s / actual_s - 1)}"


def accuracy_columns(accuracy: Sequence[PhaseAccuracy]) -> list[Column]:
    """The accuracy table's columns; phases that a predictor does not speak of are left out."""
    accuracy = [
        a
        for a in accuracy
        if a.predicted_s is not None or a.mape_frac is not None or a.phase == "step"
    ]

    def percent(value: float | None) -> str:
        return format_percent(value)

    return [
        Column("predictor", tuple(printable(a.predictor) for a in accuracy), align_left=True),
        Column("phase", tuple(a.phase for a in accuracy), align_left=True),
        Column("pred", tuple(format_seconds(a.predicted_s) for a in accuracy)),
        Column("actual", tuple(format_seconds(a.actual_s) for a in accuracy)),
        Column("err", tuple(format_error(a.error_frac) for a in accuracy)),
        Column("floor", tuple(percent(a.repeatability_frac) for a in accuracy)),
        Column("MAPE >= 1 %", tuple(_with_count(a.mape_frac, a.n_layers) for a in accuracy)),
        Column("MAPE all", tuple(_with_count(a.mape_all_frac, a.n_all) for a in accuracy), rank=1),
        Column("spread", tuple(percent(a.spread_frac) for a in accuracy), rank=2),
        Column("weighted", tuple(percent(a.weighted_frac) for a in accuracy), rank=4),
        Column(
            "seen",
            tuple("-" if a.seen_frac is None else f"{100 * a.seen_frac:.0f} %" for a in accuracy),
            rank=3,
        ),
    ]


def _with_count(value: float | None, count: int) -> str:
    return "-" if value is None else f"{format_percent(value)} ({count})"


def _folding_note(lines: Sequence[TreeLine]) -> str:
    n_hidden = sum(line.n_layers for line in lines if line.kind in (FOLDED, REST))
    return (
        f"\n{n_hidden} layers stand in folded lines; CSV, JSON and HTML have each of them"
        if n_hidden
        else ""
    )


def prediction_to_text(
    prediction: Prediction,
    epoch: Epoch | None = None,
    width: int | None = None,
    max_lines: int | None = MAX_LINES,
) -> str:
    """A prediction alone as plain text: layers, step with its 90 % interval, memory, coverage,
    warnings, and the epoch if one was forecast.
    """
    width = text_width() if width is None else width
    trace, step = prediction.trace, prediction.step
    rows = rows_of(prediction, None, prediction.predictor)
    phases = phases_of(trace.inference)
    lines = outline(rows, root_of(trace), types_of(trace), max_lines)
    what = "inference" if trace.inference else "training step"
    blocks = [
        wrap(
            f"{trace.target or root_of(trace)}: {what}, batch size {trace.batch_size},"
            f" {prediction.threads} thread{'s' if prediction.threads != 1 else ''}, on"
            f" {prediction.machine.cpu.model}, predictor {prediction.predictor}",
            width,
        ),
        format_table(layer_columns(lines, phases, measured=False), width) + _folding_note(lines),
        "\n".join(
            wrap(f"{name:<12} {value}", width, " " * 13)
            for name, value in _step_lines(step, prediction, epoch)
        ),
    ]
    remarks = [
        *coverage_remarks(prediction),
        *(f"warning: {w}" for w in prediction.warnings),
        *trace.notes,
        *prediction.prices.notes,
    ]
    blocks += _remarks([*remarks, *(() if epoch is None else epoch.notes)], width)
    return fit("\n\n".join(blocks) + "\n", width)


def _step_lines(step: Step, prediction: Prediction, epoch: Epoch | None) -> list[tuple[str, str]]:
    parts = [("forward", step.forward_s)]
    if not prediction.trace.inference:
        parts += [
            ("backward", step.backward_s),
            ("optimizer", step.optimizer_s),
            ("zero_grad", step.zero_grad_s),
        ]
    total = format_seconds(step.total_s)
    if step.low_s is not None and step.high_s is not None:
        total += f"   (90 % interval {format_seconds(step.low_s)} .. {format_seconds(step.high_s)})"
    lines = [(name, format_seconds(seconds)) for name, seconds in parts] + [("step", total)]
    of_all, each = (
        (f" of all {prediction.workers} workers", ", each worker")
        if prediction.workers > 1
        else ("", "")
    )
    if step.total_s:
        lines.append(
            (
                "throughput",
                _rate(prediction.workers * prediction.trace.batch_size / step.total_s) + of_all,
            )
        )
    if step.peak_memory_bytes is not None:
        without = (
            ""
            if prediction.machine.footprints
            else "; torch's own share is not in the machine file"
        )
        lines.append(
            (
                "peak memory",
                (
                    f"{format_bytes(step.peak_memory_bytes)} above an idle process that has"
                    f" imported torch{each}{without}"
                ),
            )
        )
    if prediction.page_faults is not None:
        lines.append(("page faults", prediction.page_faults.sentence()))
    if bounds := bound_shares(prediction):
        lines.append(
            (
                "limited by",
                ", ".join(f"{name} {100 * share:.0f} %" for name, share in bounds.items()),
            )
        )
    return lines + ([] if epoch is None else epoch_lines(epoch))


def epoch_lines(epoch: Epoch) -> list[tuple[str, str]]:
    """An epoch and the whole run with their parts, each by its name."""
    parts = [
        ("steps", epoch.steps_s),
        ("around them", epoch.loop_s),
        ("loading", epoch.loading_s),
        ("validation", epoch.evaluation_s),
    ]
    parts += [
        ("checkpoint", epoch.pauses_s),
        ("averaging", epoch.averaging_s),
        ("waiting for the slowest worker", epoch.waiting_s),
    ]
    around = [
        ("preparation", epoch.preparation_s),
        ("first step", epoch.first_step_s),
        ("workers' start", epoch.start_s),
        ("test", epoch.test_s),
    ]

    def listed(named: list[tuple[str, float | None]]) -> str:
        return "".join(f", {name} {format_seconds(seconds)}" for name, seconds in named if seconds)

    shares = f" shared by {epoch.workers} workers," if epoch.workers > 1 else ""
    n_steps = f"{epoch.steps_per_epoch} step{'s' * (epoch.steps_per_epoch != 1)}"
    waits = "; the loader binds" if epoch.bound == "loader" else ""
    return [
        (
            "epoch",
            (
                f"{format_seconds(epoch.epoch_s)}   ({epoch.samples} samples{shares} in"
                f" {n_steps}{listed(parts)}{waits})"
            ),
        ),
        (
            "run",
            (
                f"{format_seconds(epoch.total_s)}   ({epoch.epochs}"
                f" epoch{'s' if epoch.epochs != 1 else ''}{listed(around)})"
            ),
        ),
    ]


def _rate(samples_per_s: float) -> str:
    return (
        f"{samples_per_s:,.0f} samples/s"
        if samples_per_s >= 100
        else f"{samples_per_s:.3g} samples/s"
    )


def bound_shares(prediction: Prediction) -> Mapping[str, float]:
    """The share of the predicted time that each resource bounds, the largest first."""
    sums: dict[str, float] = {}
    for item in prediction.prices.items:
        sums[item.bound] = sums.get(item.bound, 0.0) + item.seconds
    total_s = sum(sums.values())
    return (
        {
            name: seconds / total_s
            for name, seconds in sorted(sums.items(), key=lambda pair: -pair[1])
        }
        if total_s
        else {}
    )


def coverage_remarks(prediction: Prediction, prefix: str = "") -> list[str]:
    """What the predictor could not price or express, by name."""
    remarks = []
    if prediction.unpriced:
        names = ", ".join(f"{op} x{count}" for op, count in prediction.unpriced.items())
        share = format_percent(1 - prediction.priced_time_frac)
        remarks.append(
            f"{prefix}{share} of the predicted time stands on {sum(prediction.unpriced.values())}"
            f" ops without a price: {names}"
        )
    if prediction.prices.unsupported:
        remarks.append(
            f"{prefix}does not speak of {len(prediction.prices.unsupported)} layers:"
            f" {some(prediction.prices.unsupported)}"
        )
    silent = [
        phase
        for phase in phases_of(prediction.trace.inference)
        if phase not in prediction.prices.phases
    ]
    if silent:
        remarks.append(f"{prefix}does not speak of the {' and the '.join(silent)}")
    return remarks


def some(names: Sequence[str], most: int = 12) -> str:
    """The names, the first ones of many."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def types_of(trace: Trace) -> dict[str, str]:
    """The modules' types by qualified name."""
    return {layer.name: layer.type for layer in trace.layers}


def measurement_to_text(measurement: Measurement, width: int | None = None) -> str:
    """A measurement alone as plain text: its layers' medians with their spread, and the step."""
    width = text_width() if width is None else width
    phases = phases_of(measurement.inference)
    columns = [
        Column(
            "layer", tuple(printable(times.layer) for times in measurement.layers), align_left=True
        ),
        Column(
            "type",
            tuple(printable(times.type) for times in measurement.layers),
            rank=1,
            align_left=True,
        ),
    ]
    for phase in phases:
        samples = [times.phase(phase) for times in measurement.layers]
        columns.append(
            Column(
                "median",
                tuple("-" if s is None else format_seconds(s.median) for s in samples),
                phase,
            )
        )
        columns.append(
            Column(
                "spread",
                tuple("-" if s is None else f"{100 * s.spread_frac:.0f} %" for s in samples),
                phase,
            )
        )
    what = "inference" if measurement.inference else "training step"
    threads = f"{measurement.threads} thread{'s' if measurement.threads != 1 else ''}"
    where = (
        f"batch size {measurement.batch_size}, {threads}, on"
        f" {measurement.machine or 'this machine'}"
    )
    blocks = [wrap(f"{measurement.target or 'model'}: {what}, {where}", width)]
    if measurement.layers:
        blocks.append(format_table(columns, width))
    blocks.append("\n".join(step_lines(measurement)))
    blocks += _remarks(measurement.notes, width)
    return fit("\n\n".join(blocks) + "\n", width)


def step_lines(measurement: Measurement) -> list[str]:
    """The measured step by phase, with the spread of its samples; how far a repetition was off;
    memory.
    """
    step = [
        f"{name:<12} {format_seconds(samples.median):>8}   (spread"
        f" {format_percent(samples.spread_frac)}, {len(samples.values)} samples)"
        for name, samples in measurement.step.items()
    ]
    if measurement.repeatability_frac is not None:
        step.append(
            f"{'repetition':<12} {format_percent(measurement.repeatability_frac):>8}   (distance of a"
            " second measurement of the step)"
        )
    if measurement.peak_memory_bytes is not None:
        step.append(
            f"{'peak memory':<12} {format_bytes(measurement.peak_memory_bytes):>8}   (the most that"
            " three steps of a fresh process add)"
        )
    return step
