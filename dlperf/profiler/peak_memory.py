"""Peak resident memory of a step, measured in a fresh process.

The counterpart of ``Step.peak_memory_bytes``. The process is this module, started as ``python -m``:
it reads a job as JSON from stdin and writes bytes to stdout. It imports little but torch, so that
the memory of torch's first step counts as it does in a user's process.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dlperf.core import child_process
from dlperf.core.errors import DlperfError

if TYPE_CHECKING:
    import torch

    from dlperf.core.device_clock import DevicePeaks
    from dlperf.recorder.targets import Target

N_STEPS = 3
_STATUS = Path("/proc/self/status")


def measure_peak_memory(
    target: str,
    batch_size: int,
    threads: int = 1,
    *,
    inference: bool = False,
    input_shape: tuple[int, ...] | None = None,
) -> int:
    """Peak resident memory, in bytes, of building a target and of N_STEPS of its steps.

    The base is a process that has imported torch and the target's module, and built nothing. The
    system counts it (Linux: VmHWM, reset before building; where a reset is not allowed, it errs
    high by what importing took for a moment). A busy machine does not change it. Processes differ
    by some 1 %: random addresses change the heap.

    Raises DlperfError where the target is unusable or the system does not tell, WorkFailed where
    its step fails.
    """
    job = {
        "spec": target,
        "batch_size": batch_size,
        "threads": threads,
        "inference": inference,
        "input_shape": input_shape,
    }
    with child_process.Child("dlperf.profiler.peak_memory", threads=threads) as process:
        name = f"target {target}: the process that measures its memory"
        return int(process.answer(job, process=name))


def measure_device_memory(target: Target, device: torch.device) -> DevicePeaks:
    """Peak of what torch's allocator has for a target on a device: building it, and N_STEPS of its
    steps, in this process. Nothing else may lie on the device.
    """
    from dlperf.recorder.accelerator import device_clock

    clock = device_clock(device)
    clock.module.reset_peak_memory_stats(device)
    _build_and_step(target)
    clock.module.synchronize(device)
    return clock.peaks()


def _build_and_step(target: Target) -> None:
    import torch

    built = target.build()
    built.model.train(not target.inference)
    with torch.set_grad_enabled(not target.inference):
        for _ in range(N_STEPS):
            built.step()


def _peak_memory(
    spec: str,
    batch_size: int,
    threads: int,
    inference: bool,
    input_shape: list[int] | None,
) -> int:
    """Bytes that building and stepping a target add to this process."""
    import torch

    from dlperf.recorder.targets import resolve

    torch.set_num_threads(threads)
    target = resolve(
        spec,
        batch_size,
        inference=inference,
        input_shape=None if input_shape is None else tuple(input_shape),
    )
    if not _STATUS.exists():
        raise DlperfError(
            "memory cannot be measured here: /proc/self/status is missing (Linux has it)"
        )
    before, peak_before = _field_bytes("VmRSS"), _field_bytes("VmHWM")
    with contextlib.suppress(OSError):  # a container may not allow the reset of VmHWM
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        peak_before = _field_bytes("VmHWM")
    _build_and_step(target)
    peak = _field_bytes("VmHWM")
    return peak - before if peak > peak_before else 0


def _field_bytes(name: str) -> int:
    """A field of this process's status, in bytes."""
    with _STATUS.open(encoding="ascii", errors="replace") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(name))


if __name__ == "__main__":
    sys.exit(child_process.run(lambda: str(_peak_memory(**child_process.read_job()))))
