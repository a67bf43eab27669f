"""Reports as one HTML page that needs nothing beside it: style and plots are inside, there is no
script.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from dlperf.core.units import format_percent, format_seconds
from dlperf.core.version import VERSION
from dlperf.report.hierarchy import TRAFFIC_NOTE, traffic_columns
from dlperf.report.layer_comparison import MEASURED, PREDICTED, phases_of
from dlperf.report.layers import error_columns, layer_columns
from dlperf.report.outline import GROUP, OWN, SUM, TreeLine
from dlperf.report.page_style import STYLE
from dlperf.report.plots import CAPTIONS
from dlperf.report.table import Column, format_error
from dlperf.report.text import ACCURACY_NOTE, accuracy_columns, heading, step_sentence

if TYPE_CHECKING:
    from dlperf.report.comparison import Report

GENERATOR = f"dlperf {VERSION}"


def reports_to_html(reports: Sequence[Report]) -> str:
    """One page for all reports: an overview of the cases, then each one's accuracy, plots and
    layers.
    """
    body = [
        f"<h1>{'Predicted and measured' if len(reports) != 1 else escape(reports[0].target)}</h1>"
    ]
    body.append(
        '<p class="dim">Times of layers and whole steps as dlperf predicted them from a calibration'
        " of the machine, beside what they then took.</p>"
    )
    if len(reports) > 1:
        body += ["<h2 class='keep'>Cases</h2>", _overview(reports)]
    for number, report in enumerate(reports, 1):
        body.append(_section(report, number))
    title = escape("dlperf: " + ", ".join(dict.fromkeys(report.target for report in reports)))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="generator"'
        f' content="{GENERATOR}">\n<meta name="viewport" content="width=device-width,'
        f' initial-scale=1">\n<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n'
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _overview(reports: Sequence[Report]) -> str:
    head = [
        "case",
        "predictor",
        "predicted",
        "measured",
        "error",
        "floor",
        "90 % interval",
        "forward MAPE",
        "backward MAPE",
    ]
    rows = []
    for number, report in enumerate(reports, 1):
        what = " (inference)" if report.inference else ""
        threads = report.measurement.threads
        name = (
            f"{report.target}{what}, batch size {report.batch_size}, {threads}"
            f" thread{'s' if threads != 1 else ''}"
        )
        for prediction, label in zip(report.predictions, report.predictors):
            by_phase = {entry.phase: entry for entry in report.accuracy if entry.predictor == label}
            step, actual_s = prediction.step, report.measurement.step["total"].median
            inside = "-"
            if step.low_s is not None and step.high_s is not None:
                inside = (
                    f"{format_seconds(step.low_s)} .. {format_seconds(step.high_s)},"
                    f" {'inside' if step.low_s <= actual_s <= step.high_s else 'outside'}"
                )
            backward = by_phase.get("backward")
            cells = [
                escape(label),
                format_seconds(step.total_s),
                format_seconds(actual_s),
                format_error(by_phase["step"].error_frac),
                format_percent(by_phase["step"].repeatability_frac),
                inside,
                format_percent(by_phase["forward"].mape_frac),
                format_percent(backward.mape_frac if backward else None),
            ]
            head_cell = (
                f'<th scope="row"><a href="#case{number}">{escape(name)}</a></th><td'
                f' class="left">{cells[0]}</td>'
            )
            rows.append(
                f"<tr>{head_cell}" + "".join(f"<td>{cell}</td>" for cell in cells[1:]) + "</tr>"
            )
    titles = "".join(
        f'<th scope="col"{" class=left" if i < 2 else ""}>{escape(title)}</th>'
        for i, title in enumerate(head)
    )
    return (
        f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>\n'
        + "\n".join(rows)
        + "\n</tbody></table></div>"
    )


def _section(report: Report, number: int) -> str:
    phases = phases_of(report.inference)
    keep = " class='keep'" if number == 1 else ""
    parts = [f'<section id="case{number}"><h2{keep}>{escape(heading(report))}</h2>', "<ul>"]
    for prediction, label in zip(report.predictions, report.predictors):
        sentence = step_sentence(
            prediction.step,
            report.measurement.step["total"].median,
            report.measurement.repeatability_frac,
        )
        parts.append(f"<li><b>{escape(label)}</b>: {escape(sentence)}</li>")
    parts.append("</ul>")
    if report.remarks:
        items = "".join(
            f"<li{' class=warn' if remark.startswith('warning') else ''}>{escape(remark)}</li>"
            for remark in report.remarks
        )
        parts.append(f"<h3>Remarks</h3><ul>{items}</ul>")
    parts += [
        "<h3>Accuracy</h3>",
        _table(accuracy_columns(report.accuracy)),
        f'<p class="dim">{escape(ACCURACY_NOTE)}</p>',
    ]
    for name, png in report.pngs.items():
        data = base64.b64encode(png).decode("ascii")
        caption = escape(CAPTIONS[name])
        parts.append(
            f'<figure><img alt="{caption}"'
            f' src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>'
        )
    outlines = [(label, report.outline(label)) for label in report.predictors]
    for label, lines in outlines:
        parts += [
            f"<h3>Layers, {escape(label)}</h3>",
            _table(layer_columns(lines, phases, measured=True), lines),
        ]
    if len(outlines) > 1:
        parts += [
            "<h3>Layers, error of each predictor</h3>",
            _table(error_columns(outlines, phases), outlines[0][1]),
        ]
    parts += [
        "<h3>Bytes by level of the memory</h3>",
        _table(traffic_columns(report)),
        f'<p class="dim">{escape(TRAFFIC_NOTE)}</p>',
    ]
    parts.append(
        '<p class="dim">'
        + "<br>".join(escape(line) for line in report.provenance)
        + "</p></section>"
    )
    return "\n".join(parts)


def _table(columns: Sequence[Column], lines: Sequence[TreeLine] = ()) -> str:
    """All columns; with `lines` behind them, rows are marked by their kind and a bar shows each
    one's share of the step.
    """
    firsts = [
        place > 0 and columns[place].group != columns[place - 1].group
        for place in range(len(columns))
    ]
    share = _shares(lines)
    head = [_group_row(columns, bool(share))] if any(column.group for column in columns) else []
    titles = "".join(
        f'<th scope="col" class="{_classes(column, first)}">{escape(column.title)}</th>'
        for column, first in zip(columns, firsts)
    )
    head.append(
        "<tr>"
        + titles
        + ('<th scope="col" class="left">share of the step</th>' if share else "")
        + "</tr>"
    )
    rows = []
    for i, name in enumerate(columns[0].cells):
        stripped = name.lstrip(" ")
        indent = (
            f' style="padding-left:{0.6 + 0.55 * (len(name) - len(stripped)):.2f}rem"'
            if len(name) > len(stripped)
            else ""
        )
        kind = _kind(lines[i]) if lines else ""
        full = f' title="{escape(lines[i].name)}"' if lines else ""
        cells = "".join(
            f'<td class="{_classes(column, first)}">{escape(column.cells[i])}</td>'
            for column, first in zip(columns[1:], firsts[1:])
        )
        bar = (
            '<td class="left"><span class="share"><i'
            f' style="width:{100 * share[i]:.1f}%"></i></span></td>'
            if share
            else ""
        )
        rows.append(
            f'<tr class="{kind}"><th'
            f' scope="row"{indent}{full}>{escape(stripped)}</th>{cells}{bar}</tr>'
        )
    return (
        f'<div class="scroll"><table><thead>{"".join(head)}</thead><tbody>\n'
        + "\n".join(rows)
        + "\n</tbody></table></div>"
    )


def _group_row(columns: Sequence[Column], share: bool) -> str:
    cells, place = [], 0
    while place < len(columns):
        end = place + 1
        while end < len(columns) and columns[end].group == columns[place].group:
            end += 1
        cells.append(
            f'<th colspan="{end - place}"'
            f' class="group{" first" if place else ""}">{escape(columns[place].group)}</th>'
        )
        place = end
    return "<tr>" + "".join(cells) + ("<th></th>" if share else "") + "</tr>"


def _classes(column: Column, first: bool) -> str:
    return " ".join(
        name for name, holds in (("left", column.align_left), ("first", first)) if holds
    )


def _kind(line: TreeLine) -> str:
    if line.side in (PREDICTED, MEASURED):
        return "oneside"
    return {GROUP: "group", SUM: "group", OWN: "own"}.get(line.kind, "")


def _shares(lines: Sequence[TreeLine]) -> list[float]:
    """Each line's share of the lines of depth 0, measured where everything was, else predicted."""
    top = [line for line in lines if line.depth == 0 and line.kind != SUM]
    for side in ("actual_s", "predicted_s"):
        whole_s = sum(getattr(line.total, side) or 0.0 for line in top)
        if whole_s:
            return [(getattr(line.total, side) or 0.0) / whole_s for line in lines]
    return []
