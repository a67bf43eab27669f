"""The thread count of predictions and measurements that nobody gave one."""

from __future__ import annotations

import math
import mmap
import os
import re
import sys
from pathlib import Path

from dlperf.core.host import available_cores
from dlperf.core.machine import Machine

_THREADS = re.compile(rb'"threads":\s*(\d{1,4})\b')


def torch_threads() -> int:
    """torch's own thread count: that of this process, or what a process that imports it gets."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.get_num_threads())
    wished = os.environ.get("OMP_NUM_THREADS", "")
    return int(wished) if wished.isdigit() and int(wished) else available_cores()


def usual_threads(machine: Machine) -> int:
    """torch's own thread count where the machine file holds it, else the nearest that it holds."""
    own = torch_threads()
    return machine.nearest_threads(own) if machine.threads else own


def usual_threads_of_file(path: Path) -> int:
    """The same for a machine file by its path; torch's own thread count where there is none.

    The file is searched and not read: a large file's text on the heap raises the size from which
    malloc asks the system for memory, and so the times of the step that is measured next.
    """
    own = torch_threads()
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            start = max(0, text.rfind(b'"kernels"'))
            held = {int(found) for found in _THREADS.findall(text, start)} - {0}
    except (OSError, ValueError):  # no file, or an empty one
        return own
    return min(held, key=lambda count: (abs(math.log(count / own)), count), default=own)
