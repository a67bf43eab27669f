"""A study as text for a terminal and as a folder: accuracy.md, CSV, plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from dlperf.core.text import frame_to_csv
from dlperf.report.document import Column, escape, format_error, format_time, table
from dlperf.report.writing import write_files
from dlperf.studies.accuracy.ablation import Ablation
from dlperf.studies.accuracy.baselines import MEANINGS, problems
from dlperf.studies.accuracy.cases import CaseScore
from dlperf.studies.accuracy.figures import CAPTIONS, pngs_of
from dlperf.studies.accuracy.residuals import N_SHOWN
from dlperf.studies.accuracy.scoring import Summary, known, summaries
from dlperf.studies.accuracy.study import MAIN, WITH_EXACT, Study
from dlperf.studies.results import percent, tables_to_text

Row = TypeVar("Row")
NOTE = (
    "All in percent. Step: the median of several fresh processes against the prediction;"
    " repeatability: (slowest - fastest process) / median. Layers: mean absolute percentage error"
    " over the modules without children that take at least 1 % of their phase, with the mean"
    " repeatability of the same ones. Seen: share of the backward that the measurement attributes"
    " to layers. Source: share of the predicted time that is the time of ops measured at their very"
    " shape, interpolated, extrapolated, unpriced, and of what is no op (calls, the optimizer's"
    " loop, page faults)."
)
AT_STATE = "at state"
"""Title of what is predicted at the state."""
STATE_NOTE = (
    "Predictions are blind unless they are at the state. Blind: for the median of the states that"
    " the machine file contains, which is what a user gets without a probe. At the state: for the"
    " median of the readings right before and right after each measurement of the case (of two the"
    " mean). An error at the state is the model's; its difference from the blind error is that of"
    " the state."
)
RESIDUAL_NOTE = (
    "What is left at the state: the error by operator (or what an item without one is), phase and"
    " bound. The time of each layer in a phase, and of what the phase takes outside of its measured"
    " layers, belongs to its predicted items in proportion to their predicted seconds. In percent:"
    " time is the share of all measured time; error is predicted - measured over that time;"
    " residual is the share of the sum of abs(predicted - measured) over all layers."
)


def study_to_text(study: Study, width: int | None = None) -> str:
    """Text page: cases by predictor, summaries, baseline tools, single ops, ablation."""
    tables = [(name, case_columns(own)) for name, own in _by_predictor(study).items()]
    if study.own_scores:
        tables.append(("summary, %", summary_columns(summaries(study.own_scores))))
    if len(study.residuals):
        tables.append(("left at the state, %", residual_columns(study.residuals[:N_SHOWN])))
    if _has_baselines(study):
        tables.append(("beside other tools, %", _comparison(study)))
    if study.ablations:
        tables.append(("one term left out, %", ablation_columns(study.ablations)))
    if len(study.op_groups):
        tables.append(("held-out single ops, %", op_columns(study.op_groups)))
    after = [*_state_notes(study), "\n".join(_remarks(study))]
    return tables_to_text(tables, after=filter(None, after), width=width)


def study_to_markdown(study: Study, images: Sequence[str] = ()) -> str:
    """The whole study as Markdown; `images` are the names of the plots that lie beside it."""
    blocks = ["<!-- dlperf validate -->", "# How right the predictions are", _provenance(study)]
    blocks += _plots(images, "steps", "cases")
    if study.own_scores:
        blocks += ["## Summary", table(summary_columns(summaries(study.own_scores))), escape(NOTE)]
        blocks += [*map(escape, _state_notes(study)[:1]), *_interval_notes(study)]
    if len(study.residuals):
        blocks += [
            "## What is left of the error",
            *map(escape, _state_notes(study)[1:]),
            table(residual_columns(study.residuals[:N_SHOWN])),
        ]
    if _has_baselines(study):
        blocks += [
            "## Beside other tools",
            table(_comparison(study)),
            _definitions(MEANINGS),
            "### Error of the step",
            table(baseline_columns(study, "step_error_frac")),
            "### Error of the forward",
            table(baseline_columns(study, "forward_error_frac")),
        ]
    if study.ablations:
        blocks += [
            "## What each term contributes",
            f"The cases of `{MAIN}` predicted with one term left out.",
            table(ablation_columns(study.ablations)),
            _definitions({row.term: row.meaning for row in study.ablations}),
        ]
    for predictor, own in _by_predictor(study).items():
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
            *_plots(images, "ops"),
        ]
    if remarks := _remarks(study):
        blocks += ["## Remarks", "\n".join(f"- {escape(remark)}" for remark in remarks)]
    return "\n\n".join(blocks) + "\n"


def write_study(study: Study, folder: str | Path, force: bool = False) -> list[Path]:
    """Write accuracy.md, cases.csv, layers.csv, residuals.csv, ops.csv (those with content) and the
    plots into `folder`, made if missing. Those of an earlier study that this one lacks are removed.

    Raises DlperfError for a folder that cannot be made or holds foreign files (unless `force`);
    WorkFailed if the disk refuses.
    """
    pngs = pngs_of(study)
    content = {
        "cases": study.scores,
        "layers": study.scores,
        "residuals": study.residuals,
        "ops": study.ops,
    }
    names = [name for name, rows in content.items() if len(rows)]
    texts = {f"{name}.csv": _csv(study, name) for name in names}
    page = study_to_markdown(study, list(pngs))
    earlier = [*(f"{name}.csv" for name in content), *(f"{name}.png" for name in CAPTIONS)]
    return write_files(folder, {"accuracy.md": page, **texts, **pngs}, force, earlier)


def _by_predictor(study: Study) -> dict[str, list[CaseScore]]:
    """The scores of each predictor, without baselines."""
    found: dict[str, list[CaseScore]] = {}
    for score in study.own_scores:
        found.setdefault(score.predictor, []).append(score)
    return found


def _has_baselines(study: Study) -> bool:
    return len(study.own_scores) < len(study.scores)


def _definitions(meanings: Mapping[str, str]) -> str:
    return "\n".join(f"- **{escape(name)}**: {escape(text)}" for name, text in meanings.items())


def _interval_notes(study: Study) -> list[str]:
    """What the intervals of the blind predictions and of those at the state are worth."""
    return [
        f"Intervals of `{MAIN}`{where}: {percent(found.inside_frac)} % of {found.n_cases} cases"
        f" lie in their 90 % interval, of median half width {percent(found.width_frac)} %."
        f" One half width for all cases would have to be {percent(found.constant_frac)} %"
        f" to hold as many; {found.needed_factor:.2f} times its own half width is what"
        " holds 90 % of the cases."
        for where, found in (("", study.intervals), (" at the state", study.intervals_at_state))
        if found is not None
    ]


def _state_notes(study: Study) -> list[str]:
    """What blind and at the state mean, and what the table of residuals shows; of a study without
    predictions at the state nothing.
    """
    residuals = study.residuals
    notes = [STATE_NOTE] if any(score.at_state for score in study.scores) else []
    if len(residuals):
        sums = residuals[["residual_s", "absolute_s"]].sum() / residuals.measured_s.sum()
        notes.append(
            f"{RESIDUAL_NOTE} All residuals add up to {format_error(sums.residual_s)} of the"
            f" measured time, their absolute values to {percent(sums.absolute_s)} %; of"
            f" {len(residuals)} rows, the {min(N_SHOWN, len(residuals))} with the most residual are"
            " shown."
        )
    return notes


def _provenance(study: Study) -> str:
    p = study.provenance
    versions = ", ".join(f"{name} {version}" for name, version in p.versions.items())
    lines = [
        f"Measured on {escape(p.machine)}: {escape(versions)}; {p.created}.",
        (
            f"Machine file: {p.machine_mode} calibration of"
            f" {p.machine_created or 'unknown date'}. Made by `{p.command}`."
        ),
    ]
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
    return [
        *study.variation_remarks,
        *study.state_remarks,
        *found,
        *problems(study.estimates),
        *study.provenance.remarks,
    ]


# -- tables ----------------------------------------------------------------------------------------


def _columns(
    rows: Sequence[Row], *columns: tuple[str, str, int, bool, Callable[[Row], str]]
) -> list[Column]:
    return [
        Column(title, tuple(cell(row) for row in rows), group, rank, align_left=left)
        for title, group, rank, left, cell in columns
    ]


def _inside(score: CaseScore) -> str:
    return "-" if score.inside is None else "yes" if score.inside else "no"


def case_columns(scores: Sequence[CaseScore]) -> list[Column]:
    """One row a case: step, error and repeatability, those of the layers, the interval, the same at
    the state, where the price comes from; in percent.
    """

    def at_state(cell: Callable[[CaseScore], str]) -> Callable[[CaseScore], str]:
        return lambda s: "-" if s.at_state is None else cell(s.at_state)

    def source(name: str) -> Callable[[CaseScore], str]:
        return lambda s: "-" if s.sources is None else f"{100 * getattr(s.sources, name):.0f}"

    columns = _columns(
        scores,
        ("case", "", 0, True, lambda s: s.case.label),
        ("actual", "step", 0, False, lambda s: format_time(s.actual_s)),
        ("predicted", "step", 0, False, lambda s: format_time(s.predicted_s)),
        ("error", "step", 0, False, lambda s: format_error(s.step_error_frac)),
        ("repeatability", "step", 0, False, lambda s: percent(s.repeatability_frac)),
        ("MAPE", "forward", 0, False, lambda s: percent(s.forward_mape_frac)),
        ("repeatability", "forward", 1, False, lambda s: percent(s.forward_repeatability_frac)),
        ("MAPE", "backward", 0, False, lambda s: percent(s.backward_mape_frac)),
        ("repeatability", "backward", 1, False, lambda s: percent(s.backward_repeatability_frac)),
        ("seen", "backward", 3, False, lambda s: percent(s.seen_frac)),
        ("weighted", "forward", 3, False, lambda s: percent(s.weighted_frac)),
        ("width", "interval", 1, False, lambda s: percent(s.width_frac)),
        ("in", "interval", 0, False, _inside),
        ("error", AT_STATE, 0, False, at_state(lambda s: format_error(s.step_error_frac))),
        ("width", AT_STATE, 2, False, at_state(lambda s: percent(s.width_frac))),
        ("in", AT_STATE, 1, False, at_state(_inside)),
        ("forward MAPE", AT_STATE, 2, False, at_state(lambda s: percent(s.forward_mape_frac))),
        ("backward MAPE", AT_STATE, 2, False, at_state(lambda s: percent(s.backward_mape_frac))),
        ("forward", "error of", 2, False, lambda s: format_error(s.forward_error_frac)),
        ("backward", "error of", 2, False, lambda s: format_error(s.backward_error_frac)),
        ("optimizer", "error of", 2, False, lambda s: format_error(s.optimizer_error_frac)),
        ("measured", "source", 2, False, source("measured")),
        ("interp.", "source", 2, False, source("interpolated")),
        ("extrap.", "source", 2, False, source("extrapolated")),
        ("unpriced", "source", 2, False, source("unpriced")),
        ("framework", "source", 2, False, source("framework")),
        ("unpriced layers", "", 3, False, lambda s: percent(s.unpriced_frac)),
        ("state", "", 3, True, lambda s: "-" if s.state is None else s.state.describe()),
    )
    is_known = any(score.at_state is not None for score in scores)
    return [one for one in columns if is_known or not _is_of_state(one)]


def _is_of_state(column: Column) -> bool:
    return column.group == AT_STATE or column.title == "state"


def summary_columns(rows: Sequence[Summary]) -> list[Column]:
    """One row a predictor and part of the cases, in percent."""
    return _columns(
        rows,
        ("predictor", "", 0, True, lambda r: f"  {AT_STATE}" if r.at_state else r.predictor),
        ("cases", "", 0, True, lambda r: r.what),
        ("number", "", 0, False, lambda r: str(r.n_cases)),
        ("median", "step error", 0, False, lambda r: percent(r.step_median_frac)),
        ("worst", "step error", 0, False, lambda r: percent(r.step_worst_frac)),
        (
            "beyond 2 x repeatability",
            "step error",
            1,
            False,
            lambda r: percent(r.step_worst_beyond_repeatability_frac),
        ),
        ("bias", "step error", 0, False, lambda r: format_error(r.step_bias_frac)),
        ("repeatability", "step error", 0, False, lambda r: percent(r.step_repeatability_frac)),
        ("MAPE", "layers", 0, False, lambda r: percent(r.layer_mape_frac)),
        ("repeatability", "layers", 1, False, lambda r: percent(r.layer_repeatability_frac)),
        ("unpriced, worst", "", 2, False, lambda r: percent(r.unpriced_worst_frac)),
        ("inside", "interval", 0, False, lambda r: percent(r.inside_frac)),
        ("half width", "interval", 0, False, lambda r: percent(r.width_median_frac)),
    )


def baseline_columns(study: Study, value: str) -> list[Column]:
    """One row a case, one column a predictor or baseline: this error."""
    labels = tuple(dict.fromkeys(score.case.label for score in study.scores))
    found = {(score.case.label, score.predictor): getattr(score, value) for score in study.scores}
    return [
        Column("case", labels, align_left=True),
        *(
            Column(name, tuple(format_error(found.get((label, name))) for label in labels))
            for name in study.predictors
        ),
    ]


def residual_columns(residuals: pd.DataFrame) -> list[Column]:
    """One row an operator, phase and bound, in percent."""
    return _columns(
        list(residuals.itertuples()),
        ("operator", "", 0, True, lambda r: r.operator),
        ("phase", "", 0, True, lambda r: r.phase),
        ("bound", "", 0, True, lambda r: r.bound or "-"),
        ("layers", "", 1, False, lambda r: str(r.n_layers)),
        ("time", "", 0, False, lambda r: percent(r.measured_share_frac)),
        ("error", "", 0, False, lambda r: format_error(known(r.error_frac))),
        ("residual", "", 0, False, lambda r: percent(r.residual_share_frac)),
    )


def group_columns(groups: pd.DataFrame) -> list[Column]:
    """One row a kind of layer, in percent."""
    columns = _columns(
        list(groups.itertuples()),
        ("layers", "", 0, True, lambda r: r.name),
        ("phase", "", 0, True, lambda r: r.phase),
        ("number", "", 0, False, lambda r: str(r.n_layers)),
        ("mean", "abs(error)", 0, False, lambda r: percent(r.mape_frac)),
        ("median", "abs(error)", 0, False, lambda r: percent(r.median_frac)),
        ("90th", "abs(error)", 0, False, lambda r: percent(r.p90_frac)),
        ("bias", "", 0, False, lambda r: format_error(r.bias_frac)),
        ("mean", AT_STATE, 0, False, lambda r: percent(r.at_state_mape_frac)),
        ("bias", AT_STATE, 0, False, lambda r: format_error(known(r.at_state_bias_frac))),
        ("repeatability", "", 0, False, lambda r: percent(r.repeatability_frac)),
    )
    is_known = groups.at_state_bias_frac.notna().any()
    return [one for one in columns if is_known or not _is_of_state(one)]


def op_columns(groups: pd.DataFrame) -> list[Column]:
    """One row a family or kind of single ops, in percent."""
    several = len(set(groups.threads)) > 1
    return _columns(
        list(groups.itertuples()),
        (
            "ops",
            "",
            0,
            True,
            lambda r: (
                (r.family if r.kind == "all" else f"  {r.kind}")
                + (f" t{r.threads}" if several else "")
            ),
        ),
        ("number", "", 0, False, lambda r: str(r.n_ops)),
        ("MAPE", "", 0, False, lambda r: percent(r.mape_frac)),
        ("median", "", 0, False, lambda r: percent(r.median_frac)),
        ("90th", "", 0, False, lambda r: percent(r.p90_frac)),
        ("bias", "", 0, False, lambda r: format_error(r.bias_frac)),
        ("repeatability", "", 0, False, lambda r: percent(r.repeatability_frac)),
        ("unpriced", "", 1, False, lambda r: str(r.n_unpriced)),
    )


def ablation_columns(rows: Sequence[Ablation]) -> list[Column]:
    """The whole predictor first, then one row a term left out, in percent."""
    if not rows:
        return []
    table: list[tuple[str, float | None, Summary]] = [
        ("nothing", None, rows[0].whole),
        *((row.term, row.share_frac, row.without) for row in rows),
    ]
    return _columns(
        table,
        ("left out", "", 0, True, lambda r: r[0]),
        ("share of the step", "", 0, False, lambda r: percent(r[1])),
        ("median", "step error", 0, False, lambda r: percent(r[2].step_median_frac)),
        ("worst", "step error", 0, False, lambda r: percent(r[2].step_worst_frac)),
        ("bias", "step error", 0, False, lambda r: format_error(r[2].step_bias_frac)),
        ("MAPE", "layers", 0, False, lambda r: percent(r[2].layer_mape_frac)),
    )


def _csv(study: Study, name: str) -> str:
    """Every case, layer, residual or op, with machine, versions and date in every row."""
    rows: list[dict[str, Any]] = study.to_json()[name]
    for row in rows:
        shares = row.pop("sources", None) or {}
        row.update((f"{source}_share_frac", share) for source, share in shares.items())
        for part in ("state", "at_state"):
            values = row.pop(part, None) or {}
            row.update((f"{part}_{key}", value) for key, value in values.items())
    provenance = study.provenance
    versions = "; ".join(
        f"{name} {version}" for name, version in sorted(provenance.versions.items())
    )
    frame = pd.DataFrame(rows).assign(
        machine=provenance.machine, versions=versions, created=provenance.created
    )
    return frame_to_csv(frame, "%.6g")


def _comparison(study: Study) -> list[Column]:
    """One row a predictor or baseline: over the cases that it supports, abs(error) of step and
    forward, and the median case's error of leaf modules.
    """
    names = ["step_error_frac", "forward_error_frac", "forward_mape_frac", "backward_mape_frac"]
    errors = pd.DataFrame(
        [[getattr(score, name) for name in names] for score in study.scores],
        columns=names,
        index=[score.predictor for score in study.scores],
        dtype=float,
    )
    groups = errors.abs().groupby(level=0, sort=False)
    middle, worst = (frame.map(percent) for frame in (groups.median(), groups.max()))
    return [
        Column("predictor", tuple(middle.index), align_left=True),
        Column("cases", tuple(map(str, groups.size()))),
        Column("median", tuple(middle.step_error_frac), "step error"),
        Column("worst", tuple(worst.step_error_frac), "step error"),
        Column("median", tuple(middle.forward_error_frac), "of forward"),
        Column("worst", tuple(worst.forward_error_frac), "of forward"),
        Column("forward", tuple(middle.forward_mape_frac), "layer MAPE"),
        Column("backward", tuple(middle.backward_mape_frac), "layer MAPE"),
    ]
