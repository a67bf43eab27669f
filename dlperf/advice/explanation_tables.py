"""The tables of an explanation, as columns: text and Markdown are made of the same."""

from __future__ import annotations

from collections.abc import Sequence

from dlperf.advice.agreement import agreement_of
from dlperf.advice.breakdown import PARTS, Breakdown, LayerParts
from dlperf.advice.changes import Advice
from dlperf.advice.explanation import Explanation
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
from dlperf.report.table import Column, format_error

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


def gain_text(gain_frac: float | None) -> str:
    """A gain in samples per second."""
    return format_error(gain_frac)


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
    """Each layer's time by heading; of more than `most` layers the dearest, the others in one row."""
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
        Column("samples/s", tuple(gain_text(s.gain_frac) for s in suggestions), "predicted"),
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
                tuple(gain_text(t.gain_frac) if t is not None else "-" for t in tried),
                "measured",
            ),
            Column(
                "runs",
                tuple(
                    " ".join(gain_text(g) for g in t.gains_frac) if t is not None else ""
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
    knee = advice.knee
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
                gain = f"{gain_text(s.gain_frac)} predicted; " if s.gain_frac is not None else ""
                lines.append(f"{printable(s.variant.name)} {verdict}: {gain}{printable(s.reason)}")
    return lines


def how_lines(suggestions: Sequence[Suggestion]) -> list[str]:
    """How to make each change that is predicted to pay, and how results differ, a line each."""
    return [
        f"{printable(s.variant.name)}: {printable(s.how)}" + (f"; {s.caveat}" if s.caveat else "")
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
