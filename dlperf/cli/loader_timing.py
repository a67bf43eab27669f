"""Samples a user's loader in a process of its own: whatever it does to that process, ending it
included, is one line here.

``python -m dlperf.cli.loader_timing`` reads ``{"spec", "batch_size", "loader_workers", "threads",
"best_s"}`` from stdin and writes to stdout what it found, or why it could not. :func:`sample_apart`
starts it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import tempfile
from dataclasses import asdict
from typing import Any

from dlperf.core.child_process import INTERRUPTED, Child
from dlperf.core.costs import CORE_SPEED
from dlperf.core.errors import DlperfError, WorkFailed
from dlperf.core.loader_sample import SampledLoader
from dlperf.core.machine import Machine
from dlperf.microbench.job import Say, do_job

_BACK_OFF_S = 3.0
"""How long the sampling may wait, in all, for a core that others slow down."""


def sample_apart(
    spec: str, batch_size: int, loader_workers: int, threads: int, machine: Machine
) -> SampledLoader:
    """The loader that ``FILE.py:CALLABLE`` makes, sampled by a fresh process with `threads`, at the
    speed that the core of `machine` has at best.

    Raises DlperfError where it cannot be called or returns no loader, WorkFailed where it or its
    data raise, or end the process.
    """
    best_s = machine.cost_value(CORE_SPEED, threads, math.inf)
    job = {
        "spec": spec,
        "batch_size": batch_size,
        "loader_workers": loader_workers,
        "threads": threads,
        "best_s": best_s if math.isfinite(best_s) else None,
    }
    # a file without a name: at a pipe one would wait for whatever the loader leaves running
    with tempfile.TemporaryFile() as out:
        with Child("dlperf.cli.loader_timing", threads=threads, stdout=out, stderr=None) as process:
            process.communicate(json.dumps(job))
        if process.returncode == INTERRUPTED:
            raise KeyboardInterrupt
        try:
            out.seek(0)
            found = json.loads(out.read())
        except (OSError, ValueError):
            raise WorkFailed(
                f"loader {spec}: {_ended(process.returncode)} while it was sampled; nothing in it"
                " may end the process"
            ) from None
    if "error" in found:
        raise (WorkFailed if found["failed"] else DlperfError)(found["error"])
    return SampledLoader(
        **{**found, "tensor_bytes": tuple(found["tensor_bytes"]), "notes": tuple(found["notes"])}
    )


def _ended(status: int) -> str:
    """How a process ended that did not answer."""
    if status >= 0:
        return f"ended its process (status {status})"
    name = str(-status)
    with contextlib.suppress(ValueError):
        name = signal.Signals(-status).name
    return f"its process was ended by {name}"


def sample(job: dict[str, Any], say: Say) -> None:
    """Sample the loader of a job; `say` gets what was found, or why it could not be."""
    import torch

    from dlperf.core.clock import CoreSpeed
    from dlperf.profiler.loader_sampling import load

    torch.set_num_threads(job["threads"])
    speed = CoreSpeed(best_s=job["best_s"] or math.inf, back_off_s=_BACK_OFF_S)
    try:
        found = load(job["spec"], job["batch_size"], job["loader_workers"], speed.clock())
        say(asdict(found))
    except DlperfError as error:
        say({"error": str(error), "failed": isinstance(error, WorkFailed)})


if __name__ == "__main__":
    status = do_job(sample)
    sys.stderr.flush()
    os._exit(status)  # a loader's threads and workers have nothing left to say
