"""The probe of a machine's state: six fixed pieces of work, and of a process with a team of threads
a seventh, taken in turns.

Its buffers are mappings of their own, so that malloc's state stays as it is.
"""

from __future__ import annotations

import datetime
import math
import mmap
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dlperf.core import host
from dlperf.core.blas import one_blas_thread
from dlperf.core.clock import quantile
from dlperf.core.machine_entries import Cpu
from dlperf.core.state import LEAST, OF_SHARING, Reading, reading_of
from dlperf.core.units import KIB, MIB

DRAM_BYTES = 128 * MIB
"""Working set of the DRAM probe: two arrays of 64 MiB."""
_SMALLEST_BYTES = 32 * KIB
_CORE_SIDE, _CORE_CALLS = 128, 3
"""Products of the core's probe, and calls of two each. Their matrices take 256 KiB. Beside a
co-tenant on the same core (AMD Zen 3, means of 824 samples in 75 s) they took 1.21 times their
least, products of 256 to 512 and convolutions of 2 ms 1.24 to 1.27, products of 64 1.31.
"""
_SIDE = 64
"""Side of the matrices of the own caches' probe."""
N_ROUNDS = 200
"""Rounds of a reading, in about 2.4 s. Without pauses: after one of 10 ms the core's probe took 1.2
times as long.
"""
_FRACTION = 0.4
"""Quantile of rounds that is a reading. Beside a co-tenant on the same core whose bursts took 14 %
of the time (AMD EPYC, Zen 4, virtual, 300 s), means of readings before and after 6 s differed from
the median within them by 7.6 % with the interpreter's probe and 3.0 % with the DRAM's (root mean
square) for medians of 100 rounds, 4.6 and 2.4 % for those of 200, 1.5 and 1.9 % for this quantile.
Medians of 100 rounds explained median steps of 1.5 s to 5.8 %, those of 28 to 7.0 %, where a
co-tenant came and went (AMD Zen 3, virtual, 45 times within 200 s; the steps varied by 9.5 %).
"""
_ENOUGH_JUDGED = 10
"""Times of a probe on a shared core, and of others, that tell how much longer it takes there."""
_VECTOR = np.arange(32.0)
_MATRIX = np.arange(16.0).reshape(4, 4) + 4.0 * np.eye(4)
_COPY_BYTES = 8 * 2**20
"""Bytes that a sample of a cached copy moves at least."""
_DROPPED = 3
"""Rounds of a reading that do not count: right after a network's step (AMD EPYC, Zen 5) copies in
DRAM took 1.06, 1.05 and 1.02 times as long in the second to fourth round as in the hundredth.
"""
_LEAST_ROUNDS, _LONGEST_ROUND_S = 9, 0.05
"""Rounds of a reading at least, and seconds of one up to which all are taken. Of two threads beside
other busy processes (Intel Xeon, virtual, load 6) 200 rounds took up to 57 s.
"""
_COPIES_BEFORE, _CODE_BEFORE = 8, 4
"""Calls before those that count, of the shared cache's and of the interpreter's probe: other work
drives out their data and branches. After one (AMD EPYC, Zen 5) copies took 1.4 times as long in the
first rounds after a network's step as in the hundredth, code 1.1 times: a calibration, which reads
often and shortly, knew a slower machine than a reading by itself.
"""
_TOUCHED_BYTES = 2**20
GRAIN_SIZE = 32768
"""Elements above which at::parallel_for wakes the whole team (ATen/Parallel.h)."""
_REGION_BYTES = GRAIN_SIZE + 4
"""Bytes that a parallel region sums up, each an element."""
_REGIONS_BEFORE, _REGIONS = 10, 20
"""Regions that wake the team, and that are timed."""

Array = npt.NDArray[np.float32]


def working_sets_bytes(cpu: Cpu) -> tuple[int, int, int]:
    """Working sets of the memory probes: three quarters of the L2 cache, four times the L2 cache
    where the shared cache holds it, and :data:`DRAM_BYTES`.
    """
    _, l2, l3 = cpu.caches_bytes
    private = max(_SMALLEST_BYTES, 3 * (l2 or MIB) // 4)
    shared = max(2 * private, min(4 * (l2 or MIB), (l3 or 32 * MIB) // 2))
    return private, min(shared, DRAM_BYTES // 2), DRAM_BYTES


def _mapped(n_bytes: int) -> Array:
    """Zeros in a mapping of their own, already touched."""
    array = np.frombuffer(mmap.mmap(-1, n_bytes), dtype=np.float32)
    array[:] = 0.0
    return array


def _call_much_code() -> None:
    """Some thirty functions of numpy on a few numbers: short calls whose code does not fit into an
    instruction cache, as a framework's. A co-tenant on the same core slows such code by up to
    60 %, a short loop by 10 %.
    """
    vector, matrix = _VECTOR, _MATRIX
    np.einsum("ij,jk->ik", matrix, matrix)
    np.sort(vector[::-1])
    np.argsort(vector)
    np.fft.rfft(vector)
    np.exp(vector).sum()
    np.tanh(vector).max()
    np.concatenate((vector, vector))
    np.where(vector > 3.0, vector, 0.0)
    np.cumsum(vector)
    np.diff(vector)
    np.mean(vector)
    np.std(vector)
    np.clip(vector, 1.0, 2.0)
    np.unique(vector)
    np.searchsorted(vector, 3.0)
    np.interp(2.5, vector, vector)
    np.pad(vector, 2)
    np.outer(vector, vector[:3])
    np.linalg.norm(vector)
    np.linalg.solve(matrix, matrix[0])
    np.linalg.eigvalsh(matrix + matrix.T)
    np.isfinite(vector).all()
    vector.reshape(4, 8).T.copy()
    vector.astype(np.float32).astype(np.int64)


class ParallelRegion:
    """A short parallel region of the team of threads that torch has in this process. `least_s` is
    the least time so far.

    On two virtual cores (AMD EPYC, Zen 5) one takes 2.0 or 3.6 us, for seconds to minutes.
    With the longer regions training steps took 1.05 to 1.35 times as long, while all other probes
    stood still: the host had moved a core to where another has no cache in common with it.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._arrays = [_mapped(_REGION_BYTES).view(np.uint8) for _ in range(2)]
        self.least_s = math.inf
        self._operands: list[Any] = []

    @property
    def threads(self) -> int:
        """The team's size; 1 where torch is not there."""
        torch = sys.modules.get("torch")  # whoever has no team need not wait for the import
        return 1 if torch is None else int(torch.get_num_threads())

    def seconds(self, n_before: int = _REGIONS_BEFORE, count: int = _REGIONS) -> float:
        """Seconds of a region, the median of some, after others that wake the team."""
        torch = sys.modules["torch"]
        if not self._operands:
            self._operands = [torch.from_numpy(array) for array in self._arrays]
        source, to = self._operands
        taken_s = []
        for _ in range(n_before + count):
            begin = self._now()
            torch.add(source, source, out=to)
            taken_s.append(self._now() - begin)
        found_s = statistics.median(taken_s[n_before:])
        self.least_s = min(self.least_s, found_s)
        return found_s


def take_reading(rounds: int = N_ROUNDS) -> Reading:
    """A reading of this machine now, in about 2.4 s; with fewer rounds in less."""
    return StateProbe(host.this_cpu()).read(rounds)


class StateProbe:
    """Probes one core of a machine; :meth:`read` takes about 10 ms a round."""

    def __init__(
        self,
        cpu: Cpu,
        now: Callable[[], float] = time.perf_counter,
        is_slow: Callable[[], bool] | None = None,
    ) -> None:
        self._now, self._is_slow = now, is_slow
        self._region = ParallelRegion(now)
        self._judged: dict[str, list[tuple[float, int]]] = {name: [] for name in OF_SHARING}
        private, *others = working_sets_bytes(cpu)
        self._copies = [
            (_mapped(size // 2), _mapped(size // 2), max(1, _COPY_BYTES // size)) for size in others
        ]
        self._few = self._matrices(2, _CORE_SIDE)
        self._many = self._matrices(max(2, private // (8 * _SIDE**2)), _SIDE)

    @staticmethod
    def _matrices(count: int, side: int) -> tuple[Array, Array]:
        """So many factors, each an identity, and room for their products."""
        factors, products = (_mapped(4 * count * side**2).reshape(-1, side, side) for _ in range(2))
        factors[:] = np.eye(side, dtype=np.float32)
        return factors, products

    def read(self, rounds: int = N_ROUNDS) -> Reading:
        """The :data:`_FRACTION` quantile of a number of rounds."""
        return reading_of(self.rounds(rounds), _FRACTION)

    @one_blas_thread
    def rounds(self, count: int) -> list[Reading]:
        """So many rounds, after some that are dropped; fewer where they take far too long."""
        begin, taken = self._now(), list[Reading]()
        while len(taken) < _DROPPED + count and (
            len(taken) < _DROPPED + _LEAST_ROUNDS
            or self._now() - begin < _LONGEST_ROUND_S * (_DROPPED + count)
        ):
            taken.append(self._round())
        created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        return [replace(one, created=created) for one in taken[_DROPPED:]]

    def _round(self) -> Reading:
        shared_s, dram_s = (
            self._time(partial(np.copyto, to, source), count, _COPIES_BEFORE)
            for source, to, count in self._copies
        )
        (few, to_few), (many, to_many) = self._few, self._many
        product_s = self._time(partial(np.matmul, few, few, to_few), _CORE_CALLS)
        private_s = self._judge("private_cache", partial(np.matmul, many, many, to_many))
        code_s = self._judge("interpreter", _call_much_code, _CODE_BEFORE)
        threads = self._region.threads
        regions_s = {threads: self._region.seconds()} if threads > 1 else {}
        seconds = product_s, code_s, private_s, shared_s, dram_s, self._touch_s()
        return Reading(*seconds, parallel_region_s=regions_s)

    def _judge(self, name: str, call: Callable[[], object], n_before: int = 1) -> float:
        """Seconds of two calls of a probe, which are judged by the core before and after."""
        if self._is_slow is None:
            return self._time(call, 2, n_before)
        before = self._is_slow()
        seconds = self._time(call, 2, n_before)
        self._judged[name].append((seconds, before + self._is_slow()))
        return seconds

    def shared_core(self) -> dict[str, float]:
        """How many times longer than at the reference the probes of
        :attr:`dlperf.core.state.State.sharing` take between two moments in which the core was slow;
        of those that had enough such, and others.
        """
        found = {}
        for name, judged in self._judged.items():
            slow_s = [seconds for seconds, n_slow in judged if n_slow == 2]
            if min(len(slow_s), len(judged) - len(slow_s)) >= _ENOUGH_JUDGED:
                least_s = quantile([seconds for seconds, _ in judged], LEAST)
                found[name] = statistics.median(slow_s) / least_s
        return found

    def _time(self, call: Callable[[], object], count: int = 1, n_before: int = 1) -> float:
        """Seconds of a call; of several, after some that warm the caches."""
        for _ in range(n_before if count > 1 else 0):
            call()
        begin = self._now()
        for _ in range(count):
            call()
        return (self._now() - begin) / count

    def _touch_s(self) -> float:
        """Seconds of the first touches of a new mapping's pages."""
        with mmap.mmap(-1, _TOUCHED_BYTES) as pages, memoryview(pages) as view:
            begin = self._now()
            view[:: mmap.PAGESIZE] = bytes(_TOUCHED_BYTES // mmap.PAGESIZE)
            return self._now() - begin
