"""Times single ops with the calibration's own sampler, in a process of its own whose settings stand
before torch is imported.

``python -m dlperf.cli.op_timing`` reads ``{"ops": TRACE, "threads": T}`` from stdin, writes to
stdout in JSON lines how many more ops are done, and at last a machine with their kernels, in its
notes what could not be called. :func:`time_ops_apart` starts it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from dlperf.core.child_process import Child, failure
from dlperf.core.errors import WorkFailed
from dlperf.core.machine import Kernel, Machine
from dlperf.core.trace import Op, Trace
from dlperf.microbench.job import Say, do_job


def time_ops_apart(
    ops: Sequence[Op], threads: int, progress: Callable[[int], None]
) -> tuple[tuple[Kernel, ...], tuple[str, ...]]:
    """The ops' kernels as a fresh process measures them, and what it could not call. `progress`
    gets how many more are done.

    Raises WorkFailed where the process ends early.
    """
    from dlperf.microbench.worker import environment

    trace = Trace("held-out ops", 1, (), tuple(ops))
    variables = {**os.environ, **environment(threads)}
    machine = None
    with Child("dlperf.cli.op_timing", environment=variables, stderr=None) as process:
        process.write(json.dumps({"ops": trace.to_json(), "threads": threads}))
        assert process.stdout is not None
        for line in process.stdout:
            message = json.loads(line) if line.endswith("\n") else {}
            progress(message.get("progress", 0))
            machine = message.get("machine")
        status = process.wait()
    if status or machine is None:
        raise failure(status, "", "the process that times single ops", unusable=WorkFailed)
    found = Machine.from_json(machine)
    return found.kernels, found.notes


def time_ops(job: dict[str, Any], say: Say) -> None:
    """Time the ops of a job."""
    import torch

    from dlperf.core import host
    from dlperf.microbench.plan import Group, Point, repeats
    from dlperf.microbench.timing import time_group
    from dlperf.microbench.worker import settled_core_speed

    threads = job["threads"]
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    ops = Trace.from_json(job["ops"]).ops
    group = Group("held-out ops", tuple(Point("held-out", op) for op in ops), repeats("full"))
    clock = settled_core_speed("full").clock()
    timed = time_group(group, threads, lambda n_points: say({"progress": n_points}), clock)
    machine = Machine(
        host.this_cpu(),
        kernels=tuple(timed.kernels),
        notes=tuple(timed.refused),
        versions=host.versions(),
    )
    say({"machine": machine.to_json()})


if __name__ == "__main__":
    sys.exit(do_job(time_ops))
