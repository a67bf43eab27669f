"""State of a machine: how many times their reference times its parts take at the moment.

The core clock of a shared machine steps, co-tenants slow its memory, and its host moves virtual
cores nearer together or farther apart, each by itself. A *reading* is six short probes, and of a
team of threads a seventh; a *state* is a reading over the machine file's reference.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from dlperf.core.clock import quantile
from dlperf.core.conversion import PositiveSeconds, Text, Threads
from dlperf.core.units import format_seconds

SCHEMA, SCHEMA_VERSION = "dlperf.state", 4


@dataclass(frozen=True)
class Reading:
    """Six probes of a machine, in seconds: long products, short calls of much code, products
    within a core's own caches, copies within the shared cache and in DRAM, and first touches of
    pages; where a team of threads was there, a parallel region of little work.

    `created` is the time of the reading, ISO 8601. A reading has at most one number of threads, a
    file's reference each that was calibrated.
    """

    core_s: PositiveSeconds  #: Long matrix products.
    interpreter_s: PositiveSeconds  #: Short calls of much code.
    private_cache_s: PositiveSeconds  #: Matrix products within a core's own caches.
    shared_cache_s: PositiveSeconds  #: Copy within the shared cache.
    dram_s: PositiveSeconds  #: Copy in DRAM.
    page_fault_s: PositiveSeconds  #: First touches of pages.
    created: Text = ""  #: Time, ISO 8601.
    #: Short parallel regions, by number of threads.
    parallel_region_s: dict[Threads, PositiveSeconds] = field(default_factory=dict)

    @property
    def seconds(self) -> tuple[float, ...]:
        """The probes' times, in the order of :class:`State`'s factors."""
        return (
            self.core_s,
            self.interpreter_s,
            self.private_cache_s,
            self.shared_cache_s,
            self.dram_s,
            self.page_fault_s,
        )

    def describe(self) -> str:
        """The probes' times in words.

        >>> Reading(2e-3, 1e-4, 1e-4, 1e-4, 1e-2, 1e-4).describe()
        'core 2.00 ms, interpreter 100 us, own caches 100 us, shared cache 100 us, DRAM 10.0 ms,
        page faults 100 us'
        """
        seconds = (*self.seconds, *self.parallel_region_s.values())
        return ", ".join(f"{name} {format_seconds(value)}" for name, value in zip(_NAMES, seconds))

    def over(self, reference: Reading) -> State:
        """The state of this reading.

        >>> Reading(2.0, 1.0, 1.0, 1.0, 3.0, 1.0).over(Reading(1.0, 1.0, 1.0, 1.0, 1.0, 1.0)).dram
        3.0
        """
        factors = (now / then for now, then in zip(self.seconds, reference.seconds))
        between = [
            min(region_s / reference.parallel_region_s[threads], _FARTHEST)
            for threads, region_s in self.parallel_region_s.items()
            if threads in reference.parallel_region_s
        ]
        return State(*factors, *between[:1])


def reading_of(readings: Sequence[Reading], fraction: float = 0.5) -> Reading:
    """Quantile of readings, probe by probe, at the time of the last one; by default the median."""
    columns = zip(*(one.seconds for one in readings))
    core, interpreter, private, shared, dram, page = (quantile(one, fraction) for one in columns)
    regions_s = {
        threads: quantile(
            [
                one.parallel_region_s[threads]
                for one in readings
                if threads in one.parallel_region_s
            ],
            fraction,
        )
        for threads in dict.fromkeys(
            itertools.chain.from_iterable(one.parallel_region_s for one in readings)
        )
    }
    return Reading(core, interpreter, private, shared, dram, page, readings[-1].created, regions_s)


@dataclass(frozen=True)
class State:
    """Slowdown factors of a machine's parts, relative to its reference state (1).

    What bounds a piece of work selects its factor (:meth:`factor`). `core_to_core` is that of a
    short parallel region, which waits for what cores hand to each other; a kernel of several
    threads moves with it by its response (:attr:`dlperf.core.items.Item.response_between`).
    """

    core: float = 1.0
    interpreter: float = 1.0
    private_cache: float = 1.0
    shared_cache: float = 1.0
    dram: float = 1.0
    page_fault: float = 1.0
    core_to_core: float = 1.0

    def factor(self, bound: str) -> float:
        """Slowdown of work that something bounds (:data:`dlperf.core.prediction.BOUNDS`).

        >>> State(core=1.13, dram=1.5).factor("DRAM"), State(core=1.13).factor("network")
        (1.5, 1.0)
        """
        part = PARTS.get(bound)
        return 1.0 if part is None else float(getattr(self, part))

    @property
    def sharing(self) -> float:
        """By which part short work within a core's own caches takes longer: the mean of both
        probes. A co-tenant on the same core slows it, and other work by its response.

        >>> round(State(interpreter=1.6, private_cache=1.4).sharing, 6)
        0.5
        """
        return statistics.fmean(getattr(self, part) for part in OF_SHARING) - 1.0

    def describe(self) -> str:
        """The state in words.

        >>> State(core=1.13, dram=1.42).describe()
        'core 1.13, DRAM 1.42 of the reference'
        >>> State().describe()
        'as the reference'
        """
        factors = zip(_NAMES, dataclasses.astuple(self))
        parts = [f"{name} {factor:.2f}" for name, factor in factors if abs(factor - 1.0) >= 0.005]
        return f"{', '.join(parts)} of the reference" if parts else "as the reference"


_FARTHEST = 3.0
"""Largest slowdown of a short parallel region by where its cores are; what takes longer waited for
a thread that had none. On two virtual cores (AMD EPYC, Zen 5) it is 1.0 or 1.8.
"""
LEAST = 0.05
"""Quantile of single rounds of a probe that counts as the machine without disturbances of
milliseconds: the least of several samples of a kernel was taken between them.
"""
_NAMES = (
    "core",
    "interpreter",
    "own caches",
    "shared cache",
    "DRAM",
    "page faults",
    "core to core",
)
REFERENCE = State()
OF_SHARING = ("private_cache", "interpreter")
"""Parts whose probes are short work within a core's own caches (:attr:`State.sharing`)."""
PARTS = {
    "compute": "core",
    "L1": "core",
    "L2": "private_cache",
    "L3": "shared_cache",
    "DRAM": "dram",
    "overhead": "interpreter",
    "page-faults": "page_fault",
}
"""The part of a machine that slows work of a bound; ``network`` has none."""


def usual_state(states: Sequence[State]) -> State:
    """The median of states, factor by factor (of two the mean): a co-tenant's burst spoils a single
    reading and disturbs few of the steps between them. But the mean of :attr:`State.core_to_core`,
    which has two levels between which a median jumps. The reference without any.
    """
    if not states:
        return REFERENCE
    found = State(*map(statistics.median, zip(*map(dataclasses.astuple, states))))
    mean = statistics.fmean(state.core_to_core for state in states)
    return dataclasses.replace(found, core_to_core=mean)
