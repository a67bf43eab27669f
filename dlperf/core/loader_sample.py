"""A sample of a user's data loader as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SampledLoader:
    """The cost of a user's own dataset and collation, sampled in one process.

    `batch_s`: mean time to fetch a batch of `batch_size` (sampler, dataset, collation).
    `waiting_frac`: the part of it that needs no processor. `tensor_bytes`: sizes of the tensors in
    a batch. `n_batches`: the loader's length, None for a loader without one. The other fields are
    the loader's settings.
    """

    name: str
    batch_size: int
    batch_s: float
    tensor_bytes: tuple[int, ...]
    n_sampled: int
    n_batches: int | None = None
    n_samples: int | None = None
    drop_last: bool = False
    persistent_workers: bool = False
    notes: tuple[str, ...] = ()
    waiting_frac: float = 0.0
