"""What surrounds a command: closed streams, other encodings, names of files, little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="a shell's redirections and limits")
ROOT = Path(__file__).resolve().parents[2]
DONE, FAILED, UNUSABLE = 0, 1, 2


def shell(
    folder: Path, line: str, environment: Mapping[str, str] | None = None, before: str = ""
) -> subprocess.CompletedProcess[str]:
    """``dlperf LINE`` in a shell of its own, in `folder`."""
    return subprocess.run(
        ["sh", "-c", f'{before} exec "$0" -m dlperf {line}', sys.executable],
        cwd=folder,
        text=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        errors="surrogateescape",
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
    )


SHOW = "machine show machine.json"
CLOSED = "dlperf machine: error: stdout: is closed; the answer cannot be written\n"


@pytest.mark.process
@pytest.mark.parametrize(
    ("line", "status", "err"),
    [
        (f"{SHOW} >&-", FAILED, CLOSED),
        (f"{SHOW} --json - >&-", FAILED, CLOSED),
        (f"{SHOW} --json out.json >&-", FAILED, CLOSED),
        (f"{SHOW} 2>&-", DONE, ""),
        (f"{SHOW} <&-", DONE, ""),
        (f"{SHOW} >&- 2>&-", FAILED, ""),
        (f"{SHOW} <&- >&- 2>&-", FAILED, ""),
        ("machine show absent.json 2>&-", UNUSABLE, ""),
        ("nosuch <&- >&- 2>&-", UNUSABLE, ""),
    ],
)
def test_closed_streams(machine_file: Path, line: str, status: int, err: str) -> None:
    done = shell(machine_file.parent, line)
    assert (done.returncode, done.stderr) == (status, err)
    assert ("calibration" in done.stdout) == (status == DONE)
    if "out.json" in line:  # the file was written
        assert json.loads((machine_file.parent / "out.json").read_text())["schema"]


@pytest.mark.process
def test_a_script_runs_without_stdout(machine_file: Path) -> None:
    (machine_file.parent / "script.py").write_text("print('said')\nimport sys\nsys.exit(3)\n")
    done = shell(machine_file.parent, "run --machine machine.json script.py >&-")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr


LOCALES = [
    {"LC_ALL": "C"},
    {"LC_ALL": "POSIX", "PYTHONUTF8": "0"},
    {"PYTHONIOENCODING": "ascii"},
]
NET = """

class Straße(nn.Module):
    def __init__(self):
        super().__init__()
        self.größe = nn.Linear(8, 4)
        self.maß = nn.Linear(4, 4)

    def forward(self, x):
        return self.maß(self.größe(x))


def straße(batch_size):
    return Straße(), (torch.zeros(batch_size, 8),), torch.sum
"""


@pytest.fixture
def umlauts(machine_file: Path, targets_file: Path) -> Path:
    """A folder with a target and a machine file whose names are not ASCII."""
    folder = machine_file.parent / "Maße"
    folder.mkdir()
    machine_file.rename(folder / "mäsch.json")
    (folder / "nétz.py").write_text(targets_file.read_text() + NET, encoding="utf-8")
    return folder


PREDICT = "predict nétz.py:straße --machine mäsch.json --predictor roofline --threads 1"


@pytest.mark.process
@pytest.mark.parametrize("locale", LOCALES, ids=lambda one: " ".join(map("=".join, one.items())))
def test_names_that_are_not_ascii(umlauts: Path, locale: dict[str, str]) -> None:
    done = shell(umlauts, f"{PREDICT} --json größe.json", locale)
    assert done.returncode == DONE, done.stderr
    assert "Error" not in done.stderr
    layers = json.loads((umlauts / "größe.json").read_text())["layers"]
    assert {"größe", "maß"} <= {layer["layer"] for layer in layers}
    has_escapes = "gr\\xf6\\xdfe" in done.stdout
    assert has_escapes == (locale != {"LC_ALL": "C"})  # there Python chooses UTF-8 by itself


@pytest.mark.process
def test_documents_with_names_that_are_not_ascii(umlauts: Path) -> None:
    line = PREDICT.replace("predict", "report", 1)
    line += " --seconds 0.01 -o bücher --format text,html,csv"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "utf-8"}
    done = shell(umlauts, line, locale)
    assert done.returncode == DONE, done.stderr
    assert "Error" not in done.stderr
    text = (umlauts / "bücher" / "report.txt").read_text(encoding="utf-8")
    assert "größe" in text
    assert len(list((umlauts / "bücher").glob("*.png"))) > 1


# -- two calibrations -------------------------------------------------------------------------


def test_a_second_calibration_of_a_file_is_refused(
    tmp_path: Path, dlperf: Callable, targets_file: Path
) -> None:
    pytest.importorskip("fcntl")
    from dlperf.core.files import one_writer

    path = tmp_path / "home" / "machine.json"  # this machine's own file, which is not there yet
    path.parent.mkdir()
    refused = f"{path}: process {os.getpid()} is writing a calibration to it; wait for its end"
    lines = ("calibrate --quick", f"calibrate --quick -o {path}", f"report {targets_file}:net")
    with one_writer(path, "a calibration"):
        for line in lines:
            done = dlperf(*line.split())
            assert done.status == UNUSABLE
            assert refused in done.err.splitlines()[-1]
    assert not list(path.parent.iterdir())


# -- little memory ----------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize(
    ("line", "kib"),
    [
        (SHOW, 50_000),
        (SHOW, 200_000),
        ("{trace}", 100_000),
        ("{trace}", 400_000),
        ("{trace}", 700_000),
        ("{trace}", 900_000),
        ("calibrate --quick -o new.json", 600_000),
        ("run --machine machine.json script.py", 150_000),
    ],
)
def test_little_memory(machine_file: Path, targets_file: Path, line: str, kib: int) -> None:
    line = line.format(trace=f"trace {targets_file.name}:net --json -")
    (machine_file.parent / "script.py").write_text("")
    done = shell(machine_file.parent, line, before=f"ulimit -v {kib};")
    assert done.returncode == FAILED
    (told,) = done.stderr.splitlines()
    assert "error: out of memory" in told
    assert done.stdout == ""


def test_a_builder_that_runs_out_of_memory(dlperf: Callable, targets_file: Path) -> None:
    targets_file.write_text(targets_file.read_text() + "\n\ndef large(n):\n    raise MemoryError\n")
    done = dlperf("trace", f"{targets_file}:large", "--json", "-")
    assert done.status == FAILED
    assert "out of memory" in done.line
