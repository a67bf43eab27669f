"""What other tools estimate for the same steps: asked in a process of their own, scored as dlperf's
own predictors are.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from dlperf.core import child_process
from dlperf.core.conversion import Name, Seconds, convert
from dlperf.studies.accuracy.cases import LAYER_PHASES, Case, CaseScore, Reference
from dlperf.studies.accuracy.scoring import case_score, layer_scores

NAIVE, COST_MODEL, REPLAY, NEURAL_COST, NEURAL_REPLAY = (
    "FLOPs / peak",
    "RuntimeEstimator roofline",
    "RuntimeEstimator replay",
    "neural-cost",
    "neural-cost replay",
)
MEANINGS = {
    NAIVE: (
        "torch's FlopCounterMode total over the measured peak of matrix multiplication: the"
        " estimate that people make by hand"
    ),
    COST_MODEL: (
        "torch.distributed._tools.RuntimeEstimator, operator-level-cost-model, given this machine's"
        " measured peak and DRAM bandwidth"
    ),
    REPLAY: "the same, operator-level-benchmark: it executes every op at its exact shape",
    NEURAL_COST: "neural-cost (PyPI), its own quick calibration; supports the forward pass alone",
    NEURAL_REPLAY: "the same, with its layers executed one by one; supports the forward pass alone",
}
BASELINES = tuple(MEANINGS)
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class BaselineEstimate:
    """A baseline's estimate of one step, in seconds; None where it has none. `layers` are
    (name, forward, backward); `problem` is why it has none.
    """

    baseline: Name
    forward_s: Seconds | None = None
    backward_s: Seconds | None = None
    optimizer_s: Seconds | None = None
    total_s: Seconds | None = None
    layers: tuple[tuple[Name, Seconds | None, Seconds | None], ...] = ()
    problem: str = ""


def ask_baselines(
    case: Case,
    peak_flops_per_s: float,
    dram_bytes_per_s: float,
    input_shape: tuple[int, ...] | None,
) -> tuple[BaselineEstimate, ...]:
    """Every baseline's estimate of a case, from a fresh process: what the peers need patched in
    torch never reaches this one.

    A baseline that cannot estimate the case, or is not installed, says so in its `problem`; so do
    all that were still to come where the process dies.
    """
    job = {
        "target": case.target,
        "batch_size": case.batch_size,
        "threads": case.threads,
        "inference": case.inference,
        "input_shape": input_shape,
        "peak_flops_per_s": peak_flops_per_s,
        "dram_bytes_per_s": dram_bytes_per_s,
    }
    module = "dlperf.studies.accuracy.baseline_process"
    try:
        with child_process.Child(module, threads=case.threads) as process:
            out, err = process.communicate(json.dumps(job), timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return tuple(
            BaselineEstimate(baseline, problem=f"took more than {TIMEOUT_S:.0f} s")
            for baseline in BASELINES
        )
    found = {
        row["baseline"]: convert(row, BaselineEstimate) for row in map(json.loads, out.splitlines())
    }
    last = child_process.last_line(err) or "no message"
    return tuple(
        found.get(baseline)
        or BaselineEstimate(
            baseline, problem=f"its process ended with status {process.returncode}: {last[:200]}"
        )
        for baseline in BASELINES
    )


def score_baseline(
    case: Case, reference: Reference, estimate: BaselineEstimate
) -> tuple[CaseScore, pd.DataFrame]:
    """A baseline on one case. Layers that it does not name are left out; a phase that it does not
    estimate has no error.
    """
    rows = pd.DataFrame(estimate.layers, columns=["layer", *LAYER_PHASES])
    predicted = rows.melt("layer", var_name="phase", value_name="predicted_s").dropna()
    named = reference.layers.merge(predicted[["layer", "phase"]])
    layers = layer_scores(
        case,
        reference,
        named,
        estimate.baseline,
        predicted.assign(source="baseline", bound=""),
        predicted.layer.tolist(),
    )
    return case_score(case, reference, estimate, estimate.baseline, layers), layers


def problems(estimates: Sequence[tuple[Case, BaselineEstimate]]) -> tuple[str, ...]:
    """One line a baseline and reason: where it could not estimate."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for case, estimate in estimates:
        if estimate.problem:
            reasons.setdefault((estimate.baseline, estimate.problem), []).append(case.label)
    n_cases = len({case for case, _ in estimates})
    return tuple(
        f"{baseline}: {reason} ({'every case' if len(where) == n_cases else ', '.join(where)})"
        for (baseline, reason), where in reasons.items()
    )
