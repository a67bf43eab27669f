"""The process in which a step's memory is counted: reads an order as JSON from stdin, writes bytes
to stdout.

Started by :func:`dlperf.profiler.peak_memory.measure_peak_memory` as ``python -m
dlperf.profiler.peak_memory_process``. It imports next to nothing beside torch, so that what torch
itself takes at its first step is counted as it is in a user's process.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from dlperf.core import child_process
from dlperf.core.errors import DlperfError
from dlperf.profiler.peak_memory import N_STEPS
from dlperf.recorder.targets import resolve

_STATUS = Path("/proc/self/status")


class Growth:
    """How much resident memory a process has gained at most since this was made."""

    def __init__(self) -> None:
        if not _STATUS.exists():
            raise DlperfError(
                "memory cannot be measured here: /proc/self/status is missing (Linux has it)"
            )
        self._before = _field_bytes("VmRSS")
        self._most_before = _field_bytes("VmHWM")
        with contextlib.suppress(
            OSError
        ):  # a container may not allow it: then what importing took for a moment is counted as well
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            self._most_before = _field_bytes("VmHWM")

    @property
    def n_bytes(self) -> int:
        """The most so far, in bytes; 0 where what came before was more."""
        most = _field_bytes("VmHWM")
        return most - self._before if most > self._most_before else 0


def _field_bytes(name: str) -> int:
    with _STATUS.open(encoding="ascii", errors="replace") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(name))


def measure_order(order: dict[str, Any]) -> int:
    """Bytes that building and stepping the ordered target added. Raises WorkFailed or DlperfError
    as building does, and what a step raises.
    """
    torch.set_num_threads(order["threads"])
    inference = order["inference"]
    target = resolve(
        order["spec"],
        order["batch_size"],
        inference=inference,
        input_shape=tuple(order["input"]) if order["input"] else None,
    )
    growth = Growth()
    built = target.build()
    built.model.train(not inference)
    with torch.set_grad_enabled(not inference):
        for _ in range(N_STEPS):
            built.step()
    return growth.n_bytes


if __name__ == "__main__":
    sys.exit(child_process.run(lambda: str(measure_order(json.load(sys.stdin)))))
