"""Where the steps of a forecast lie on the Ridgeline plane, and what one rank can do: the rates
that divide it (:mod:`dlperf.models.ridgeline`).
"""

from __future__ import annotations

from collections import Counter

from dlperf.core.cluster import Cluster
from dlperf.distributed.collective_times import link_bytes_per_s
from dlperf.distributed.what_if import WhatIf
from dlperf.forecast.prediction import Prediction
from dlperf.models.ridgeline import RESOURCES, Rates, bounding_resource
from dlperf.ops.roofs import roofs_of


def rates_of(
    prediction: Prediction, cluster: Cluster | None, between_nodes: bool, what_if: WhatIf
) -> Rates | None:
    """What one rank can do: the measured peak at the dtype of most of its parameters' bytes, DRAM's
    bandwidth and the link's, times the factors of `what_if`.

    The link is that between nodes, or inside one. None where the machine file has no peak or
    bandwidth, or there is no cluster. Raises DlperfError where the cluster lacks the link. Ranks of
    a node are supposed to have their rates for themselves: errs high where they share them.
    """
    roofs = roofs_of(prediction.machine, prediction.threads)
    memory = next((roof.bytes_per_s for roof in roofs.bandwidths if roof.level == "DRAM"), None)
    n_bytes: Counter[str] = Counter()
    for parameter in prediction.trace.parameters:
        n_bytes[parameter.spec.dtype] += parameter.spec.nbytes
    peak = roofs.ceiling(max(n_bytes, key=lambda dtype: n_bytes[dtype], default="float32"))
    if cluster is None or memory is None or peak is None:
        return None
    link = link_bytes_per_s(cluster, between_nodes, what_if.links)
    return (
        None
        if link is None
        else Rates(what_if.flops * peak.fma_flops_per_s, what_if.memory_bandwidth * memory, link)
    )


def region_of(
    flops: float, memory_bytes: float, network_bytes: float, rates: Rates | None
) -> str | None:
    """The resource that bounds a rank's step on the plane: compute, memory or network; None without
    rates.
    """
    return (
        None
        if rates is None
        else RESOURCES[int(bounding_resource(flops, memory_bytes, network_bytes, rates))]
    )
