"""The lock of a file: for one process at a time, and for no longer than it lives."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlperf.core.errors import DlperfError
from dlperf.core.files import one_writer

pytest.importorskip("fcntl")
HOLD = """
import sys, time
from dlperf.core.files import one_writer
with one_writer(sys.argv[1], "a calibration"):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        text=True,
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.process
def test_the_second_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / ("m" * 250 + ".json")
    link = tmp_path / "link.json"
    link.symlink_to(path)
    with hold(path) as process:
        for name in (path, link):
            with pytest.raises(DlperfError) as refused, one_writer(name, "a calibration"):
                pass
            told = f"{name}: process {process.pid} is writing a calibration to it; wait for its end"
            assert str(refused.value).startswith(told)
        with one_writer(tmp_path / "another.json", "a calibration"):
            pass
    with one_writer(path, "a calibration"):
        pass
    assert list(tmp_path.iterdir()) == [link]


@pytest.mark.process
def test_a_killed_process_holds_nothing_up(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    with hold(path) as process:
        process.send_signal(signal.SIGKILL)
    assert len(list(tmp_path.iterdir())) == 1
    with one_writer(path, "a calibration"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    lock = one_writer(tmp_path / "none" / "m.json", "a calibration")
    with pytest.raises(DlperfError, match=r"m\.json: cannot be written \(No such file"), lock:
        pass
