"""Data-parallel training on several ranks, forecast from one rank's predicted step and a cluster file."""

from dlperf.scaling.forecast import Question, forecast, hosts_per_system_of, ranks_per_node_of
from dlperf.scaling.result import CollectiveTime, Row, Scaling
from dlperf.scaling.what_if import WhatIf

__all__ = ["CollectiveTime", "Question", "Row", "Scaling", "WhatIf", "forecast", "hosts_per_system_of", "ranks_per_node_of"]
