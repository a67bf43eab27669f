"""Data in one line (`one_line`) and on a page that fits a screen (`page`)."""

from __future__ import annotations

from collections import Counter
from functools import singledispatch

from dlperf.core.cluster import Cluster, Link
from dlperf.core.data_sheet import UNMEASURED
from dlperf.core.errors import DlperfError
from dlperf.core.machine import Machine
from dlperf.core.machine_doubts import join_threads
from dlperf.core.measurement import Measurement
from dlperf.core.text import counted, printable
from dlperf.core.trace import Trace
from dlperf.core.units import format_bytes, format_percent, format_seconds, format_si
from dlperf.distributed.link_fits import fit_link
from dlperf.forecast.epoch import Epoch
from dlperf.forecast.prediction import Prediction
from dlperf.ops.roofs import LEVELS
from dlperf.report.document import Block, Preformatted, format_error, shorten
from dlperf.report.layer_comparison import root_of
from dlperf.report.step_comparison import StepComparison
from dlperf.report.step_difference import StepDifference
from dlperf.report.step_pages import (
    epoch_facts,
    interval_text,
    measured_facts,
    prediction_page,
    report_page,
)

_LINES = 24
"""Lines of a layer table on a page; longer ones are folded."""
_MOST_NOTES = 5
_NAME_WIDTH = 48


@singledispatch
def one_line(value: object) -> str:
    """What the data is, in one line."""
    raise TypeError(f"one_line: no words for {type(value).__name__}")


@singledispatch
def page(value: object) -> list[Block]:
    """The data on a page that fits a screen."""
    raise TypeError(f"page: no words for {type(value).__name__}")


def _name(text: str) -> str:
    return shorten(printable(text), _NAME_WIDTH)


def _notes(notes: tuple[str, ...], where: str) -> list[str]:
    """The first notes, and where the others are."""
    lines = [f"note: {printable(shorten(note, 200))}" for note in notes[:_MOST_NOTES]]
    if len(notes) > _MOST_NOTES:
        lines.append(f"note: {len(notes) - _MOST_NOTES} more in {where}")
    return lines


def _where(path: str) -> str:
    return f", {printable(path)}" if path else ""


# -- machine ------------------------------------------------------------------------------


@one_line.register
def _(machine: Machine) -> str:
    threads = join_threads(machine.threads) if machine.threads else "no threads"
    return (
        f"<Machine {_name(machine.cpu.model)}: {_state(machine)},"
        f" {counted(len(machine.kernels), 'kernel')}, {threads}{_where(machine.path)}>"
    )


@page.register
def _(machine: Machine) -> list[Block]:
    cpu = machine.cpu
    named = [*zip(LEVELS, cpu.caches_bytes), ("memory", cpu.memory_bytes)]
    sizes = [f"{name} {format_bytes(size)}" for name, size in named if size]
    path, created = printable(machine.path or "machine"), machine.created or "some time"
    lines = [
        f"{path}: {_state(machine)}, made {created}",
        f"  {printable(cpu.model)}, {counted(cpu.n_cores, 'core')}",
        *([f"  {', '.join(sizes)}"] if sizes else []),
    ]
    for threads in machine.threads:
        families = Counter(kernel.family for kernel in machine.kernels if kernel.threads == threads)
        kernels = f"{counted(sum(families.values()), 'kernel')} of {len(families)} families"
        rate = format_si(machine.dram_bytes_per_s(threads), "B/s") if machine.bandwidths else ""
        lines.append(f"  {counted(threads, 'thread')}: {kernels}{rate and f', DRAM {rate}'}")
    notes = counted(len(machine.notes), "note")
    lines.append(f"  {counted(len(machine.costs), 'cost')}, {notes}; dlperf machine show has all")
    return [Preformatted("\n".join(lines))]


def _state(machine: Machine) -> str:
    if machine.data_sheet is not None and machine.mode == UNMEASURED:
        return f"{machine.data_sheet.kind} by its data sheet"
    return f"{machine.mode} calibration, {'complete' if machine.complete else 'incomplete'}"


# -- trace --------------------------------------------------------------------------------


@one_line.register
def _(trace: Trace) -> str:
    return f"<Trace {_what(trace)}, {_sizes(trace)}>"


@page.register
def _(trace: Trace) -> list[Block]:
    lines = [f"{_what(trace)}, recorded on {trace.recorded_on}", f"  {_sizes(trace)}"]
    for title, found in (
        ("ops by phase", Counter(op.phase for op in trace.ops)),
        ("leaf layers", Counter(layer.type for layer in trace.layers if layer.is_leaf)),
        ("ops", Counter(op.packet for op in trace.ops)),
    ):
        if found:
            shown = ", ".join(f"{printable(name)} x{n}" for name, n in found.most_common(8))
            more = f" and {len(found) - 8} other kinds" if len(found) > 8 else ""
            lines.append(f"  {title}: {shown}{more}")
    if trace.optimizer is not None:
        lines.append(f"  optimizer: {trace.optimizer.type} ({trace.optimizer.implementation})")
    return [Preformatted("\n".join([*lines, *_notes(trace.notes, ".notes")]))]


def _what(trace: Trace) -> str:
    what = "forward pass" if trace.inference else "training step"
    return f"{_name(trace.target or root_of(trace))}: {what}, batch size {trace.batch_size}"


def _sizes(trace: Trace) -> str:
    return (
        f"{counted(len(trace.layers), 'layer')}, {counted(len(trace.ops), 'op')},"
        f" {counted(trace.n_parameters, 'parameter')}"
    )


# -- prediction, measurement, report ------------------------------------------------------


@one_line.register
def _(prediction: Prediction) -> str:
    step = prediction.step
    text = format_seconds(step.total_s) if step.total_s is not None else "no whole step"
    interval = interval_text(step)
    return (
        f"<Prediction {_what(prediction.trace)}, {counted(prediction.threads, 'thread')},"
        f" {prediction.predictor}: {text}{interval and f' (90 %: {interval})'}>"
    )


@page.register
def _(prediction: Prediction) -> list[Block]:
    return prediction_page(prediction, max_lines=_LINES)


@one_line.register
def _(measurement: Measurement) -> str:
    return f"<Measurement {_measured(measurement)}>"


@page.register
def _(measurement: Measurement) -> list[Block]:
    lines = [f"  {name:<13} {value}" for name, value in measured_facts(measurement)]
    if measurement.layers:
        lines.append(f"  {counted(len(measurement.layers), 'layer')} in .frame")
    notes = _notes(measurement.notes, ".notes")
    return [Preformatted("\n".join([_measured(measurement), *lines, *notes]))]


def _measured(measurement: Measurement) -> str:
    what = "forward pass" if measurement.inference else "training step"
    total = measurement.step["total"]
    return (
        f"{_name(measurement.target or 'model')}: {what}, batch size {measurement.batch_size}, "
        f"{counted(measurement.threads, 'thread')}: {format_seconds(total.median)} "
        f"(spread {format_percent(total.spread_frac)})"
    )


@one_line.register
def _(report: StepComparison) -> str:
    actual_s = report.measurement.step["total"].median
    sides = []
    for label, prediction in zip(report.predictors, report.predictions):
        total_s = prediction.step.total_s
        error = "no whole step" if total_s is None else format_error(total_s / actual_s - 1)
        sides.append(f"{label} {error}")
    return f"<Report {_measured(report.measurement)}; predicted: {', '.join(sides)}>"


@page.register
def _(report: StepComparison) -> list[Block]:
    return report_page(report, max_lines=_LINES, is_brief=True)


@one_line.register
def _(difference: StepDifference) -> str:
    a, b = difference.first, difference.second
    return f"<StepDifference {_name(a.name)} -> {_name(b.name)}: {difference.verdict}>"


@page.register
def _(difference: StepDifference) -> list[Block]:
    return difference.page()


# -- epoch, cluster -----------------------------------------------------------------------


@one_line.register
def _(epoch: Epoch) -> str:
    run = f"{counted(epoch.epochs, 'epoch')} in {format_seconds(epoch.total_s)}"
    return f"<Epoch of {counted(epoch.samples, 'sample')}: {format_seconds(epoch.epoch_s)}, {run}>"


@page.register
def _(epoch: Epoch) -> list[Block]:
    lines = [f"{name:<6} {value}" for name, value in epoch_facts(epoch)]
    return [Preformatted("\n".join([*lines, *_notes(epoch.notes, ".notes")]))]


@one_line.register
def _(cluster: Cluster) -> str:
    links = ", ".join(link.distance for link in cluster.links) or "no links"
    return f"<Cluster {cluster.backend}: {_ranks(cluster)}, {links}{_where(cluster.path)}>"


@page.register
def _(cluster: Cluster) -> list[Block]:
    state = "written by hand" if cluster.mode == "hand-written" else f"{cluster.mode} measurement"
    path = printable(cluster.path or "cluster")
    lines = [
        f"{path}: {state}, backend {cluster.backend}, {_ranks(cluster)}",
        *(f"  link, {link.distance}: {_link(link)}" for link in cluster.links),
    ]
    kinds = Counter(one.kind for one in cluster.collectives)
    if kinds:
        shown = ", ".join(f"{kind} x{n}" for kind, n in kinds.items())
        lines.append(f"  collectives: {shown}; dlperf machine show has all")
    return [Preformatted("\n".join([*lines, *_notes(cluster.notes, ".notes")]))]


def _link(link: Link) -> str:
    try:
        fitted = fit_link(link)
    except DlperfError:  # too few messages
        return counted(len(link.messages), "series of messages")
    rate = format_si(1 / fitted.s_per_byte if fitted.s_per_byte else None, "B/s")
    return f"latency {format_seconds(fitted.latency_s)}, bandwidth {rate}"


def _ranks(cluster: Cluster) -> str:
    if not cluster.ranks:
        return "no ranks"
    return f"{counted(len(cluster.ranks), 'rank')} on {counted(len(cluster.hosts), 'host')}"
