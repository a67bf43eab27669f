"""networks/train_workers.py as a user runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_train_script import ENVIRONMENT, ROOT, check_refusal, write_digits

from networks.catalog import NETWORKS
from networks.data import generate
from networks.train_workers import main, share

SCRIPT = "networks/train_workers.py"
TINY = ("--samples", "65", "--val-samples", "33", "--test-samples", "1")


def run(*arguments, start=(SCRIPT,)):
    return subprocess.run(
        [sys.executable, *start, *arguments],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, SCRIPT, *arguments],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(process, beginning):
    while not (line := process.stdout.readline()).startswith(beginning):
        assert process.poll() is None, process.stderr.read()
    return line


def children(pid):
    """Processes whose parent is `pid`, but the one that tracks shared memory."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "cmdline").read_text()
        except (OSError, ValueError):
            continue
        if parent == pid and "resource_tracker" not in words:
            found.append(int(folder.name))
    return found


def group_is_empty(group, seconds=30.0):
    """Whether nobody of a process group is left within some seconds; what died and was not yet
    waited for does not count.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        states = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                states.append(folder.name)
        if not states:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.process
def test_two_workers_learn_and_tell_their_times(tmp_path):
    samples = (
        "--net",
        "lenet",
        "--samples",
        "601",
        "--val-samples",
        "101",
        "--test-samples",
        "101",
        "--batch-size",
        "16",
    )
    done = run(*samples, "--workers", "2", "--epochs", "3", "--json", str(tmp_path / "times.json"))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert "601 training, 101 validation, 101 test samples generated" in lines[0]
    assert lines[1].endswith("batch size 16, workers 2")
    losses = [
        float(
            re.search(
                rf"epoch {epoch}/3  train loss ([0-9.]+) accuracy [0-9.]+ %  validation loss"
                r" [0-9.]+ ",
                done.stdout,
            )[1]
        )
        for epoch in (1, 2, 3)
    ]
    assert losses[0] > losses[1] > losses[2]
    assert re.fullmatch(r"test loss [0-9.]+ accuracy [0-9.]+ %  [0-9.]+ s", lines[-2])
    times = json.loads((tmp_path / "times.json").read_text())
    assert {
        key: times[key]
        for key in (
            "net",
            "workers",
            "batch_size",
            "epochs",
            "samples",
            "val_samples",
            "test_samples",
        )
    } == {
        "net": "lenet",
        "workers": 2,
        "batch_size": 16,
        "epochs": 3,
        "samples": 601,
        "val_samples": 101,
        "test_samples": 101,
    }
    parts = times["preparation_s"] + sum(times["epochs_s"]) + times["test_s"]
    assert len(times["epochs_s"]) == 3
    assert 0 < times["data_s"] < times["preparation_s"]
    assert 0 < parts <= times["total_s"] * 1.01


@pytest.mark.process
@pytest.mark.parametrize("workers", ["1", "3"])
def test_workers_average_what_one_would_find(workers):
    # a learning rate that moves nothing: the mean of equal weights gives every worker's share of a
    # file the loss that one worker finds
    done = run(
        "--net",
        "dlrm-bottom",
        "--lr",
        "1e-20",
        "--workers",
        workers,
        *TINY,
        start=("-m", "networks.train_workers"),
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"epoch 1/1  train loss [0-9.]+  validation loss [0-9.]+  ", done.stdout)


@pytest.mark.process
def test_weights_are_the_mean_of_the_workers(tmp_path):
    """Files of digits, two workers, shares known: the validation loss is that of the mean of two
    trainings made here.
    """
    write_digits(tmp_path, n_train=6, n_test=1)
    done = run(
        "--net",
        "cnn-small",
        "--data",
        str(tmp_path),
        "--val-samples",
        "2",
        "--workers",
        "2",
        "--batch-size",
        "2",
        "--lr",
        "0.05",
    )
    assert done.returncode == 0, done.stderr
    network = NETWORKS["cnn-small"]
    from networks.data import load

    splits = load(tmp_path, network, None, 2, None)
    models = []
    for rank in range(2):
        torch.manual_seed(0)
        model = network.build()
        inputs, wanted = (
            torch.stack(parts)
            for parts in zip(*(splits.train[index] for index in share(4, rank, 2)))
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        network.loss(model(inputs), wanted).backward()  # one batch holds a worker's whole share
        optimizer.step()
        models.append(model)
    with torch.no_grad():
        for mean, other in zip(models[0].parameters(), models[1].parameters()):
            mean.add_(other).div_(2)
        inputs, wanted = (
            torch.stack(parts) for parts in zip(*(splits.validation[index] for index in range(2)))
        )
        expected = float(network.loss(models[0](inputs), wanted))
    assert float(re.search(r"validation loss ([0-9.]+)", done.stdout)[1]) == pytest.approx(
        expected, abs=2e-4
    )


def test_shares():
    assert [list(share(5, rank, 2)) for rank in range(2)] == [[0, 2, 4], [1, 3]]
    # portions of generated data differ, and each is what it was before
    network = NETWORKS["cnn-small"]
    first, second, again = (generate(network, 3, 0, 0, portion=n).train for n in (0, 1, 1))
    assert not torch.equal(first[0][0], second[0][0])
    assert torch.equal(again[0][0], second[0][0])
    vectors = [generate(NETWORKS["dlrm-bottom"], 2, 1, 1, portion=n) for n in (0, 1)]
    assert (
        len(
            {
                tuple(data[0][0].tolist())
                for splits in vectors
                for data in (splits.train, splits.validation, splits.test)
            }
        )
        == 6
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--workers", "0"], "argument --workers: '0' is no whole number from 1"),
        (
            ["--workers", "5", "--samples", "4"],
            "4 training samples are too few for 5 workers; give more --samples, or fewer --workers",
        ),
        (["--epochs", "0"], "argument --epochs: '0' is no whole number"),
        (["--data", "no/such/folder"], "no/such/folder: is no folder"),
        (["--json", "no/such/folder/times.json"], "times.json: its folder is not there"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(arguments, complaint, capsys):
    check_refusal(main, "train_workers", arguments, complaint, capsys)


@pytest.mark.process
def test_divergence_gets_one_line_and_status_1():
    done = run(
        "--net",
        "lenet",
        "--lr",
        "1e30",
        "--samples",
        "1000",
        "--val-samples",
        "0",
        "--test-samples",
        "0",
    )
    assert done.returncode == 1
    assert (
        done.stderr
        == "train_workers: error: the loss of lenet is no finite number any more; choose a smaller"
        " --lr\n"
    )


@pytest.mark.process
def test_a_worker_that_dies_ends_all_within_seconds():
    process = start(
        "--net", "cnn-small", "--samples", "2000", "--epochs", "100000", "--workers", "2"
    )
    try:
        wait_for(process, "epoch 1/")
        victim = max(children(process.pid))
        os.kill(victim, signal.SIGKILL)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 1
    assert re.fullmatch(
        rf"train_workers: error: worker [01] of 2 \(process {victim}\) was ended by SIGKILL; the"
        r" others were ended, too\n",
        errors,
    )
    assert group_is_empty(process.pid)


@pytest.mark.process
@pytest.mark.parametrize("whole_group", [True, False], ids=["terminal", "parent alone"])
def test_ctrl_c_ends_it_with_130_and_leaves_nobody(whole_group):
    process = start(
        "--net", "cnn-small", "--samples", "500", "--epochs", "100000", "--workers", "2"
    )
    try:
        wait_for(process, "epoch 2/")
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors == ""
    assert group_is_empty(process.pid)
