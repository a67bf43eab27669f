"""An explanation as text for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from dlperf.advice.explanation import Explanation
from dlperf.advice.explanation_tables import (
    THRESHOLD_NOTE,
    agreement_line,
    considered_lines,
    expenses_columns,
    gains_columns,
    how_lines,
    layers_columns,
    parts_columns,
    sweep_columns,
    width_lines,
)
from dlperf.advice.variants import PAYS, Suggestion
from dlperf.core.text import fit, printable, text_width
from dlperf.core.units import format_percent, format_seconds
from dlperf.report.markdown import escape, table
from dlperf.report.step_comparison import coverage_remarks
from dlperf.report.table import format_table
from dlperf.report.text import wrap


def heading(explanation: Explanation) -> str:
    """What is explained, in one line."""
    p = explanation.prediction
    what = "inference" if p.trace.inference else "training step"
    return (
        f"{printable(p.trace.target)}: {what}, batch size {p.trace.batch_size}, {p.threads}"
        f" thread{'s' if p.threads != 1 else ''}, on {p.machine.cpu.model}"
    )


def step_line(explanation: Explanation) -> str:
    """The step predicted and, where it was tried, measured, in words."""
    step, trials = explanation.prediction.step, explanation.trials
    text = f"step predicted {format_seconds(step.total_s)}"
    if step.low_s is not None and step.high_s is not None:
        text += f" (90 %: {format_seconds(step.low_s)} .. {format_seconds(step.high_s)})"
    if trials is not None and trials.baseline_step_s is not None:
        floor = (
            ""
            if trials.repeatability_frac is None
            else (
                "; floor: neighbouring processes of it differ by"
                f" {format_percent(trials.repeatability_frac)}"
            )
        )
        text += (
            f", measured {format_seconds(trials.baseline_step_s)} (median of"
            f" {len(trials.baselines_s)} processes{floor})"
        )
    return text


def shown_suggestions(explanation: Explanation) -> list[Suggestion]:
    """Those that pay, and those that were tried although they do not, by falling gain."""
    advice, trials = explanation.advice, explanation.trials
    chosen = list(advice.with_verdict(PAYS))
    if trials is not None:
        chosen += [
            s
            for s in advice.suggestions
            if s not in chosen
            and (trial := trials.trial_of(s.variant.name)) is not None
            and trial.pairs
        ]
    return sorted(chosen, key=lambda s: (s.verdict != PAYS, -(s.gain_frac or 0.0)))


def _remarks(explanation: Explanation) -> list[str]:
    p = explanation.prediction
    remarks = [
        *coverage_remarks(p),
        *(f"warning: {w}" for w in p.warnings),
        *p.trace.notes,
        *p.prices.notes,
        *explanation.advice.notes,
    ]
    if explanation.trials is not None:
        remarks += [
            f"{trial.name} could not be tried: {trial.error}"
            for trial in explanation.trials.trials
            if trial.error
        ]
        remarks += explanation.trials.notes
        if explanation.trials.is_interrupted:
            finished = any(trial.pairs for trial in explanation.trials.trials)
            remarks.append(
                "the trials were interrupted:"
                f" {'what was finished is shown' if finished else 'no change had been tried'}"
            )
    return list(dict.fromkeys(remarks))


def one_line(explanation: Explanation) -> str:
    """The target and its predicted step."""
    trace = explanation.prediction.trace
    return (
        f"<Explanation {printable(trace.target)}, batch size {trace.batch_size}:"
        f" {step_line(explanation)}>"
    )


def page(explanation: Explanation) -> str:
    """The step's parts and the changes that would pay, without layers and remarks."""
    width, paying = text_width(), explanation.advice.with_verdict(PAYS)
    parts = format_table(parts_columns(explanation.breakdown), width)
    gains = f"changes that would pay\n{format_table(gains_columns(explanation, paying), width)}"
    changes = gains if paying else "no change that was considered would pay"
    head = f"{heading(explanation)}\n{step_line(explanation)}"
    return fit("\n\n".join([head, f"what the step is made of\n{parts}", changes]), width)


def explanation_to_text(explanation: Explanation, width: int | None = None) -> str:
    """The explanation as plain text, at most `width` columns wide (default: the terminal's, 120
    where there is none).
    """
    width = text_width() if width is None else width
    advice = explanation.advice

    def lines(texts: Sequence[str]) -> str:
        return "\n".join(wrap(f"  {text}", width, "    ") for text in texts)

    blocks = [
        wrap(heading(explanation), width) + "\n" + wrap(step_line(explanation), width),
        f"what the step is made of\n{format_table(parts_columns(explanation.breakdown), width)}",
        f"by layer\n{format_table(layers_columns(explanation.breakdown), width)}",
        f"the dearest work\n{format_table(expenses_columns(explanation.breakdown), width)}",
    ]
    shown = shown_suggestions(explanation)
    if any(s.verdict == PAYS for s in shown):
        title = (
            "changes that would pay"
            if len(shown) == len(advice.with_verdict(PAYS))
            else "changes that would pay, and others that were tried"
        )
        blocks.append(
            f"{title}\n{format_table(gains_columns(explanation, shown), width)}\n\n{lines(how_lines(shown))}"
        )
    else:
        table_of_tried = (
            f"\n{format_table(gains_columns(explanation, shown), width)}" if shown else ""
        )
        blocks.append(f"no change that was considered would pay{table_of_tried}")
    if agreement := agreement_line(explanation):
        blocks.append(wrap(agreement, width))
    if considered := considered_lines(advice, shown):
        blocks.append(f"considered as well\n{lines(considered)}")
    if advice.sweep:
        blocks.append(f"throughput over batch size\n{format_table(sweep_columns(advice), width)}")
    if widths := width_lines(advice):
        blocks.append(f"widths off the multiples of 16\n{lines(widths)}")
    blocks.append(wrap(THRESHOLD_NOTE, min(width, 120)))
    if remarks := _remarks(explanation):
        blocks.append("\n".join(wrap(f"- {remark}", width, "  ") for remark in remarks))
    return fit("\n\n".join(block for block in blocks if block) + "\n", width)


def explanation_to_markdown(explanation: Explanation, images: Sequence[str] = ()) -> str:
    """The explanation with every layer; `images` are links to its plots."""
    advice = explanation.advice

    def bullets(texts: Sequence[str]) -> str:
        return "\n".join(f"- {escape(text)}" for text in texts)

    blocks = [
        "<!-- dlperf explanation -->",
        f"## {escape(heading(explanation))}",
        escape(step_line(explanation)) + ".",
    ]
    blocks += ["### What the step is made of", table(parts_columns(explanation.breakdown))]
    blocks += [f"![{link.rpartition('.')[0]}]({link})" for link in images]
    shown = shown_suggestions(explanation)
    blocks.append(
        "### Changes that would pay"
        + (" and others that were tried" if len(shown) > len(advice.with_verdict(PAYS)) else "")
    )
    blocks += (
        [table(gains_columns(explanation, shown)), bullets(how_lines(shown))]
        if shown
        else ["None that was considered."]
    )
    if agreement := agreement_line(explanation):
        blocks.append(escape(f"{agreement[0].upper()}{agreement[1:]}."))
    if considered := considered_lines(advice, shown):
        blocks += ["### Considered as well", bullets(considered)]
    if advice.sweep:
        blocks += ["### Throughput over batch size", table(sweep_columns(advice))]
    if widths := width_lines(advice):
        blocks += ["### Widths off the multiples of 16", bullets(widths)]
    blocks += [
        "### The dearest work",
        table(expenses_columns(explanation.breakdown)),
        "### By layer",
        table(layers_columns(explanation.breakdown, None)),
    ]
    blocks.append(escape(THRESHOLD_NOTE))
    if remarks := _remarks(explanation):
        blocks += ["### Remarks", bullets(remarks)]
    if explanation.provenance:
        blocks.append(
            "<sub>" + "<br>".join(escape(line) for line in explanation.provenance) + "</sub>"
        )
    return "\n\n".join(block for block in blocks if block) + "\n"
