"""How much links vary."""

from __future__ import annotations

import statistics

from dlperf.core.cluster import Cluster
from dlperf.core.units import KIB
from dlperf.core.variation import log_sigma

_LONG_BYTES = 256 * KIB


def link_sigma(cluster: Cluster) -> float:
    """How much the links vary: the median over the measured all-reduces from 256 KiB up, where the
    link decides; 0 where none was measured.

    What shorter ones vary by is the scheduler's doing
    (:func:`dlperf.distributed.collective_costs.mean_excess_s`).
    """
    found = [
        log_sigma(c.samples)
        for c in cluster.collectives
        if c.kind == "all_reduce" and len(c.samples.values) > 2 and c.n_bytes >= _LONG_BYTES
    ]
    return statistics.median(found or [0.0])
