"""How a child ends, with work of our own, and what its ending is to the parent."""

from __future__ import annotations

import io
import os
import signal
import subprocess
from pathlib import Path

import pytest

from dlperf.core import child_process
from dlperf.core.child_process import (
    FAILED,
    INTERRUPTED,
    UNUSABLE,
    Child,
    failure,
    last_line,
    read_job,
    run,
)
from dlperf.core.errors import DlperfError, WorkFailed


def test_what_the_work_prints_is_not_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> str:
        print("built")
        return '{"total_s": 1.5}'

    assert run(work) == 0
    assert capsys.readouterr() == ('{"total_s": 1.5}\n', "built\n")
    elsewhere = io.StringIO()
    assert run(work, elsewhere) == 0
    assert elsewhere.getvalue() == '{"total_s": 1.5}\n'
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (DlperfError("target x: is not\nknown"), UNUSABLE, "target x: is not known\n"),
        (WorkFailed("its builder\n raises"), FAILED, "its builder raises\n"),
        (ValueError("no such\n\tweather"), FAILED, "ValueError: no such weather\n"),
        (KeyboardInterrupt(), INTERRUPTED, ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failure_crosses_to_the_parent(
    raised: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> str:
        raise raised

    assert run(work) == status
    printed = capsys.readouterr()
    assert printed == ("", said)
    found = failure(status, "a warning before\n" + printed.err)
    assert type(found) is (WorkFailed if isinstance(raised, ValueError) else type(raised))
    if status != INTERRUPTED:
        assert str(found) == said.strip()


def test_where_a_trial_cannot_be_made_it_has_failed() -> None:
    assert type(failure(UNUSABLE, "the network has no Conv2d\n", unusable=WorkFailed)) is WorkFailed


def test_a_process_that_said_nothing_is_named() -> None:
    assert (
        str(failure(-9, " \n\n", "the process that measures memory"))
        == "the process that measures memory ended with status -9"
    )
    assert last_line("") == ""


def test_a_child_whose_parent_is_gone_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"threads": 1}\n'))
    assert read_job() == {"threads": 1}
    with pytest.raises(SystemExit) as ended:
        read_job()
    assert ended.value.code == FAILED
    assert capsys.readouterr() == ("", "")


@pytest.mark.process
def test_a_child_answers_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "twice.py").write_text(
        "import sys\n"
        "from dlperf.core.child_process import read_job, run\n"
        "sys.exit(run(lambda: str(2 * read_job()['number'])))\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with Child("twice") as process:
        assert process.answer({"number": 21}) == 42
    with Child("twice") as process, pytest.raises(WorkFailed, match="KeyError: 'number'"):
        process.answer({})
    with pytest.raises(ZeroDivisionError), Child("twice") as process:
        raise ZeroDivisionError
    assert process.returncode != 0  # killed while it waited for its job
    with Child("sys", stderr=None) as process:
        process.wait()
        process.write("nobody reads this")
        with pytest.raises(WorkFailed, match=r"^it ended with status"):
            process.answer(process="it")


@pytest.mark.process
@pytest.mark.parametrize(
    ("does", "status"),
    [
        ("while True: os.write(1, bytes(2**16))", FAILED),  # no reader, so it fails
        ("time.sleep(60)", -signal.SIGKILL),
    ],
)
def test_a_child_that_ignores_its_end_is_ended_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, status: int
) -> None:
    """An interrupt that a library swallows leaves a child that writes while its parent waits."""
    (tmp_path / "deaf.py").write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.write(1, b'ready\\n')\n"
        f"{does}\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(child_process, "_ENDS_S", 5.0 if status == FAILED else 0.1)
    with Child("deaf", stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.stop()
        assert process.returncode == status
