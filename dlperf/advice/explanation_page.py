"""An explanation as a page for a terminal, as Markdown, and as a folder of files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from dlperf.advice.batch_sizes import knee_of
from dlperf.advice.breakdown import PARTS, Breakdown, LayerParts
from dlperf.advice.changes import Advice, Width
from dlperf.advice.explanation import (
    Agreement,
    Explanation,
    agreement_of,
    explanation_to_json,
    parts_to_csv,
    suggestions_to_csv,
)
from dlperf.advice.tuning import rate_text
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
from dlperf.report.document import (
    Block,
    Bullets,
    Column,
    Heading,
    Image,
    Paragraph,
    Table,
    format_error,
    to_markdown,
)
from dlperf.report.step_comparison import coverage_remarks
from dlperf.report.step_pages import interval_text, step_title
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
    "unpriced": "ops that the machine file lacks, entered with a bound",
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
        longest = sorted(layers, key=lambda row: -row.total_s)[: most - 1]
        others = [row for row in layers if row not in longest]
        rest = tuple((part, sum(row.part_s(part) for row in others)) for part in PARTS)
        kept = (row for row in layers if row in longest)
        layers = [*kept, LayerParts(f"({len(others)} others)", "", rest)]
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


def expenses_columns(breakdown: Breakdown) -> list[Column]:
    """The most expensive kinds of work, and what limits each."""
    rows = breakdown.expenses[:MOST_EXPENSES]
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
    """Suggestions with their predicted gain and, where they were tried, the measured one."""
    columns = [
        Column("change", tuple(printable(s.variant.name) for s in suggestions), align_left=True),
        Column("step", tuple(format_seconds(s.step_s) for s in suggestions), "predicted"),
        Column("samples/s", tuple(format_error(s.gain_frac) for s in suggestions), "predicted"),
    ]
    if explanation.trials is not None:
        tried = list(map(explanation.trial_of, suggestions))
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
            tuple(rate_text(p.samples_per_s) for p in advice.sweep),
        ),
        Column("memory", tuple(format_bytes(p.peak_memory_bytes) for p in advice.sweep)),
        Column("page faults", tuple(_share(p.page_faults_s / p.step_s) for p in advice.sweep)),
        Column("", tuple("knee" if p is knee else "" for p in advice.sweep), align_left=True),
    ]


def _width_line(width: Width) -> str:
    start = f"{printable(width.layer)}: {width.width} -> {width.wider}"
    if width.cost_frac is None:
        return f"{start}: {width.reason}"
    cost = f"{format_error(width.cost_frac)} of the step"
    return f"{start} costs nothing ({cost})" if width.is_free else f"{start}: {cost}"


def _considered_line(s: Suggestion) -> str:
    gain = f"{format_error(s.gain_frac)} predicted; " if s.gain_frac is not None else ""
    return f"{printable(s.variant.name)} {s.verdict}: {gain}{printable(s.reason)}"


def considered_lines(advice: Advice, shown: Sequence[Suggestion]) -> list[str]:
    """What does not pay or cannot be judged, and why, a line each; what stands in the table of
    those `shown` needs none for a small gain.
    """
    others = chain.from_iterable(map(advice.with_verdict, (UNSURE, DOES_NOT_PAY, DOES_NOT_APPLY)))
    return [_considered_line(s) for s in others if s.verdict != DOES_NOT_PAY or s not in shown]


def how_lines(suggestions: Sequence[Suggestion]) -> list[str]:
    """How to make each change that is predicted to pay, and how results differ, a line each."""
    return [
        f"{printable(s.variant.name)}: {printable(s.variant.how)}"
        + (f"; {s.variant.caveat}" if s.variant.caveat else "")
        for s in suggestions
        if s.verdict == PAYS
    ]


def agreement_line(found: Agreement) -> str:
    """How often prediction and measurement agree on whether a change pays."""
    close = f", {found.n_close} within the repeatability" if found.n_close else ""
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


def step_line(explanation: Explanation) -> str:
    """The step predicted and, where it was tried, measured, in words."""
    step, trials = explanation.prediction.step, explanation.trials
    text = f"step predicted {format_seconds(step.total_s)}"
    if interval := interval_text(step):
        text += f" (90 %: {interval})"
    if trials is not None and trials.baseline_step_s is not None:
        variation = (
            "; repeatability: neighbouring processes of it differ by"
            f" {format_percent(trials.repeatability_frac)}"
        )
        text += (
            f", measured {format_seconds(trials.baseline_step_s)} (median of"
            f" {len(trials.baselines_s)} processes"
            f"{variation if trials.repeatability_frac is not None else ''})"
        )
    return text


def shown_suggestions(explanation: Explanation) -> list[Suggestion]:
    """Those that pay, and those that were tried although they do not, by falling gain."""
    chosen = explanation.advice.with_verdict(PAYS)
    chosen += [suggestion for suggestion, _ in explanation.tried if suggestion.verdict != PAYS]
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
    trials = explanation.trials
    if trials is not None:
        remarks += [f"{t.name} could not be tried: {t.error}" for t in trials.trials if t.error]
        remarks += trials.notes
        if trials.is_interrupted:
            nothing = "no change had been tried"
            shown = "what was finished is shown" if explanation.tried else nothing
            remarks.append(f"the trials were interrupted: {shown}")
    return list(dict.fromkeys(remarks))


def one_line(explanation: Explanation) -> str:
    """The target and its predicted step."""
    trace = explanation.prediction.trace
    return (
        f"<Explanation {printable(trace.target)}, batch size {trace.batch_size}:"
        f" {step_line(explanation)}>"
    )


def page(explanation: Explanation) -> list[Block]:
    """The step's parts and the changes that pay, without layers and remarks."""
    paying = explanation.advice.with_verdict(PAYS)
    changes = (
        [Heading("changes that would pay"), Table(tuple(gains_columns(explanation, paying)))]
        if paying
        else [Paragraph(("no change that was considered would pay",))]
    )
    return [*_top(explanation), *changes]


def _top(explanation: Explanation) -> list[Block]:
    p = explanation.prediction
    title = step_title(
        p.trace.target, p.trace.inference, p.trace.batch_size, p.threads, p.machine.cpu.model
    )
    return [
        Heading(title, 2),
        Paragraph((step_line(explanation),)),
        Heading("what the step is made of"),
        Table(tuple(parts_columns(explanation.breakdown))),
    ]


def explanation_page(
    explanation: Explanation, images: Sequence[Image] = (), most_layers: int | None = MOST_LAYERS
) -> list[Block]:
    """The page: parts, plots, changes, batch sizes, widths, expenses, layers, remarks."""
    advice, breakdown = explanation.advice, explanation.breakdown
    shown, agreement = shown_suggestions(explanation), agreement_of(explanation)
    blocks: list[Block] = [*_top(explanation), *images]
    n_paying = len(advice.with_verdict(PAYS))
    others = ", and others that were tried" if len(shown) > n_paying else ""
    blocks.append(
        Heading(
            f"changes that would pay{others}"
            if n_paying
            else "no change that was considered would pay"
        )
    )
    if shown:
        blocks.append(Table(tuple(gains_columns(explanation, shown))))
    for title, content in (
        ("", Bullets(tuple(how_lines(shown)))),
        ("", Paragraph((agreement_line(agreement),) if agreement else ())),
        ("considered as well", Bullets(tuple(considered_lines(advice, shown)))),
        ("throughput over batch size", Table(tuple(sweep_columns(advice)) if advice.sweep else ())),
        ("widths off the multiples of 16", Bullets(tuple(map(_width_line, advice.widths)))),
        ("the dearest work", Table(tuple(expenses_columns(breakdown)))),
        ("by layer", Table(tuple(layers_columns(breakdown, most_layers)))),
        ("", Paragraph((THRESHOLD_NOTE,))),
        ("remarks", Bullets(tuple(_remarks(explanation)))),
    ):
        if any(vars(content).values()):
            blocks += [Heading(title), content] if title else [content]
    return blocks


def write(explanation: Explanation, folder: str | Path, force: bool = False) -> list[Path]:
    """Write ``explanation.md`` and ``.json``, ``parts.csv``, ``changes.csv`` and the plots; the
    files in that order.

    Raises DlperfError for a folder that cannot be made or holds foreign files (unless `force`),
    WorkFailed if the disk refuses.
    """
    from dlperf.advice.plots import pngs_of

    pngs = {f"{name}.png": png for name, png in pngs_of(explanation).items()}
    pictures = [Image(name.removesuffix(".png"), link=name) for name in pngs]
    blocks = explanation_page(explanation, pictures, most_layers=None)
    if explanation.provenance:
        blocks.append(Paragraph(explanation.provenance, is_small=True))
    files: dict[str, str | bytes] = {
        "explanation.md": to_markdown("explanation", blocks),
        "explanation.json": (
            json.dumps(explanation_to_json(explanation), indent=1, allow_nan=False) + "\n"
        ),
        "parts.csv": parts_to_csv(explanation),
        "changes.csv": suggestions_to_csv(explanation),
        **pngs,
    }
    return write_files(folder, files, force)
