"""Self-test of a machine file: steps of random networks, predicted from it and measured.

A calibration ends with it, and the check of a machine file repeats it. Nothing is fitted to it. Its
errors widen the intervals of predictions; it fails above
:data:`dlperf.core.verification.WORST_FACTOR`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dlperf.core import child_process
from dlperf.core.machine import Machine
from dlperf.core.trace import Trace
from dlperf.core.verification import SelfTest, has_failed
from dlperf.forecast.prediction import predict
from dlperf.predictors.allocator.simulation import policy_of

_POLICY = "tuned"
"""Malloc in a self-test: without page faults, whose number differs from process to process,
whatever a machine file says.
"""
_MALLOC = dict(setting.split("=") for setting in policy_of(_POLICY).settings.split())


@dataclass(frozen=True)
class TimedStep:
    """A step that was timed: its trace, the seed that its network was generator with, and its
    median in seconds.
    """

    trace: Trace
    seed: int
    measured_s: float


class Process(child_process.Child):
    """A fresh process that draws networks at random and times their steps with so many threads. It
    starts at once and imports torch while others work.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        variables = {**os.environ, **_MALLOC, "MKL_NUM_THREADS": str(threads)}
        super().__init__("dlperf.studies.self_test_process", threads=threads, environment=variables)

    def time_steps(self, seed: int) -> list[TimedStep]:
        """The steps of the networks of this seed. Raises WorkFailed where the process fails,
        KeyboardInterrupt where it was interrupted.
        """
        job = {"threads": self.threads, "seed": seed}
        rows = self.answer(job, process="the self-test's process")
        return [TimedStep(Trace.from_json(row["trace"]), seed, row["measured_s"]) for row in rows]


def compare(machine: Machine, timed: Sequence[TimedStep], threads: int) -> tuple[SelfTest, ...]:
    """The steps that were timed beside what the machine file, without any self-test of its own,
    predicts of them.
    """
    plain = replace(machine, self_tests=())
    tests = []
    for one in timed:
        step = predict(one.trace, plain, threads, malloc=_POLICY).step
        assert step.total_s is not None
        assert step.low_s is not None
        assert step.high_s is not None
        tests.append(
            SelfTest(
                one.trace.target,
                threads,
                one.seed,
                step.total_s,
                step.low_s,
                step.high_s,
                one.measured_s,
            )
        )
    return tuple(tests)


def run(machine: Machine, processes: Sequence[Process]) -> Machine:
    """The machine with a self-test in each of these processes, for its thread count.

    Where one fails it is run once more, in case the machine was busy for a moment; what it says
    then counts.
    """
    for process in processes:
        seed = random.SystemRandom().randrange(2**31)
        tests = compare(machine, process.time_steps(seed), process.threads)
        if has_failed(tests):
            with Process(process.threads) as another:
                tests = compare(machine, another.time_steps(seed), process.threads)
        others = tuple(test for test in machine.self_tests if test.threads != process.threads)
        machine = replace(machine, self_tests=(*others, *tests))
    return machine
