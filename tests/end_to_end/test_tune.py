"""``dlperf tune`` from the command line, one trial in processes of their own, and a step's memory
counted in one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dlperf.advice.grid import Configuration
from dlperf.advice.trials import measure_configuration
from dlperf.core.errors import DlperfError, WorkFailed
from dlperf.profiler.peak_memory import measure_peak_memory

UNUSABLE = 2


def test_tune_compares_what_the_machine_file_speaks_of(
    dlperf: Callable, targets_file: Path, machine_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "tuned"
    for _ in range(2):  # the second time it finds its own files there
        done = dlperf(
            "tune",
            f"{targets_file}:net",
            "--machine",
            machine_file,
            "--batch-sizes",
            "8,64",
            "--samples",
            "1000",
            "-o",
            folder,
            "--json",
            "-",
        )
        assert done.status == 0, done.err
    data = json.loads(done.out)
    assert data["schema"] == "dlperf.tuning"
    assert data["objective"] == "epoch"
    assert data["best"] == {
        "threads": 1,
        "batch_size": 64,
        "loader_workers": 0,
        "workers": 1,
    }  # a step of small ops costs what it costs
    assert [row["batch_size"] for row in data["rows"]] == [64, 8]
    remedy = f"dlperf calibrate --workers 1,2,4 -o {machine_file} adds them"
    assert f"only 1 worker is considered; {remedy}" in done.err
    assert sorted(path.name for path in folder.iterdir()) == [
        "landscape.png",
        "tuning.csv",
        "tuning.json",
        "tuning.md",
    ]
    assert json.loads((folder / "tuning.json").read_text())["rows"] == data["rows"]


def test_a_limit_of_memory_is_kept(
    dlperf: Callable, targets_file: Path, machine_file: Path
) -> None:
    command = (
        "tune",
        f"{targets_file}:net",
        "--machine",
        machine_file,
        "--batch-sizes",
        "1024,65536",
        "--json",
        "-",
    )
    rows = json.loads(dlperf(*command).out)["rows"]
    needs = {row["batch_size"]: row["peak_memory_bytes"] for row in rows}
    limited = json.loads(dlperf(*command, "--memory-limit", needs[65536] - 1).out)
    assert limited["best"]["batch_size"] == 1024
    done = dlperf(*command, "--memory-limit", "1k")
    assert done.status == UNUSABLE
    assert "nothing fits into 1000 B: the smallest need is" in done.err.splitlines()[-1]


def test_a_trace_file_has_one_batch_size(
    dlperf: Callable, targets_file: Path, machine_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "net.json"
    assert dlperf("trace", f"{targets_file}:net", "--batch-size", "16", "-o", path).status == 0
    done = dlperf("tune", path, "--machine", machine_file, "--json", "-")
    assert [row["batch_size"] for row in json.loads(done.out)["rows"]] == [16]
    assert (
        "has one batch size, 16"
        in dlperf("tune", path, "--machine", machine_file, "--batch-sizes", "8,16").line
    )
    assert "no code to measure" in dlperf("tune", path, "--machine", machine_file, "--try").line


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--memory-limit", "lots"], "'lots' is no size"),
        (["--memory-limit", "0"], "no memory to work in"),
        (["--threads", "0"], "no whole number of at least 1"),
        (["--batch-sizes", ""], "no whole number of at least 1"),
        (["--batch-sizes", "8", "--batch-size", "8"], "give one of --batch-size and --batch-sizes"),
        (["--objective", "epoch"], "give --samples N"),
        (["--samples", "4", "--workers", "8"], "workers is 8, more than the 4 samples"),
        (["--samples", "4", "--batch-sizes", "8"], "the grid is empty"),
        (["--threads", "99999"], "threads holds 99999"),
        (["--runs", "2"], "--runs is for the measuring of --try"),
        (["--best", "2"], "--best is for the measuring of --try"),
        (["-o", "-"], "is no folder"),
    ],
)
def test_bad_input_is_one_line(
    dlperf: Callable, targets_file: Path, machine_file: Path, options: list[str], text: str
) -> None:
    done = dlperf("tune", f"{targets_file}:net", "--machine", machine_file, *options)
    assert done.status == UNUSABLE
    assert text in done.err.splitlines()[-1]
    assert "Traceback" not in done.err


def test_more_threads_than_cores_is_a_note(
    dlperf: Callable, targets_file: Path, machine_file: Path
) -> None:
    done = dlperf(
        "tune",
        f"{targets_file}:net",
        "--machine",
        machine_file,
        "--threads",
        "1,512",
        "--batch-sizes",
        "8",
    )
    assert done.status == 0
    assert "512 threads asked for, this process may use" in done.err


@pytest.mark.process
def test_a_configuration_is_measured_in_processes_of_its_own(targets_file: Path) -> None:
    spec = f"{targets_file}:net"
    for configuration in (Configuration(2, 1, 0, 8), Configuration(1, 1, 1, 8)):
        assert (
            measure_configuration(
                configuration,
                spec,
                inference=False,
                input_shape=None,
                seconds=0.1,
                with_loader=True,
            )
            > 0
        )
    with pytest.raises(WorkFailed, match="the model is tired"):
        measure_configuration(
            Configuration(2, 1, 0, 8),
            f"{targets_file}:broken",
            inference=False,
            input_shape=None,
            seconds=0.1,
            with_loader=False,
        )


@pytest.mark.process
def test_ones_own_loader_is_sampled_and_measured(
    dlperf: Callable, targets_file: Path, loading_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "mydata.py"
    path.write_text(
        "import time, torch\n\nclass Slow(torch.utils.data.Dataset):\n    def __len__(self):\n     "
        "   return 1000\n    def __getitem__(self, i):\n        time.sleep(0.002)\n        return"
        " torch.zeros(8)\n\ndef slow(batch_size, num_workers):\n    return Slow()\n\ndef"
        " nothing(batch_size, num_workers):\n    return torch.utils.data.DataLoader([],"
        " batch_size)\n"
    )
    command = (
        "tune",
        f"{targets_file}:net",
        "--machine",
        loading_file,
        "--batch-sizes",
        "8",
        "--threads",
        "1",
        "--json",
        "-",
    )
    rows = {}
    for name, options in (("memory", ()), ("own", ("--loader", f"{path}:slow"))):
        done = dlperf(*command, *options)
        assert done.status == 0, done.err
        rows[name] = {row["loader_workers"]: row for row in json.loads(done.out)["rows"]}
    assert rows["own"][0]["step_s"] > 8 * 0.002 > rows["memory"][0]["step_s"]
    assert (
        rows["own"][2]["step_s"] < 0.75 * rows["own"][0]["step_s"]
    )  # workers wait beside one another
    spec = f"{targets_file}:net"
    slow = measure_configuration(
        Configuration(1, 1, 0, 8),
        spec,
        inference=False,
        input_shape=None,
        seconds=0.1,
        with_loader=True,
        loader=f"{path}:slow",
    )
    assert slow < 1 / 0.002
    with pytest.raises(WorkFailed, match="is empty"):
        measure_configuration(
            Configuration(1, 1, 0, 8),
            spec,
            inference=False,
            input_shape=None,
            seconds=0.1,
            with_loader=True,
            loader=f"{path}:nothing",
        )


@pytest.mark.process
def test_memory_is_counted_in_a_process_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "wide.py"
    path.write_text(
        "import torch\n\ndef wide(batch_size, n_in=4096):\n    return torch.nn.Linear(n_in, 4096,"
        " bias=False), (torch.ones(batch_size, n_in),), torch.sum\n\ndef narrow(batch_size):\n   "
        " return wide(batch_size, 64)\n\ndef wrong(batch_size):\n    return torch.nn.Linear(7, 2),"
        " (torch.ones(batch_size, 8),), torch.sum\n"
    )
    assert (
        measure_peak_memory(f"{path}:wide", 1) > 2 * 4 * 4096**2
    )  # weights and their gradients, 64 MiB each
    small, large = (measure_peak_memory(f"{path}:narrow", batch_size) for batch_size in (1, 4096))
    assert large - small == pytest.approx(
        4 * 4096 * (64 + 2 * 4096), rel=0.25
    )  # input, output and its gradient
    with pytest.raises(WorkFailed, match="mat1 and mat2"):
        measure_peak_memory(f"{path}:wrong", 1)
    with pytest.raises(DlperfError, match="there is no file"):
        measure_peak_memory(f"{tmp_path}/nowhere.py:wide", 1)
