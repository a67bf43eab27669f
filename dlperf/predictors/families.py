"""Look-up of kernel descriptions. To add an operator, register a function in a family's module."""

from __future__ import annotations

from dlperf.core.trace import Op
from dlperf.predictors import (  # noqa: F401  (their import registers the descriptions)
    families_contractions,
    families_elements,
    families_images,
    families_layers,
    families_others,
    families_sequences,
)
from dlperf.predictors.kernel_description import DESCRIPTIONS, KernelDescription


def describe(op: Op, threads: int = 1) -> KernelDescription | None:
    """Description of an op on `threads` threads; None for an operator without a function."""
    function = DESCRIPTIONS.get(op.packet)
    return None if function is None else function(op, threads)


def known() -> tuple[str, ...]:
    """Packet names of the described operators."""
    return tuple(sorted(DESCRIPTIONS))
