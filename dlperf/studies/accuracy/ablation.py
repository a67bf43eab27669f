"""What each term of a prediction contributes: the same cases predicted with one term left out.

Terms that stand as items of their own are dropped from the sums; terms inside an op's price are
switched off by taking from the machine file what they live on. So nothing here knows how a
predictor works inside, and a term that another predictor does not have changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from dlperf.core.costs import (
    CACHE_MISS,
    CACHE_RESIDENCY,
    COLD_START,
    COLD_STARTS,
    KINDS,
)
from dlperf.core.machine import Machine
from dlperf.core.prediction import Item
from dlperf.forecast.prediction import Prediction
from dlperf.predictors import registry
from dlperf.studies.accuracy.cases import Case, Reference
from dlperf.studies.accuracy.scoring import Summary, score, summarize

PAGE_FAULTS = "page faults"


def without_page_faults(prediction: Prediction) -> Prediction:
    """No first touches of memory that malloc got anew."""
    return _with_items(
        prediction,
        (
            item
            for item in prediction.prices.items
            if item.what != PAGE_FAULTS and item.bound != "page-faults"
        ),
    )


def without_calls(prediction: Prediction) -> Prediction:
    """Nothing but ops and page faults: no module calls, look-ups, gradient accumulation, optimizer
    loop, zero_grad.
    """
    return _with_items(
        prediction,
        (item for item in prediction.prices.items if item.op >= 0 or item.bound != "overhead"),
    )


def with_rooflines(prediction: Prediction) -> Prediction:
    """Ops at their roofline (FLOPs / peak or bytes / DRAM bandwidth) instead of their measured
    kernels; everything else as it is.
    """
    roofs = registry.get("roofline").price(prediction.trace, prediction.machine, prediction.threads)
    roofs = roofs.at_state(prediction.state)
    return _with_items(
        prediction, [*roofs.items, *(item for item in prediction.prices.items if item.op < 0)]
    )


def _with_items(prediction: Prediction, items: Iterable[Item]) -> Prediction:
    prices = replace(prediction.prices, items=tuple(items), low_factor=None, high_factor=None)
    return Prediction(
        prediction.trace,
        prediction.machine,
        prediction.threads,
        prediction.predictor,
        prices,
        prediction.warnings,
    )


def near_operands(machine: Machine) -> Machine:
    """Operands always lie where the micro-benchmark had them, however far a step drove them out."""
    return _with(
        machine,
        costs=tuple(
            cost
            for cost in machine.costs
            if cost.key.kind != CACHE_MISS and cost.key[:2] != (COLD_START, "operand")
        ),
    )


def warm_code(machine: Machine) -> Machine:
    """No call finds its code and the interpreter's data cold."""
    return _with(
        machine,
        costs=tuple(cost for cost in machine.costs if cost.key.kind not in COLD_STARTS),
    )


def free_framework(machine: Machine) -> Machine:
    """No cost of dispatch, autograd, modules, optimizers; page faults stay, and what is no cost but
    a factor.
    """
    return _with(
        machine,
        costs=tuple(
            cost
            for cost in machine.costs
            if "fault" in cost.key.kind or KINDS[cost.key.kind].unit == "factor"
        ),
    )


def undisturbed_cache(machine: Machine) -> Machine:
    """Nobody takes the shared cache's room while a step computes."""
    return _with(
        machine,
        costs=tuple(cost for cost in machine.costs if cost.key.kind != CACHE_RESIDENCY),
    )


def without_corrections(machine: Machine) -> Machine:
    """Every curve its physical first approximation alone: no correction by the neighbouring
    kernels' residuals.
    """
    return _with(
        machine,
        kernel_models=tuple(
            replace(model, signal=1e-6, noise=1.0) for model in machine.kernel_models
        ),
    )


def _with(machine: Machine, **changes: object) -> Machine:
    return replace(machine, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Term:
    """One term: what it is called, and how to predict without it (from the whole prediction, or
    anew on a changed machine).
    """

    name: str
    meaning: str
    on_prediction: Callable[[Prediction], Prediction] | None = None
    on_machine: Callable[[Machine], Machine] | None = None


TERMS = (
    Term(
        "page faults",
        "first touches of memory that malloc got anew from the system",
        on_prediction=without_page_faults,
    ),
    Term(
        "calls",
        "module calls, parameter look-ups, gradient accumulation, the optimizer's loop, zero_grad",
        on_prediction=without_calls,
    ),
    Term("framework", "calls, and dispatch and autograd of every op", on_machine=free_framework),
    Term(
        "cold calls",
        "the code of a call that finds its caches taken by the step's data",
        on_machine=warm_code,
    ),
    Term(
        "cache levels",
        "operands that lie farther away than in the micro-benchmark",
        on_machine=near_operands,
    ),
    Term(
        "cache residency",
        "operands and code that left the shared cache because they were not touched for long",
        on_machine=undisturbed_cache,
    ),
    Term(
        "corrections",
        "what neighbouring kernels say beyond the weighted sum of work",
        on_machine=without_corrections,
    ),
    Term(
        "kernel curves",
        "measured kernels by regime and shape: every op at its roofline instead",
        on_prediction=with_rooflines,
    ),
)


@dataclass(frozen=True)
class Ablation:
    """All cases without one term: `without` beside the `whole`; `share_frac` is the median over
    cases of 1 - (prediction without) / (whole prediction).
    """

    term: str
    meaning: str
    whole: Summary
    without: Summary
    share_frac: float


def ablate(
    cases: Sequence[tuple[Case, Reference, Prediction]], terms: Sequence[Term] = TERMS
) -> tuple[Ablation, ...]:
    """Every term left out in turn. `cases` hold the whole predictions of one predictor, which gives
    a step's time.
    """
    if not cases:
        return ()
    name = cases[0][2].predictor
    whole = summarize(
        [score(case, reference, prediction, name)[0] for case, reference, prediction in cases], name
    )
    found = []
    for term in terms:
        machines: dict[
            int, Machine
        ] = {}  # one changed machine serves all its cases: what is fitted from it is fitted once
        scores, shares = [], []
        for case, reference, prediction in cases:
            changed = prediction
            if term.on_machine is not None:
                machine = machines.setdefault(
                    id(prediction.machine), term.on_machine(prediction.machine)
                )
                prices = registry.get(prediction.predictor).price(
                    prediction.trace, machine, prediction.threads
                )
                changed = replace(
                    prediction, machine=machine, prices=prices.at_state(prediction.state)
                )
            if term.on_prediction is not None:
                changed = term.on_prediction(changed)
            scores.append(score(case, reference, changed, name)[0])
            if changed.step.total_s is not None and prediction.step.total_s:
                shares.append(1 - changed.step.total_s / prediction.step.total_s)
        found.append(
            Ablation(
                term.name,
                term.meaning,
                whole,
                summarize(scores, name, f"without {term.name}"),
                median(shares) if shares else 0.0,
            )
        )
    return tuple(found)


@dataclass(frozen=True)
class Intervals:
    """What the intervals are worth: `inside_frac` of the cases lie in theirs, of median half width
    `width_frac`.

    `constant_frac` is the half width, the same for every case, that would hold as many;
    `needed_factor` is the factor on every interval's half width that would hold 90 % of them.
    """

    n_cases: int
    inside_frac: float
    width_frac: float
    constant_frac: float
    needed_factor: float


def intervals(cases: Sequence[tuple[float, float, float, float]]) -> Intervals | None:
    """From (actual, predicted, low, high) in seconds of each case; None where there is none.

    >>> intervals([(1.0, 1.1, 0.9, 1.3), (1.0, 2.0, 1.6, 2.4)]).inside_frac
    0.5
    """
    if not cases:
        return None
    inside = [low <= actual <= high for actual, _, low, high in cases]
    widths = [(high - low) / 2 / predicted for _, predicted, low, high in cases]
    off = sorted(abs(actual / predicted - 1) for actual, predicted, _, _ in cases)
    return Intervals(
        len(cases),
        fmean(inside),
        median(widths),
        off[sum(inside) - 1] if any(inside) else 0.0,
        sorted(_half_widths_off(*case) for case in cases)[math.ceil(0.9 * len(cases)) - 1],
    )


def _half_widths_off(actual: float, predicted: float, low: float, high: float) -> float:
    """Error of a prediction in its own half widths on the side of the measured value."""
    half = high - predicted if actual > predicted else predicted - low
    return abs(actual - predicted) / half if half > 0 else math.inf if actual != predicted else 0.0
