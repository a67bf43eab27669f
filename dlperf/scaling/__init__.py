"""Training on several ranks: forecast from one rank's predicted step and a cluster file, or a recorded one replayed over another cluster."""

from dlperf.scaling.forecast import Question, forecast, hosts_per_system_of, ranks_per_node_of
from dlperf.scaling.replay_result import Replay
from dlperf.scaling.replaying import replay_trace
from dlperf.scaling.result import CollectiveTime, Row, Scaling
from dlperf.scaling.what_if import WhatIf

__all__ = ["CollectiveTime", "Question", "Replay", "Row", "Scaling", "WhatIf", "forecast", "hosts_per_system_of", "ranks_per_node_of", "replay_trace"]
