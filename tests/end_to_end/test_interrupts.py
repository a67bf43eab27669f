"""Ctrl-C and SIGTERM while a process of ours measures: no orphans, and no promise that is not kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="finds children in /proc"
)
ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 90.0
REPORT = ("report", "{net}", "--predictor", "roofline")
CALIBRATE = ("calibrate", "--quick", "-o", "{folder}/m.json", "--threads", "1")


def descendants(pid: int) -> set[int]:
    """Processes below one, by /proc."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it has ended meanwhile
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in found | {pid}} - found:
        found |= more
    return found


def words_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def left_running(children: set[int], patience_s: float = 10.0) -> list[int]:
    """Those of the processes that do not end in time: one that was killed needs a moment to go, and
    on a busy machine a long one.
    """
    until = time.monotonic() + patience_s
    while (alive := [child for child in children if is_alive(child)]) and time.monotonic() < until:
        time.sleep(0.05)
    return alive


@pytest.mark.process
@pytest.mark.parametrize(
    ("command", "number"),
    [
        (REPORT, signal.SIGTERM),
        (REPORT, signal.SIGINT),
        (CALIBRATE, signal.SIGTERM),
        (CALIBRATE, signal.SIGINT),
        # handlers are the same for all commands
        (("explain", "{net}", "--try"), signal.SIGINT),
        (
            ("validate", "{net}@4", "--predictor", "roofline", "--cache", "{folder}/kept"),
            signal.SIGTERM,
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value.name,
)
def test_children_end_and_nothing_is_promised(
    tmp_path: Path,
    machine_file: Path,
    targets_file: Path,
    command: tuple[str, ...],
    number: signal.Signals,
) -> None:
    words = [word.format(net=f"{targets_file}:net", folder=tmp_path) for word in command]
    words += (
        [] if command[0] == "calibrate" else ["--machine", str(machine_file), "--seconds", "60"]
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "dlperf", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "DLPERF_MACHINE": str(tmp_path / "home" / "machine.json"),
        },
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        until = time.monotonic() + PATIENCE_S
        # What looks for a library runs others; and until a child has become what it will be, it goes
        # by our words, which /proc does not have yet right after the start.
        ours = [sys.executable, "-m", "dlperf", *words]
        while process.poll() is None and time.monotonic() < until:
            children = descendants(process.pid)
            seen = [one for one in map(words_of, children) if one]
            if any(one[0] == sys.executable and one != ours for one in seen):
                break
            time.sleep(0.05)
        else:
            process.kill()
            pytest.fail(f"no child: {process.communicate()[1]}")
        process.send_signal(number)  # to it alone: a terminal would tell its children too
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == (143 if number == signal.SIGTERM else 130), err
    assert not left_running(children)
    assert "Traceback" not in err
    if command[0] == "explain":  # the prediction was finished, and is shown
        assert "interrupted before a first change was tried; the prediction alone is shown" in err
        assert "no change had been tried" in out
        return
    assert out == ""
    said = {signal.SIGTERM: "ended by SIGTERM", signal.SIGINT: "interrupted"}[number]
    told = "; no group was finished, so nothing was kept" if command[0] == "calibrate" else ""
    assert err.splitlines()[-1] == f"dlperf: {said}{told}"


@pytest.mark.process
def test_a_report_shows_the_targets_that_were_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dlperf, machine_file: Path, targets_file: Path
) -> None:
    from dlperf.cli import report

    measure_apart = report.measure_apart
    asked: list[str] = []

    def measure_once(args, spec, batch_size, threads):
        asked.append(spec)
        if len(asked) > 1:
            raise KeyboardInterrupt
        return measure_apart(args, spec, batch_size, threads)

    monkeypatch.setattr(report, "measure_apart", measure_once)
    net = f"{targets_file}:net"
    done = dlperf(
        "report",
        f"{net}@4,8",
        "--machine",
        machine_file,
        "--predictor",
        "roofline",
        "--seconds",
        "0.05",
        "--threads",
        "1",
    )
    assert done.status == 130
    assert "interrupted; what was finished (1 of the targets) is reported" in done.err
    assert "batch size 4" in done.out
    assert "batch size 8" not in done.out


@pytest.mark.process
def test_where_the_shell_ignores_ctrl_c_sigterm_alone_ends_a_command(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time; from dlperf.cli import main as cli\n"
        "def work(*_):\n    print('works', flush=True)\n    time.sleep(60)\n"
        "cli._dispatch = work; sys.exit(cli.main(['machine', 'show']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as nohup's shell does
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "works\n"
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143
    assert err == "dlperf: ended by SIGTERM\n"
