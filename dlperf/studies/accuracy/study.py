"""The study itself: every case recorded, measured in fresh processes, predicted, scored; what it
takes to measure is given from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import pandas as pd

from dlperf.core.errors import DlperfError
from dlperf.core.machine import EXACT, Machine
from dlperf.core.measurement import Measurement
from dlperf.core.state import State
from dlperf.core.trace import Trace
from dlperf.forecast.prediction import Prediction, predict
from dlperf.report.step_comparison import states_during
from dlperf.studies.accuracy.ablation import Ablation, Intervals, ablate, intervals
from dlperf.studies.accuracy.baselines import MEANINGS, BaselineEstimate, problems, score_baseline
from dlperf.studies.accuracy.cases import Case, CaseScore, Reference, join
from dlperf.studies.accuracy.residuals import residual_table, residuals_of
from dlperf.studies.accuracy.scoring import (
    joined,
    layer_groups,
    records,
    score,
    score_at_state,
    summaries,
    variation_remark,
)
from dlperf.studies.accuracy.single_ops import OP_COLUMNS, op_groups
from dlperf.studies.results import Provenance

SCHEMA, SCHEMA_VERSION = "dlperf.validation", 3
MAIN = "calibrated"
"""The predictor that is also asked at the state of each measurement."""
WITH_EXACT = "calibrated, ops measured"
"""The main predictor on the whole file, for the cases whose ops ``--for`` has measured."""


@dataclass(frozen=True)
class Variant:
    """A predictor on a machine file under a name for tables; `only_measured` leaves out the cases
    whose op times are not exact in the file.
    """

    name: str
    predictor: str
    machine: Machine
    only_measured: bool = False


def variants(machine: Machine, predictors: Sequence[str]) -> tuple[Variant, ...]:
    """The predictors asked for, `measured` and `interpolated` apart.

    Where the file holds a target's own operations, the main predictor is asked twice: without them
    (what a calibration alone knows), and with them for the cases that they cover. An operation that
    the calibration and ``--for`` both measured is gone with them: that errs against the first.
    """
    if not any(kernel.family == EXACT for kernel in machine.kernels):
        return tuple(Variant(name, name, machine) for name in predictors)
    alone = replace(
        machine, kernels=tuple(kernel for kernel in machine.kernels if kernel.family != EXACT)
    )
    found = [Variant(name, name, alone) for name in predictors]
    if MAIN in predictors:
        found.insert(
            list(predictors).index(MAIN) + 1, Variant(WITH_EXACT, MAIN, machine, only_measured=True)
        )
    return tuple(found)


@dataclass(frozen=True)
class Failure:
    """A case that could not be measured, and why."""

    case: Case
    reason: str


@dataclass(frozen=True)
class Study:
    """What was found: a score a case and predictor, baselines after the predictors; layers; what is
    left of the main predictor's error at the state; single ops; what the terms contribute.
    """

    provenance: Provenance
    scores: tuple[CaseScore, ...] = ()
    layers: pd.DataFrame = field(default_factory=lambda: joined(()))
    residuals: pd.DataFrame = field(default_factory=lambda: residual_table(()))
    references: tuple[tuple[Case, Reference], ...] = ()
    estimates: tuple[tuple[Case, BaselineEstimate], ...] = ()
    ablations: tuple[Ablation, ...] = ()
    failures: tuple[Failure, ...] = ()
    ops: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=OP_COLUMNS))

    @cached_property
    def own_scores(self) -> tuple[CaseScore, ...]:
        """The scores of predictors."""
        return tuple(score for score in self.scores if score.predictor not in MEANINGS)

    @property
    def predictors(self) -> list[str]:
        """The names of all predictors and baselines that have scores."""
        return list(dict.fromkeys(score.predictor for score in self.scores))

    @cached_property
    def groups(self) -> pd.DataFrame:
        """Layers by source and by type, under each predictor."""
        return layer_groups(self.layers[~self.layers.predictor.isin(list(MEANINGS))])

    @cached_property
    def op_groups(self) -> pd.DataFrame:
        """Single ops by family and kind."""
        return op_groups(self.ops)

    @cached_property
    def intervals(self) -> Intervals | None:
        """What the main predictor's intervals are worth; None where it gave none."""
        return _intervals(self._main_scores)

    @cached_property
    def intervals_at_state(self) -> Intervals | None:
        """The same of its predictions at the state."""
        return _intervals([s.at_state for s in self._main_scores if s.at_state is not None])

    @cached_property
    def _main_scores(self) -> list[CaseScore]:
        return [score for score in self.scores if score.predictor == MAIN]

    @property
    def state_remarks(self) -> tuple[str, ...]:
        """How many cases the main predictor has not predicted at the state, and why."""
        n_blind = sum(score.at_state is None for score in self._main_scores)
        remark = (
            f"{n_blind} of {len(self._main_scores)} cases have no prediction at the state: the"
            " machine file has no reference state or is of another processor, or a measurement has"
            " no readings"
        )
        return (remark,) if n_blind else ()

    @cached_property
    def variation_remarks(self) -> tuple[str, ...]:
        """Where the machine was too busy for the errors to mean anything: steps with one thread,
        single ops.
        """
        steps = (
            reference.repeatability_frac for case, reference in self.references if case.threads == 1
        )
        ops = self.ops[self.ops.threads == 1].repeatability_frac.dropna()
        remarks = (variation_remark(steps, "step"), variation_remark(ops, "op"))
        return tuple(remark for remark in remarks if remark)

    def with_ops(self, ops: pd.DataFrame) -> Study:
        """The study with further single ops."""
        return replace(self, ops=joined((self.ops, ops), OP_COLUMNS))

    def with_remark(self, remark: str) -> Study:
        """The study with one more thing that a reader must know."""
        return replace(
            self, provenance=replace(self.provenance, remarks=(*self.provenance.remarks, remark))
        )

    def to_json(self) -> dict[str, Any]:
        """The study as JSON data, schema ``dlperf.validation``; null where unknown."""
        provenance = asdict(self.provenance)
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            **{key: list(v) if isinstance(v, tuple) else v for key, v in provenance.items()},
            "cases": [_case_row(score) for score in self.scores],
            "references": [
                {**asdict(case), **{k: v for k, v in asdict(reference).items() if k != "layers"}}
                for case, reference in self.references
            ],
            "summaries": [asdict(summary) for summary in summaries(self.scores)],
            "layer_groups": records(self.groups),
            "layers": records(self.layers),
            "intervals": None if self.intervals is None else asdict(self.intervals),
            "intervals_at_state": (
                None if self.intervals_at_state is None else asdict(self.intervals_at_state)
            ),
            "residuals": records(self.residuals),
            "ablation": [asdict(one) for one in self.ablations],
            "variation_remarks": list(self.variation_remarks),
            "state_remarks": list(self.state_remarks),
            "baseline_problems": list(problems(self.estimates)),
            "failures": [{**asdict(f.case), "reason": f.reason} for f in self.failures],
            "families": records(self.op_groups),
            "ops": records(self.ops),
        }


_STATE_FIELDS = (
    *("predicted_s", "low_s", "high_s"),
    *("step_error_frac", "forward_error_frac", "backward_error_frac", "optimizer_error_frac"),
    *("forward_mape_frac", "backward_mape_frac", "width_frac", "inside"),
)
"""What a case's row contains of its prediction at the state; the rest is as of the blind one."""


def _case_row(score: CaseScore) -> dict[str, Any]:
    row = asdict(replace(score, at_state=None))
    del row["at_state"]
    at_state = score.at_state
    return {
        **row.pop("case"),
        "network": score.case.network,
        **row,
        "width_frac": score.width_frac,
        "inside": score.inside,
        "at_state": None if at_state is None else {n: getattr(at_state, n) for n in _STATE_FIELDS},
    }


def _intervals(scores: Sequence[CaseScore]) -> Intervals | None:
    return intervals(
        [
            (s.actual_s, s.predicted_s, s.low_s, s.high_s)
            for s in scores
            if s.predicted_s and s.low_s and s.high_s
        ]
    )


def states_of(runs: Sequence[Measurement], machine: Machine) -> list[State]:
    """The machine's states around the measurements of a case; none where one has none."""
    states = [states_during(run, machine) for run in runs]
    return [state for of_run in states for state in of_run] if all(states) else []


Record = Callable[[Case], Trace]
Measure = Callable[[Case, Trace, int], Measurement]
"""Measures a case in a fresh process; the last argument numbers the run, from 1."""
Ask = Callable[[Case, Trace], Sequence[BaselineEstimate]]


def run_study(
    cases: Sequence[Case],
    asked: Sequence[Variant],
    n_runs: Callable[[int], int],
    record: Record,
    measure: Measure,
    log: Callable[[str], None],
    *,
    ask_baselines: Ask | None = None,
    with_ablation: bool = False,
    provenance: Provenance,
) -> Study:
    """Record every case, then measure all of them once, then all of them again, and so on; then
    predict and score.

    All targets are recorded before anything slow begins, so that one that does not work is known at
    once (its error is raised). A case that cannot be measured is a failure of its own and the
    others go on. Runs of one case lie as far apart in time as the study allows: the repeatability
    holds the machine's drift too. `n_runs` gives the number of runs for a thread count.
    """
    traces: dict[Case, Trace] = {}
    for case in cases:
        same = next((one for one in traces if replace(one, threads=case.threads) == case), None)
        traces[case] = record(case) if same is None else traces[same]
    taken: dict[Case, list[Measurement]] = {case: [] for case in cases}
    failed: dict[Case, str] = {}
    for number in range(1, 1 + max((n_runs(case.threads) for case in cases), default=0)):
        for case in cases:
            if number <= n_runs(case.threads) and case not in failed:
                try:
                    taken[case].append(measure(case, traces[case], number))
                except DlperfError as error:
                    failed[case] = str(error)
                    log(f"warning: {case.label} is left out: {error}")
    references = tuple((case, join(runs)) for case, runs in taken.items() if case not in failed)
    scores: list[CaseScore] = []
    layers: list[pd.DataFrame] = []
    residuals: list[pd.DataFrame] = []
    whole: list[tuple[Case, Reference, Prediction]] = []
    for variant in asked:
        for case, reference in references:
            trace, states = traces[case], states_of(taken[case], variant.machine)
            to_predict = partial(predict, trace, variant.machine, case.threads, variant.predictor)
            prediction = to_predict()
            found, rows = score(case, reference, prediction, variant.name)
            if variant.only_measured and not (found.sources and found.sources.all_measured):
                continue
            if variant.predictor == MAIN and states:
                at_state = to_predict(state=states)
                found, rows = score_at_state((found, rows), reference, at_state)
                if variant.name == MAIN:
                    residuals.append(residuals_of(case, reference, at_state))
            scores.append(found)
            layers.append(rows)
            if variant.name == MAIN:
                whole.append((case, reference, prediction))
    study = Study(
        provenance,
        tuple(scores),
        joined(layers),
        residual_table(residuals),
        references,
        failures=tuple(Failure(case, reason) for case, reason in failed.items()),
    )
    if with_ablation:
        log("predicting again without each term")
        study = replace(study, ablations=ablate(whole))
    return study if ask_baselines is None else _with_baselines(study, traces, ask_baselines, log)


def _with_baselines(
    study: Study,
    traces: Mapping[Case, Trace],
    ask_baselines: Ask,
    log: Callable[[str], None],
) -> Study:
    estimates: list[tuple[Case, BaselineEstimate]] = []
    scores, layers = list(study.scores), [study.layers]
    for index, (case, reference) in enumerate(study.references, start=1):
        log(f"asking the baseline tools, case {index} of {len(study.references)}: {case.label}")
        for estimate in ask_baselines(case, traces[case]):
            estimates.append((case, estimate))
            if not estimate.problem:
                found, rows = score_baseline(case, reference, estimate)
                scores.append(found)
                layers.append(rows)
    return replace(
        study,
        estimates=tuple(estimates),
        scores=tuple(scores),
        layers=joined(layers),
    )
