"""Every bad input: the contract's exit status, exactly one line on stderr that names what is wrong,
nothing on stdout, no traceback.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

UNUSABLE, FAILED = 2, 1


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], "COMMAND"),
        (["foretell"], "foretell"),
        (["predict"], "TARGET"),
        (["predict", "x:y", "--batch-size", "0"], "--batch-size: '0'"),
        (["predict", "x:y", "--batch-size", "-3"], "--batch-size: '-3'"),
        (["predict", "x:y", "--batch-size", "many"], "--batch-size: 'many'"),
        (["predict", "x:y", "--threads", "0"], "--threads: '0'"),
        (["predict", "x:y", "--samples", "0"], "--samples: '0'"),
        (["predict", "x:y", "--epochs", "3"], "--samples"),
        (["predict", "x:y", "--epochs", "0"], "--epochs: '0'"),
        (["predict", "x:y", "--samples", "-5"], "--samples: '-5'"),
        (["predict", "x:y", "--samples", "9", "--accumulate", "0"], "--accumulate: '0'"),
        (
            ["predict", "x:y", "--loader", "a:b"],
            "--loader forecasts an epoch and needs --samples N",
        ),
        (
            ["predict", "x:y", "--samples", "9", "--loader", "a.py:b"],
            "--loader: a.py:b: there is no file a.py",
        ),
        (
            ["predict", "x:y", "--samples", "9", "--loader", "b"],
            "--loader: 'b' names no function; give FILE.py:CALLABLE",
        ),
        (["tune", "x:y", "--objective", "epoch"], "give --samples N, or --objective throughput"),
        (["tune", "x:y", "--loader-workers", "3000"], "loader workers holds 3000"),
        (
            ["validate", "--training", "--parts", "workers,nosuch"],
            "--parts nosuch: is unknown; known are workers, oversubscribed",
        ),
        (["validate", "--training", "nosuch"], "nosuch: the training scripts know mlp"),
        (["validate", "--predictor", "nosuch"], "predictor 'nosuch' is unknown"),
        (["predict", "x:y", "--predictor", "nosuch"], "predictor 'nosuch' is unknown"),
        (["predict", "x:y", "--drop-last"], "--drop-last forecasts an epoch and needs --samples N"),
        (["predict", "x:y", "--workers", "0"], "--workers: '0'"),
        (["measure", "lenet", "--threads", "99999", "--json", "-"], "threads is 99999, of "),
        (["run", "--threads", "99999", __file__], "threads is 99999, of "),
        (["run", "-m", "nosuch.module"], "nosuch.module: there is no such module here"),
        (
            ["predict", "x:y", "--workers", "5", "--samples", "4"],
            "--workers 5 are more than the 4 samples",
        ),
        (
            ["predict", "x:y", "--workers", "2", "--threads", "2"],
            "--workers have one thread each; leave --threads 2 out",
        ),
        (["calibrate", "--workers", "1,0"], "--workers: '0'"),
        (["predict", "x:y", "--input", "3,0"], "--input: '0'"),
        (["predict", "x:y", "--batch", "3"], "--batch"),
        (["calibrate", "--threads", "1,0"], "--threads: '0'"),
        (["calibrate", "--quick", "--thorough"], "--thorough"),
        (["machine"], "ACTION"),
        (["machine", "diff", "a.json"], "FILE"),
        (["trace", "x:y"], "-o FILE"),
        (["measure", "x:y", "-o", "a.json", "--seconds", "nan"], "--seconds: 'nan'"),
        (["predict", "x:y", "--timeline", "-"], "--timeline - is no file; name one"),
        (["run", "--timeline", "-", "script.py"], "--timeline - is no file; name one"),
        (["predict", "x:y", "--timeline", "no/such.json"], "no/such.json: its folder does not"),
        (
            ["predict", "x:y", "--json", "a.json", "--timeline", "./a.json"],
            "./a.json: --timeline and --json name the same file",
        ),
        (
            ["run", "--json", "b.json", "-o", "b.json", "script.py"],
            "b.json: --json and -o name the same file",
        ),
        (["machine", "show", "--bar"], "unrecognized arguments: --bar; dlperf machine show --help"),
        (
            ["predict", "x:y", "--bacth-size=4"],
            "unrecognized arguments: --bacth-size=4; did you mean --batch-size?; dlperf predict",
        ),
        (["pedict"], "'reproduce'); did you mean predict?; dlperf --help"),
        (["predict", "--what-if", "flops=2", "x:y"], "a target stands before them"),
        (["report", "x:y", "--format", "pdf"], "'pdf' is unknown"),
        (["run"], "script"),
        (["run", "--threads", "1", "-m"], "script"),
        (["run", "--threads", "none", "script.py"], "--threads: 'none'"),
        (["reproduce", "nobody"], "'nobody' is unknown; known are"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage(dlperf: Callable, arguments: list[str], names: str) -> None:
    done = dlperf(*arguments)
    assert done.status == UNUSABLE
    assert names in done.line
    assert done.out == ""


@pytest.mark.parametrize(
    ("target", "status", "names"),
    [
        ("missing.py:net", UNUSABLE, "missing.py"),
        ("no.such.module:net", UNUSABLE, "no.such"),
        ("no_short_name", UNUSABLE, "no_short_name"),
        ("{file}:absent", UNUSABLE, "absent"),
        ("{file}:raises@64", UNUSABLE, "give the batch size with --batch-size 64"),
        ("{file}:number", UNUSABLE, "number"),
        ("{file}", UNUSABLE, "sample_targets.py"),
        ("{file}:nothing", UNUSABLE, "nothing"),
        ("{file}:pair", UNUSABLE, "pair"),
        ("{file}:no_arguments", UNUSABLE, "no_arguments"),
        ("{file}:no_parameters", UNUSABLE, "--inference"),
        ("{file}:frozen", UNUSABLE, "--inference"),
        ("{file}:vector_loss", UNUSABLE, "scalar"),
        ("{file}:raises", FAILED, "no such weather"),
        ("{file}:broken", FAILED, "the model is tired"),
        ("{file}:wrong_shape", FAILED, "wrong_shape"),
    ],
)
def test_unusable_target(
    dlperf: Callable, targets_file: Path, machine_file: Path, target: str, status: int, names: str
) -> None:
    done = dlperf(
        "predict",
        target.format(file=targets_file),
        "--machine",
        machine_file,
        "--predictor",
        "roofline",
        "--threads",
        "1",
    )
    assert done.status == status
    assert names in done.line
    assert done.out == ""


def test_a_machine_file_without_the_terms_of_workers(
    dlperf: Callable, targets_file: Path, machine_file: Path
) -> None:
    done = dlperf(
        "predict",
        f"{targets_file}:talkative",
        "--machine",
        machine_file,
        "--predictor",
        "roofline",
        "--workers",
        "2",
        "--samples",
        "100",
    )
    assert done.status == UNUSABLE
    assert f"{machine_file}: holds no contention of workers" in done.err.splitlines()[-1]
    assert (
        f"dlperf calibrate --workers 1,2,4 -o {machine_file} adds it" in done.err.splitlines()[-1]
    )
    assert done.out == ""


@pytest.mark.parametrize("command", ["trace", "measure"])
@pytest.mark.parametrize(
    ("name", "status"), [("absent", UNUSABLE), ("frozen", UNUSABLE), ("broken", FAILED)]
)
def test_unusable_target_elsewhere(
    dlperf: Callable, targets_file: Path, tmp_path: Path, command: str, name: str, status: int
) -> None:
    out = tmp_path / "out.json"
    done = dlperf(command, f"{targets_file}:{name}", "-o", out, "--threads", "1")
    assert done.status == status
    assert name in done.line
    assert not out.exists()


def edited(path: Path, change: Callable[[dict], object]) -> Path:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path


BAD_MACHINES = {
    "missing": lambda path: path.unlink(),
    "truncated": lambda path: path.write_text(path.read_text()[:200]),
    "empty": lambda path: path.write_text(""),
    "binary": lambda path: path.write_bytes(bytes(range(256))),
    "a list": lambda path: path.write_text("[]"),
    "a trace": lambda path: edited(path, lambda data: data.update(schema="dlperf.trace")),
    "newer": lambda path: edited(path, lambda data: data.update(schema_version=99)),
    "negative time": lambda path: edited(
        path, lambda data: data["kernels"][0].update(samples_s=[-1e-3])
    ),
    "NaN time": lambda path: edited(
        path, lambda data: data["kernels"][1].update(samples_s=[math.nan])
    ),
    "zero time": lambda path: edited(
        path, lambda data: data["bandwidths"][0].update(samples_s=[0.0])
    ),
    "negative threads": lambda path: edited(
        path, lambda data: data["kernels"][0].update(threads=-1)
    ),
    "negative size": lambda path: edited(
        path, lambda data: data["tensors"][0].__setitem__(0, [-3, 4])
    ),
    "no kernels": lambda path: edited(path, lambda data: data.pop("kernels")),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("fault", BAD_MACHINES)
def test_unusable_machine_file(
    dlperf: Callable, targets_file: Path, machine_file: Path, fault: str
) -> None:
    BAD_MACHINES[fault](machine_file)
    for arguments in (
        ["predict", f"{targets_file}:net", "--machine", machine_file, "--threads", "1"],
        ["machine", "show", machine_file],
    ):
        done = dlperf(*arguments)
        assert done.status == UNUSABLE
        assert "machine.json" in done.line
        assert done.out == ""


def test_predict_without_a_machine_names_the_command_that_makes_it(
    dlperf: Callable, targets_file: Path
) -> None:
    done = dlperf("predict", f"{targets_file}:net")
    assert done.status == UNUSABLE
    assert "dlperf calibrate" in done.line


def test_unknown_predictor_lists_the_known(
    dlperf: Callable, targets_file: Path, machine_file: Path
) -> None:
    done = dlperf(
        "predict",
        f"{targets_file}:net",
        "--machine",
        machine_file,
        "--predictor",
        "tea-leaves",
        "--threads",
        "1",
    )
    assert done.status == UNUSABLE
    assert "tea-leaves" in done.line
    assert "calibrated" in done.line


def test_report_with_a_machine_file_that_is_missing_makes_none(
    dlperf: Callable, targets_file: Path, tmp_path: Path
) -> None:
    done = dlperf(
        "report", f"{targets_file}:net", "--machine", tmp_path / "none.json", "--threads", "1"
    )
    assert done.status == UNUSABLE
    assert "none.json" in done.line
    assert not (tmp_path / "none.json").exists()


# -- outputs ---------------------------------------------------------------------------------------


def write_foreign(folder: Path) -> Path:
    path = folder / "thesis.json"
    path.write_text("three years of work")
    return path


@pytest.mark.parametrize("option", ["-o", "--json"])
def test_a_foreign_file_is_not_replaced(
    dlperf: Callable, targets_file: Path, tmp_path: Path, option: str
) -> None:
    path = write_foreign(tmp_path)
    done = dlperf("trace", f"{targets_file}:net", option, path)
    assert done.status == UNUSABLE
    assert "thesis.json" in done.line
    assert "--force" in done.line
    assert path.read_text() == "three years of work"


def test_force_replaces_and_dlperfs_own_file_needs_none(
    dlperf: Callable, targets_file: Path, tmp_path: Path
) -> None:
    path = write_foreign(tmp_path)
    assert dlperf("trace", f"{targets_file}:net", "-o", path, "--force").status == 0
    assert dlperf("trace", f"{targets_file}:net", "-o", path, "--batch-size", "7").status == 0
    assert json.loads(path.read_text())["batch_size"] == 7


def test_calibrate_leaves_a_foreign_file(dlperf: Callable, tmp_path: Path) -> None:
    path = write_foreign(tmp_path)
    done = dlperf("calibrate", "--quick", "-o", path, "--threads", "1")
    assert done.status == UNUSABLE
    assert "--force" in done.line
    assert path.read_text() == "three years of work"


def test_report_leaves_a_foreign_folder(
    dlperf: Callable, targets_file: Path, machine_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.md").write_text("three years of work")
    done = dlperf(
        "report", f"{targets_file}:net", "--machine", machine_file, "-o", folder, "--threads", "1"
    )
    assert done.status == UNUSABLE
    assert "--force" in done.line
    assert [path.name for path in folder.iterdir()] == ["chapter.md"]


@pytest.mark.parametrize(
    "command",
    [["trace"], ["predict", "--predictor", "roofline", "--machine", "{machine}"]],
    ids=lambda c: c[0],
)
@pytest.mark.parametrize("place", ["no/such/folder/out.json", "."])
def test_unwritable_output(
    dlperf: Callable, targets_file: Path, machine_file: Path, command: list[str], place: str
) -> None:
    name, *options = command
    done = dlperf(
        name,
        f"{targets_file}:net",
        *(option.format(machine=machine_file) for option in options),
        "--json",
        place,
        "--threads",
        "1",
    )
    assert done.status == UNUSABLE
    assert place in done.line


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere"
)
def test_folder_without_permission(dlperf: Callable, targets_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    done = dlperf("trace", f"{targets_file}:net", "-o", folder / "out.json")
    assert done.status == UNUSABLE
    assert "locked" in done.line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_failed_work(dlperf: Callable, targets_file: Path) -> None:
    done = dlperf("trace", f"{targets_file}:net", "-o", "/dev/full")
    assert done.status == FAILED
    assert "/dev/full: No space left on device" in done.line


# -- trace files -----------------------------------------------------------------------------------


@pytest.fixture
def trace_file(dlperf: Callable, targets_file: Path, tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    assert dlperf("trace", f"{targets_file}:net", "-o", path, "--batch-size", "16").status == 0
    return path


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--batch-size", "8"], "batch size 16, not 8"),
        (["--inference"], "--inference"),
        (["--input", "8"], "--input 8"),
    ],
    ids=["batch size", "inference", "input"],
)
def test_what_a_trace_file_fixes(
    dlperf: Callable, trace_file: Path, machine_file: Path, options: list[str], names: str
) -> None:
    done = dlperf("predict", trace_file, "--machine", machine_file, "--threads", "1", *options)
    assert done.status == UNUSABLE
    assert names in done.line


def test_a_trace_file_cannot_be_measured(
    dlperf: Callable, trace_file: Path, machine_file: Path, tmp_path: Path
) -> None:
    for arguments in (
        ["measure", trace_file, "-o", tmp_path / "m.json"],
        ["report", trace_file, "--machine", machine_file],
    ):
        done = dlperf(*arguments)
        assert done.status == UNUSABLE
        assert "no code" in done.line


@pytest.mark.parametrize("fault", ["missing", "truncated", "newer", "empty"])
def test_unusable_trace_file(
    dlperf: Callable, trace_file: Path, machine_file: Path, fault: str
) -> None:
    BAD_MACHINES[fault](trace_file)
    done = dlperf("predict", trace_file, "--machine", machine_file, "--threads", "1")
    assert done.status == UNUSABLE
    assert "trace.json" in done.line


def test_debug_shows_the_traceback(
    dlperf: Callable, targets_file: Path, machine_file: Path
) -> None:
    done = dlperf(
        "predict", f"{targets_file}:broken", "--machine", machine_file, "--threads", "1", "--debug"
    )
    assert done.status == FAILED
    assert "Traceback" in done.err
    assert "the model is tired" in done.err


@pytest.mark.process
@pytest.mark.parametrize(
    ("options", "status", "names"),
    [
        (
            ("--loader-workers", "1"),
            UNUSABLE,
            "machine.json: holds no costs of loading data; dlperf calibrate -o",
        ),
        (
            ("--samples", "7", "--drop-last"),
            UNUSABLE,
            "samples is 7, fewer than a batch of 32, and drop_last leaves no step",
        ),
        (
            ("--loader", "absent.py:data"),
            UNUSABLE,
            "--loader: absent.py:data: there is no file absent.py",
        ),
        (
            ("--loader", "{file}:net"),
            UNUSABLE,
            "is called as CALLABLE(batch_size, num_workers), but takes (batch_size)",
        ),
        (("--loader", "torn.py:dat"), UNUSABLE, "--loader: torn.py:dat: torn.py defines no dat"),
        (
            ("--loader", "torn.py:gone"),
            FAILED,
            "loader torn.py:gone: ended its process (status 0) while it was sampled",
        ),
        (
            ("--loader", "torn.py:killed"),
            FAILED,
            "loader torn.py:killed: its process was ended by SIGSEGV while it was sampled",
        ),
        (
            ("--loader", "torn.py:data"),
            FAILED,
            "loader torn.py:data: raises ValueError: the sample is torn",
        ),
        (("--checkpoint",), UNUSABLE, "holds no cost of 'save'; dlperf calibrate -o"),
    ],
)
def test_epochs_that_cannot_be_forecast(
    dlperf: Callable,
    targets_file: Path,
    referenced: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    status: int,
    names: str,
) -> None:
    (tmp_path / "cwd" / "torn.py").write_text(
        "class Data(list):\n    def __getitem__(self, i):\n        raise ValueError('the sample is"
        " torn')\nimport os, signal\ndef gone(batch_size, num_workers):\n    os._exit(0)\ndef"
        " killed(batch_size, num_workers):\n    os.kill(os.getpid(), signal.SIGSEGV)\ndef"
        " data(batch_size, num_workers):\n    from torch.utils.data import DataLoader\n    return"
        " DataLoader(Data([1] * 100), batch_size)\n"
    )
    words = [word.format(file=targets_file) for word in options]
    done = dlperf(
        "predict",
        f"{targets_file}:net",
        "--machine",
        referenced,
        "--predictor",
        "roofline",
        "--threads",
        "1",
        "--samples",
        "100",
        *words,
    )
    assert done.status == status
    assert names in done.line


def test_an_operator_without_its_arguments_is_named(
    dlperf: Callable, targets_file: Path, machine_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    assert dlperf("trace", f"{targets_file}:net", "-o", path).status == 0
    data = json.loads(path.read_text())
    number = next(number for number, op in enumerate(data["ops"]) if op[0] == "aten.addmm.default")
    data["ops"][number][1] = []
    path.write_text(json.dumps(data))
    done = dlperf("predict", path, "--machine", machine_file, "--threads", "1")
    assert done.status == 2
    line = (
        f"{path}: ops[{number}] is aten.addmm.default(()|); expected the arguments of"
        " aten.addmm.default. Record it again."
    )
    assert done.line == f"dlperf predict: error: {line}"


def test_a_kernel_without_its_arguments_is_named(
    dlperf: Callable, targets_file: Path, machine_file: Path
) -> None:
    data = json.loads(machine_file.read_text())
    data["kernels"][1]["op"][1][0] = None
    machine_file.write_text(json.dumps(data))
    line = (
        f"{machine_file}: kernels[1].op is aten.mm.default((None,float32[512x512])|); expected the"
        " arguments of aten.mm.default."
    )
    for command in (
        ("machine", "show", machine_file),
        ("predict", f"{targets_file}:net", "--machine", machine_file, "--threads", "1"),
    ):
        done = dlperf(*command)
        assert (done.status, done.line) == (
            2,
            f"dlperf {command[0]}: error: {line} Recalibrate, or edit the file.",
        )


NO_NAME = "n" * 256
LINES = [
    "trace {net} -o {name}",
    "trace {net} --json {name}",
    "measure {net} -o {name}",
    "measure {net} --json {name}",
    "predict {net} --json {name}",
    "predict {net} --timeline {name}",
    "report {net} --json {name}",
    "report {net} --timeline {name}",
    "report {net} -o {name}",
    "explain {net} -o {name}",
    "tune {net} -o {name}",
    "scale {net} --ranks 2 -o {name}",
    "validate {net}@4 -o {name}",
    "reproduce -o {name}",
    "calibrate --quick -o {name}",
    "calibrate --quick --json {name}",
    "calibrate --machine {name}",
    "run -o {name} {script}",
    "run --json {name} {script}",
    "run --timeline {name} {script}",
    "run --communication {name} {script}",
    "machine show {name}",
    "predict {net} --machine {name}",
    "trace {name}.py:net -o a.json",
    "trace {name} -o a.json",
    "run {name}",
    "predict {net} --samples 9 --loader {name}.py:data",
]


@pytest.mark.parametrize("line", LINES)
def test_a_name_that_is_too_long(dlperf: Callable, targets_file: Path, line: str) -> None:
    words = [
        word.format(net=f"{targets_file}:net", name=NO_NAME, script=targets_file)
        for word in line.split()
    ]
    done = dlperf(*words)
    assert done.status == UNUSABLE
    assert NO_NAME[:60] in done.line
    assert done.out == ""
