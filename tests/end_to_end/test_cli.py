"""The command line where all goes well: what stands on stdout, in files, and in warnings."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dlperf.core import files, state_probe
from dlperf.core.errors import WorkFailed
from dlperf.core.machine import Machine
from dlperf.core.state import Reading
from dlperf.report import plots
from dlperf.report.comparison import Report
from dlperf.studies import self_test

ROOFLINE = ("--predictor", "roofline", "--threads", "1")


@pytest.fixture
def net(targets_file: Path) -> str:
    return f"{targets_file}:net"


def test_predict_prints_a_table(dlperf: Callable, net: str, referenced: Path) -> None:
    done = dlperf("predict", net, "--machine", referenced, *ROOFLINE)
    assert done.status == 0
    assert "Linear" in done.out
    assert done.err == ""


def test_timelines_of_a_prediction_and_a_report(
    dlperf: Callable, net: str, referenced: Path
) -> None:
    """The same command writes the same file again; a file of others is left alone."""
    path = Path("timeline.json")
    for _ in range(2):
        done = dlperf("predict", net, "--machine", referenced, *ROOFLINE, "--timeline", path)
        assert (done.status, done.err) == (0, "")
        events = json.loads(path.read_text())["traceEvents"]
        slices = {event["name"] for event in events if event["ph"] == "X"}
        assert {"step", "forward", "Sequential", "0", "(loss)", "aten.addmm.default"} <= slices
        once = path.read_text()
    assert path.read_text() == once
    on = ("--machine", referenced, "--threads", "1")
    assert dlperf("measure", net, "--threads", "1", "--seconds", "0.2", "-o", "m.json").status == 0
    done = dlperf("report", "m.json", *on, "--predictor", "roofline", "--timeline", path)
    assert done.status == 0, done.err
    events = json.loads(path.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        f"{net}, batch size 32: {how}" for how in ("predicted (roofline)", "measured")
    ]
    path.write_text("mine")
    refused = dlperf("predict", net, *on, "--timeline", path)
    assert refused.status == 2
    assert "timeline.json: exists and is no whole file of dlperf" in refused.err
    assert path.read_text() == "mine"


def test_predict_json_is_alone_on_stdout(
    dlperf: Callable, targets_file: Path, machine_file: Path
) -> None:
    """Even where the target prints: what it says is narration."""
    done = dlperf(
        "predict",
        f"{targets_file}:talkative",
        "--machine",
        machine_file,
        *ROOFLINE,
        "--batch-size",
        "16",
        "--json",
        "-",
    )
    assert done.status == 0
    data = json.loads(done.out)
    assert (
        data["schema"],
        data["schema_version"],
        data["batch_size"],
        data["threads"],
        data["predictor"],
    ) == ("dlperf.prediction", 1, 16, 1, "roofline")
    assert [row["layer"] for row in data["layers"]] == ["0", "1", "2", "(loss)"]
    assert "built" in done.err


def test_predict_json_to_a_file_keeps_the_table(
    dlperf: Callable, net: str, machine_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "prediction.json"
    done = dlperf("predict", net, "--machine", machine_file, *ROOFLINE, "--json", path)
    assert "Linear" in done.out
    assert json.loads(path.read_text())["target"] == net


def test_predict_epoch(dlperf: Callable, net: str, machine_file: Path) -> None:
    """60 samples in batches of 32 are a step of 32 and one of 28, 40 validation samples 2 passes,
    32 test samples 1 pass.
    """

    def step_s(*options: str) -> float:
        return json.loads(
            dlperf(
                "predict", net, "--machine", machine_file, *ROOFLINE, "--json", "-", *options
            ).out
        )["step"]["total_s"]

    options = ("--samples", "60", "--epochs", "3", "--val-samples", "40", "--test-samples", "32")
    epoch = json.loads(
        dlperf("predict", net, "--machine", machine_file, *ROOFLINE, "--json", "-", *options).out
    )["epoch"]
    train_s, evaluation_s = step_s(), step_s("--inference")
    assert epoch["samples"] == 60
    last_s = step_s("--batch-size", "28")
    assert epoch["epoch_s"] == pytest.approx(train_s + last_s + 2 * evaluation_s)
    assert epoch["total_s"] == pytest.approx(
        3 * (train_s + last_s + 2 * evaluation_s) + evaluation_s
    )


LOADER = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def data(batch_size, num_workers):
    return TensorDataset(torch.zeros(100, 8), torch.zeros(100, dtype=torch.long))

def without_length(batch_size, num_workers):
    return DataLoader(Stream(), batch_size)

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(8)
"""


@pytest.mark.process
def test_predict_epoch_with_its_loader(
    dlperf: Callable, net: str, loading_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "cwd" / "data.py").write_text(LOADER)
    options = (
        "--samples",
        "100",
        "--loader-workers",
        "1",
        "--clip",
        "--scheduler",
        "--accuracy",
        "--checkpoint",
        "--accumulate",
        "2",
    )
    found = {}
    for name in ("data", "without_length"):
        done = dlperf(
            "predict",
            net,
            "--machine",
            loading_file,
            *ROOFLINE,
            "--json",
            "-",
            *options,
            "--loader",
            f"data.py:{name}",
        )
        assert done.status == 0, done.err
        found[name] = json.loads(done.out)["epoch"]
        epoch = found[name]
        assert epoch["steps_per_epoch"] == 4
        assert epoch["epoch_s"] == pytest.approx(
            epoch["steps_s"] + epoch["loop_s"] + epoch["loading_s"] + epoch["pauses_s"]
        )
        # 4 looks and counts, 2 updates (a call, 4 parameters of 46 elements in all, the scheduler),
        # 2 additions to gradients
        assert epoch["loop_s"] >= (4 * 2 + 2 * (1 + 4 + 1)) * 1e-6
        assert epoch["loading_s"] > 0
    assert any("has no length" in note for note in found["without_length"]["notes"])
    assert not any("has no length" in note for note in found["data"]["notes"])
    text = dlperf("predict", net, "--machine", loading_file, *ROOFLINE, *options).out
    assert "100 samples in 4 steps, steps" in text
    assert ", loading " in text


def test_predict_epoch_records_the_last_batch(
    dlperf: Callable, net: str, machine_file: Path
) -> None:
    def epoch(*options: str) -> dict:
        return json.loads(
            dlperf(
                "predict", net, "--machine", machine_file, *ROOFLINE, "--json", "-", *options
            ).out
        )

    last_s, step_s = (epoch("--batch-size", size)["step"]["total_s"] for size in ("4", "32"))
    assert epoch("--samples", "100")["epoch"]["epoch_s"] == pytest.approx(3 * step_s + last_s)
    assert epoch("--samples", "100", "--drop-last")["epoch"]["epoch_s"] == pytest.approx(3 * step_s)
    assert epoch("--samples", "4")["epoch"]["epoch_s"] == pytest.approx(
        last_s
    )  # one batch, and not a whole one


def test_what_belongs_to_training_is_refused_of_inference(
    dlperf: Callable, net: str, machine_file: Path
) -> None:
    done = dlperf(
        "predict",
        net,
        "--machine",
        machine_file,
        *ROOFLINE,
        "--inference",
        "--samples",
        "64",
        "--clip",
    )
    assert done.status == 2
    assert (
        done.line
        == "dlperf predict: error: --clip belongs to training; leave it or --inference out"
    )


def test_a_bare_module_takes_its_input(
    dlperf: Callable, targets_file: Path, machine_file: Path
) -> None:
    done = dlperf(
        "predict",
        f"{targets_file}:Bare",
        "--input",
        "8",
        "--machine",
        machine_file,
        *ROOFLINE,
        "--json",
        "-",
    )
    assert done.status == 0, done.err
    assert [row["layer"] for row in json.loads(done.out)["layers"]] == ["Bare", "(loss)"]


def test_a_trace_file_is_the_same_target(
    dlperf: Callable, net: str, machine_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    traced = dlperf("trace", net, "-o", path, "--batch-size", "16")
    assert traced.status == 0
    assert "batch size 16" in traced.out
    assert "46 parameters" in traced.out  # (8 + 1) 4 + (4 + 1) 2
    from_code = json.loads(
        dlperf(
            "predict",
            net,
            "--batch-size",
            "16",
            "--machine",
            machine_file,
            *ROOFLINE,
            "--json",
            "-",
        ).out
    )
    from_file = json.loads(
        dlperf("predict", path, "--machine", machine_file, *ROOFLINE, "--json", "-").out
    )
    assert from_file == from_code


def test_trace_to_stdout(dlperf: Callable, net: str) -> None:
    for option in ("-o", "--json"):
        done = dlperf("trace", net, option, "-")
        assert json.loads(done.out)["schema"] == "dlperf.trace"


# -- warnings --------------------------------------------------------------------------------------


def change(path: Path, **changes: object) -> None:
    machine = Machine.load(path)
    replace(machine, **changes).save(path)  # type: ignore[arg-type]


def warnings_of(done: object) -> list[str]:
    assert done.status == 0  # type: ignore[attr-defined]
    lines = done.err.splitlines()  # type: ignore[attr-defined]
    assert all(line.startswith("dlperf: warning: ") for line in lines), lines
    return lines


def test_another_cpu_is_a_warning(dlperf: Callable, net: str, referenced: Path) -> None:
    change(referenced, cpu=replace(Machine.load(referenced).cpu, model="Other 1"))
    (line,) = warnings_of(dlperf("predict", net, "--machine", referenced, *ROOFLINE))
    assert "another CPU (Other 1" in line
    assert "extrapolated" in line


def test_another_torch_is_a_warning(dlperf: Callable, net: str, referenced: Path) -> None:
    change(referenced, versions={"torch": "1.0.0"})
    (line,) = warnings_of(dlperf("predict", net, "--machine", referenced, *ROOFLINE))
    assert "torch 1.0.0" in line


def test_other_threads_are_a_warning(dlperf: Callable, net: str, machine_file: Path) -> None:
    change(machine_file, cpu=replace(Machine.load(machine_file).cpu, n_cores=2))
    lines = warnings_of(
        dlperf(
            "predict", net, "--machine", machine_file, "--predictor", "roofline", "--threads", "64"
        )
    )
    assert any("2 cores" in line for line in lines)
    assert any("not with 64: extrapolated" in line for line in lines)


def test_another_dtype_is_a_warning(
    dlperf: Callable, targets_file: Path, machine_file: Path
) -> None:
    lines = warnings_of(
        dlperf("predict", f"{targets_file}:half", "--machine", machine_file, *ROOFLINE)
    )
    assert any("float16: extrapolated" in line for line in lines)


def test_an_unfinished_calibration_is_a_warning(
    dlperf: Callable, net: str, referenced: Path
) -> None:
    change(referenced, complete=False)
    (line,) = warnings_of(dlperf("predict", net, "--machine", referenced, *ROOFLINE))
    assert "did not finish" in line


# -- machine files ---------------------------------------------------------------------------------


def test_machine_show(dlperf: Callable, machine_file: Path) -> None:
    done = dlperf("machine", "show", machine_file)
    assert done.status == 0
    for part in ("100 GFLOP/s", "10.0 GB/s", "fork_join", "1.00 us"):
        assert part in done.out
    data = json.loads(dlperf("machine", "show", "--machine", machine_file, "--json", "-").out)
    assert data["peaks"] == [
        {"dtype": "float32", "threads": 1, "flops_per_s": pytest.approx(100e9, rel=1e-5)}
    ]


def test_machine_check(
    dlperf: Callable, machine_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratio = 1.1

    def repeat(machine: Machine, *_: object) -> Machine:
        return replace(
            machine,
            self_tests=tuple(
                replace(test, measured_s=test.predicted_s / ratio) for test in machine.self_tests
            ),
        )

    monkeypatch.setattr(self_test, "start", lambda threads: contextlib.nullcontext())
    monkeypatch.setattr(self_test, "run", repeat)
    reading = Reading(1e-4, 1e-4, 1e-5, 1e-4, 1e-2, 1e-4)
    monkeypatch.setattr(state_probe, "take_reading", lambda: replace(reading, core_s=1.25e-4))
    replace(Machine.load(machine_file), reference=reading).save(machine_file)
    done = dlperf("machine", "check", machine_file)
    assert done.status == 0
    assert "state now: core 1.25 of the reference" in done.out
    assert len(Machine.load(machine_file).readings) == 1
    assert "can be trusted here" in " ".join(done.out.split())
    assert "self-test: MLP, 1 thread: predicted 1.00 ms, measured 909 us: +10.0 %" in done.out
    ratio = 10.0  # every kernel of the file was multiplied by hand
    done = dlperf("machine", "check", machine_file, "--json", "-")
    assert done.status == 1
    assert json.loads(done.out)["self_tests"][0]["error_frac"] == pytest.approx(9.0)
    assert (
        "failed its self-test"
        in dlperf("predict", "lenet", "--machine", machine_file, "--threads", "1").err
    )  # the file keeps what was found
    ratio = 1.0
    change(machine_file, complete=False)
    done = dlperf("machine", "check", machine_file)
    assert done.status == 1
    assert "did not finish" in done.out
    whole = machine_file.read_text()
    change(machine_file, bandwidths=[])  # interrupted before its memory sweep
    done = dlperf("machine", "check", machine_file)
    assert done.status == 1
    assert "did not finish" in done.out
    machine_file.write_text(whole)
    change(machine_file, complete=True, reference=None)
    done = dlperf("machine", "check", machine_file)
    assert done.status == 0
    assert "note: it contains no reference state, so states have no effect" in done.out
    before = machine_file.read_bytes()

    def refuse(path: object, *_: object) -> None:
        raise WorkFailed(f"{path}: Read-only file system; nothing was written")

    monkeypatch.setattr(files, "write_bytes", refuse)
    done = dlperf("machine", "check", machine_file)
    assert done.status == 0
    (line,) = warnings_of(done)
    assert f"{machine_file}: cannot be written, so it keeps neither this check's reading" in line
    assert machine_file.read_bytes() == before


def test_machine_diff(dlperf: Callable, machine_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    machine = Machine.load(machine_file)
    kernels = tuple(
        replace(k, samples=replace(k.samples, values=tuple(2 * v for v in k.samples.values)))
        for k in machine.kernels
    )
    replace(machine, kernels=kernels).save(other)
    data = json.loads(dlperf("machine", "diff", machine_file, other, "--json", "-").out)
    assert {row["what"]: row["ratio"] for row in data["ratios"]}["gemm"] == pytest.approx(
        2.0, rel=1e-5
    )


# -- measure, report, reproduce --------------------------------------------------------------------


@pytest.mark.slow
def test_measure_and_report(
    dlperf: Callable,
    net: str,
    machine_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, folder = tmp_path / "measurement.json", tmp_path / "reports"
    measured = dlperf(
        "measure", net, "-o", path, "--batch-size", "4", "--threads", "1", "--seconds", "0.2"
    )
    assert measured.status == 0, measured.err
    assert json.loads(path.read_text())["batch_size"] == 4
    drawn: list[dict[str, bytes]] = []

    def draw_once(report: Report, draw: Callable = plots.pngs_of) -> dict[str, bytes]:
        drawn[:] = drawn or [draw(report)]
        return drawn[0]

    monkeypatch.setattr(plots, "pngs_of", draw_once)
    for _ in range(2):  # the second time the folder is dlperf's own
        reported = dlperf(
            "report",
            path,
            "--machine",
            machine_file,
            "--predictor",
            "roofline",
            "-o",
            folder,
            "--format",
            "html,md,csv",
        )
        assert reported.status == 0, reported.err
    assert "roofline  step predicted" in reported.out
    assert drawn
    names = {file.name for file in folder.iterdir()}
    assert {"report.html", "report.md", "report.csv"} <= names
    assert any(name.endswith(".png") for name in names)
    assert "report.txt" not in names
    for option, measured_at in (("--batch-size", "batch size 4"), ("--threads", "threads 1")):
        refused = dlperf("report", path, "--machine", machine_file, option, "2")
        assert refused.status == 2
        assert refused.line.endswith(f"measurement.json: was measured at {measured_at}, not 2")


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


SIDE_EFFECT = """
from pathlib import Path
Path(__file__).with_suffix(".ran").touch()
import torch

def net(batch_size):
    return torch.nn.Linear(8, 2), (torch.zeros(batch_size, 8),), torch.sum
"""


def test_a_report_of_a_measurement_file_runs_no_code_of_its_target(
    dlperf: Callable, machine_file: Path, tmp_path: Path
) -> None:
    script, path = tmp_path / "script.py", tmp_path / "measurement.json"
    ran = script.with_suffix(".ran")
    script.write_text(SIDE_EFFECT)
    common = ("--machine", machine_file, *ROOFLINE)
    assert (
        dlperf("measure", f"{script}:net", "-o", path, "--threads", "1", "--seconds", "0.05").status
        == 0
    )
    ran.unlink()
    done = dlperf("report", path, *common, "--json", "-")
    assert done.status == 0, done.err
    data = json.loads(done.out)
    assert (data["target"], [row["layer"] for row in data["layers"]]) == (
        f"{script}:net",
        ["Linear", "(loss)"],
    )
    assert not ran.exists()

    change_json(path, trace=None)
    done = dlperf("report", path, *common)
    assert (done.status, done.line) == (
        2,
        (
            f"dlperf report: error: {path}: contains no trace of its step, and its target is not"
            f" run; name it yourself: dlperf report TARGET --measured {path}"
        ),
    )
    assert not ran.exists()

    own = dlperf(
        "report", f"{script}:net", "--measured", path, *common, "--json", "-"
    )  # the user names the code
    assert own.status == 0, own.err
    assert json.loads(own.out)["layers"] == data["layers"]
    assert ran.exists()


def test_a_measurement_is_compared_with_a_trace_file(
    dlperf: Callable, net: str, machine_file: Path, tmp_path: Path
) -> None:
    path, trace = tmp_path / "measurement.json", tmp_path / "trace.json"
    dlperf(
        "measure",
        net,
        "-o",
        path,
        "--no-trace",
        "--threads",
        "1",
        "--seconds",
        "0.05",
        "--batch-size",
        "4",
    )
    assert json.loads(path.read_text())["trace"] is None
    common = ("--measured", path, "--machine", machine_file, *ROOFLINE)
    for options, words in (
        (("--batch-size", "4"), ""),
        (("--batch-size", "8"), "was recorded at batch size 8, not 4"),
        (
            ("--batch-size", "4", "--inference"),
            f"{trace}: is a forward pass and {path} a training step",
        ),
    ):
        dlperf("trace", net, "-o", trace, *options)
        done = dlperf("report", trace, *common)
        assert (done.status, words in done.err) == (2 if words else 0, True), done.err
    for arguments, words in (
        ((f"{net}@8", *common), "was measured at batch size 4, not 8"),
        ((net, "--inference", *common), "is of a training step"),
        ((net, net, *common), "is of one target, not of 2"),
        ((path, *common), "is a measurement, no target"),
    ):
        done = dlperf("report", *arguments)
        assert (done.status, words in done.line) == (2, True), done.err


def test_a_profile_of_torch_profiler_is_a_measurement(
    dlperf: Callable, net: str, machine_file: Path, tmp_path: Path
) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    from dlperf.recorder.targets import resolve

    built, path = resolve(net, 4).build(), tmp_path / "trace.json"
    optimizer = torch.optim.SGD(built.model.parameters(), 0.01)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(3):
            optimizer.zero_grad()
            built.loss(built.forward()).backward()
            optimizer.step()
    profiler.export_chrome_trace(str(path))
    common = ("--measured", path, "--machine", machine_file, *ROOFLINE)
    done = dlperf("report", f"{net}@4", *common, "--json", "-")
    assert done.status == 0, done.err
    data = json.loads(done.out)
    assert (data["batch_size"], data["threads"], data["unmeasured"]) == (4, 1, [])
    counts = {row["op"]: (row["n_predicted"], row["n_measured"]) for row in data["ops"]}
    assert counts["aten.addmm"] == (2, 2)
    phases = ("zero_grad", "forward", "backward", "optimizer")
    total_s = sum(data["measured"]["step"][f"{phase}_s"] for phase in phases)
    assert sum(row["actual_s"] or 0.0 for row in data["ops"]) == pytest.approx(total_s)
    for arguments, words in (
        ((net, *common), "in {net} at batch size 32 "),
        ((f"{net}@4", "--inference", *common), "is of a training step"),
        ((f"{net}@4", "--measured", machine_file), "is no dlperf.measurement file"),
    ):
        done = dlperf("report", *arguments)
        assert (done.status, words.format(net=net) in done.line) == (2, True), done.err
    path.write_bytes(path.read_bytes()[:-100])
    done = dlperf("report", f"{net}@4", *common)
    assert (done.status, "is neither a measurement nor a whole profile" in done.line) == (2, True)


def test_what_a_model_prints_while_it_is_measured_is_no_data(
    dlperf: Callable, targets_file: Path
) -> None:
    done = dlperf(
        "measure", f"{targets_file}:chatty", "--json", "-", "--threads", "1", "--seconds", "0.05"
    )
    assert done.status == 0
    assert json.loads(done.out)["schema"] == "dlperf.measurement"
    assert "forward" in done.err


@pytest.mark.process
def test_report_measures_in_a_process_of_its_own(
    dlperf: Callable, net: str, machine_file: Path
) -> None:
    done = dlperf(
        "report",
        f"{net}@4",
        "--machine",
        machine_file,
        *ROOFLINE,
        "--seconds",
        "0.2",
        "--json",
        "-",
    )
    assert done.status == 0, done.err
    data = json.loads(done.out)
    assert data["batch_size"] == 4
    assert data["schema"] == "dlperf.report"


def test_reproduce(dlperf: Callable) -> None:
    done = dlperf("reproduce", "cardwell")
    assert done.status == 0
    assert done.err == ""
    assert "3.6" in done.out
    assert json.loads(dlperf("reproduce", "--json", "-").out)["schema"] == "dlperf.reproduction"


# -- the process -----------------------------------------------------------------------------------


def start(*arguments: object, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dlperf", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )  # type: ignore[call-overload,no-any-return]


SLOW = """
import sys, time
print("here", flush=True, file=sys.stderr)
time.sleep(60)
def net(batch_size): ...
"""


@pytest.mark.process
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_interrupted_while_importing(tmp_path: Path, machine_file: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    process = start("predict", f"{tmp_path / 'slow.py'}:net", "--machine", machine_file)
    assert process.stderr is not None
    assert process.stderr.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "dlperf: interrupted\n"


@pytest.mark.process
@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("delay_s", [0.1, 0.3, 0.6, 1.0, 1.5])
def test_interrupted_at_any_time(machine_file: Path, net: str, delay_s: float) -> None:
    process = start("predict", net, "--machine", machine_file, *ROOFLINE, "--json", "-")
    time.sleep(delay_s)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    # before Python is up its own death; abort or a bad access where torch's C++ was being imported;
    # or it was done before
    own = err.startswith("Fatal Python error: init_")
    others = {-signal.SIGINT, -signal.SIGABRT, -signal.SIGSEGV, 0} | ({1} if own else set())
    assert process.returncode in {130, *others}, err
    if process.returncode == 130:
        assert err == "dlperf: interrupted\n"
        assert out == ""


@pytest.mark.process
@pytest.mark.skipif(os.name != "posix", reason="pipes")
def test_a_reader_that_leaves_is_no_error(machine_file: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "dlperf", "machine", "show", str(machine_file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=60) == 0


@pytest.mark.process
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_stdout_is_failed_work(machine_file: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dlperf", "machine", "show", str(machine_file)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == "dlperf machine: error: stdout: No space left on device\n"
