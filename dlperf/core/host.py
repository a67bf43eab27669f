"""This computer: processor, caches, memory, versions, thread count. Nothing here imports torch."""

from __future__ import annotations

import math
import mmap
import os
import platform
import re
import sys
import time
from importlib import metadata
from pathlib import Path

from dlperf.core.errors import DlperfError
from dlperf.core.machine import Cpu, Machine
from dlperf.core.text import counted
from dlperf.core.units import KIB, MIB
from dlperf.core.version import VERSION

_FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
    "bf16",
)


def this_cpu() -> Cpu:
    """The processor that this process may run on; unknown sizes are 0."""
    fields = _cpuinfo()
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    family = "/".join(
        fields[key] for key in ("vendor_id", "cpu family", "model", "stepping") if key in fields
    )
    return Cpu(
        model=fields.get("model name") or platform.processor() or platform.machine(),
        n_cores=available_cores(),
        caches_bytes=_caches(),
        memory_bytes=_memory_bytes(),
        flags=tuple(flag for flag in _FLAGS if flag in flags),
        family=family or platform.machine(),
        n_physical_cores=_physical_cores(),
    )


def available_cores() -> int:
    """Cores that this process may use (its affinity mask; a container's quota is not looked at)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


THREADS_A_CORE = 4
"""Threads of a team at most: more a core wait for each other for minutes, and their times are no
evidence; OpenMP crashes where it cannot make as many.
"""


def check_threads(threads: int, way_out: str = "") -> None:
    """Raise DlperfError for more threads than this process' cores can serve."""
    n_cores = available_cores()
    if threads > THREADS_A_CORE * n_cores:
        raise DlperfError(
            f"threads is {threads}, of {counted(n_cores, 'core')}; give at most"
            f" {THREADS_A_CORE * n_cores}{way_out}"
        )


def versions() -> dict[str, str]:
    """Versions of dlperf, Python, torch, numpy and the system, without importing torch."""
    found = {
        "dlperf": VERSION,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    for name in ("torch", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpuinfo() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    first = text.split("\n\n", 1)[0]
    return {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in first.splitlines())
        if value
    }


_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def _physical_cores() -> int:
    """Cores among those that this process may use, hardware threads of one core counted once; 0
    where the system does not tell.
    """
    if not hasattr(os, "sched_getaffinity"):
        return 0
    siblings = set()
    for number in os.sched_getaffinity(0):
        try:
            siblings.add(Path(_SIBLINGS.format(number)).read_text().strip())
        except OSError:
            return 0
    return len(siblings)


def _caches() -> tuple[int, int, int]:
    sizes = {1: 0, 2: 0, 3: 0}
    for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level, kind, size = (
                int((folder / "level").read_text()),
                (folder / "type").read_text().strip(),
                (folder / "size").read_text().strip(),
            )
        except (OSError, ValueError):
            continue
        match = re.fullmatch(r"(\d+)([KM]?)", size)
        if kind != "Instruction" and match and level in sizes:
            sizes[level] = int(match.group(1)) * {"": 1, "K": KIB, "M": MIB}[match.group(2)]
    return sizes[1], sizes[2], sizes[3]


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


# -- the thread count where none is given ---------------------------------------------------------

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


def running_processes() -> int:
    """Runnable processes now, this one included; 1 where the system does not tell. The least of a
    few readings counts.
    """
    counts = []
    for _ in range(3):
        try:
            counts.append(int(Path("/proc/loadavg").read_text().split()[3].split("/")[0]))
        except (OSError, ValueError, IndexError):
            return 1
        time.sleep(0.05)
    return max(1, min(counts))
