"""dlperf: how long a PyTorch layer, step, epoch or run takes on a CPU, what limits it, and how right that answer was.

A measured :class:`Machine` and a recorded :class:`Trace` go through a predictor and give a :class:`Prediction`; a
:class:`Measurement` of the same step turns it into a :class:`Report`.
"""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dlperf.version import VERSION as __version__

if TYPE_CHECKING:
    from dlperf.errors import DlperfError
    from dlperf.machine import Machine
    from dlperf.measurement import Measurement
    from dlperf.prediction import Prediction, predict
    from dlperf.recorder import record
    from dlperf.report.comparison import Report, compare
    from dlperf.runner import profile
    from dlperf.stopwatch import measure
    from dlperf.trace import Trace

_HOME = {
    "Machine": "dlperf.machine", "Trace": "dlperf.trace", "Prediction": "dlperf.prediction", "Measurement": "dlperf.measurement",
    "Report": "dlperf.report.comparison", "DlperfError": "dlperf.errors", "record": "dlperf.recorder", "predict": "dlperf.prediction",
    "measure": "dlperf.stopwatch", "compare": "dlperf.report.comparison", "profile": "dlperf.runner",
}  # fmt: skip

__all__ = [
    "DlperfError",
    "Machine",
    "Measurement",
    "Prediction",
    "Report",
    "Trace",
    "__version__",
    "compare",
    "measure",
    "predict",
    "profile",
    "record",
]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: ``import dlperf`` alone costs next to nothing."""
    if name not in _HOME:
        raise AttributeError(f"module 'dlperf' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOME))
