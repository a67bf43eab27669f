"""An explanation as a page for a terminal, as Markdown, and as a folder of files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dlperf.advice.batch_sizes import knee_of
from dlperf.advice.breakdown import PARTS, Breakdown, LayerParts
from dlperf.advice.changes import Advice
from dlperf.advice.explanation import Explanation, agreement_of
from dlperf.advice.explanation_export import explanation_to_json, parts_to_csv, suggestions_to_csv
from dlperf.advice.variants import (
    DOES_NOT_APPLY,
    DOES_NOT_PAY,
    LEAST_GAIN_FRAC,
    PAYS,
    UNSURE,
    Suggestion,
)
from dlperf.core.text import printable
from dlperf.core.units import format_bytes, format_percent, format_seconds
from dlperf.report.document import Block, Bullets, Heading, Image, Paragraph, Table
from dlperf.report.markdown import to_markdown
from dlperf.report.step_comparison import coverage_remarks
from dlperf.report.table import Column, format_error
from dlperf.report.text import to_text
from dlperf.report.writing import write_files

MEANINGS = {
    "compute": "kernels at the arithmetic they do",
    "L1": "kernels that wait for the first cache",
    "L2": "kernels that wait for the second cache",
    "L3": "kernels that wait for the last cache",
    "DRAM": "kernels that wait for memory",
    "overhead": "dispatch, autograd, module calls: Python and PyTorch around the kernels",
    "page-faults": "memory that malloc gets anew from the system each step",
    "network": "communication",
    "unpriced": "ops that the machine file says nothing of, entered with a bound",
    "optimizer": "the optimizer's step, whatever bounds it",
}
MOST_LAYERS, MOST_EXPENSES = 20, 10


def parts_columns(breakdown: Breakdown) -> list[Column]:
    """What the step is made of, the largest part first."""
    rows = sorted(breakdown.parts_s, key=lambda row: -row[1])
    return [
        Column("part", (*(part for part, _ in rows), "step"), align_left=True),
        Column(
            "time",
            (*(format_seconds(seconds) for _, seconds in rows), format_seconds(breakdown.total_s)),
        ),
        Column("share", (*(_share(breakdown.share_frac(part)) for part, _ in rows), "100 %")),
        Column("what it is", (*(MEANINGS[part] for part, _ in rows), ""), align_left=True, rank=1),
    ]


def layers_columns(breakdown: Breakdown, most: int | None = MOST_LAYERS) -> list[Column]:
    """Time of each layer by heading; layers beyond the `most` longest in one row."""
    layers = list(breakdown.layers)
    if most is not None and len(layers) > most:
        dear = set(sorted(range(len(layers)), key=lambda place: -layers[place].total_s)[: most - 1])
        others = [layers[place] for place in range(len(layers)) if place not in dear]
        rest = tuple((part, sum(row.part_s(part) for row in others)) for part in PARTS)
        layers = [row for place, row in enumerate(layers) if place in dear] + [
            LayerParts(f"({len(others)} others)", "", rest)
        ]
    parts = [part for part, _ in breakdown.parts_s]
    by_size = sorted(parts, key=lambda part: -breakdown.share_frac(part))
    return [
        Column("layer", tuple(printable(row.layer) for row in layers), align_left=True),
        Column(
            "type",
            tuple(printable(row.type) for row in layers),
            align_left=True,
            rank=len(parts) + 1,
        ),
        Column("time", tuple(format_seconds(row.total_s) for row in layers)),
        Column(
            "share",
            tuple(
                _share(row.total_s / breakdown.total_s if breakdown.total_s else 0.0)
                for row in layers
            ),
        ),
        *(
            Column(
                part,
                tuple(
                    format_seconds(row.part_s(part)) if row.part_s(part) else "-" for row in layers
                ),
                rank=1 + by_size.index(part),
            )
            for part in parts
        ),
    ]


def expenses_columns(breakdown: Breakdown, most: int = MOST_EXPENSES) -> list[Column]:
    """The dearest kinds of work, and what limits each."""
    rows = breakdown.expenses[:most]
    return [
        Column(
            "op",
            tuple(printable(e.what) + (f" x{e.count}" if e.count > 1 else "") for e in rows),
            align_left=True,
        ),
        Column("layer", tuple(printable(e.layer) for e in rows), align_left=True),
        Column("phase", tuple(e.phase for e in rows), align_left=True),
        Column("time", tuple(format_seconds(e.seconds) for e in rows)),
        Column(
            "share",
            tuple(
                _share(e.seconds / breakdown.total_s if breakdown.total_s else 0.0) for e in rows
            ),
        ),
        Column("limited by", tuple(e.bound for e in rows), align_left=True),
        Column("price", tuple(e.source for e in rows), align_left=True, rank=1),
    ]


def gains_columns(explanation: Explanation, suggestions: Sequence[Suggestion]) -> list[Column]:
    """Suggestions with their predicted gain and, where they were tried, the measured one beside the
    floor.
    """
    trials = explanation.trials
    columns = [
        Column("change", tuple(printable(s.variant.name) for s in suggestions), align_left=True),
        Column("step", tuple(format_seconds(s.step_s) for s in suggestions), "predicted"),
        Column("samples/s", tuple(format_error(s.gain_frac) for s in suggestions), "predicted"),
    ]
    if trials is not None:
        tried = [trials.trial_of(s.variant.name) for s in suggestions]
        columns += [
            Column(
                "step",
                tuple(format_seconds(t.step_s) if t is not None else "-" for t in tried),
                "measured",
            ),
            Column(
                "samples/s",
                tuple(format_error(t.gain_frac) if t is not None else "-" for t in tried),
                "measured",
            ),
            Column(
                "runs",
                tuple(
                    " ".join(format_error(g) for g in t.gains_frac) if t is not None else ""
                    for t in tried
                ),
                "measured",
                rank=2,
                align_left=True,
            ),
        ]
    columns.append(
        Column("memory", tuple(format_bytes(s.peak_memory_bytes) for s in suggestions), rank=1)
    )
    if any(s.verdict != PAYS for s in suggestions):
        columns.append(
            Column("verdict", tuple(s.verdict for s in suggestions), align_left=True, rank=1)
        )
    return columns


def sweep_columns(advice: Advice) -> list[Column]:
    """Throughput over batch size."""
    knee = knee_of(advice.sweep)
    return [
        Column("batch size", tuple(str(p.batch_size) for p in advice.sweep)),
        Column("step", tuple(format_seconds(p.step_s) for p in advice.sweep)),
        Column(
            "samples/s",
            tuple(
                f"{p.samples_per_s:,.0f}" if p.samples_per_s >= 100 else f"{p.samples_per_s:.3g}"
                for p in advice.sweep
            ),
        ),
        Column("memory", tuple(format_bytes(p.peak_memory_bytes) for p in advice.sweep)),
        Column("page faults", tuple(_share(p.page_faults_s / p.step_s) for p in advice.sweep)),
        Column("", tuple("knee" if p is knee else "" for p in advice.sweep), align_left=True),
    ]


def width_lines(advice: Advice) -> list[str]:
    """What a wider layer would cost, a line each."""
    lines = []
    for width in advice.widths:
        start = f"{printable(width.layer)}: {width.width} -> {width.wider}"
        if width.cost_frac is None:
            lines.append(f"{start}: {width.reason}")
        elif width.is_free:
            lines.append(f"{start} costs nothing ({format_error(width.cost_frac)} of the step)")
        else:
            lines.append(f"{start}: {format_error(width.cost_frac)} of the step")
    return lines


def considered_lines(advice: Advice, shown: Sequence[Suggestion] = ()) -> list[str]:
    """What does not pay or cannot be judged, and why, a line each; what stands in the table of
    those `shown` needs none to say that its gain is small.
    """
    lines = []
    for verdict in (UNSURE, DOES_NOT_PAY, DOES_NOT_APPLY):
        for s in advice.with_verdict(verdict):
            if verdict != DOES_NOT_PAY or s not in shown:
                gain = f"{format_error(s.gain_frac)} predicted; " if s.gain_frac is not None else ""
                lines.append(f"{printable(s.variant.name)} {verdict}: {gain}{printable(s.reason)}")
    return lines


def how_lines(suggestions: Sequence[Suggestion]) -> list[str]:
    """How to make each change that is predicted to pay, and how results differ, a line each."""
    return [
        f"{printable(s.variant.name)}: {printable(s.variant.how)}"
        + (f"; {s.variant.caveat}" if s.variant.caveat else "")
        for s in suggestions
        if s.verdict == PAYS
    ]


def agreement_line(explanation: Explanation) -> str | None:
    """How often prediction and measurement agree on whether a change pays; None where nothing was
    tried.
    """
    found = agreement_of(explanation)
    if found is None:
        return None
    close = f", {found.n_close} too close to the floor to tell" if found.n_close else ""
    return (
        f"of {found.n_tried} changes that were tried, {found.n_right} came out as predicted (they"
        f" pay, or do not), {found.n_wrong} did not{close}; median distance between predicted and"
        f" measured gain: {100 * found.median_distance_frac:.1f} points"
    )


THRESHOLD_NOTE = (
    f"A change pays from {format_percent(LEAST_GAIN_FRAC)} more samples a second on; below, a"
    " repeated measurement differs as much. Gains are per sample, so that batch sizes compare."
)


def _share(share_frac: float) -> str:
    return f"{100 * share_frac:.0f} %" if share_frac >= 0.095 else f"{100 * share_frac:.1f} %"


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
    """The step's parts and the changes that pay, without layers and remarks."""
    paying = explanation.advice.with_verdict(PAYS)
    blocks = [*_top(explanation)]
    if paying:
        blocks += [
            Heading("changes that would pay"),
            Table(tuple(gains_columns(explanation, paying))),
        ]
    else:
        blocks.append(Paragraph(("no change that was considered would pay",)))
    return to_text(blocks).rstrip("\n")


def _top(explanation: Explanation) -> list[Block]:
    return [
        Heading(heading(explanation), 2),
        Paragraph((step_line(explanation),)),
        Heading("what the step is made of"),
        Table(tuple(parts_columns(explanation.breakdown))),
    ]


def explanation_page(
    explanation: Explanation, images: Sequence[Image] = (), most_layers: int | None = MOST_LAYERS
) -> list[Block]:
    """The page: parts, plots, changes, batch sizes, widths, expenses, layers, remarks."""
    advice, breakdown = explanation.advice, explanation.breakdown
    shown = shown_suggestions(explanation)
    blocks: list[Block] = [*_top(explanation), *images]
    if any(s.verdict == PAYS for s in shown):
        others = (
            ", and others that were tried" if len(shown) > len(advice.with_verdict(PAYS)) else ""
        )
        blocks.append(Heading(f"changes that would pay{others}"))
    else:
        blocks.append(Heading("no change that was considered would pay"))
    if shown:
        blocks.append(Table(tuple(gains_columns(explanation, shown))))
    agreement = agreement_line(explanation)
    for title, content in (
        ("", Bullets(tuple(how_lines(shown)))),
        ("", Paragraph((agreement,) if agreement else ())),
        ("considered as well", Bullets(tuple(considered_lines(advice, shown)))),
        ("throughput over batch size", Table(tuple(sweep_columns(advice)) if advice.sweep else ())),
        ("widths off the multiples of 16", Bullets(tuple(width_lines(advice)))),
        ("the dearest work", Table(tuple(expenses_columns(breakdown)))),
        ("by layer", Table(tuple(layers_columns(breakdown, most_layers)))),
        ("", Paragraph((THRESHOLD_NOTE,))),
        ("remarks", Bullets(tuple(_remarks(explanation)))),
    ):
        if any(vars(content).values()):
            blocks += [Heading(title), content] if title else [content]
    return blocks


def explanation_to_text(explanation: Explanation, width: int | None = None) -> str:
    """The explanation for a terminal, at most `width` columns wide (default: the terminal's)."""
    return to_text(explanation_page(explanation), width)


def explanation_to_markdown(explanation: Explanation, images: Sequence[str] = ()) -> str:
    """The explanation with every layer; `images` are links to its plots."""
    pictures = [Image(link.rpartition(".")[0], link=link) for link in images]
    blocks = explanation_page(explanation, pictures, None)
    if explanation.provenance:
        blocks.append(Paragraph(explanation.provenance, is_small=True))
    return to_markdown("explanation", blocks)


def write(explanation: Explanation, folder: str | Path, force: bool = False) -> list[Path]:
    """Write ``explanation.md`` and ``.json``, ``parts.csv``, ``changes.csv`` and the plots; the
    files in that order.

    Raises DlperfError for a folder that cannot be made or holds foreign files (unless `force`),
    WorkFailed if the disk refuses.
    """
    from dlperf.advice.explanation_plots import pngs_of

    pngs = {f"{name}.png": png for name, png in pngs_of(explanation).items()}
    files: dict[str, str | bytes] = {
        "explanation.md": explanation_to_markdown(explanation, list(pngs)),
        "explanation.json": (
            json.dumps(explanation_to_json(explanation), indent=1, allow_nan=False) + "\n"
        ),
        "parts.csv": parts_to_csv(explanation),
        "changes.csv": suggestions_to_csv(explanation),
        **pngs,
    }
    return write_files(folder, files, force)
