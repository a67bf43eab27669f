"""A study as tables: for the terminal, for Markdown, as CSV."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pandas as pd

from dlperf.core.text import frame_to_csv
from dlperf.report.document import Column, format_error, format_time
from dlperf.studies.accuracy.ablation import Ablation
from dlperf.studies.accuracy.cases import CaseScore
from dlperf.studies.accuracy.scoring import Summary
from dlperf.studies.accuracy.study import Study

Row = TypeVar("Row")


def percent(value: float | None) -> str:
    """A fraction in percent with one decimal, without the sign.

    >>> percent(0.0312), percent(None)
    ('3.1', '-')
    """
    return "-" if value is None or math.isnan(value) else f"{100 * value:.1f}"


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
    """One row a case: the step, its error and floor, the layers' errors and repeatabilities in
    percent, the interval, where the price comes from.
    """

    def source(name: str) -> Callable[[CaseScore], str]:
        return lambda s: "-" if s.sources is None else f"{100 * getattr(s.sources, name):.0f}"

    return _columns(
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
        ("forward", "error of", 2, False, lambda s: format_error(s.forward_error_frac)),
        ("backward", "error of", 2, False, lambda s: format_error(s.backward_error_frac)),
        ("optimizer", "error of", 2, False, lambda s: format_error(s.optimizer_error_frac)),
        ("measured", "source", 2, False, source("measured")),
        ("interp.", "source", 2, False, source("interpolated")),
        ("extrap.", "source", 2, False, source("extrapolated")),
        ("unpriced", "source", 2, False, source("unpriced")),
        ("framework", "source", 2, False, source("framework")),
        ("unpriced layers", "", 3, False, lambda s: percent(s.unpriced_frac)),
    )


def summary_columns(rows: Sequence[Summary]) -> list[Column]:
    """One row a predictor and part of the cases, in percent."""
    return _columns(
        rows,
        ("predictor", "", 0, True, lambda r: r.predictor),
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
        ("bias", "step error", 1, False, lambda r: format_error(r.step_bias_frac)),
        ("repeatability", "step error", 0, False, lambda r: percent(r.step_repeatability_frac)),
        ("MAPE", "layers", 0, False, lambda r: percent(r.layer_mape_frac)),
        ("repeatability", "layers", 1, False, lambda r: percent(r.layer_repeatability_frac)),
        ("unpriced, worst", "", 2, False, lambda r: percent(r.unpriced_worst_frac)),
        ("inside", "interval", 0, False, lambda r: percent(r.inside_frac)),
        ("half width", "interval", 0, False, lambda r: percent(r.width_median_frac)),
    )


def baseline_columns(
    scores: Sequence[CaseScore], names: Sequence[str], value: Callable[[CaseScore], float | None]
) -> list[Column]:
    """One row a case, one column a predictor or baseline: the error that `value` gives."""
    labels = tuple(dict.fromkeys(score.case.label for score in scores))
    found = {(score.case.label, score.predictor): value(score) for score in scores}
    first = Column("case", labels, align_left=True)
    return [
        first,
        *(
            Column(name, tuple(format_error(found.get((label, name))) for label in labels))
            for name in names
        ),
    ]


def group_columns(groups: pd.DataFrame) -> list[Column]:
    """One row a kind of layer, in percent."""
    return _columns(
        list(groups.itertuples()),
        ("layers", "", 0, True, lambda r: r.name),
        ("phase", "", 0, True, lambda r: r.phase),
        ("number", "", 0, False, lambda r: str(r.n_layers)),
        ("mean", "abs(error)", 0, False, lambda r: percent(r.mape_frac)),
        ("median", "abs(error)", 0, False, lambda r: percent(r.median_frac)),
        ("90th", "abs(error)", 0, False, lambda r: percent(r.p90_frac)),
        ("bias", "", 0, False, lambda r: format_error(r.bias_frac)),
        ("repeatability", "", 0, False, lambda r: percent(r.repeatability_frac)),
    )


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


def cases_csv(study: Study) -> str:
    """Every case and predictor, peers included, with machine, versions and date in every row."""
    return _csv(study, "cases")


def layers_csv(study: Study) -> str:
    """Every layer, phase and predictor."""
    return _csv(study, "layers")


def ops_csv(study: Study) -> str:
    """Every single op."""
    return _csv(study, "ops")


def _csv(study: Study, name: str) -> str:
    rows: list[dict[str, Any]] = study.to_json()[name]
    flat = []
    for row in rows:
        sources = row.pop("sources", None) or {}
        flat.append({**row, **{f"{key}_share_frac": value for key, value in sources.items()}})
    frame = pd.DataFrame(flat)
    frame["machine"] = study.provenance.machine
    frame["versions"] = "; ".join(
        f"{name} {version}" for name, version in sorted(study.provenance.versions.items())
    )
    frame["created"] = study.provenance.created
    return frame_to_csv(frame, "%.6g")
