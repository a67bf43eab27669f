"""Williams' roofline: every op takes max(FLOPs / peak, bytes / DRAM bandwidth), and nothing else
takes time.

Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for multicore
architectures", CACM 52(4), 2009. The yardstick that other predictors are held against, not a good
predictor: it errs low where an op is small (no dispatch, no autograd, no page faults) or its kernel
slow, and high where the data is in cache.
"""

from __future__ import annotations

import numpy as np

from dlperf.core.machine import Machine
from dlperf.core.prediction import Item, Prices
from dlperf.core.trace import Op, Trace
from dlperf.models.roofline import time_s
from dlperf.ops import counts
from dlperf.predictors.base import register
from dlperf.predictors.gemm_points import peak_flops_per_s

FALLBACK_DTYPE = "float32"


@register
class Roofline:
    """Peak = the fastest measured matrix product of the op's dtype, bandwidth = the best STREAM
    kernel, both at the nearest thread count.

    Sources: ``interpolated`` for every op with a FLOP formula (two measured ceilings stand for all
    ops, none is priced by its own measurement), ``unpriced`` for the others, which take bytes /
    bandwidth. Bounds: ``compute`` or ``DRAM``.
    """

    name = "roofline"

    def price(
        self, trace: Trace, machine: Machine, threads: int, malloc: str = "default"
    ) -> Prices:
        """The price list: one item per op (one per layer where an op serves several).

        Raises DlperfError where the machine file holds no matrix product or no memory bandwidth.
        """
        if not trace.ops:
            return Prices(())
        peaks = peak_flops_per_s(machine, threads)
        bandwidth = machine.dram_bytes_per_s(threads)
        flops, n_bytes = counts.totals(trace)
        unknown = frozenset(counts.unknown_ops(trace))
        fallback = (
            FALLBACK_DTYPE
            if FALLBACK_DTYPE in peaks
            else max(peaks, key=lambda dtype: peaks[dtype])
        )
        dtypes = [_dtype(op, fallback) for op in trace.ops]
        peak = np.array([peaks.get(dtype, peaks[fallback]) for dtype in dtypes])
        seconds = np.asarray(
            time_s(np.array(flops, dtype=float), np.array(n_bytes, dtype=float), peak, bandwidth)
        )
        compute_bound = np.array(flops) / peak >= np.array(n_bytes) / bandwidth
        items = []
        for place, op in enumerate(trace.ops):
            bound = "compute" if flops[place] and compute_bound[place] else "DRAM"
            source = "unpriced" if place in unknown else "interpolated"
            for layer, share_frac in op.shares or ((op.layer, 1.0),):
                items.append(
                    Item(
                        layer,
                        op.phase,
                        share_frac * float(seconds[place]),
                        bound,
                        source,
                        op=place,
                        share=share_frac,
                    )
                )
        missing = sorted(
            {
                dtype
                for dtype, count in zip(dtypes, flops)
                if count and dtype not in peaks and dtype.startswith(("float", "bfloat", "complex"))
            }
        )
        notes = tuple(
            f"roofline: no {dtype} matrix product in the machine file; the peak of {fallback}"
            " stands for it"
            for dtype in missing
        )
        return Prices(tuple(items), notes=notes)


def _dtype(op: Op, default: str) -> str:
    return op.inputs[0].dtype if op.inputs else op.outputs[0].dtype if op.outputs else default
