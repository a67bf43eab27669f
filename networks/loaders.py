"""Loaders of the data that the training scripts generate, by network: ``CALLABLE(batch_size,
num_workers)`` each, shuffled as in an epoch of training.
"""

from __future__ import annotations

from torch.utils.data import DataLoader

from networks.catalog import NETWORKS
from networks.data import Sample, generate

_N_SAMPLES = 4096


def _loader(name: str, batch_size: int, num_workers: int) -> DataLoader[Sample]:
    splits = generate(NETWORKS[name], max(_N_SAMPLES, 8 * batch_size), 0, 0)
    return DataLoader(splits.train, batch_size, shuffle=True, num_workers=num_workers)


def mlp(batch_size: int, num_workers: int = 0) -> DataLoader[Sample]:
    """Digits as 784 numbers, one-hot classes."""
    return _loader("mlp", batch_size, num_workers)


def lenet(batch_size: int, num_workers: int = 0) -> DataLoader[Sample]:
    """Digits of 28x28."""
    return _loader("lenet", batch_size, num_workers)


def cnn(batch_size: int, num_workers: int = 0) -> DataLoader[Sample]:
    """Digits of 29x29, for the small, the medium and the large network."""
    return _loader("cnn-small", batch_size, num_workers)
