"""Self-test of a machine file: steps of random networks, predicted from it and measured.

A calibration ends with it, always of the same networks; the check of a machine file times others.
All that is fitted to them are one factor on steps' kernels
(:func:`dlperf.core.verification.kernel_factor`), one on intervals
(:func:`dlperf.core.verification.interval_factor`), and one on the cost of pages
(:func:`dlperf.core.verification.page_factor`), for which a calibration times the networks with
a malloc that gives back all it can, too. A file fails by
:func:`dlperf.core.verification.why_failed`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from dlperf.core.errors import WorkFailed
from dlperf.core.items import NO_KERNEL
from dlperf.core.machine import Machine
from dlperf.core.streams import log
from dlperf.core.text import counted
from dlperf.core.verification import FIRST_CHECK_SEED, PageTest, SelfTest
from dlperf.forecast.prediction import predict
from dlperf.studies.random_steps import Process, TimedStep

_POLICY = "tuned"
"""Malloc in a self-test: without page faults, whose number differs from process to process,
whatever a machine file says.
"""
_TRIMMING = "MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=131072 MALLOC_TOP_PAD_=0"
"""glibc's malloc as it takes and gives back most pages, in a way that no history decides."""
_N_NETWORKS = {"quick": 3, "full": 19, "thorough": 39}
"""Networks of a calibration. 19 and 39 are the least numbers of which one and three lie above the
conformal bound (:func:`dlperf.core.verification.conformal_bound`).
"""
_N_CHECKED, _SECONDS = 3, 0.3
_FAR_FRAC = 0.2
"""Error of a step above which it is timed again. Bursts of co-tenants, of seconds, made steps 1.2
to 1.8 times as long on an AMD EPYC of Zen 4.
"""
_SEEDS_OF_A_KIND, _N_TRIED = 9, 4
"""A seed plus nine has the same kind of network."""


def seeds_of_calibration(mode: str) -> range:
    """The seeds of a calibration's networks: always the same."""
    return range(_N_NETWORKS[mode])


def seeds_of_check() -> range:
    """The seeds of a check's networks: each time others."""
    first = FIRST_CHECK_SEED + random.SystemRandom().randrange(FIRST_CHECK_SEED)
    return range(first, first + _N_CHECKED)


def times_pages(mode: str) -> bool:
    """Whether a calibration times its networks with page faults, too: not a quick one, whose few
    would hardly move what is assumed of pages beforehand.
    """
    return mode != "quick"


def start(threads: int) -> Process:
    """The process of a self-test with so many threads."""
    return Process(threads, _POLICY)


def start_trimming(threads: int) -> Process:
    """The process of the same steps with page faults, with so many threads."""
    return Process(threads, settings=_TRIMMING, times_only=True)


def time_steps(
    process: Process, seeds: range, trimming: Process | None = None
) -> tuple[list[TimedStep], list[PageTest]]:
    """Steps of the networks of these seeds, each timed in the other process right after, if there
    is one. Where one is skipped, another of its kind is timed, of a seed beyond.

    Raises WorkFailed where none is left.
    """
    found, pages = [], []
    beyond = math.ceil(len(seeds) / _SEEDS_OF_A_KIND) * _SEEDS_OF_A_KIND
    for seed in seeds:
        for another in range(_N_TRIED):
            timed = list(process.time_steps([seed + another * beyond], _SECONDS))
            if trimming is not None:
                again = trimming.time_steps([one.seed for one in timed], _SECONDS)
                pages += [_page_test(*pair) for pair in zip(timed, again)]
            found += timed
            if timed:
                break
    if not found:
        raise WorkFailed("every network of the self-test was skipped")
    return found, pages


def _page_test(tuned: TimedStep, trimmed: TimedStep) -> PageTest:
    n_tuned, n_trimmed = (one.measurement.noise["page_faults_per_step"] for one in (tuned, trimmed))
    return PageTest(
        tuned.measurement.target,
        tuned.measurement.threads,
        tuned.seed,
        trimmed.measured_s,
        tuned.measured_s,
        max(0.0, n_trimmed - n_tuned),
    )


def compare(machine: Machine, timed: Sequence[TimedStep], threads: int) -> tuple[SelfTest, ...]:
    """The steps that were timed beside what the machine file, without any self-test of its own,
    predicts of them at the state of their measurement.
    """
    plain = replace(machine, self_tests=())
    tests = []
    for one in timed:
        assert one.measurement.trace is not None
        states = one.measurement.states_over(machine.reference)
        prediction = predict(one.measurement.trace, plain, threads, malloc=_POLICY, state=states)
        step, items = prediction.step, prediction.prices.items
        assert step.total_s is not None
        assert step.low_s is not None
        assert step.high_s is not None
        tests.append(
            SelfTest(
                one.measurement.target,
                threads,
                one.seed,
                step.total_s,
                step.low_s,
                step.high_s,
                one.measured_s,
                math.fsum(item.seconds for item in items if item.bound in NO_KERNEL),
            )
        )
    return tuple(tests)


def run(
    machine: Machine,
    processes: Sequence[Process],
    seeds: range,
    trimming: Sequence[Process] = (),
) -> Machine:
    """The machine with a self-test of these seeds' networks in each of the processes, for its
    thread count. It replaces the former one of the calibration, or of a check, whose seeds these
    are. The processes of `trimming` time the steps with page faults, too.

    A step that is far off is timed once more, in case the machine was busy for a moment; what it
    takes then counts, whatever that is.
    """
    for process in processes:
        threads = process.threads
        log(
            f"self-test: steps of {counted(len(seeds), 'random network')} with"
            f" {counted(threads, 'thread')}"
        )
        other = next((other for other in trimming if other.threads == threads), None)
        timed, pages = time_steps(process, seeds, other)
        if pages:
            others = (test for test in machine.page_tests if test.threads != threads)
            machine = replace(machine, page_tests=(*others, *pages))
        tests = compare(machine, timed, threads)
        far = [test.seed for test in tests if abs(test.error_frac) > _FAR_FRAC]
        if far:
            again = list(process.time_steps(far, _SECONDS))
            anew = {test.seed: test for test in compare(machine, again, threads)}
            tests = tuple(anew.get(test.seed, test) for test in tests)
        kept = tuple(
            test
            for test in machine.self_tests
            if (test.threads, test.is_check) != (threads, tests[0].is_check)
        )
        machine = replace(machine, self_tests=(*kept, *tests))
    return machine
