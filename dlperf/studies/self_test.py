"""Self-test of a machine file: steps of random networks, predicted from it and measured.

A calibration ends with it, and the check of a machine file repeats it. Nothing is fitted to it. Its
errors widen the intervals of predictions; it fails above
:data:`dlperf.core.verification.WORST_FACTOR`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from dlperf.core.errors import WorkFailed
from dlperf.core.machine import Machine
from dlperf.core.verification import SelfTest, has_failed
from dlperf.forecast.prediction import predict
from dlperf.studies.random_steps import Process, TimedStep

_POLICY = "tuned"
"""Malloc in a self-test: without page faults, whose number differs from process to process,
whatever a machine file says.
"""
_SECONDS = 0.5
_SEEDS, _SEEDS_OF_A_KIND, _N_TRIED = 2**31, 9, 4
"""A seed plus nine has the same kind of network."""


def start(threads: int) -> Process:
    """The process of a self-test with so many threads."""
    return Process(threads, _POLICY)


def time_steps(process: Process, seed: int) -> list[TimedStep]:
    """Steps of three networks of three kinds, from this seed on. Where one is skipped, another of
    its kind is timed. Raises WorkFailed where none is left.
    """
    found = []
    for first in range(seed, seed + 3):
        for another in range(_N_TRIED):
            timed = list(process.time_steps([first + another * _SEEDS_OF_A_KIND], _SECONDS))
            found += timed
            if timed:
                break
    if not found:
        raise WorkFailed("every network of the self-test was skipped")
    return found


def compare(machine: Machine, timed: Sequence[TimedStep], threads: int) -> tuple[SelfTest, ...]:
    """The steps that were timed beside what the machine file, without any self-test of its own,
    predicts of them.
    """
    plain = replace(machine, self_tests=())
    tests = []
    for one in timed:
        assert one.measurement.trace is not None
        step = predict(one.measurement.trace, plain, threads, malloc=_POLICY).step
        assert step.total_s is not None
        assert step.low_s is not None
        assert step.high_s is not None
        tests.append(
            SelfTest(
                one.kind,
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
        seed = random.SystemRandom().randrange(_SEEDS)
        tests = compare(machine, time_steps(process, seed), process.threads)
        if has_failed(tests):
            with start(process.threads) as another:
                tests = compare(machine, time_steps(another, seed), process.threads)
        others = tuple(test for test in machine.self_tests if test.threads != process.threads)
        machine = replace(machine, self_tests=(*others, *tests))
    return machine
