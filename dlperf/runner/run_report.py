"""The report on a watched run: as text, JSON data, Markdown or a page of HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dlperf.core import host, units
from dlperf.core.text import counted, fit, text_width
from dlperf.runner.compilation import COMPILED, NOT_COMPILED
from dlperf.runner.eta_report import eta_lines, eta_to_json
from dlperf.runner.findings import Findings

if TYPE_CHECKING:
    from dlperf.report.document import Block, Image

_FILE_WIDTH = 160  # columns of text in a file
_ALONE = (
    "step and layers: predicted for one rank on its own, measured with what they wait for the"
    " others; the distributed step is compared below them"
)


def to_text(findings: Findings, width: int | None = None) -> str:
    """Layers, loading, forecast and notes, `width` columns wide (default: the terminal's)."""
    width = text_width() if width is None else width
    if findings.report is not None:
        body = findings.report.to_text(width)
    else:
        from dlperf.report.step_pages import measurement_to_text

        body = measurement_to_text(findings.measurement, width)
    ranks = rank_lines(findings, width)
    first = [f"{line}\n" for line in _first_lines(findings)]
    first += [f"{_ALONE}\n"] if ranks and findings.report is not None else []
    notes = [f"note: {note}" for note in _notes(findings) if note not in body]
    return fit("\n".join([*first, body, "", *run_lines(findings), *ranks, *notes]), width)


def _first_lines(findings: Findings) -> tuple[str, ...]:
    """What to know before the numbers."""
    disturbance = findings.disturbance
    lines = [disturbance.to_text()] if disturbance.is_notable else []
    return (
        *lines,
        *(note for note in findings.watched.notes if note in (COMPILED, NOT_COMPILED)),
        *compiled_lines(findings),
    )


def compiled_lines(findings: Findings) -> list[str]:
    """The compiled step as predicted and measured, and its gain over the predicted eager step."""
    eager, compiled = findings.prediction, findings.compiled_prediction
    if COMPILED not in findings.watched.notes or eager is None or eager.step.total_s is None:
        return []
    seconds, disturbance, lines = units.format_seconds, findings.disturbance, list[str]()
    measured_s = findings.measurement.step["total"].median
    measured = f"measured {seconds(measured_s)}"
    if disturbance.is_notable and disturbance.step_s is not None:
        measured_s = disturbance.step_s
        measured = f"about {seconds(measured_s)} on a core of its own"
    if compiled is not None and (predicted_s := compiled.step.total_s) is not None:
        step = compiled.step
        lines.append(
            f"compiled step predicted {seconds(predicted_s)} (forward {seconds(step.forward_s)},"
            f" backward {seconds(step.backward_s)}, optimizer {seconds(step.optimizer_s)}),"
            f" {measured}: {100 * (predicted_s / measured_s - 1):+.1f} %"
        )
    ratio = eager.step.total_s / measured_s
    faster = f"{ratio:.2f} times as fast" if ratio >= 1 else f"{1 / ratio:.2f} times as slow"
    lines.append(
        f"compiled step {measured}, eager step predicted {seconds(eager.step.total_s)}:"
        f" compiled is {faster} as predicted for eager"
    )
    return lines


def _compiled_to_json(findings: Findings) -> dict[str, Any] | None:
    if not findings.watched.is_compiled or findings.prediction is None:
        return None
    step = None if findings.compiled_prediction is None else findings.compiled_prediction.step
    return {
        "step": None if step is None else asdict(step),
        "eager_s": findings.prediction.step.total_s,
        "measured_s": findings.measurement.step["total"].median,
    }


def _notes(findings: Findings) -> list[str]:
    return list(dict.fromkeys([*findings.notes, *findings.measurement.notes]))


def rank_lines(findings: Findings, width: int | None = None) -> list[str]:
    """The tables of the ranks and of their step; none where the ranks do not fit together."""
    ranks, step = findings.ranks, findings.parallel_step
    if ranks is None or ranks.trace is None:
        return []
    own = [] if step is None else [*step.lines(width), ""]
    return ["", *ranks.lines(width), "", *own]


def run_lines(findings: Findings) -> list[str]:
    """The watched steps, and the forecasts beside the measured times; one sentence a line."""
    seconds, watched, forecast = units.format_seconds, findings.watched, findings.forecast
    first = f"watched {watched.root_type} with {watched.optimizer_type}: "
    first += counted(len(watched.plain), "step")
    if findings.loading_frac is not None:
        loading = units.format_percent(findings.loading_frac)
        first += f", one every {seconds(findings.interval_s)}, {loading} of it waiting for data"
    if forecast is None:
        return [first]
    n_steps = counted(forecast.n_steps, "step")
    what = f"epoch of {n_steps}"
    if not forecast.is_epoch:
        what = f"for the {n_steps} that the run had (no data loader tells an epoch's length)"
    predicted = ""
    if forecast.from_prediction_s is not None:
        predicted = f"{seconds(forecast.from_prediction_s)} from the prediction, "
    second = (
        f"forecast after the watched steps, {what}: {predicted}{seconds(forecast.from_steps_s)}"
        f" from the measured steps; measured: {_listed(forecast.measured_s)}"
    )
    return [first, second, *([] if findings.live is None else eta_lines(findings.live))]


def _listed(values: Sequence[float]) -> str:
    if not values:
        return "no epoch was finished"
    shown = [units.format_seconds(value) for value in values]
    return ", ".join(shown if len(shown) <= 6 else [*shown[:5], "...", shown[-1]])


def to_json(findings: Findings) -> dict[str, Any]:
    """The findings as JSON data (schema ``dlperf.run``)."""
    forecast, ranks, step = findings.forecast, findings.ranks, findings.parallel_step
    live = {} if findings.live is None else eta_to_json(findings.live)
    return {
        "schema": "dlperf.run",
        "schema_version": 2,
        "target": findings.name,
        "batch_size": findings.batch_size,
        "threads": findings.watched.threads,
        "model": findings.watched.root_type,
        "optimizer": findings.watched.optimizer_type,
        "passes_per_step": findings.n_passes,
        "loading_frac": findings.loading_frac,
        "interval_s": findings.interval_s,
        "forecast": None if forecast is None else forecast.to_json() | live,
        "ranks": None if ranks is None else ranks.to_json(),
        "parallel_step": None if step is None else step.to_json(),
        "disturbance": findings.disturbance.to_json(),
        "measurement": findings.measurement.to_json(),
        "compiled": _compiled_to_json(findings),
        "report": None if findings.report is None else findings.report.to_json(),
        "notes": _notes(findings),
        "versions": host.versions(),
    }


def to_timeline(findings: Findings) -> dict[str, Any]:
    """The step of the findings as a timeline, with its prediction where there is one."""
    from dlperf.report.timeline import timeline

    predictions = () if findings.prediction is None else (findings.prediction,)
    return timeline([(predictions, findings.measurement)])


def to_document(findings: Findings, suffix: str) -> str:
    """The report in the format of a file's suffix: ``.html``, ``.md``, else text.

    Without a prediction a page contains the text.
    """
    from dlperf.report.comparison import plots_of
    from dlperf.report.document import to_markdown
    from dlperf.report.html import to_html

    match suffix:
        case ".md":
            return to_markdown("report", page(findings))
        case ".html":
            images = [] if findings.report is None else plots_of(findings.report)
            return to_html(findings.name, page(findings, images))
    return f"dlperf report\n\n{to_text(findings, _FILE_WIDTH)}\n"


def page(findings: Findings, images: Sequence[Image] = (), is_brief: bool = False) -> list[Block]:
    """The report as a page; without a prediction it contains the text."""
    from dlperf.report.document import Bullets, Heading, Preformatted
    from dlperf.report.step_pages import MAX_LINES, report_page

    if findings.report is None:
        return [Preformatted(to_text(findings, _FILE_WIDTH))]
    max_lines = MAX_LINES if is_brief else None
    blocks = report_page(findings.report, images, max_lines=max_lines, is_brief=is_brief)
    if first := _first_lines(findings):
        blocks.insert(0, Bullets(first))
    lines = (*run_lines(findings), *(f"note: {note}" for note in findings.notes))
    blocks += [Heading("Run"), Bullets(lines)]
    if table := "\n".join(rank_lines(findings, _FILE_WIDTH)).strip("\n"):
        blocks += [Heading("Ranks"), Preformatted(table)]
    return blocks
