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
from dlperf.core.prediction import Prices
from dlperf.core.trace import Trace
from dlperf.models.roofline import time_s
from dlperf.ops import counts
from dlperf.predictors.base import op_items, register
from dlperf.predictors.gemm_table import peak_flops_per_s

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
        flops, n_bytes = (np.array(amounts, dtype=float) for amounts in counts.totals(trace))
        unknown = frozenset(counts.unknown_ops(trace))
        fallback = FALLBACK_DTYPE if FALLBACK_DTYPE in peaks else max(peaks, key=peaks.__getitem__)
        dtypes = [
            next((spec.dtype for spec in (*op.inputs[:1], *op.outputs[:1])), fallback)
            for op in trace.ops
        ]
        peak = np.array([peaks.get(dtype, peaks[fallback]) for dtype in dtypes])
        compute_bound = (flops > 0) & (flops / peak >= n_bytes / bandwidth)
        seconds = np.asarray(time_s(flops, n_bytes, peak, bandwidth))
        by_time = np.where(seconds > 0, seconds, 1.0)
        fracs = (flops / peak / by_time).tolist(), (n_bytes / bandwidth / by_time).tolist()
        items = op_items(
            trace,
            seconds.tolist(),
            np.where(compute_bound, "compute", "DRAM").tolist(),
            ["unpriced" if i in unknown else "interpolated" for i in range(len(trace.ops))],
            needs=[(("compute", one), ("DRAM", other)) for one, other in zip(*fracs)],
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
