"""What a data sheet says of a device, and what published micro-benchmarks add to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from dlperf.core.conversion import Name, Seconds, Text

UNMEASURED = "data sheet"
"""The mode of a machine of which nothing was measured here; others are a calibration's."""
Rate = Annotated[float, Meta(gt=0, le=1e24)]
RateOrNone = Annotated[float, Meta(ge=0, le=1e24)]
Capability = Annotated[float, Meta(ge=0, le=1000)]
Part = Annotated[float, Meta(gt=0, le=1)]


@dataclass(frozen=True)
class DataSheet:
    """Rates and latencies of a device that was not measured here.

    Sizes, the name and the number of multiprocessors or cores stand in the machine's
    :class:`~dlperf.core.machine_entries.Cpu`. 0 is unknown.
    """

    #: `accelerator` or `processor`.
    kind: Literal["accelerator", "processor"]
    #: Peak by dtype without matrix units, FLOP/s.
    flops_per_s: Annotated[dict[Name, Rate], Meta(min_length=1)]
    dram_bytes_per_s: Rate  #: Bandwidth of the memory.
    #: Peak of matrix units (tensor cores) by dtype, FLOP/s.
    matrix_flops_per_s: dict[Name, Rate] = field(default_factory=dict)
    #: Bandwidth of L1, L2 and L3, all units together; 0 if unknown.
    caches_bytes_per_s: tuple[RateOrNone, RateOrNone, RateOrNone] = (0.0, 0.0, 0.0)
    #: Clock that the device sustains (base) over that of its peaks (boost).
    sustained_frac: Part = 1.0
    launch_s: Seconds = 0.0  #: Time of an empty kernel in a stream of kernels; 0 if unknown.
    dram_latency_s: Seconds = 0.0  #: Latency of a load from the memory; 0 if unknown.
    compute_capability: Capability = 0.0  #: CUDA's compute capability; 0 without one.
    tf32: bool = False  #: Whether contractions in float32 use the matrix units' tf32.
    sources: dict[Name, Text] = field(default_factory=dict)  #: Where each value is from.

    def peak_flops_per_s(self, dtype: str, contraction: bool) -> float:
        """Peak in FLOP/s of a dtype; `contraction` may use matrix units. The highest peak without
        matrix units stands for an unlisted dtype.

        >>> sheet = DataSheet("accelerator", {"float32": 19.5e12}, 1e12, {"tf32": 156e12})
        >>> sheet.peak_flops_per_s("float32", contraction=True)
        19500000000000.0
        """
        if contraction:
            name = "tf32" if self.tf32 and dtype == "float32" else dtype
            matrix = self.matrix_flops_per_s.get(name, 0.0)
            if matrix:
                return max(matrix, self.flops_per_s.get(dtype, 0.0))
        return self.flops_per_s.get(dtype) or max(self.flops_per_s.values())
