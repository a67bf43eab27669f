"""The predictions of every predictor for the frozen traces, by the public API."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_networks import RECORDED_WITH, TARGETS, record
from frozen_results import EXACT, check_data, without_host_facts

import dlperf
from dlperf.predictors.kernels.catalog import describe
from dlperf.predictors.kernels.contractions import sort_of, sort_of_variant

PREDICTORS = ("calibrated", "roofline", "gemm-table", "viebke-a", "viebke-b")
THREADS = (1, 2)
UNDETERMINED = {"attention-8": 0.03}
"""Relative tolerances of networks whose kernel models are not determined by the machine file.

The quick machine file has eight points for the seventeen regression terms of attention.
Non-negative least squares then has many solutions. Versions of scipy find different ones, and so do
BLAS kernels of different processors.
"""


@pytest.fixture(scope="module")
def machine(frozen_files: Path) -> dlperf.Machine:
    """The machine without its file: taken as it is, on every host."""
    return replace(dlperf.Machine.load(frozen_files / "machine.json"), path="")


def summary(prediction: dlperf.Prediction, path: Path) -> dict[str, Any]:
    """The saved prediction, and its operators by bound and source."""
    prediction.save(path)
    saved = json.loads(path.read_text(encoding="utf-8"))
    table = prediction.ops
    by_kind = [
        {"bound": bound, "source": source, "count": len(rows), "seconds": rows["seconds"].sum()}
        for (bound, source), rows in table.groupby(["bound", "source"])
    ]
    sums = {name: float(table[name].sum()) for name in ("seconds", "flops", "bytes")}
    warnings = saved["warnings"]
    kept = {key: value for key, value in without_host_facts(saved).items() if key != "epoch"}
    return {**kept, "warnings": warnings, "ops": {"count": len(table), **sums, "kinds": by_kind}}


@pytest.mark.parametrize("name", TARGETS)
def test_predictions(
    name: str, machine: dlperf.Machine, frozen_files: Path, tmp_path: Path, renew: bool
) -> None:
    trace = dlperf.Trace.load(frozen_files / f"{name}.json")
    found = {}
    for predictor in PREDICTORS:
        for threads in THREADS:
            key = f"{predictor}, {threads} threads"
            try:
                prediction = dlperf.predict(trace, machine, threads=threads, predictor=predictor)
                found[key] = summary(prediction, tmp_path / "prediction.json")
            except dlperf.DlperfError as error:
                found[key] = {"error": str(error).replace(str(frozen_files), "FOLDER")}
    check_data(f"predictions/{name}", found, renew, UNDETERMINED.get(name, EXACT))


@pytest.mark.skipif(
    not torch.__version__.startswith(RECORDED_WITH), reason="recordings depend on torch"
)
@pytest.mark.parametrize("name", ["lenet-16", "convolutions-4"])
def test_recordings(name: str, frozen_files: Path, tmp_path: Path) -> None:
    record(name, tmp_path / f"{name}.json")
    old, new = (dlperf.Trace.load(folder / f"{name}.json") for folder in (frozen_files, tmp_path))
    assert [(op.name, op.layer) for op in new.ops] == [(op.name, op.layer) for op in old.ops]


def test_kernels_are_of_the_sort_of_their_variants(machine: dlperf.Machine) -> None:
    sorts = set()
    for kernel in machine.kernels:
        description = describe(kernel.op, kernel.threads)
        if description is not None:
            sorts.add(sort := sort_of(kernel.op))
            assert sort_of_variant(description.variant) == sort
            for fallback in description.fallbacks:  # none serves another's operators
                assert bool(sort_of_variant(fallback)) == bool(sort)
    assert ("conv", "float32", "dense2d") in sorts
    assert () in sorts
