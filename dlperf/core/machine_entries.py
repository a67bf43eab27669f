"""What a machine file holds of the machine: its processor, timed operators, memory sweeps, and the
memory that torch takes.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from dlperf.core.clock import Samples, samples_to_json
from dlperf.core.conversion import refuse
from dlperf.core.costs import KINDS, Cost, CostKey
from dlperf.core.errors import DlperfError
from dlperf.core.operators import Op
from dlperf.core.records.machine import CostRecord


@dataclass(frozen=True)
class Cpu:
    """What the machine is. Sizes in bytes; `caches_bytes` are per core (L1, L2) and per socket
    (L3), 0 where unknown.

    `n_cores` are those that the system shows; where several of them are hardware threads of one
    core, there are only `n_physical_cores` (0 where unknown).
    """

    model: str
    n_cores: int
    caches_bytes: tuple[int, int, int] = (0, 0, 0)
    memory_bytes: int = 0
    flags: tuple[str, ...] = ()
    family: str = ""
    n_physical_cores: int = 0

    @property
    def threads_per_core(self) -> int:
        """Hardware threads that share a core; 1 where the number of cores is unknown."""
        return -(-self.n_cores // self.n_physical_cores) if self.n_physical_cores else 1

    @property
    def identity(self) -> tuple[str, str, int]:
        """What makes two machines the same one for a machine file."""
        return self.model, self.family, self.n_cores


@dataclass(frozen=True)
class Kernel:
    """One aten op timed at one shape: seconds a call, called as a user's Python calls it, caches
    warm.

    While a calibration goes on, `readings` are the numbers of the machine's readings before its
    last samples; `slowdown` is that of the others: of the least sample over the reference state.
    `shared_core` is how many times longer a call takes while a co-tenant has the same core, 0 where
    none had. `core_to_core` is by which part it takes longer while a short parallel region takes
    twice as long (:attr:`dlperf.core.state.State.core_to_core`), None where that was not seen.
    """

    op: Op
    family: str
    threads: int
    samples: Samples
    readings: tuple[int, ...] = ()
    slowdown: float = 1.0
    shared_core: float = 0.0
    core_to_core: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds of a call on a core of one's own, in the reference state: the least sample,
        normalised.
        """
        return self.samples.minimum / self.slowdown


@dataclass(frozen=True)
class Bandwidth:
    """A memory kernel at one working set.

    `kernel` is ``copy``, ``scale``, ``add``, or ``triad``; samples in seconds a sweep that moves
    `moved_bytes`. `readings` are those around it while a calibration goes on, `slowdown` is that of
    its samples over the reference state.
    """

    kernel: str
    threads: int
    working_set_bytes: int
    moved_bytes: int
    samples: Samples
    readings: tuple[int, ...] = ()
    slowdown: float = 1.0

    @property
    def best_bytes_per_s(self) -> float:
        """The highest rate seen (STREAM reports the best run), in the reference state."""
        return self.slowdown * self.moved_bytes / self.samples.minimum

    @property
    def median_bytes_per_s(self) -> float:
        """The usual rate, in the reference state."""
        return self.slowdown * self.moved_bytes / self.samples.median


@dataclass(frozen=True)
class Footprint:
    """Memory that torch itself takes when it first does something: `name` is ``forward``,
    ``training``, ``convolution``, or ``operator`` (each further one).
    """

    name: str
    n_bytes: int


def bandwidth_to_json(bandwidth: Bandwidth) -> dict[str, Any]:
    """A memory kernel as JSON data."""
    return {
        "kernel": bandwidth.kernel,
        "threads": bandwidth.threads,
        "working_set_bytes": bandwidth.working_set_bytes,
        "moved_bytes": bandwidth.moved_bytes,
        **samples_to_json(bandwidth.samples),
        **state_to_json(bandwidth),
    }


def state_to_json(entry: Kernel | Bandwidth | Cost) -> dict[str, Any]:
    """The readings at an entry's samples, and its slowdown over the reference, where it has any."""
    readings = {"readings": list(entry.readings)} if entry.readings else {}
    return readings | ({"slowdown": entry.slowdown} if entry.slowdown != 1.0 else {})


def cost_to_json(cost: Cost) -> dict[str, Any]:
    """A cost as JSON data."""
    kind = KINDS[cost.key.kind]
    return {
        **{name: value for name, value in cost.key._asdict().items() if value},
        "threads": cost.threads,
        "unit": kind.unit,
        "statistic": kind.statistic,
        "samples": [float(f"{value:.6g}") for value in cost.samples.values],
        "disturbed": cost.samples.n_disturbed,
        **state_to_json(cost),
    }


def cost_from_record(row: CostRecord, entry: str) -> Cost:
    """The cost that :func:`cost_to_json` wrote as `entry` of a file. Raises DlperfError for an
    unknown kind, or what does not fit it.
    """
    kind = KINDS.get(row.kind)
    if kind is None:
        near = difflib.get_close_matches(row.kind, KINDS, 3, cutoff=0.3) or list(KINDS)[:3]
        refuse(f"{entry}.kind", row.kind, f"a kind of cost, such as {', '.join(near)}")
    for name, value, expected, former in (
        ("unit", row.unit, kind.unit, kind.unit),
        ("statistic", row.statistic, kind.statistic, kind.former),
    ):
        if value not in (expected, former):
            refuse(f"{entry}.{name}", value, f"{expected!r} for {row.kind}")
    if bool(row.at) != bool(kind.at):
        refuse(f"{entry}.at", row.at, f"a positive number of {kind.at}" if kind.at else "nothing")
    samples = Samples(tuple(row.samples), row.disturbed)
    key = CostKey(row.kind, row.of, row.at, row.variant)
    return Cost(key, row.threads, samples, row.readings, row.slowdown)


def check_unique(kernels: Iterable[Kernel], costs: Iterable[Cost]) -> None:
    """Raise DlperfError for two entries of a file that are of the same. In the messages of a
    calibration they may be; the last one counts.
    """
    keys: dict[str, list[Hashable]] = {
        "kernels": [(one.op.signature, one.threads) for one in kernels],
        "costs": [(one.key, one.threads) for one in costs],
    }
    for name, own in keys.items():
        first: dict[Hashable, int] = {}
        for number, key in enumerate(own):
            if first.setdefault(key, number) != number:
                raise DlperfError(f"{name}[{number}] is of the same as {name}[{first[key]}]")
