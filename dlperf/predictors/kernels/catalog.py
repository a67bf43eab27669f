"""Look-up of kernel descriptions. To add an operator, register a function in a family's module."""

from __future__ import annotations

from dlperf.core.trace import Op
from dlperf.predictors.kernels import (  # noqa: F401  (their import registers the descriptions)
    contractions,
    elementwise,
    images,
    layers,
    sequences,
    uncommon,
)
from dlperf.predictors.kernels.description import DESCRIPTIONS, KernelDescription
from dlperf.predictors.kernels.onednn import BLOCK


def describe(op: Op, threads: int = 1, block: int = BLOCK) -> KernelDescription | None:
    """Description of an op on `threads` threads of a processor with oneDNN's blocks of so many
    channels (:func:`dlperf.predictors.kernels.onednn.block_of`); None for an operator without a
    function.
    """
    function = DESCRIPTIONS.get(op.packet)
    return None if function is None else function(op, threads, block)


def known() -> tuple[str, ...]:
    """Packet names of the described operators."""
    return tuple(sorted(DESCRIPTIONS))
