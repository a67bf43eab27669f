"""The answers of the command line for the frozen files: ``--json -`` in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from frozen_networks import RECORDED_WITH
from frozen_results import EXACT, check_data, without_host_facts

from dlperf.__main__ import main

ELSEWHERE = "--machine elsewhere.json"
EPOCH = "--samples 1000 --epochs 3 --val-samples 200 --test-samples 100"
LOOP = "--accumulate 2 --clip --scheduler --accuracy --checkpoint --drop-last"
SCALE = "--cluster cluster.json --ranks 1,2,4,8 --threads 1"
NODES = "--cluster nodes.json --ranks 1,2,4,8 --threads 1"
COMMANDS = {
    "show-machine": "machine show machine.json",
    "show-cluster": "machine show cluster.json",
    "predict-elsewhere": f"predict lenet-16.json {ELSEWHERE} --threads 1",
    "predict-malloc": f"predict cnn-medium-64.json {ELSEWHERE} --threads 2 --malloc tuned",
    "predict-what-if": (
        f"predict cnn-medium-64.json {ELSEWHERE} --threads 1 --samples 1000 --what-if flops=2"
        " memory_bandwidth=0.5 l3_bandwidth=0.25 overhead=0.5 page_faults=3"
    ),
    "predict-profiled-on": (
        f"predict cnn-medium-64.json {ELSEWHERE} --threads 1 --profiled-on machine.json"
    ),
    "epochs": f"predict lenet-16.json {ELSEWHERE} --threads 1 {EPOCH}",
    "epochs-loop": f"predict cnn-small-8.json {ELSEWHERE} --threads 2 {EPOCH} {LOOP}",
    "epochs-inference": f"predict lenet-inference-16.json {ELSEWHERE} --threads 1 --samples 1000",
    "epochs-loaders": f"predict mlp-32.json {ELSEWHERE} --threads 2 {EPOCH} --loader-workers 2",
    "epochs-persistent": (
        f"predict mlp-32.json {ELSEWHERE} --threads 1 {EPOCH} --loader-workers 1"
        " --persistent-workers"
    ),
    "epochs-viebke": (
        f"predict cnn-small-8.json {ELSEWHERE} --threads 1 --predictor viebke-b {EPOCH}"
    ),
    "workers": f"predict lenet-16.json {ELSEWHERE} --workers 2",
    "workers-epochs": f"predict dlrm-top-128.json {ELSEWHERE} --workers 2 {EPOCH}",
    "scale-weak": f"scale lenet-16.json {ELSEWHERE} {SCALE}",
    "scale-large": f"scale dlrm-top-128.json {ELSEWHERE} {SCALE} --samples 50000",
    "scale-options": (
        f"scale norms-8.json {ELSEWHERE} {NODES} --ranks-per-node 2 --bucket-cap-mb 0.001"
        " --gradient-as-bucket-view --static-graph --accumulate 2"
    ),
    "scale-what-if": (
        f"scale dlrm-top-128.json {ELSEWHERE} {SCALE} --what-if flops=2 memory_bandwidth=1.5"
        " link_bandwidth=10 link_latency=0.5"
    ),
    "replay": "scale --trace communication.json --cluster cluster.json",
    "replay-what-if": (
        "scale --trace communication.json --cluster nodes.json --recorded-on cluster.json"
        " --ranks 2,4 --ranks-per-node 1 --what-if link_bandwidth=4"
    ),
    "tune": f"tune lenet-16.json {ELSEWHERE} --threads 1,2 --loader-workers 0,1,2 --workers 1,2",
    "tune-epoch": (
        f"tune mlp-32.json {ELSEWHERE} --threads 1,2 --loader-workers 0,1 --workers 1,2"
        " --samples 6000 --memory-limit 500MB"
    ),
    "explain": f"explain cnn-medium-64.json {ELSEWHERE} --threads 1",
    "explain-recurrent": f"explain recurrent-8.json {ELSEWHERE} --threads 2",
    "report": f"report lenet-16.json --measured measurement.json {ELSEWHERE} --threads 1",
    "reproduce": "reproduce",
    "roofline": "roofline flash-attention.csv",
    "roofline-a100": "roofline attention.csv --machine a100",
    "predict-device": "predict lenet-16.json --device a100",
    "show-device": "machine show v100",
}
ITERATED = {"show-cluster": 1e-7}
"""Relative tolerances of answers with parameters that an iteration finds.

The bands of a link are fitted by scipy's ``curve_fit``, which ends where a step changes cost and
parameters by less than 1e-8 of their size. Versions of scipy take the last steps differently.
"""
FROM_CODE = {
    "scale-strong": f"scale networks.targets:lenet {ELSEWHERE} {SCALE} --scaling strong",
    "epochs-validation": f"predict networks.targets:mlp {ELSEWHERE} --threads 1 {EPOCH}",
    "tune-batch-sizes": (
        f"tune networks.targets:mlp {ELSEWHERE} --threads 1,2 --batch-sizes 16,64"
        " --loader-workers 0,2 --workers 1"
    ),
}


def check_answer(
    name: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    renew: bool,
    tolerance: float = EXACT,
) -> None:
    status = main([*words.split(), "--json", "-"])
    told = capsys.readouterr()
    assert status == 0, told.err
    check_data(f"commands/{name}", without_host_facts(json.loads(told.out)), renew, tolerance)


@pytest.fixture(autouse=True)
def in_the_folder(frozen_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(frozen_files)


@pytest.mark.parametrize("name", COMMANDS)
def test_answers(name: str, capsys: pytest.CaptureFixture[str], renew: bool) -> None:
    check_answer(name, COMMANDS[name], capsys, renew, ITERATED.get(name, EXACT))


@pytest.mark.skipif(
    not torch.__version__.startswith(RECORDED_WITH), reason="recordings depend on torch"
)
@pytest.mark.parametrize("name", FROM_CODE)
def test_answers_from_code(name: str, capsys: pytest.CaptureFixture[str], renew: bool) -> None:
    check_answer(name, FROM_CODE[name], capsys, renew)
