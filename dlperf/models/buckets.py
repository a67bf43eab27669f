"""How DistributedDataParallel cuts gradients into the buckets that it reduces.

Source: torch, torch/csrc/distributed/c10d/reducer.cpp (`compute_bucket_assignment_by_size`,
`rebuild_buckets`) and torch/nn/parallel/distributed.py (`_BucketCapacityConfig`,
`_ddp_init_helper`), as of torch 2.13.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dlperf.core.errors import DlperfError
from dlperf.core.text import counted
from dlperf.core.units import MIB
from dlperf.models.arguments import Checked

FIRST_BUCKET_BYTES, BUCKET_BYTES = MIB, 25 * MIB
"""kDefaultFirstBucketBytes and kDefaultBucketBytesCap in reducer.hpp."""
Bucket = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of one trained parameter: its bytes and dtype. A `sparse` one has a bucket of
    its own.
    """

    n_bytes: int
    dtype: str = "float32"
    sparse: bool = False


@dataclass(frozen=True)
class ReducerOptions(Checked):
    """DDP's own arguments, as far as they decide what is sent when, and `accumulate`: batches to
    one synchronisation (all but the last under ``no_sync``).

    `bucket_bytes` None is DDP's default, 1 MiB first and then 25 MiB; another number is the cap of
    the first bucket as well. Raises DlperfError for a cap or a number of batches below 1.
    """

    bucket_bytes: int | None = None
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    accumulate: int = 1

    @property
    def limits_bytes(self) -> tuple[int, int]:
        """The cap of the first bucket, and that of the others."""
        return (
            (FIRST_BUCKET_BYTES, BUCKET_BYTES)
            if self.bucket_bytes is None
            else (self.bucket_bytes, self.bucket_bytes)
        )

    @property
    def rebuilds(self) -> bool:
        """Whether buckets are built anew after the first iteration, in the order in which gradients
        arrived.
        """
        return self.static_graph or not self.find_unused_parameters


def assign(
    gradients: Sequence[Gradient], order: Sequence[int], limits_bytes: Sequence[int]
) -> tuple[Bucket, ...]:
    """Indices of `gradients`, taken in `order`, by bucket, in the order in which the buckets close.

    Each dtype fills a bucket of its own, which closes as soon as it reaches or passes the next of
    `limits_bytes` (the last one holds for all that follow). Buckets still open at the end come
    last, the dtype seen last before the others (torch keeps them in a hash map, whose newest entry
    comes first).

    >>> assign([Gradient(600_000)] * 4, range(4), (2**20, 2**40))
    ((0, 1), (2, 3))
    """
    closed: list[Bucket] = []
    filling: dict[str, Bucket] = {}
    n_closed: Counter[str] = Counter()
    for index in order:
        gradient = gradients[index]
        if gradient.sparse:
            closed.append((index,))
            continue
        bucket = (*filling.get(gradient.dtype, ()), index)
        limit = limits_bytes[min(n_closed[gradient.dtype], len(limits_bytes) - 1)]
        is_full = sum(gradients[i].n_bytes for i in bucket) >= limit
        filling[gradient.dtype] = () if is_full else bucket
        if is_full:
            closed.append(bucket)
            n_closed[gradient.dtype] += 1
    return (*closed, *(bucket for bucket in reversed(filling.values()) if bucket))


def first_buckets(
    gradients: Sequence[Gradient], options: ReducerOptions = ReducerOptions()
) -> tuple[Bucket, ...]:
    """The buckets of the first iteration, in the order in which they are reduced: parameters
    backwards, as they are defined.

    Where they will be rebuilt, one for each dtype, so that nothing overlaps yet; else as large as
    the options say.
    """
    limits = (2**63 - 1,) if options.rebuilds else options.limits_bytes
    return tuple(sorted(assign(gradients, range(len(gradients)), limits), key=min, reverse=True))


def rebuilt_buckets(
    gradients: Sequence[Gradient],
    arrivals: Sequence[int],
    options: ReducerOptions = ReducerOptions(),
) -> tuple[Bucket, ...]:
    """The buckets of all further iterations, in the order in which they are reduced.

    `arrivals` are the indices of the gradients as they were accumulated in the first backward.
    Raises DlperfError where one is missing: DDP refuses unused parameters unless it is told to look
    for them, or that the graph is static (which puts them at the end).
    """
    if not options.rebuilds:
        return first_buckets(gradients, options)
    unused = [index for index in range(len(gradients)) if index not in set(arrivals)]
    if unused and not options.static_graph:
        raise DlperfError(
            f"{counted(len(unused), 'trained parameter')} without a gradient, which DDP refuses;"
            " let it find unused parameters"
        )
    return assign(gradients, (*arrivals, *unused), options.limits_bytes)


def sizes_bytes(gradients: Sequence[Gradient], buckets: Sequence[Bucket]) -> tuple[int, ...]:
    """The bytes of each bucket."""
    return tuple(sum(gradients[index].n_bytes for index in bucket) for bucket in buckets)
