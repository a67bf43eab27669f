"""A study as text for a terminal and as a folder: accuracy.md, CSV, plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from dlperf.core.files import write_bytes, write_text
from dlperf.core.text import fit, text_width
from dlperf.report.document import Column, escape, format_table, table
from dlperf.report.writing import check_folder, make_folder
from dlperf.studies.accuracy.baselines import MEANINGS
from dlperf.studies.accuracy.cases import CaseScore
from dlperf.studies.accuracy.figures import CAPTIONS, pngs_of
from dlperf.studies.accuracy.study import MAIN, WITH_EXACT, Study
from dlperf.studies.accuracy.tables import (
    ablation_columns,
    baseline_columns,
    case_columns,
    cases_csv,
    group_columns,
    layers_csv,
    op_columns,
    ops_csv,
    percent,
    summary_columns,
)

NOTE = (
    "All in percent. Step: the median of several fresh processes against the prediction;"
    " repeatability: (slowest - fastest process) / median. Layers: mean absolute percentage error"
    " over the modules without children that take at least 1 % of their phase, with the mean"
    " repeatability of the same ones. Seen: share of the backward that the measurement attributes"
    " to layers. Source: share of the predicted time that is the time of ops measured at their very"
    " shape, interpolated, extrapolated, unpriced, and of what is no op (calls, the optimizer's"
    " loop, page faults)."
)


def study_to_text(study: Study, width: int | None = None) -> str:
    """Text page: cases by predictor, summaries, baseline tools, single ops, ablation."""
    width = text_width() if width is None else width
    blocks = []
    for predictor in _predictors(study):
        own = [score for score in study.scores if score.predictor == predictor]
        blocks.append(f"{predictor}\n\n{format_table(case_columns(own), width)}")
    if study.summaries:
        blocks.append(f"summary, %\n\n{format_table(summary_columns(study.summaries), width)}")
    if study.baseline_scores:
        blocks.append(f"beside other tools, %\n\n{format_table(_comparison(study), width)}")
    if study.ablations:
        blocks.append(
            f"one term left out, %\n\n{format_table(ablation_columns(study.ablations), width)}"
        )
    if len(study.op_groups):
        blocks.append(
            f"held-out single ops, %\n\n{format_table(op_columns(study.op_groups), width)}"
        )
    remarks = _remarks(study)
    if remarks:
        blocks.append("\n".join(remarks))
    return fit("\n\n".join(blocks), width)


def study_to_markdown(study: Study, images: Sequence[str] = ()) -> str:
    """The whole study as Markdown; `images` are the names of the plots that lie beside it."""
    blocks = ["<!-- dlperf validate -->", "# How right the predictions are", _provenance(study)]
    blocks += _plots(images, "steps", "cases")
    if study.summaries:
        blocks += ["## Summary", table(summary_columns(study.summaries)), escape(NOTE)]
        if study.intervals is not None:
            found = study.intervals
            blocks.append(
                f"Intervals of `{MAIN}`: {percent(found.inside_frac)} % of {found.n_cases} cases"
                f" lie in their 90 % interval, of median half width {percent(found.width_frac)} %."
                f" One half width for all cases would have to be {percent(found.constant_frac)} %"
                f" to hold as many; {found.needed_factor:.2f} times its own half width is what"
                " holds 90 % of the cases."
            )
    if study.baseline_scores:
        names = [
            name
            for name in _all_names(study)
            if name in {score.predictor for score in study.baseline_scores}
            or name in _predictors(study)
        ]
        scores = (*study.scores, *study.baseline_scores)
        blocks += ["## Beside other tools", table(_comparison(study))]
        blocks.append(
            "\n".join(
                f"- **{escape(name)}**: {escape(meaning)}" for name, meaning in MEANINGS.items()
            )
        )
        blocks += [
            "### Error of the step",
            table(baseline_columns(scores, names, lambda s: s.step_error_frac)),
        ]
        blocks += [
            "### Error of the forward",
            table(baseline_columns(scores, names, lambda s: s.forward_error_frac)),
        ]
    if study.ablations:
        blocks += [
            "## What each term contributes",
            f"The cases of `{MAIN}` predicted with one term left out.",
            table(ablation_columns(study.ablations)),
        ]
        blocks.append(
            "\n".join(f"- **{escape(row.term)}**: {escape(row.meaning)}" for row in study.ablations)
        )
    for predictor in _predictors(study):
        own = [score for score in study.scores if score.predictor == predictor]
        blocks += [f"## Cases, {escape(predictor)}", table(case_columns(own))]
        if predictor not in (MAIN, WITH_EXACT):
            continue
        for kind, title in (("source", "Layers by source"), ("family", "Layers by type")):
            groups = study.groups[
                (study.groups.predictor == predictor) & (study.groups.kind == kind)
            ]
            if len(groups):
                blocks += [f"### {title}, {escape(predictor)}", table(group_columns(groups))]
    blocks += _plots(images, "layers")
    if len(study.op_groups):
        blocks += [
            "## Held-out single ops",
            _ops_note(study),
            table(op_columns(study.op_groups), set(np.flatnonzero(study.op_groups.kind == "all"))),
        ]
        blocks += _plots(images, "ops")
    remarks = _remarks(study)
    if remarks:
        blocks += ["## Remarks", "\n".join(f"- {escape(remark)}" for remark in remarks)]
    return "\n\n".join(blocks) + "\n"


def write_study(study: Study, folder: str | Path, force: bool = False) -> list[Path]:
    """Write accuracy.md, cases.csv, layers.csv, ops.csv (what there is to say) and the plots into
    `folder`, made if missing.

    Raises DlperfError for a folder that cannot be made or holds foreign files (unless `force`);
    WorkFailed if the disk refuses.
    """
    check_folder(folder, force)
    folder = make_folder(folder)
    pngs = pngs_of(study)
    texts = {"accuracy.md": study_to_markdown(study, [f"{name}.png" for name in pngs])}
    if study.scores:
        texts |= {"cases.csv": cases_csv(study), "layers.csv": layers_csv(study)}
    if len(study.ops):
        texts["ops.csv"] = ops_csv(study)
    written = []
    for name, text in texts.items():
        write_text(folder / name, text)
        written.append(folder / name)
    for name, png in pngs.items():
        write_bytes(folder / f"{name}.png", png)
        written.append(folder / f"{name}.png")
    return written


def _predictors(study: Study) -> list[str]:
    return list(dict.fromkeys(score.predictor for score in study.scores))


def _all_names(study: Study) -> list[str]:
    return list(dict.fromkeys(score.predictor for score in (*study.scores, *study.baseline_scores)))


def _comparison(study: Study) -> list[Column]:
    """One row a predictor or baseline: over the cases that it speaks of, abs(error) of step and
    forward, and the median case's error of leaf modules.
    """
    names = _all_names(study)
    own = {
        name: [s for s in (*study.scores, *study.baseline_scores) if s.predictor == name]
        for name in names
    }

    def middle(value: Callable[[CaseScore], float | None], worst: bool = False) -> tuple[str, ...]:
        cells = []
        for name in names:
            values = [abs(found) for score in own[name] if (found := value(score)) is not None]
            cells.append(percent((max if worst else median)(values) if values else None))
        return tuple(cells)

    return [
        Column("predictor", tuple(names), align_left=True),
        Column("cases", tuple(str(len(own[name])) for name in names)),
        Column("median", middle(lambda s: s.step_error_frac), "step error"),
        Column("worst", middle(lambda s: s.step_error_frac, worst=True), "step error"),
        Column("median", middle(lambda s: s.forward_error_frac), "of forward"),
        Column("worst", middle(lambda s: s.forward_error_frac, worst=True), "of forward"),
        Column("forward", middle(lambda s: s.forward_mape_frac), "layer MAPE"),
        Column("backward", middle(lambda s: s.backward_mape_frac), "layer MAPE"),
    ]


def _provenance(study: Study) -> str:
    p = study.provenance
    lines = [
        (
            f"Measured on {escape(p.machine)}:"
            f" {escape(', '.join(f'{name} {version}' for name, version in p.versions.items()))};"
            f" {p.created}."
        )
    ]
    lines.append(
        f"Machine file: {p.machine_mode} calibration of {p.machine_created or 'unknown date'}. Made"
        f" by `{p.command}`."
    )
    if p.n_runs:
        runs = ", ".join(
            f"{runs} with {threads} thread{'s' if threads > 1 else ''}"
            for threads, runs in p.n_runs
        )
        lines.append(
            f"Fresh processes a case: {runs}, {p.seconds:g} s each. Nothing was fitted on any of"
            " these networks."
        )
    return "\n".join(lines)


def _ops_note(study: Study) -> str:
    return (
        f"Random ops (seed {study.provenance.seed}) of realistic shapes, float32, that stand"
        " nowhere in the machine file, timed in fresh processes with the calibration's own sampler"
        " (warm caches, nothing around them), against what the machine file's curves say. In"
        " percent; repeatability: median of what two processes differ by."
    )


def _plots(images: Sequence[str], *names: str) -> list[str]:
    return [f"![{CAPTIONS[name]}]({name}.png)" for name in names if f"{name}.png" in images]


def _remarks(study: Study) -> list[str]:
    found = [
        f"{failure.case.label} could not be measured: {failure.reason}"
        for failure in study.failures
    ]
    return [*study.variation_remarks, *found, *study.baseline_problems, *study.provenance.remarks]
