"""Calibrations killed at random moments: what they leave behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_interrupts import descendants, is_alive, left_running, words_of

from dlperf.core.machine import Machine

ROOT = Path(__file__).resolve().parents[2]
SEED, N_KILLS, AT_ONCE, LATEST_S = 5, 10, 5, 2.0
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def measuring(pid: int) -> set[int]:
    """The processes below one that measure for it."""
    return {child for child in descendants(pid) if "dlperf.microbench.worker" in words_of(child)}


class Calibration:
    """A calibration over a complete machine file, one of whose processes is to be killed."""

    def __init__(self, folder: Path, trace: Path, moments: random.Random) -> None:
        self.temporary, self.file = folder / "tmp", folder / "machine.json"
        self.temporary.mkdir(parents=True)
        self.begin_s = time.monotonic()
        self.when_it_measures, self.kills_child = moments.random() < 0.7, moments.random() < 0.4
        self.after_s = moments.uniform(0.0, LATEST_S)
        self.err = (folder / "err.txt").open("w+")
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "dlperf",
                "calibrate",
                "--quick",
                "--threads",
                "1",
                "-o",
                str(self.file),
                "--for",
                str(trace),
            ],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.err,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "TMPDIR": str(self.temporary),
                "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),
            },  # torch's own, kept on purpose
            start_new_session=True,
        )
        self.children: set[int] = set()

    def kill(self) -> None:
        """Kill the measuring process where there is one and it is to be, else the command."""
        while self.when_it_measures and not measuring(self.process.pid):
            assert self.process.poll() is None
            self.begin_s = time.monotonic()
            time.sleep(0.02)
        time.sleep(max(0.0, self.begin_s + self.after_s - time.monotonic()))
        self.children = measuring(self.process.pid)
        for pid in self.children if self.kills_child and self.children else {self.process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def check(self) -> None:
        """Nothing runs on, nothing lies about, nobody is shown a traceback, the file is whole."""
        status = self.process.wait(60)
        assert status in (-signal.SIGKILL, 1)
        assert not left_running(self.children)
        self.err.seek(0)
        err = self.err.read()
        self.err.close()
        assert "Traceback" not in err
        assert "Error" not in err
        if status == 1:
            assert "the measuring process ended with status -9" in err.splitlines()[-1]
        assert not list(self.temporary.iterdir())
        if self.file.exists():
            Machine.load(self.file)


@pytest.mark.process
def test_kills_at_random_moments(tmp_path: Path, dlperf: Callable, targets_file: Path) -> None:
    trace = tmp_path / "trace.json"
    assert dlperf("trace", f"{targets_file}:net", "-o", trace).status == 0
    moments = random.Random(SEED)
    for first in range(0, N_KILLS, AT_ONCE):
        some = [Calibration(tmp_path / f"{first + i}", trace, moments) for i in range(AT_ONCE)]
        try:
            for one in sorted(some, key=lambda one: (one.when_it_measures, one.after_s)):
                one.kill()
            for one in some:
                one.check()
        finally:
            for one in some:
                for pid in (one.process.pid, *one.children):
                    if is_alive(pid):
                        os.kill(pid, signal.SIGKILL)
