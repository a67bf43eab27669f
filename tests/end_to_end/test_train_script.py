"""networks/train.py as people run it: as a file, as a module, under torchrun, with bad input, with
Ctrl-C.
"""

from __future__ import annotations

import gzip
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path

import preloaded
import pytest

from networks.train import main

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--samples", "70", "--val-samples", "33", "--test-samples", "10", "--threads", "1"]
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "PYTHONPATH"}},
    "OMP_NUM_THREADS": "1",
}


def run(
    *arguments: str,
    start: tuple[str, ...] = ("networks/train.py",),
    cwd: Path = ROOT,
    environment: dict[str, str] | None = None,
):
    """The script, or torchrun of it, quicker in the root: there torch is imported already."""
    environment = {**ENVIRONMENT, **(environment or {})}
    command = [sys.executable, *start, *arguments]
    if cwd == ROOT:
        return preloaded.run(command, cwd=cwd, env=environment)
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def write_digits(folder: Path, n_train: int = 60, n_test: int = 10) -> None:
    for prefix, n in (("train", n_train), ("t10k", n_test)):
        images = struct.pack(">4BIII", 0, 0, 8, 3, n, 28, 28) + b"".join(
            bytes([25 * (i % 10)]) * 784 for i in range(n)
        )
        (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(
            struct.pack(">4BI", 0, 0, 8, 1, n) + bytes(i % 10 for i in range(n))
        )


def check_refusal(command, name, arguments, complaint, capsys):
    """Status 2, and one line on stderr with the command's name and the complaint in it."""
    try:
        status = command(arguments)
    except SystemExit as end:
        status = end.code
    printed = capsys.readouterr()
    assert status == 2
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert printed.err.startswith(f"{name}: error: ")
    assert complaint in printed.err


@pytest.mark.process
def test_runs_as_a_file_from_anywhere_and_learns(tmp_path):
    samples = ("--samples", "1000", "--val-samples", "100", "--test-samples", "100")
    done = run(
        *samples,
        "--epochs",
        "3",
        "--threads",
        "1",
        start=(str(ROOT / "networks/train.py"),),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert (
        lines[0]
        == "mlp: 39,760 parameters; 1,000 training, 100 validation, 100 test samples generated"
    )
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
    assert (
        float(re.search(r"test loss [0-9.]+ accuracy ([0-9.]+) %$", lines[-1])[1]) > 50
    )  # guessing gives 10


@pytest.mark.process
def test_runs_as_a_module_with_workers_and_repeats():
    arguments = ("--net", "cnn-small", "--optimizer", "adamw", "--loader-workers", "1", *TINY)
    first, second = (run(*arguments, start=("-m", "networks.train")) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr
    without_time = [
        re.sub(r"[0-9.]+ s$", "", done.stdout, flags=re.MULTILINE) for done in (first, second)
    ]
    assert without_time[0] == without_time[1]


@pytest.mark.process
def test_trains_on_files(tmp_path):
    write_digits(tmp_path)
    done = run("--net", "cnn-small", "--data", str(tmp_path), "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert f"50 training, 10 validation, 10 test samples from {tmp_path}" in done.stdout


@pytest.mark.process
def test_nets_of_vectors_train_on_generated_ones():
    done = run("--net", "dlrm-bottom", *TINY)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"epoch 1/1  train loss [0-9.]+  validation loss [0-9.]+  ", done.stdout
    )  # no right and wrong, no accuracy


@pytest.mark.process
def test_no_validation_and_no_test():
    done = run("--samples", "40", "--val-samples", "0", "--test-samples", "0")
    assert done.returncode == 0, done.stderr
    assert "validation loss" not in done.stdout
    assert "test loss" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--net", "alexnet"], "'alexnet'"),
        (["--epochs", "0"], "argument --epochs: '0' is no whole number from 1 up"),
        (["--batch-size", "x"], "argument --batch-size: 'x' is no whole number"),
        (["--lr", "nan"], "argument --lr: 'nan' is no positive number"),
        (["--samples", "10000000000"], "from 1 to 1,000,000"),
        (["--loader-workers", "-1"], "argument --loader-workers"),
        (["--no-such"], "unrecognized arguments: --no-such"),
        (["--data", "no/such/folder"], "no/such/folder: is no folder"),
        (
            ["--net", "fc4096", "--data", "."],
            "fc4096 does not read digits but vectors of 4096 numbers; leave --data out",
        ),
    ],
)
def test_bad_input_gets_one_line_and_status_2(arguments, complaint, capsys):
    check_refusal(main, "train", arguments, complaint, capsys)


@pytest.mark.process
def test_truncated_file_gets_one_line_and_status_2(tmp_path):
    write_digits(tmp_path)
    path = tmp_path / "t10k-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    done = run("--data", str(tmp_path))
    assert done.returncode == 2
    assert (
        done.stderr
        == f"train: error: {path}: is truncated: 10 elements need 10 bytes, the file has 9; fetch"
        " it again\n"
    )


@pytest.mark.parametrize(
    "net", ["lenet", "fc4096"]
)  # a layer of dead ReLUs, as in mlp, stays finite
def test_divergence_gets_one_line_and_status_1(net, capsys):
    assert (
        main(
            [
                "--net",
                net,
                "--lr",
                "1e30",
                "--samples",
                "1000",
                "--val-samples",
                "0",
                "--test-samples",
                "0",
            ]
        )
        == 1
    )
    assert capsys.readouterr().err.splitlines() == [
        f"train: error: the loss of {net} is no finite number any more; choose a smaller --lr"
    ]


@pytest.mark.process
@pytest.mark.parametrize("workers", ["0", "1"])
def test_ctrl_c_ends_it_with_130_and_no_traceback(workers):
    process = subprocess.Popen(
        [
            sys.executable,
            "networks/train.py",
            "--samples",
            "500",
            "--epochs",
            "100000",
            "--loader-workers",
            workers,
            "--threads",
            "1",
        ],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a test run in the background has Ctrl-C ignored, and children inherit that
    )
    try:
        while not process.stdout.readline().startswith("epoch 2/"):
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole group
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors == ""


@pytest.mark.process
def test_two_processes_under_torchrun_see_each_sample_once():
    # a learning rate that moves nothing: the evaluation passes must then give what one process
    # gives, whatever the shares (33 samples on 2 ranks)
    arguments = ("--lr", "1e-20", "--net", "lenet", *TINY)
    torchrun = (
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        "--local-addr",
        "127.0.0.1",
    )
    alone, together = (
        run(*arguments),
        run(
            *arguments,
            start=(*torchrun, "networks/train.py"),
            environment={"GLOO_SOCKET_IFNAME": "lo"},
        ),
    )
    assert alone.returncode == 0, alone.stderr
    assert together.returncode == 0, together.stderr
    assert "terminate called" not in together.stderr
    assert "processes 2" in together.stdout
    assert together.stdout.count("epoch 1/1") == 1  # only the first process prints
    results = [
        re.search(r"(validation loss \S+ accuracy \S+ %).*\n(test loss .*)\n", done.stdout).groups()
        for done in (alone, together)
    ]
    assert results[0] == results[1]


@pytest.mark.process
def test_more_processes_than_samples():
    done = run("--samples", "1", environment={"RANK": "0", "WORLD_SIZE": "2"})
    assert done.returncode == 2
    assert (
        done.stderr
        == "train: error: 1 training samples are too few for 2 processes; give more --samples\n"
    )
