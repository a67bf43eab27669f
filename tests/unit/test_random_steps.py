"""Steps of random networks: what a child of the process answers, and how it ends."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from dlperf.core.child_process import INTERRUPTED
from dlperf.core.clock import Samples
from dlperf.core.errors import WorkFailed
from dlperf.core.measurement import Measurement
from dlperf.core.state import Reading
from dlperf.recorder.targets import Built
from dlperf.studies import random_step_process, random_steps
from dlperf.studies.random_step_process import (
    answer_of_child,
    is_too_long,
    medians_of,
    serve,
    time_network,
)

READING = Reading(1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3)
SAMPLES = Samples((1e-3, 3e-3, 2e-3), 1)
MEASUREMENT = Measurement(
    "dense network",
    4,
    1,
    {"forward": SAMPLES, "total": SAMPLES},
    (),
    inference=True,
)


def test_samples_become_their_median() -> None:
    found = medians_of(MEASUREMENT)
    median = Samples((2e-3,), 1)
    assert found.step == {"forward": median, "total": median}


@pytest.mark.parametrize(("times_s", "too_long"), [((0.5, 0.2, 0.07), False), ((0.1,) * 3, True)])
def test_the_shortest_of_the_first_steps_counts(times_s: tuple[float, ...], too_long: bool) -> None:
    now_s, left = [0.0], [*times_s]

    class Steps(Built):
        def step(self, inputs: object = None) -> None:
            now_s[0] += left.pop(0)

    assert is_too_long(Steps(nn.Identity(), (), None), lambda: now_s[0]) is too_long


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small network at every seed, and a state that is known."""

    def draw(seed: int) -> Built:
        model = nn.Linear(4, 2)
        return Built(
            model, (torch.ones(3, 4),), lambda y: y.sum(), torch.optim.SGD(model.parameters())
        )

    class Probe:
        def __init__(self, cpu: object) -> None:
            """Nothing is probed."""

        def read(self, rounds: int) -> Reading:
            return READING

    monkeypatch.setattr(random_step_process, "draw", draw)
    monkeypatch.setattr(random_step_process, "StateProbe", Probe)


JOB = {"threads": 1, "seconds": 0.02, "seeds": [4], "times_only": False}


@pytest.mark.usefixtures("fake")
def test_a_network_is_measured_with_trace_and_states(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.loads(json.dumps(time_network(4, JOB)))
    assert answer["seed"] == 4
    found = Measurement.from_json(answer["measurement"])
    assert found.states == (READING, READING)
    assert found.target == "convolutional network"
    assert found.trace is not None
    assert len(found.step["total"].values) == 1
    assert found.layers == ()  # the step alone is compared
    monkeypatch.setattr(random_step_process, "is_too_long", lambda built: True)
    assert time_network(4, JOB) is None


@pytest.mark.usefixtures("fake")
def test_a_process_of_times_only_neither_records_nor_reads_the_state() -> None:
    answer = time_network(4, {**JOB, "times_only": True})
    assert answer is not None
    found = Measurement.from_json(answer["measurement"])
    assert (found.trace, found.states) == (None, ())
    assert len(found.step["total"].values) == 1


def _fail(*_: object) -> Any:
    raise ValueError("no such\nweather")


def _crash(*_: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.process
def test_a_child_that_fails_or_crashes_is_skipped(capfd: pytest.CaptureFixture[str]) -> None:
    works: dict[int, Callable[..., Any]] = {1: _crash, 2: lambda: None, 3: _fail}
    out = io.StringIO()
    jobs = io.StringIO(json.dumps({"seeds": [0, 1, 2, 3, 5]}) + "\n")
    assert serve(jobs, out, lambda seed, _: works.get(seed, lambda: {"seed": seed})()) == ""
    answers = [json.loads(line) for line in out.getvalue().splitlines()]
    assert answers == [{"seed": 0}, None, None, None, {"seed": 5}]
    assert capfd.readouterr().err == "ValueError: no such weather\n"
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)  # none is left


@pytest.mark.process
def test_an_interruption_ends_the_child_first() -> None:
    def interrupt() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer_of_child(interrupt)
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        answer_of_child(lambda: time.sleep(60))  # type: ignore[arg-type, func-returns-value]
    assert time.monotonic() - begin < 30
    timer.join()
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


class Fake(random_steps.Process):
    """A shell in place of the process."""

    def __init__(self, script: str) -> None:
        self.threads, self.times_only = 1, False
        subprocess.Popen.__init__(
            self,
            ["sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


ANSWER = json.dumps(
    {"seed": 7, "measurement": replace(MEASUREMENT, states=(READING, READING)).to_json()}
)


@pytest.mark.process
def test_answers_stream_and_skipped_networks_are_left_out() -> None:
    with Fake(f"read job; echo null; echo '{ANSWER}'; read never") as process:
        (step,) = process.time_steps([1, 7], 0.1)
        measured = step.measurement
        assert (step.seed, measured.target, measured.threads) == (7, "dense network", 1)
        assert step.measurement.states == (READING, READING)
        assert step.measured_s == 2e-3
    assert process.returncode == -signal.SIGKILL


@pytest.mark.process
@pytest.mark.parametrize(
    ("end", "raised"),
    [
        ("echo 'out of paper' >&2; exit 1", WorkFailed),
        ("exit 0", WorkFailed),
        (f"exit {INTERRUPTED}", KeyboardInterrupt),
    ],
)
def test_what_was_finished_is_kept_where_the_process_ends(
    end: str, raised: type[BaseException]
) -> None:
    with Fake(f"read job; echo '{ANSWER}'; {end}") as process:
        steps: Iterator[random_steps.TimedStep] = process.time_steps([7, 8], 0.1)
        assert next(steps).seed == 7
        with pytest.raises(raised):
            next(steps)


TWO_THREADS = """
import torch
from dlperf.studies.random_step_process import answer_of_child

def work():
    torch.set_num_threads(2)
    total = (torch.ones(2**20) + 1).sum().item()
    return {"threads": torch.get_num_threads(), "total": total}

print(answer_of_child(work), answer_of_child(work))
"""


@pytest.mark.process
def test_two_threads_work_in_each_child() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWO_THREADS], capture_output=True, text=True, timeout=120, check=True
    )
    answer = json.dumps({"threads": 2, "total": 2.0**21})
    assert done.stdout.split("\n")[0] == f"{answer} {answer}"
