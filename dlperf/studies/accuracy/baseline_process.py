"""Asks the peers about one step, in a process of its own: ``python -m
dlperf.studies.accuracy.baseline_process`` with a job on stdin, a JSON line a baseline on stdout.

torch's RuntimeEstimator refuses without CUDA. What it asks of CUDA is a clock, a peak and a
bandwidth; here they are those of this machine, put in place for this process alone.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from dlperf.core.child_process import read_job
from dlperf.core.errors import DlperfError
from dlperf.recorder.targets import Built, resolve
from dlperf.studies.accuracy.baselines import (
    COST_MODEL,
    NAIVE,
    NEURAL_COST,
    NEURAL_REPLAY,
    REPLAY,
    BaselineEstimate,
)

Job = dict[str, Any]
_MS = 1e-3


def _built(job: Job) -> Built:
    shape = job["input_shape"]
    return resolve(
        job["target"],
        job["batch_size"],
        inference=job["inference"],
        input_shape=tuple(shape) if shape else None,
    ).build()


def _phases(built: Built) -> Iterator[tuple[str, Callable[[], None]]]:
    """A step's phases as functions, to be called in this order."""
    kept: list[Any] = []

    def forward() -> None:
        output = (
            built.model(**built.inputs)
            if isinstance(built.inputs, dict)
            else built.model(*built.inputs)
        )
        kept.append(output if built.loss is None else built.loss(output))

    yield "forward", forward
    if built.loss is not None and built.optimizer is not None:
        yield "backward", lambda: kept[-1].backward()
        yield "optimizer", built.optimizer.step


def _naive(job: Job) -> Iterator[BaselineEstimate]:
    """FLOPs by torch's own counter over the measured peak; the optimizer has none."""
    with FakeTensorMode():
        built = _built(job)
        built.model.train(not job["inference"])
        counts: list[float] = []
        with (
            torch.set_grad_enabled(not job["inference"]),
            FlopCounterMode(display=False) as counter,
        ):
            for _, run in _phases(built):
                run()
                counts.append(counter.get_total_flops() / job["peak_flops_per_s"])
    yield BaselineEstimate(
        NAIVE,
        forward_s=counts[0],
        backward_s=counts[1] - counts[0] if len(counts) > 1 else None,
        total_s=counts[-1],
    )


class _Event:
    """What RuntimeEstimator uses of torch.cuda.Event, by the processor's clock."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._at = 0.0

    def record(self, stream: object = None) -> None:
        """Take the time."""
        self._at = time.perf_counter()

    def elapsed_time(self, other: _Event) -> float:
        """Milliseconds from this event to the other."""
        return (other._at - self._at) / _MS


def _pretend_cuda(peak_flops_per_s: float, dram_bytes_per_s: float) -> None:
    """Put this machine in CUDA's place, for the rest of this process."""
    torch.cuda.is_available = lambda: True
    torch.cuda.Event = _Event  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda device=None: None  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    for name in ("torch.utils._runtime_estimation", "torch.distributed._tools.runtime_estimator"):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(name)
            for attribute in list(vars(module)):
                # Its cost model halves the FLOPs and reaches 0.75 of the peak: peak / 1.5 makes it
                # a plain roofline.
                if attribute.startswith("get_") and attribute.endswith("tflops"):
                    setattr(module, attribute, lambda *_: peak_flops_per_s / 1.5 / 1e12)
                if attribute.startswith("get_") and attribute.endswith("dram_gbps"):
                    setattr(module, attribute, lambda *_: dram_bytes_per_s / 1e9)


def _runtime_estimator(job: Job, baseline: str, mode: str) -> BaselineEstimate:
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator

    with (
        FakeTensorMode(),
        contextlib.redirect_stdout(sys.stderr),
        torch.set_grad_enabled(not job["inference"]),
    ):
        built = _built(job)
        built.model.train(not job["inference"])
        for _, run in _phases(built):  # the optimizer's state is there afterwards
            run()
        if built.optimizer is not None:
            built.optimizer.zero_grad()
        estimator = RuntimeEstimator()
        sums: list[float] = []
        with estimator(estimate_mode_type=mode):
            for _, run in _phases(built):
                run()
                sums.append(estimator.total_runtime * _MS)
        root = type(built.model).__name__
        layers = []
        for name, module in built.model.named_modules():
            times = estimator.mod_runtimes.get(f"{root}.{name}" if name else root)
            if times is not None and next(module.children(), None) is None:
                backward_s = None if job["inference"] else times.get("bw", 0.0) * _MS
                layers.append((name or root, times.get("fw", 0.0) * _MS, backward_s))
    forward_s, backward_s, optimizer_s, *_ = (*np.diff(sums, prepend=0.0).tolist(), None, None)
    return BaselineEstimate(baseline, forward_s, backward_s, optimizer_s, sums[-1], tuple(layers))


def _estimators(job: Job) -> Iterator[BaselineEstimate]:
    _pretend_cuda(job["peak_flops_per_s"], job["dram_bytes_per_s"])
    for baseline, mode in (
        (COST_MODEL, "operator-level-cost-model"),
        (REPLAY, "operator-level-benchmark"),
    ):
        yield _or_problem(partial(_runtime_estimator, job, baseline, mode), baseline)


def _neural_cost(job: Job) -> Iterator[BaselineEstimate]:
    """neural-cost's calibrated model and its replay, as its own validation combines them."""
    try:
        adapters, estimating, validating = (
            importlib.import_module(f"neural_cost.{name}")
            for name in ("adapters.torch", "estimate", "validation")
        )
    except ImportError as error:
        why = f"not installed here ({error}); pip install neural-cost adds it"
        raise DlperfError(why) from error
    built = _built(job)
    if isinstance(built.inputs, dict):
        raise DlperfError("takes positional inputs alone")
    inputs = built.inputs
    with torch.no_grad():
        adapter = adapters.TorchAdapter(use_profiler=False)
        calibration = adapter.calibrate("cpu", quick=True)
        operations = adapter.operations(built.model, inputs)
        records = adapter.trace_kernels(built.model, inputs)
        extra = [(record.bytes, record.python_dispatch) for record in records if not record.heavy]
        costs = [estimating.estimate_operation(operation) for operation in operations]
        yield _or_problem(
            lambda: BaselineEstimate(
                NEURAL_COST, forward_s=sum(calibration.predict(costs, len(records), extra))
            ),
            NEURAL_COST,
        )
        isolated = adapter.replay(operations, "cpu")
        yield _or_problem(
            lambda: BaselineEstimate(
                NEURAL_REPLAY,
                forward_s=validating.replay_prediction(
                    costs, isolated, calibration, len(records), extra
                ),
            ),
            NEURAL_REPLAY,
        )


def _or_problem(estimate: Callable[[], BaselineEstimate], baseline: str) -> BaselineEstimate:
    try:
        return estimate()
    except Exception as error:
        return BaselineEstimate(baseline, problem=_why(error))


def _why(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = "" if isinstance(error, DlperfError) else f"{type(error).__name__}: "
    return f"{kind}{lines[0][:160] if lines else 'no message'}"


def main() -> int:
    """Ask every baseline about the job on stdin."""
    job: Job = read_job()
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the peers print
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)

    def write(estimate: BaselineEstimate) -> None:
        lines.write(json.dumps(asdict(estimate)) + "\n")
        lines.flush()

    # What patches torch comes last.
    for ask, tools in (
        (_naive, (NAIVE,)),
        (_neural_cost, (NEURAL_COST, NEURAL_REPLAY)),
        (_estimators, (COST_MODEL, REPLAY)),
    ):
        missing = list(tools)
        try:
            for estimate in ask(job):
                missing.remove(estimate.baseline)
                write(estimate)
        except Exception as error:
            for baseline in missing:
                write(BaselineEstimate(baseline, problem=_why(error)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
