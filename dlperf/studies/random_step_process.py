"""The process that times steps of random networks. Started as ``python -m
dlperf.studies.random_step_process``; it reads jobs as JSON lines from stdin and writes a JSON line
for each network to stdout.

It imports torch once and runs no kernel. It forks a child for each network, so that each finds a
fresh allocator and no thread pool.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TextIO

import torch

# Recording imports these at its first use, which would be in every child.
import torch._dynamo.utils
import torch._refs
import torch._subclasses.fake_tensor

from dlperf.core import child_process, host
from dlperf.core.clock import Samples
from dlperf.core.measurement import Measurement
from dlperf.core.state_probe import StateProbe
from dlperf.profiler.step_profiler import measure
from dlperf.recorder.recording import record
from dlperf.recorder.targets import Built
from dlperf.studies.random_networks import draw, kind_of

LONGEST_STEP_S = 0.08
"""Networks whose steps take longer are skipped."""
_N_TRIED = 3
_N_ROUNDS = 16
"""Rounds of a reading: a self-test takes some forty."""

Job = dict[str, Any]
Answer = dict[str, Any]


def is_too_long(built: Built, now: Callable[[], float] = time.perf_counter) -> bool:
    """Whether the shortest of a network's first steps takes longer than :data:`LONGEST_STEP_S`."""
    shortest_s = float("inf")
    for _ in range(_N_TRIED):
        begin = now()
        built.step()
        shortest_s = min(shortest_s, now() - begin)
    return shortest_s > LONGEST_STEP_S


def time_network(seed: int, job: Job) -> Answer | None:
    """The measurement of a seed's network, with its trace and with readings of the machine's state
    before and after it, or, where the job asks for `times_only`, with neither; None where its step
    takes too long.

    It is recorded last, since recording takes memory and time of its own.
    """
    torch.set_num_threads(job["threads"])
    built = draw(seed)
    if is_too_long(built):
        return None
    probe = None if job["times_only"] else StateProbe(host.this_cpu())
    before = () if probe is None else (probe.read(_N_ROUNDS),)
    kind = kind_of(seed)
    measured = measure(
        built.model,
        built.inputs,
        loss=built.loss,
        optimizer=built.optimizer,
        seconds=job["seconds"],
        target=kind,
        with_layers=False,
        with_trace=False,
        threads=job["threads"],
    )
    if probe is not None:
        states = (*before, probe.read(_N_ROUNDS))
        trace = record(
            built.model,
            built.inputs,
            loss=built.loss,
            optimizer=built.optimizer,
            target=kind,
            batch_size=measured.batch_size,
        )
        measured = replace(measured, trace=trace, states=states)
    return {"seed": seed, "measurement": medians_of(measured).to_json()}


def medians_of(measured: Measurement) -> Measurement:
    """The measurement of a whole step with the median alone of all samples."""
    step = {
        name: Samples((samples.median,), samples.n_disturbed)
        for name, samples in measured.step.items()
    }
    return replace(measured, step=step)


# -- a child for each network ----------------------------------------------------------------------


def answer_of_child(work: Callable[[], Answer | None]) -> str:
    """The JSON of the work's answer, done in a child that is forked for it.

    "null" where the child fails or crashes; what it says goes to stderr. Raises KeyboardInterrupt
    where it was interrupted. The child ends before this returns or raises.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _end_with(work, writer)
    os.close(writer)
    status = None
    try:
        with open(reader, encoding="utf-8") as answers:
            answer = answers.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        if status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if status == child_process.INTERRUPTED:
        raise KeyboardInterrupt
    return answer.strip() if status == 0 and answer else "null"


def _end_with(work: Callable[[], Answer | None], writer: int) -> None:
    """Do the work of a child, write its answer, and end this process."""
    status = child_process.FAILED
    try:
        child_process.end_with_parent()
        with open(writer, "w", encoding="utf-8") as out:
            status = child_process.run(lambda: json.dumps(work()), out)
    except KeyboardInterrupt:
        status = child_process.INTERRUPTED
    finally:
        os._exit(status)


def serve(
    jobs: TextIO,
    out: TextIO,
    time_it: Callable[[int, Job], Answer | None] = time_network,
) -> str:
    """Answer each seed of each job in a line of its own; the empty string after the last job."""
    for line in jobs:
        job: Job = json.loads(line)
        for seed in job["seeds"]:
            answer = answer_of_child(lambda seed=seed, job=job: time_it(seed, job))  # type: ignore[misc]
            print(answer, file=out, flush=True)
    return ""


if __name__ == "__main__":
    gc.freeze()  # collections in children leave what was imported alone
    answers = sys.stdout
    sys.exit(child_process.run(lambda: serve(sys.stdin, answers)))
