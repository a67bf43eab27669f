"""Pages of a step: predicted, measured, or both beside each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from dlperf.core.measurement import Measurement
from dlperf.core.prediction import PredictedStep, Step
from dlperf.core.state import REFERENCE
from dlperf.core.text import counted, printable
from dlperf.core.units import format_bytes, format_percent, format_seconds, format_si
from dlperf.core.what_if import describe
from dlperf.forecast.epoch import Epoch
from dlperf.forecast.prediction import Prediction
from dlperf.report.document import (
    Block,
    Bullets,
    Column,
    Facts,
    Heading,
    Image,
    Paragraph,
    Table,
    format_error,
    to_text,
)
from dlperf.report.layer_comparison import PHASES, PhaseAccuracy, phases_of, root_of, rows_of
from dlperf.report.layer_table import (
    FOLDED,
    REST,
    TreeLine,
    error_columns,
    layer_columns,
    layer_tree,
    marked_table,
)
from dlperf.report.op_comparison import OPS_NOTE, op_columns
from dlperf.report.step_comparison import StepComparison, coverage_remarks

MAX_OPS = 15
"""Operators in a brief page."""
MAX_LINES = 60
"""Lines of a layer table in text; longer ones are folded."""
DURING = "state during the measurement"
ACCURACY_NOTE = (
    "err: predicted / actual - 1. repeats: difference of a repeated measurement of the step."
    " MAPE: mean |err| over the layers that take >= 1 % of their phase (in brackets how many), and"
    " over all measured layers. spread: mean (90th - 10th percentile) / median of those layers'"
    " samples. weighted: sum |predicted - actual| / sum actual. seen: sum of the layers' actual"
    " times / that of the phase; it can exceed 100 %, as layers are timed with hooks, in passes of"
    " their own."
)

TRAFFIC_NOTE = (
    "Bytes that each level exchanges with the next inner level (L1: with the registers), modelled"
    " from footprints, reuse distances and the tiling of contractions. FMA: share of multiply-adds"
    " among floating-point instructions. allows: time at the lowest measured roof."
)


def step_title(
    target: str, inference: bool, batch_size: int, threads: int, machine: str, more: str = ""
) -> str:
    """The step in one line: target, kind, batch size, threads, machine.

    >>> step_title("nets.py:cnn", False, 32, 1, "Testor 9000")
    'nets.py:cnn: training step, batch size 32, 1 thread, on Testor 9000'
    """
    what = "inference" if inference else "training step"
    return (
        f"{printable(target)}: {what}, batch size {batch_size}, {threads}"
        f" thread{'s' * (threads != 1)}, on {machine}{more}"
    )


def interval_text(step: Step) -> str:
    """The step's 90 % interval, ``1.25 ms .. 1.53 ms``; empty without one."""
    if step.low_s is None or step.high_s is None:
        return ""
    return f"{format_seconds(step.low_s)} .. {format_seconds(step.high_s)}"


def _inside(step: Step, actual_s: float) -> str:
    return "inside" if (step.low_s or 0.0) <= actual_s <= (step.high_s or 0.0) else "outside"


def state_sentence(prediction: PredictedStep) -> str:
    """The machine's state that a prediction is for; empty at the reference."""
    state, machine = prediction.state, prediction.machine
    if state == REFERENCE:
        return ""
    is_usual = bool(machine.states) and state == machine.usual_state
    n = len(machine.readings)
    source = f"median of {counted(n, 'reading')}: " if is_usual else ""
    return f"state: {source}{state.describe()}"


# -- report ---------------------------------------------------------------------------------------


def report_page(
    report: StepComparison,
    images: Sequence[Image] = (),
    anchor: str = "",
    max_lines: int | None = None,
    is_brief: bool = False,
) -> list[Block]:
    """The comparison: the steps, every predictor's layers, their accuracy, `images`, remarks.

    Layer tables beyond `max_lines` lines are folded. A brief page has the layers of the first
    predictor and the errors of the others, and no bytes by level of the memory.
    """
    phases = phases_of(report.inference)
    measured = report.measurement
    title = step_title(
        report.target, report.inference, report.batch_size, measured.threads, report.machine
    )
    sides = enumerate(zip(report.predictors, report.predictions))
    sentences = (
        (label, _step_sentence(p.step, measured, report.blind_step(i))) for i, (label, p) in sides
    )
    state = report.state
    page: list[Block] = [
        Heading(title, 2 if anchor or not is_brief else 1, anchor),
        *([] if state is None else [Paragraph((f"{DURING}: {state.describe()}",))]),
        Facts((*sentences, *_memory_sentences(report))),
    ]
    trees = {label: report.layer_tree(label, max_lines) for label in report.predictors}
    for label, lines in list(trees.items())[: 1 if is_brief else None]:
        page += [
            Heading(f"Layers, {printable(label)}"),
            marked_table(layer_columns(lines, phases, measured=True), lines),
            *_folding_note(lines),
        ]
    if len(trees) > 1:
        errors = marked_table(error_columns(trees, phases), trees[report.predictors[0]])
        page += [Heading("Layers, error of each predictor"), errors]
    for label, rows in list(zip(report.predictors, report.ops))[: 1 if is_brief else None]:
        if rows:
            page += [
                Heading(f"Operators, {printable(label)}"),
                Table(op_columns(rows[:MAX_OPS] if is_brief else rows)),
                Paragraph((OPS_NOTE,), is_small=True),
            ]
    page += [
        Heading("Accuracy"),
        Table(accuracy_columns(report.accuracy)),
        Paragraph((ACCURACY_NOTE,), is_small=True),
    ]
    if images:
        page += [Heading("Plots"), *images]
    if not is_brief:
        page += [
            Heading("Bytes by level of the memory"),
            Table(traffic_columns(report)),
            Paragraph((TRAFFIC_NOTE,), is_small=True),
        ]
    if report.remarks:
        page += [*([] if is_brief else [Heading("Remarks")]), Bullets(report.remarks)]
    return [*page, Paragraph(report.provenance, is_small=True)]


def _memory_sentences(report: StepComparison) -> Iterator[tuple[str, str]]:
    """What the device's allocator had, predicted and measured."""
    peaks, predicted = report.measurement.device_memory, report.predictions[0].device_memory
    if peaks is None or predicted is None:
        return
    for name, predicted_bytes, actual_bytes in (
        ("allocated", predicted.peak_allocated_bytes, peaks.allocated_bytes),
        ("reserved", predicted.peak_reserved_bytes, peaks.reserved_bytes),
    ):
        error = format_error(predicted_bytes / actual_bytes - 1) if actual_bytes else "-"
        both = f"predicted {format_bytes(predicted_bytes)}, measured {format_bytes(actual_bytes)}"
        yield f"device memory, {name}", f"{both}: {error}"


def _step_sentence(step: Step, measurement: Measurement, blind: Step | None) -> str:
    """The step predicted and measured, in words; beside it the `blind` prediction."""
    actual_s, repeats_frac = measurement.step["total"].median, measurement.repeatability_frac
    repeats = "" if repeats_frac is None else f" (repeats within {format_percent(repeats_frac)})"
    measured = f"measured {format_seconds(actual_s)}{repeats}"
    if step.total_s is None:
        return f"no whole step predicted; {measured}"
    error = f"{measured}: {format_error(step.total_s / actual_s - 1)}"
    if interval := interval_text(step):
        error += f", {_inside(step, actual_s)} the interval"
        interval = f" (90 %: {interval})"
    if blind is not None and blind.total_s is not None:
        blind_error = format_error(blind.total_s / actual_s - 1)
        error += f"; blind: {format_seconds(blind.total_s)}, {blind_error}"
    return f"step predicted {format_seconds(step.total_s)}{interval}, {error}"


def overview_page(reports: Sequence[StepComparison]) -> list[Block]:
    """What precedes the reports on a page of all: for several a table of the cases."""
    text = "Times of layers and steps, predicted from a calibration of the machine, and measured."
    intro = Paragraph((text,), is_small=True)
    if len(reports) == 1:
        return [Heading(reports[0].target, 1), intro]
    rows, links = [], []
    for number, report in enumerate(reports, 1):
        actual_s, threads = report.measurement.step["total"].median, report.measurement.threads
        name = (
            f"{report.target}{' (inference)' if report.inference else ''}, batch size"
            f" {report.batch_size}, {counted(threads, 'thread')}"
        )
        for label, prediction in zip(report.predictors, report.predictions):
            own = {entry.phase: entry for entry in report.accuracy if entry.predictor == label}
            step, interval = prediction.step, interval_text(prediction.step)
            mapes = (own[p].mape_frac if p in own else None for p in ("forward", "backward"))
            row = {
                "case": name,
                "predictor": label,
                "predicted": format_seconds(step.total_s),
                "measured": format_seconds(actual_s),
                "error": format_error(own["step"].error_frac),
                "repeatability": format_percent(own["step"].repeatability_frac),
                "90 % interval": f"{interval}, {_inside(step, actual_s)}" if interval else "-",
                **dict(zip(("forward MAPE", "backward MAPE"), map(format_percent, mapes))),
            }
            rows.append(row)
            links.append(f"case{number}")
    columns = tuple(
        Column(title, tuple(row[title] for row in rows), align_left=title in ("case", "predictor"))
        for title in rows[0]
    )
    return [
        Heading("Predicted and measured", 1),
        intro,
        Heading("Cases", 2),
        Table(columns, links=tuple(links)),
    ]


def accuracy_columns(accuracy: Sequence[PhaseAccuracy]) -> tuple[Column, ...]:
    """The accuracy table's columns, without the phases that a predictor does not support."""
    shown = [
        a
        for a in accuracy
        if a.predicted_s is not None or a.mape_frac is not None or a.phase == "step"
    ]

    def percents(title: str, name: str, rank: int = 0, count: str = "") -> Column:
        values = [(getattr(a, name), f" ({getattr(a, count)})" if count else "") for a in shown]
        cells = ("-" if v is None else format_percent(v) + of for v, of in values)
        return Column(title, tuple(cells), rank=rank)

    seen = (a.seen_frac for a in shown)
    return (
        Column("predictor", tuple(printable(a.predictor) for a in shown), align_left=True),
        Column("phase", tuple(a.phase for a in shown), align_left=True),
        Column("pred", tuple(format_seconds(a.predicted_s) for a in shown)),
        Column("actual", tuple(format_seconds(a.actual_s) for a in shown)),
        Column("err", tuple(format_error(a.error_frac) for a in shown)),
        percents("repeats", "repeatability_frac"),
        percents("MAPE >= 1 %", "mape_frac", count="n_layers"),
        percents("MAPE all", "mape_all_frac", 1, "n_all"),
        percents("spread", "spread_frac", 2),
        percents("weighted", "weighted_frac", 4),
        Column("seen", tuple("-" if s is None else f"{100 * s:.0f} %" for s in seen), rank=3),
    )


def _folding_note(lines: Sequence[TreeLine]) -> list[Block]:
    n_hidden = sum(line.n_layers for line in lines if line.kind in (FOLDED, REST))
    note = f"{counted(n_hidden, 'layer')} in folded lines; CSV, JSON and HTML contain each of them"
    return [Paragraph((note,), is_small=True)] if n_hidden else []


def traffic_columns(report: StepComparison) -> tuple[Column, ...]:
    """Bytes moved at each level of the memory: one line per layer and phase."""
    prediction = report.predictions[0]
    rows = {row.layer: row for row in report.rows[0]}
    entries = [t for t in prediction.layer_traffic if t.phase in phases_of(report.inference)]
    times = [rows[t.layer].phase(t.phase) if t.layer in rows else None for t in entries]
    fma_fracs = (t.fma_frac for t in entries)
    return (
        Column("layer", tuple(printable(t.layer) for t in entries), align_left=True),
        Column("phase", tuple(t.phase for t in entries), align_left=True),
        Column("FLOP", tuple(format_si(t.flops, "").rstrip() if t.flops else "" for t in entries)),
        Column("FMA", tuple("" if f is None else format_percent(f) for f in fma_fracs)),
        *(
            Column(level, tuple(format_si(t.bytes_at(level), "B") for t in entries), "bytes moved")
            for level in (entries[0].levels if entries else ())
        ),
        Column(
            "lowest roof",
            tuple(t.binding(prediction.roofs) or "-" for t in entries),
            align_left=True,
        ),
        Column(
            "allows", tuple(format_seconds(t.least_s(prediction.roofs)) for t in entries), "time"
        ),
        Column("measured", tuple(format_seconds(t.actual_s if t else None) for t in times), "time"),
    )


# -- prediction -----------------------------------------------------------------------------------


def prediction_to_text(
    prediction: Prediction, epoch: Epoch | None = None, width: int | None = None
) -> str:
    """A prediction as plain text (:func:`prediction_page`)."""
    return to_text(prediction_page(prediction, epoch), width)


def prediction_page(
    prediction: Prediction, epoch: Epoch | None = None, max_lines: int | None = MAX_LINES
) -> list[Block]:
    """The prediction: layers, step with its 90 % interval, memory, coverage, warnings, and the
    epoch if one was forecast.
    """
    trace = prediction.trace
    rows = rows_of(prediction, None, prediction.predictor)
    lines = layer_tree(rows, trace, max_lines)
    title = step_title(
        trace.target or root_of(trace),
        trace.inference,
        trace.batch_size,
        prediction.threads,
        prediction.machine.cpu.model,
        f", predictor {prediction.predictor}",
    )
    told = tuple(
        line for line in (state_sentence(prediction), describe(prediction.what_if.changed)) if line
    )
    remarks = (
        *coverage_remarks(prediction),
        *(f"warning: {w}" for w in prediction.warnings),
        *trace.notes,
        *prediction.prices.notes,
        *(() if epoch is None else epoch.notes),
    )
    page: list[Block] = [
        Heading(title, 1),
        *([Paragraph(told)] if told else []),
        marked_table(layer_columns(lines, phases_of(trace.inference), measured=False), lines),
        *_folding_note(lines),
        Facts(tuple(_step_facts(prediction, epoch).items())),
    ]
    return [*page, *([Bullets(remarks)] if remarks else [])]


def _step_facts(prediction: Prediction, epoch: Epoch | None) -> dict[str, str]:
    step, workers = prediction.step, prediction.workers
    phases = ("forward",) if prediction.trace.inference else (*PHASES, "zero_grad")
    facts = {phase: format_seconds(getattr(step, f"{phase}_s")) for phase in phases}
    interval = interval_text(step)
    facts["step"] = format_seconds(step.total_s)
    facts["step"] += f"   (90 % interval {interval})" if interval else ""
    if step.total_s:
        rate = workers * prediction.trace.batch_size / step.total_s
        whose = f" of all {workers} workers" if workers > 1 else ""
        text = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
        facts["throughput"] = f"{text} samples/s{whose}"
    if step.peak_memory_bytes is not None and prediction.machine.data_sheet is None:
        each = ", each worker" if workers > 1 else ""
        lacking = "; torch's own share is not in the machine file"
        facts["peak memory"] = (
            f"{format_bytes(step.peak_memory_bytes)} above an idle process that has imported torch"
            f"{each}{'' if prediction.machine.footprints else lacking}"
        )
    if prediction.page_faults is not None:
        facts["page faults"] = prediction.page_faults.sentence()
    sums: dict[str, float] = defaultdict(float)
    for item in prediction.prices.items:
        sums[item.bound] += item.seconds
    if total_s := sum(sums.values()):
        bounds = sorted(sums, key=lambda bound: -sums[bound])
        shares = (f"{bound} {100 * sums[bound] / total_s:.0f} %" for bound in bounds)
        facts["limited by"] = ", ".join(shares)
    if prediction.device_memory is not None:
        facts["device memory"] = str(prediction.device_memory)
    return facts if epoch is None else {**facts, **dict(epoch_facts(epoch))}


def epoch_facts(epoch: Epoch) -> list[tuple[str, str]]:
    """An epoch and the whole run with their parts."""
    parts = {
        "steps": epoch.steps_s,
        "around them": epoch.loop_s,
        "loading": epoch.loading_s,
        "validation": epoch.evaluation_s,
        "checkpoint": epoch.pauses_s,
        "averaging": epoch.averaging_s,
        "waiting for the slowest worker": epoch.waiting_s,
    }
    around = {
        "preparation": epoch.preparation_s,
        "first step": epoch.first_step_s,
        "workers' start": epoch.start_s,
        "test": epoch.test_s,
    }

    def listed(seconds: Mapping[str, float | None]) -> str:
        return "".join(f", {name} {format_seconds(s)}" for name, s in seconds.items() if s)

    shares = f" shared by {epoch.workers} workers," if epoch.workers > 1 else ""
    n_steps = counted(epoch.steps_per_epoch, "step")
    waits = "; the loader binds" if epoch.bound == "loader" else ""
    n_epochs = counted(epoch.epochs, "epoch")
    own = f"({epoch.samples} samples{shares} in {n_steps}{listed(parts)}{waits})"
    return [
        ("epoch", f"{format_seconds(epoch.epoch_s)}   {own}"),
        ("run", f"{format_seconds(epoch.total_s)}   ({n_epochs}{listed(around)})"),
    ]


# -- measurement ----------------------------------------------------------------------------------


def measurement_to_text(measurement: Measurement, width: int | None = None) -> str:
    """A measurement as plain text: its layers' medians with their spread, and the step."""
    layers = measurement.layers
    columns = [
        Column("layer", tuple(printable(times.layer) for times in layers), align_left=True),
        Column("type", tuple(printable(times.type) for times in layers), rank=1, align_left=True),
    ]
    for phase in phases_of(measurement.inference):
        samples = [times.phase(phase) for times in layers]
        medians = tuple("-" if s is None else format_seconds(s.median) for s in samples)
        spreads = tuple("-" if s is None else f"{100 * s.spread_frac:.0f} %" for s in samples)
        columns += [Column("median", medians, phase), Column("spread", spreads, phase)]
    title = step_title(
        measurement.target or "model",
        measurement.inference,
        measurement.batch_size,
        measurement.threads,
        measurement.machine or "this machine",
    )
    page: list[Block] = [
        Heading(title, 1),
        *([Table(tuple(columns))] if layers else []),
        Facts(tuple(measured_facts(measurement))),
        *([Bullets(tuple(measurement.notes))] if measurement.notes else []),
    ]
    return to_text(page, width)


def measured_facts(measurement: Measurement) -> list[tuple[str, str]]:
    """The measured step by phase with its spread, repeatability, memory."""
    facts = [
        (
            name,
            format_seconds(s.median),
            f"spread {format_percent(s.spread_frac)}, {len(s.values)} samples",
        )
        for name, s in measurement.step.items()
    ]
    if (repeats_frac := measurement.repeatability_frac) is not None:
        remark = "difference of a second measurement of the step"
        facts.append(("repeatability", format_percent(repeats_frac), remark))
    if (peak_bytes := measurement.peak_memory_bytes) is not None:
        remark = "the most that three steps of a fresh process add"
        facts.append(("peak memory", format_bytes(peak_bytes), remark))
    if (host_s := measurement.noise.get("host_s")) is not None:
        remark = "the host's time from a step's begin to its end on the device"
        facts.append(("host", format_seconds(host_s), remark))
    if (peaks := measurement.device_memory) is not None:
        remark = f"allocated at the peak; {format_bytes(peaks.reserved_bytes)} reserved"
        facts.append(("device memory", format_bytes(peaks.allocated_bytes), remark))
    return [(name, f"{value:>8}   ({remark})") for name, value, remark in facts]
