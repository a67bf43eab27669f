"""Costs of PyTorch and of the system: what a calibration measures beside kernels and bandwidths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dlperf.core.clock import Samples, quantile
from dlperf.core.errors import DlperfError

MINIMUM, LOWER_QUARTILE, MEDIAN = "minimum", "lower quartile", "median"


class CostKind(NamedTuple):
    """Unit of a kind of cost, the statistic of its samples that counts, and the unit of `at`; the
    `former` statistic is that of older machine files, whose samples are the same.

    The minimum is the cost on a core of one's own, since disturbances only add. The lower quartile
    is for costs that are spread by their nature (pages, processes that are woken). The median is
    for differences and ratios of two calls in a row, which disturbances lower as often as they
    raise them, and for what a step meets as often at its worst as at its best (code in far caches).
    """

    unit: str = "s"
    statistic: str = MINIMUM
    at: str = ""
    former: str = ""


CORE_SPEED = "core_speed"
"""Seconds of a fixed piece of work on a core of one's own (:class:`dlperf.core.clock.CoreSpeed`).
"""
SHARED_CORE = "shared_core"
"""How many times longer a probe takes while a co-tenant has the same core."""
CACHE_MISS, COLD_START = "cache_miss", "cold_start"
PAGE_EVICTION, CODE_EVICTION = "page_allocation_eviction", "instruction_cache_pressure"
COLD_STARTS = (COLD_START, PAGE_EVICTION, CODE_EVICTION)
"""Penalties of a call whose code and data left the nearer caches, by what drove them out."""
SHORT_ROWS, SHORT_ROW_BYTES, LONG_ROW_BYTES = "short_rows", 4 * 6 * 6, 4 * 32 * 32
"""The cache misses of an operator that passes over such short rows, far from each other, and the
bytes of rows from which on it misses no more than where all is in order. A batch norm's backward
does, channel by channel: its rows are images.
"""
CACHE_RESIDENCY = "cache_residency"
"""Slowdown, by milliseconds without a touch, of data in the shared cache."""
SMALL_PAGE_COSTS = ("page_fault", "page_release")
PAGE_COSTS = (*SMALL_PAGE_COSTS, "huge_page_fault")
ARITHMETIC = "arithmetic"
OPTIMIZER_CALL, OPTIMIZER_TENSOR = "optimizer_call", "optimizer_tensor"
LOADER_BYTE = "loader_byte"

KINDS = {
    CORE_SPEED: CostKind(),
    SHARED_CORE: CostKind("factor", MEDIAN),
    **dict.fromkeys(
        (
            "boxed_call native_call python_call module_call module_body parameter_lookup"
            " python_instruction autograd_record autograd_node accumulate_grad backward_call"
            " zero_grad_call zero_grad_tensor optimizer_zero_root fork_join loader_batch"
            " loader_batch_tensor loader_sample loader_tensor loader_shuffle loader_send_batch"
            " loader_send_tensor loop_item loop_accuracy loop_scheduler loop_clip_call"
            " loop_clip_tensor"
        ).split(),
        CostKind(),
    ),
    OPTIMIZER_CALL: CostKind(),
    OPTIMIZER_TENSOR: CostKind(at="operators"),
    COLD_START: CostKind("s", MEDIAN, "bytes", former=LOWER_QUARTILE),
    PAGE_EVICTION: CostKind("s", MEDIAN, "bytes", former=LOWER_QUARTILE),
    CODE_EVICTION: CostKind("s", MEDIAN, "code", former=LOWER_QUARTILE),
    CACHE_MISS: CostKind("s/byte", MEDIAN, "bytes", former=LOWER_QUARTILE),
    **dict.fromkeys(
        (
            "page_fault page_release huge_page_fault loader_receive_batch loader_receive_tensor"
            " loader_start_call loader_start_worker loader_stop_call loader_stop_worker"
            " loader_resume loop_save_call loop_save_tensor loop_first_convolution loop_first_step"
        ).split(),
        CostKind("s", LOWER_QUARTILE),
    ),
    **dict.fromkeys(
        ("loader_receive_byte", "loader_fork_byte", "loop_save_byte"),
        CostKind("s/byte", LOWER_QUARTILE),
    ),
    LOADER_BYTE: CostKind("s/byte", MINIMUM, "bytes"),
    **dict.fromkeys(("loader_send_byte", "loop_clip_byte"), CostKind("s/byte")),
    **dict.fromkeys(("ddp_call", "ddp_hook", "ddp_sync"), CostKind("s", MEDIAN)),
    ARITHMETIC: CostKind("s/FLOP"),
    CACHE_RESIDENCY: CostKind("factor", MEDIAN, "ms"),
}
"""Every kind of cost that a machine file may hold."""


class CostKey(NamedTuple):
    """What a cost is of.

    `of` is the operator, phase, group or optimizer that it belongs to, `at` the amount at which it
    was measured (in its kind's unit; 0 where the kind has none), `variant` the optimizer's
    implementation or the dtype of an arithmetic ceiling.

    >>> keys = CostKey("cold_start", "aten.mm", 1048576), CostKey("optimizer_call", "SGD", 0, "x")
    >>> tuple(map(str, keys))
    ('cold_start aten.mm at 1048576 bytes', 'optimizer_call SGD x')
    """

    kind: str
    of: str = ""
    at: int = 0
    variant: str = ""

    def __str__(self) -> str:
        amount = f"at {self.at} {KINDS[self.kind].at}" if self.at else ""
        return " ".join(part for part in (self.kind, self.of, self.variant, amount) if part)


STEP_COSTS = {
    "framework": (
        CostKey("native_call"),
        CostKey("boxed_call"),
        CostKey("python_call"),
        CostKey("module_call"),
        CostKey("module_body"),
        CostKey("parameter_lookup"),
        CostKey("python_instruction"),
        CostKey(COLD_START, "first"),
        CostKey(COLD_START, "next"),
        CostKey(CODE_EVICTION, "first"),
        CostKey(CODE_EVICTION, "next"),
        CostKey(CACHE_MISS, "next"),
    ),
    "framework of training": (
        CostKey("autograd_record"),
        CostKey("autograd_node"),
        CostKey("accumulate_grad"),
        CostKey("backward_call"),
        CostKey("zero_grad_call"),
        CostKey("zero_grad_tensor"),
        CostKey(OPTIMIZER_CALL),
        CostKey(OPTIMIZER_TENSOR),
        CostKey("optimizer_zero_root"),
    ),
    "memory": (CostKey("page_fault"), CostKey("page_release")),
}
"""Costs that the prediction of a step adds up, by group of a calibration; of any amount."""


@dataclass(frozen=True)
class Cost:
    """A cost with its samples, measured with so many threads.

    `readings` are the numbers of the machine's readings meanwhile while a calibration goes on,
    `slowdown` is that of the statistic over the reference state. Raises DlperfError for a kind that
    is not in :data:`KINDS`.
    """

    key: CostKey
    threads: int
    samples: Samples
    readings: tuple[int, ...] = ()
    slowdown: float = 1.0

    def __post_init__(self) -> None:
        if self.key.kind not in KINDS:
            raise DlperfError(f"cost {self.key.kind!r} is unknown; known are {', '.join(KINDS)}")

    @property
    def value(self) -> float:
        """The statistic of the samples that counts for the kind, in the kind's unit and the
        reference state.
        """
        statistic = KINDS[self.key.kind].statistic
        if statistic == LOWER_QUARTILE:
            return quantile(self.samples.values, 0.25) / self.slowdown
        of = self.samples.median if statistic == MEDIAN else self.samples.minimum
        return of / self.slowdown
