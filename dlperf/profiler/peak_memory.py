"""The most memory that a step takes, measured: in a fresh process, whose memory nothing else has
touched. The counterpart of ``Step.peak_memory_bytes``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

from dlperf.core import child_process

N_STEPS = 3


def measure_peak_memory(
    target: str,
    batch_size: int,
    threads: int = 1,
    *,
    inference: bool = False,
    input_shape: tuple[int, ...] | None = None,
    environment: Mapping[str, str] | None = None,
) -> int:
    """The most resident memory, in bytes, that building a target and N_STEPS of its steps add to a
    fresh process that has imported torch (and the target's module), and built nothing yet.

    The system counts it (VmHWM of Linux, set back before building; where that is not allowed,
    ru_maxrss, which errs high by what importing took for a moment). A busy machine does not change
    it; processes differ by what the system's random addresses make of the heap, some 1 %.
    `environment` is the process's own; this one's where none is given.

    Raises DlperfError where the target is unusable or the system does not tell, WorkFailed where
    its step fails.
    """
    order = {
        "spec": target,
        "batch_size": batch_size,
        "threads": threads,
        "inference": inference,
        "input": list(input_shape) if input_shape else None,
    }
    done = subprocess.run(
        [sys.executable, "-m", "dlperf.profiler.peak_memory_process"],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        errors="replace",
        env={
            **(os.environ if environment is None else environment),
            "OMP_NUM_THREADS": str(threads),
        },
    )
    if done.returncode:
        raise child_process.failure(
            done.returncode, done.stderr, f"target {target}: the process that measures its memory"
        )
    return int(done.stdout)
