"""How far off: a prediction against the reference of its case, and many cases in one line."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from dlperf.core.trace import LOSS
from dlperf.report.layer_comparison import SHARE_FRAC
from dlperf.studies.accuracy.cases import (
    LAYER_PHASES,
    OWN_OPS,
    PHASES,
    Case,
    CaseScore,
    Reference,
    SourceShares,
    median_or_none,
)

if TYPE_CHECKING:
    from dlperf.core.prediction import Item, Step
    from dlperf.forecast.prediction import Prediction
    from dlperf.studies.accuracy.baselines import BaselineEstimate

FRAMEWORK = "framework"
"""The source of a layer's time where no op has a share in it."""

LAYER_COLUMNS = [
    *("target", "batch_size", "threads", "inference", "network", "predictor"),
    *("layer", "family", "phase", "predicted_s", "actual_s", "repeatability_frac"),
    *("phase_share_frac", "source", "bound", "error_frac"),
    *("at_state_s", "at_state_error_frac"),
]


def source_shares(items: Sequence[Item]) -> SourceShares:
    """The shares of the predicted time by where the ops' prices come from."""
    sums: dict[str, float] = defaultdict(float)
    for item in items:
        sums[item.source if item.op >= 0 else FRAMEWORK] += item.seconds
    total = math.fsum(sums.values())
    return (
        SourceShares(**{name: value / total for name, value in sums.items()})
        if total
        else SourceShares()
    )


def score(
    case: Case, reference: Reference, prediction: Prediction, predictor: str
) -> tuple[CaseScore, pd.DataFrame]:
    """One predictor on one case, as a whole and layer by layer (see :func:`layer_scores`).

    A measured layer without a predicted row counts as a prediction of 0. Layers, and phases, that
    the predictor does not support are left out.
    """
    prices, measured = prediction.prices, reference.layers
    supported = measured.phase.isin(prices.phases) & ~measured.layer.isin(prices.unsupported)
    leaves = [layer.name for layer in prediction.trace.layers if layer.is_leaf]
    layers = layer_scores(
        case, reference, measured[supported], predictor, _predicted_layers(prices.items), leaves
    )
    forward = layers[(layers.phase == "forward") & is_leaf(layers)]
    seen_s = measured.groupby("phase").actual_s.sum()
    rows = prediction.layers
    unpriced = measured.layer.isin(rows.layer[rows.source == "unpriced"])
    unpriced_s = measured.actual_s[(measured.phase == "forward") & unpriced].sum()
    return case_score(
        case,
        reference,
        prediction.step,
        predictor,
        layers,
        low_s=prediction.step.low_s,
        high_s=prediction.step.high_s,
        seen_frac=(
            float(seen_s.get("backward", 0.0)) / reference.backward_s
            if reference.backward_s
            else None
        ),
        weighted_frac=known(
            (forward.predicted_s - forward.actual_s).abs().sum() / forward.actual_s.sum()
            if len(forward)
            else None
        ),
        unpriced_frac=float(unpriced_s) / reference.forward_s,
        sources=source_shares(prices.items),
    ), layers


def score_at_state(
    blind: tuple[CaseScore, pd.DataFrame],
    reference: Reference,
    prediction: Prediction,
) -> tuple[CaseScore, pd.DataFrame]:
    """A blind :func:`score` with that of the same predictor's prediction at the state beside."""
    whole, layers = blind
    at_state, rows = score(whole.case, reference, prediction, whole.predictor)
    return replace(whole, state=prediction.state, at_state=at_state), layers.assign(
        at_state_s=rows.predicted_s, at_state_error_frac=rows.error_frac
    )


def case_score(
    case: Case,
    reference: Reference,
    step: Step | BaselineEstimate,
    predictor: str,
    layers: pd.DataFrame,
    **details: Any,
) -> CaseScore:
    """The score of what is predicted of a step, with that of its layers."""
    errors = {}
    for name in ("total", *PHASES):
        predicted_s, actual_s = getattr(step, f"{name}_s"), getattr(reference, f"{name}_s")
        errors[f"{'step' if name == 'total' else name}_error_frac"] = (
            predicted_s / actual_s - 1 if predicted_s is not None and actual_s else None
        )
    for phase in LAYER_PHASES:
        own = layers[layers.phase == phase]
        errors[f"{phase}_mape_frac"] = mape_frac(own)
        errors[f"{phase}_repeatability_frac"] = known(large_leaves(own).repeatability_frac.mean())
    return CaseScore(
        case,
        predictor,
        reference.total_s,
        reference.repeatability_frac,
        step.total_s,
        **errors,
        **details,
    )


def _predicted_layers(items: Sequence[Item]) -> pd.DataFrame:
    """By layer and phase: seconds, the source of most of the ops' time, what bounds most of the
    time.
    """
    frame = pd.DataFrame(
        [(i.layer, i.phase, i.seconds, i.source if i.op >= 0 else None, i.bound) for i in items],
        columns=["layer", "phase", "predicted_s", "source", "bound"],
    )
    by = ["layer", "phase"]
    found = frame.groupby(by).predicted_s.sum().to_frame()
    for name in ("source", "bound"):
        sums = frame.groupby([*by, name]).predicted_s.sum().reset_index()
        found[name] = sums.sort_values(["predicted_s", name]).groupby(by)[name].last()
    return found.fillna({"source": FRAMEWORK}).reset_index()


def layer_scores(
    case: Case,
    reference: Reference,
    measured: pd.DataFrame,
    predictor: str,
    predicted: pd.DataFrame,
    leaves: Sequence[str],
) -> pd.DataFrame:
    """A frame of LAYER_COLUMNS: measured layers against what was predicted of them; nothing
    predicted is a prediction of 0.

    ``phase_share_frac`` is the layer's share of the measured phase. ``family`` is the type of a
    leaf (a module without children); what stands outside of leaves is of the family ``(loss)`` or
    ``(own ops)``, those of a module that has children.
    """
    rows = measured.merge(predicted, on=["layer", "phase"], how="left")
    phases_s = {phase: getattr(reference, f"{phase}_s") for phase in LAYER_PHASES}
    rows = rows.assign(
        **asdict(case),
        network=case.network,
        predictor=predictor,
        family=rows.type.where(
            rows.layer.isin(leaves), rows.layer.where(rows.layer == LOSS, OWN_OPS)
        ),
        predicted_s=rows.predicted_s.fillna(0.0),
        phase_share_frac=rows.actual_s / rows.phase.map(phases_s).astype(float),
        source=rows.source.fillna("missing"),
        bound=rows.bound.fillna(""),
    )
    rows = rows[rows.phase_share_frac > 0]
    return rows.assign(
        error_frac=rows.predicted_s / rows.actual_s - 1,
        at_state_s=math.nan,
        at_state_error_frac=math.nan,
    )[LAYER_COLUMNS]


def joined(frames: Sequence[pd.DataFrame], columns: Sequence[str] = LAYER_COLUMNS) -> pd.DataFrame:
    """Frames of these columns in one."""
    filled = [frame for frame in frames if len(frame)]
    return pd.concat(filled, ignore_index=True) if filled else pd.DataFrame(columns=list(columns))


def known(value: float | None) -> float | None:
    """A number; None where it is NaN."""
    return None if value is None or math.isnan(value) else float(value)


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of a frame as JSON data; null where unknown."""
    values = frame.astype(object)
    rows: list[dict[str, Any]] = values.where(values.notna(), None).to_dict("records")
    return rows


def is_leaf(layers: pd.DataFrame) -> pd.Series[bool]:
    """Which layers are modules without children."""
    return ~layers.family.isin((LOSS, OWN_OPS))


def large(layers: pd.DataFrame) -> pd.DataFrame:
    """The layers that take at least 1 % of their phase: below it, timing noise would be averaged at
    full weight.
    """
    return layers[layers.phase_share_frac >= SHARE_FRAC]


def large_leaves(layers: pd.DataFrame) -> pd.DataFrame:
    """The :func:`large` layers that are leaves, as any other tool can time them too."""
    return large(layers[is_leaf(layers)])


def mape_frac(layers: pd.DataFrame) -> float | None:
    """Mean of abs(predicted / actual - 1) over the :func:`large_leaves`; None without any."""
    return known(large_leaves(layers).error_frac.abs().mean())


LARGE_VARIATION_FRAC = 0.1
"""A median repeatability beyond which a study notes that the machine was busy: on a quiet one it is
a few percent with one thread.
"""


def variation_remark(repeatabilities: Iterable[float | None], what: str) -> str:
    """The remark that two processes of the same thing differ too much for the errors to mean
    anything; empty where they do not.
    """
    middle = median_or_none(repeatabilities)
    if middle is None or middle <= LARGE_VARIATION_FRAC:
        return ""
    return (
        f"processes of the same {what} differ by {100 * middle:.0f} % (median); the machine was"
        " busy; study it again when it is quiet"
    )


@dataclass(frozen=True)
class Summary:
    """Many cases of one predictor in one line, predicted blind or `at_state`; fractions, None where
    no case has a value.

    `step_bias_frac` is the median signed error: a predictor that errs to both sides is nearer to 0
    than one that always errs to one. `step_worst_beyond_repeatability_frac` is the largest among
    the cases that err by more than twice their repeatability. `layer_mape_frac` is the mean over
    the cases' forward and backward layer errors, `layer_repeatability_frac` over their
    repeatabilities.
    """

    predictor: str
    what: str
    at_state: bool
    n_cases: int
    step_median_frac: float | None
    step_worst_frac: float | None
    step_worst_beyond_repeatability_frac: float | None
    step_bias_frac: float | None
    step_repeatability_frac: float | None
    layer_mape_frac: float | None
    layer_repeatability_frac: float | None
    unpriced_worst_frac: float | None
    inside_frac: float | None
    width_median_frac: float | None


def summarize(
    scores: Sequence[CaseScore], predictor: str, what: str = "all", at_state: bool = False
) -> Summary:
    """The summary of one predictor's cases."""

    def values(*names: str) -> pd.Series[float]:
        """Known values of these attributes."""
        found = [getattr(score, name) for name in names for score in scores]
        return pd.Series(found, dtype=float).dropna()

    errors = values("step_error_frac").abs()
    beyond = [
        abs(score.step_error_frac or 0.0)
        for score in scores
        if abs(score.step_error_frac or 0.0) > 2 * (score.repeatability_frac or 0.0)
    ]
    numbers = (
        errors.median(),
        errors.max(),
        max(beyond, default=0.0) if len(errors) else None,
        values("step_error_frac").median(),
        values("repeatability_frac").median(),
        values("forward_mape_frac", "backward_mape_frac").mean(),
        values("forward_repeatability_frac", "backward_repeatability_frac").mean(),
        values("unpriced_frac").max(),
        values("inside").mean(),
        values("width_frac").median(),
    )
    return Summary(predictor, what, at_state, len(scores), *map(known, numbers))


def summaries(scores: Sequence[CaseScore]) -> tuple[Summary, ...]:
    """Each predictor's summary: all cases, each thread count, and the cases whose op times are
    exact in the machine file apart from the others. Under each, the same cases at their state.
    """
    found = []
    for predictor in dict.fromkeys(score.predictor for score in scores):
        own = [score for score in scores if score.predictor == predictor]
        parts = {"all": own}
        counts = sorted({score.case.threads for score in own})
        for count in counts if len(counts) > 1 else ():
            name = f"{count} thread{'s' if count > 1 else ''}"
            parts[name] = [s for s in own if s.case.threads == count]
        exact = [s for s in own if s.sources is not None and s.sources.all_measured]
        if exact and len(exact) < len(own):
            parts["ops measured"] = exact
            parts["ops interpolated"] = [s for s in own if s not in exact]
        for what, part in parts.items():
            found.append(summarize(part, predictor, what))
            if at_state := [score.at_state for score in part if score.at_state is not None]:
                found.append(summarize(at_state, predictor, what, at_state=True))
    return tuple(found)


def error_statistics(
    rows: pd.DataFrame, by: Sequence[str], count: str, repeatability: str
) -> pd.DataFrame:
    """Groups of rows in the order of their first ones: their number, mean, median and 90th
    percentile of abs(error), the median signed error (bias), and the repeatability.
    """
    rows = rows.astype({"error_frac": float, "repeatability_frac": float})
    groups = rows.assign(size=rows.error_frac.abs()).groupby(list(by), sort=False)
    return pd.DataFrame(
        {
            count: groups["size"].count(),
            "mape_frac": groups["size"].mean(),
            "median_frac": groups["size"].median(),
            "p90_frac": groups["size"].quantile(0.9),
            "bias_frac": groups.error_frac.median(),
            "repeatability_frac": groups.repeatability_frac.agg(repeatability),
        }
    ).reset_index()


def layer_groups(layers: pd.DataFrame) -> pd.DataFrame:
    """Layers of at least 1 % of their phase by the source of their price (leaves alone) and by
    their family, each phase apart, the largest groups first.
    """
    found = []
    for kind, rows in (("source", large_leaves(layers)), ("family", large(layers))):
        by = ("predictor", kind, "phase")
        groups = error_statistics(rows, by, "n_layers", "mean")
        at_state = rows.assign(error_frac=rows.at_state_error_frac)
        others = error_statistics(at_state, by, "n_layers", "mean")
        for name in ("mape_frac", "bias_frac"):
            groups[f"at_state_{name}"] = others[name]
        groups = groups.rename(columns={kind: "name"})
        groups.insert(1, "kind", kind)
        found.append(
            groups.sort_values(
                ["predictor", "n_layers", "name", "phase"], ascending=[True, False, True, True]
            )
        )
    return pd.concat(found, ignore_index=True)
