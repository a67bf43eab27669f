"""What follows from a cluster file: the fitted parameters of its links, the time of a collective over them, and a page that shows both."""

from dlperf.network.calls import call_s, message_s
from dlperf.network.fits import BANDS, Band, LinkFit, fit_link
from dlperf.network.forecast import Burst, LinkFactors, burst_of, collective_s, link_bytes_per_s
from dlperf.network.summary import ClusterSummary, summarize_cluster

__all__ = [
    "BANDS", "Band", "Burst", "ClusterSummary", "LinkFactors", "LinkFit", "burst_of", "call_s", "collective_s", "fit_link", "link_bytes_per_s",
    "message_s", "summarize_cluster",
]  # fmt: skip
