"""Work of the kernels that a compiler fuses from operators of one pass: see :data:`FUSED`."""

from __future__ import annotations

from typing import Any

from dlperf.core.trace import Op
from dlperf.ops.operand_bytes import once_each
from dlperf.ops.registry import byte_formula, flop_formula

FUSED = "inductor.fused"
"""Packet name of a generated kernel. Its argument is a tuple of the tensors that it reads, its
outputs are those that it writes. Keywords: `instructions` of a call, `lanes` of a vector,
`threads`.
"""


@flop_formula(FUSED)
def fused_flops(op: Op) -> int:
    """One per lane and instruction: at most what the kernel computes."""
    options: dict[str, Any] = dict(op.kwargs)
    return int(options["instructions"]) * int(options["lanes"])


def fused_threads(op: Op) -> int:
    """Threads that run the kernel."""
    options: dict[str, Any] = dict(op.kwargs)
    return int(options["threads"])


@byte_formula(FUSED)
def fused_bytes(op: Op) -> int:
    """Each tensor once, at most as many elements as the instructions reach: look-ups touch few."""
    return min(once_each(op), 8 * fused_flops(op))
