"""How far off: a prediction against the reference of its case, and many cases in one line."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

from dlperf.core.clock import quantile
from dlperf.core.trace import LOSS
from dlperf.report.accuracy import SHARE_FRAC
from dlperf.studies.accuracy.cases import (
    LAYER_PHASES,
    OWN_OPS,
    Case,
    CaseScore,
    LayerScore,
    Reference,
    SourceShares,
)

if TYPE_CHECKING:
    from dlperf.core.prediction import Item
    from dlperf.forecast.prediction import Prediction

FRAMEWORK = "framework"
"""The source of a layer's time where no op has a share in it."""


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
) -> tuple[CaseScore, tuple[LayerScore, ...]]:
    """One predictor on one case, as a whole and layer by layer.

    A measured layer without a predicted row counts as a prediction of 0. Layers, and phases, that
    the predictor does not speak of are left out.
    """
    step, prices = prediction.step, prediction.prices
    layers: list[LayerScore] = []
    leaves = {layer.name for layer in prediction.trace.layers if layer.is_leaf}
    for phase in LAYER_PHASES:
        if phase in prices.phases:
            predicted = _layer_predictions(prediction, phase)
            layers += [
                layer
                for layer in layer_scores(case, reference, predictor, phase, predicted, leaves)
                if layer.layer not in prices.unsupported
            ]
    by_phase = {
        phase: [layer for layer in layers if layer.phase == phase] for phase in LAYER_PHASES
    }
    forward = [layer for layer in by_phase["forward"] if layer.is_leaf]
    actual_sum = math.fsum(layer.actual_s for layer in forward)
    seen_s = math.fsum(row.backward_s for row in reference.layers if row.backward_s is not None)
    unpriced = {
        name
        for name, source in zip(prediction.layers["layer"], prediction.layers["source"])
        if source == "unpriced"
    }
    return CaseScore(
        case,
        predictor,
        reference.total_s,
        reference.repeatability_frac,
        step.total_s,
        step.low_s,
        step.high_s,
        step_error_frac=_error(step.total_s, reference.total_s),
        forward_error_frac=_error(step.forward_s, reference.forward_s),
        backward_error_frac=_error(step.backward_s, reference.backward_s),
        optimizer_error_frac=_error(step.optimizer_s, reference.optimizer_s),
        forward_mape_frac=mape_frac(by_phase["forward"]),
        forward_repeatability_frac=repeatability_frac(by_phase["forward"]),
        backward_mape_frac=mape_frac(by_phase["backward"]),
        backward_repeatability_frac=repeatability_frac(by_phase["backward"]),
        seen_frac=seen_s / reference.backward_s if reference.backward_s else None,
        weighted_frac=(
            math.fsum(abs(layer.predicted_s - layer.actual_s) for layer in forward) / actual_sum
            if actual_sum
            else None
        ),
        unpriced_frac=math.fsum(
            row.forward_s
            for row in reference.layers
            if row.forward_s is not None and row.layer in unpriced
        )
        / reference.forward_s,
        sources=source_shares(prices.items),
    ), tuple(layers)


def _error(predicted_s: float | None, actual_s: float | None) -> float | None:
    return predicted_s / actual_s - 1 if predicted_s is not None and actual_s else None


LayerPrediction = tuple[float, str, str]
"""What a predictor says of a layer in a phase: seconds, the source of most of the ops' time, what
bounds most of it.
"""


def _layer_predictions(prediction: Prediction, phase: str) -> dict[str, LayerPrediction]:
    seconds: dict[str, float] = defaultdict(float)
    by_source: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    by_bound: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for item in prediction.prices.items:
        if item.phase == phase:
            seconds[item.layer] += item.seconds
            by_bound[item.layer][item.bound] += item.seconds
            if item.op >= 0:
                by_source[item.layer][item.source] += item.seconds
    return {
        layer: (total, _largest(by_source.get(layer), FRAMEWORK), _largest(by_bound[layer], ""))
        for layer, total in seconds.items()
    }


def layer_scores(
    case: Case,
    reference: Reference,
    predictor: str,
    phase: str,
    predicted: Mapping[str, LayerPrediction],
    leaves: Container[str],
) -> Iterator[LayerScore]:
    """Every measured layer of a phase against what was predicted of it; nothing predicted is a
    prediction of 0.
    """
    phase_s = reference.phase_s(phase)
    for row in reference.layers:
        actual_s = row.seconds(phase)
        if phase_s and actual_s:
            predicted_s, source, bound = predicted.get(row.layer, (0.0, "missing", ""))
            family = row.type if row.layer in leaves else LOSS if row.layer == LOSS else OWN_OPS
            yield LayerScore(
                case,
                predictor,
                row.layer,
                family,
                phase,
                predicted_s,
                actual_s,
                row.repeatability_frac(phase),
                actual_s / phase_s,
                source,
                bound,
            )


def _largest(shares: dict[str, float] | None, otherwise: str) -> str:
    return max(shares, key=lambda name: (shares[name], name)) if shares else otherwise


def large(layers: Iterable[LayerScore]) -> list[LayerScore]:
    """The layers that take at least 1 % of their phase: below it, timing noise would be averaged at
    full weight.
    """
    return [layer for layer in layers if layer.phase_share_frac >= SHARE_FRAC]


def large_leaves(layers: Iterable[LayerScore]) -> list[LayerScore]:
    """The :func:`large` layers that are leaves: modules without children, as any other tool can
    time them too.
    """
    return [layer for layer in large(layers) if layer.is_leaf]


def mape_frac(layers: Iterable[LayerScore]) -> float | None:
    """Mean of abs(predicted / actual - 1) over the layers that are :func:`large_leaves`; None where
    there is none.
    """
    errors = [abs(layer.error_frac) for layer in large_leaves(layers)]
    return fmean(errors) if errors else None


def repeatability_frac(layers: Iterable[LayerScore]) -> float | None:
    """Mean repeatability floor of the layers that are :func:`large_leaves`; None where none has
    one."""
    return _mean_repeatability(large_leaves(layers))


def _mean_repeatability(layers: Iterable[LayerScore]) -> float | None:
    repeatabilities = [
        layer.repeatability_frac for layer in layers if layer.repeatability_frac is not None
    ]
    return fmean(repeatabilities) if repeatabilities else None


def worst_beyond_repeatability(errors: Iterable[tuple[float, float]]) -> float:
    """The largest abs(error) among the cases that err by more than twice their floor; 0 where none
    does.

    >>> worst_beyond_repeatability([(0.3, 0.2), (-0.1, 0.01)])
    0.1
    """
    return max((abs(error) for error, floor in errors if abs(error) > 2 * floor), default=0.0)


LARGE_VARIATION_FRAC = 0.1
"""A median floor beyond which a study says that the machine was busy: on a quiet one it is a few
percent with one thread.
"""


def variation_remark(repeatabilities: Sequence[float], what: str) -> str:
    """The remark that two processes of the same thing differ too much for the errors to mean
    anything; empty where they do not.
    """
    if not repeatabilities or median(repeatabilities) <= LARGE_VARIATION_FRAC:
        return ""
    return (
        f"processes of the same {what} differ by {100 * median(repeatabilities):.0f} % (median);"
        " the machine was busy; study it again when it is quiet"
    )


@dataclass(frozen=True)
class Summary:
    """Many cases of one predictor in one line; fractions, None where no case has a value.

    `step_bias_frac` is the median signed error: a predictor that errs to both sides is nearer to 0
    than one that always errs to one. `layer_mape_frac` is the mean over the cases' forward and
    backward layer errors, `layer_repeatability_frac` over their repeatabilities.
    """

    predictor: str
    what: str
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


def summarize(scores: Sequence[CaseScore], predictor: str, what: str = "all") -> Summary:
    """The summary of one predictor's cases."""
    spoken = [
        (score.step_error_frac, score.repeatability_frac or 0.0)
        for score in scores
        if score.step_error_frac is not None
    ]
    errors = [abs(error) for error, _ in spoken]
    layers = [
        value
        for score in scores
        for value in (score.forward_mape_frac, score.backward_mape_frac)
        if value is not None
    ]
    repeatabilities = [
        value
        for score in scores
        for value in (score.forward_repeatability_frac, score.backward_repeatability_frac)
        if value is not None
    ]
    step_repeatabilities = [
        score.repeatability_frac for score in scores if score.repeatability_frac is not None
    ]
    inside = [score.inside for score in scores if score.inside is not None]
    widths = [score.width_frac for score in scores if score.width_frac is not None]
    unpriced = [score.unpriced_frac for score in scores if score.unpriced_frac is not None]
    return Summary(
        predictor,
        what,
        len(scores),
        median(errors) if errors else None,
        max(errors, default=None),
        worst_beyond_repeatability(spoken) if spoken else None,
        median([error for error, _ in spoken]) if spoken else None,
        median(step_repeatabilities) if step_repeatabilities else None,
        fmean(layers) if layers else None,
        fmean(repeatabilities) if repeatabilities else None,
        max(unpriced, default=None),
        fmean(inside) if inside else None,
        median(widths) if widths else None,
    )


def summaries(scores: Sequence[CaseScore]) -> tuple[Summary, ...]:
    """Each predictor's summary: all cases, each thread count, and the cases whose op times are
    exact in the machine file apart from the others.
    """
    found = []
    for predictor in dict.fromkeys(score.predictor for score in scores):
        own = [score for score in scores if score.predictor == predictor]
        parts: list[tuple[str, list[CaseScore]]] = [("all", own)]
        counts = sorted({score.case.threads for score in own})
        parts += [
            (
                f"{count} thread{'s' if count > 1 else ''}",
                [s for s in own if s.case.threads == count],
            )
            for count in counts
            if len(counts) > 1
        ]
        exact = [s for s in own if s.sources is not None and s.sources.all_measured]
        if exact and len(exact) < len(own):
            parts += [
                ("ops measured", exact),
                ("ops interpolated", [s for s in own if s not in exact]),
            ]
        found += [summarize(part, predictor, what) for what, part in parts]
    return tuple(found)


@dataclass(frozen=True)
class LayerGroup:
    """The layers of one kind under one predictor: `n_layers` of at least 1 % of their phase, with
    mean, median and 90th percentile of abs(error).
    """

    predictor: str
    kind: str
    name: str
    phase: str
    n_layers: int
    mape_frac: float
    median_frac: float
    p90_frac: float
    bias_frac: float
    repeatability_frac: float | None


def layer_groups(layers: Sequence[LayerScore]) -> tuple[LayerGroup, ...]:
    """Layers by the source of their price (leaves alone) and by their family, each phase apart, the
    largest groups first.
    """
    found = []
    for kind in ("source", "family"):
        groups: dict[tuple[str, str, str], list[LayerScore]] = defaultdict(list)
        for layer in large_leaves(layers) if kind == "source" else large(layers):
            groups[
                layer.predictor, layer.source if kind == "source" else layer.family, layer.phase
            ].append(layer)
        for (predictor, name, phase), members in sorted(
            groups.items(), key=lambda entry: (entry[0][0], -len(entry[1]), entry[0])
        ):
            errors = [abs(member.error_frac) for member in members]
            found.append(
                LayerGroup(
                    predictor,
                    kind,
                    name,
                    phase,
                    len(members),
                    fmean(errors),
                    median(errors),
                    quantile(errors, 0.9),
                    median([member.error_frac for member in members]),
                    _mean_repeatability(members),
                )
            )
    return tuple(found)
