"""The ways of handing out memory that a process can be started with, and what to set for each."""

from __future__ import annotations

from dataclasses import dataclass

from dlperf.core.errors import DlperfError
from dlperf.core.units import GIB, KIB, MIB


@dataclass(frozen=True)
class Policy:
    """When an allocator takes memory from the system and when it gives it back.

    `settings` are the environment variables to start the process with ("" for none); the loader
    looks for a library by its name. A request of at least `mapping_bytes` is a mapping of its own;
    where `adapts`, freeing one raises that and `trim_bytes` (glibc). The heap is given back above
    `trim_bytes`. Requests of at least `huge_bytes` ask for pages of 2 MiB (None: nothing does).
    With `purges`, free extents that have grown to `trim_bytes` are given back wherever they lie
    (jemalloc).
    """

    name: str
    settings: str
    mapping_bytes: int
    trim_bytes: int
    adapts: bool = False
    top_pad_bytes: int = 128 * KIB
    huge_bytes: int | None = None
    purges: bool = False

    @property
    def keeps(self) -> bool:
        """Whether nothing that was freed goes back to the system."""
        return self.mapping_bytes >= _NEVER and self.trim_bytes >= _NEVER


_NEVER = 4 * GIB
_OVERSIZE = 8 * MIB

POLICIES = {
    policy.name: policy
    for policy in (
        # malloc/malloc.c: DEFAULT_MMAP_THRESHOLD, DEFAULT_TRIM_THRESHOLD and DEFAULT_TOP_PAD are
        # 128 KiB.
        Policy("default", "", 128 * KIB, 128 * KIB, adapts=True),
        # Below glibc 2.35 a threshold above 32 MiB is refused, MALLOC_MMAP_MAX_=0 is not; it and
        # the limit of the top end the adapting.
        Policy(
            "tuned",
            f"MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_={_NEVER} MALLOC_TOP_PAD_={64 * MIB}",
            _NEVER,
            _NEVER,
            top_pad_bytes=64 * MIB,
        ),
        # c10/core/impl/alloc_cpu.cpp: from 2 MiB on aligned to a page, then madvise(MADV_HUGEPAGE);
        # the rest is glibc's.
        Policy(
            "huge-pages",
            "THP_MEM_ALLOC_ENABLE=1",
            128 * KIB,
            128 * KIB,
            adapts=True,
            huge_bytes=2 * MIB,
        ),
        # jemalloc 5.3: requests of oversize_threshold (8 MiB) have an arena of their own that keeps
        # nothing (arena_choose_huge), and free extents that coalesce to as much are purged at once
        # (extent.c, ecache_dalloc); other dirty pages decay over 10 s, far longer than a step.
        Policy("jemalloc", "LD_PRELOAD=libjemalloc.so.2", _OVERSIZE, _OVERSIZE, purges=True),
        # gperftools: ReleaseRate 1 gives back one page of a thousand freed (page_heap.cc,
        # IncrementalScavenge), the median step none.
        Policy("tcmalloc", "LD_PRELOAD=libtcmalloc_minimal.so.4", _NEVER, _NEVER),
    )
}
"""The known policies by name."""


def policy_of(name: str) -> Policy:
    """The policy called `name`. Raises DlperfError that lists the known ones."""
    try:
        return POLICIES[name]
    except KeyError:
        raise DlperfError(f"malloc {name!r} is unknown; known are {', '.join(POLICIES)}") from None
