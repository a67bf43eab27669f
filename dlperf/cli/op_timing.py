"""Times single ops with the calibration's own sampler, in a process of its own whose settings stand
before torch is imported.

``python -m dlperf.cli.op_timing`` reads ``{"ops": TRACE, "threads": T}`` from stdin, writes to
stdout how many ops are done, a line each time, and in the last line a machine with their kernels,
in its notes what could not be called. :func:`time_ops_apart` starts it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence

from dlperf.core.child_process import Child, end_with_parent, failure, read_job
from dlperf.core.errors import WorkFailed
from dlperf.core.machine import Kernel, Machine
from dlperf.core.trace import Op, Trace


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
    answer = ""
    with Child("dlperf.cli.op_timing", environment=variables, stderr=None) as process:
        process.write(json.dumps({"ops": trace.to_json(), "threads": threads}))
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                answer = line
            else:
                progress(int(line))
        status = process.wait()
    if status or not answer.endswith("\n"):
        raise failure(status, "", "the process that times single ops", unusable=WorkFailed)
    machine = Machine.from_json(json.loads(answer))
    return machine.kernels, machine.notes


def main() -> int:
    """Time the ops of the job on stdin."""
    end_with_parent()
    job = read_job()
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints goes to stderr, not between our lines
    import torch

    from dlperf.core import host
    from dlperf.microbench.plan import Group, Point, repeats
    from dlperf.microbench.timing import time_group
    from dlperf.microbench.worker import settled_core_speed

    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)

    def progress(n_points: int) -> None:
        lines.write(f"{n_points}\n")
        lines.flush()

    group = Group(
        "held-out ops",
        tuple(Point("held-out", op) for op in Trace.from_json(job["ops"]).ops),
        repeats("full"),
    )
    try:
        timed = time_group(group, job["threads"], progress, settled_core_speed("full").clock())
    except KeyboardInterrupt:
        return 130
    machine = Machine(
        host.this_cpu(),
        kernels=tuple(timed.kernels),
        notes=tuple(timed.refused),
        versions=host.versions(),
    )
    lines.write(json.dumps(machine.to_json()) + "\n")
    lines.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
