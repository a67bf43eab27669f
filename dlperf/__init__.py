"""dlperf: time of a PyTorch layer, step, epoch or run on a CPU, its bounds, and its accuracy.

A measured :class:`Machine` and a recorded :class:`Trace` go through a predictor and give a
:class:`Prediction`. A :class:`Measurement` of the same step turns it into a :class:`Report`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dlperf.core.version import VERSION as __version__

if TYPE_CHECKING:
    from dlperf.core.errors import DlperfError
    from dlperf.core.machine import Machine
    from dlperf.core.measurement import Measurement
    from dlperf.core.shelf import device
    from dlperf.core.trace import Trace
    from dlperf.forecast.prediction import Prediction, predict
    from dlperf.predictors.allocator.caching import CachingAllocator
    from dlperf.predictors.allocator.device_memory import device_memory
    from dlperf.profiler.step_profiler import measure
    from dlperf.recorder.recording import record
    from dlperf.report.comparison import Report, compare
    from dlperf.runner.wrapping import profile

_HOME = {
    "Machine": "dlperf.core.machine",
    "Trace": "dlperf.core.trace",
    "Prediction": "dlperf.forecast.prediction",
    "Measurement": "dlperf.core.measurement",
    "Report": "dlperf.report.comparison",
    "DlperfError": "dlperf.core.errors",
    "device": "dlperf.core.shelf",
    "CachingAllocator": "dlperf.predictors.allocator.caching",
    "device_memory": "dlperf.predictors.allocator.device_memory",
    "record": "dlperf.recorder.recording",
    "predict": "dlperf.forecast.prediction",
    "measure": "dlperf.profiler.step_profiler",
    "compare": "dlperf.report.comparison",
    "profile": "dlperf.runner.wrapping",
}

__all__ = [
    "CachingAllocator",
    "DlperfError",
    "Machine",
    "Measurement",
    "Prediction",
    "Report",
    "Trace",
    "__version__",
    "compare",
    "device",
    "device_memory",
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


def load_ipython_extension(ipython: Any) -> None:
    """``%load_ext dlperf``: the cell magic ``%%dlperf_profile``."""
    from dlperf.integrations.notebook import DlperfMagics

    ipython.register_magics(DlperfMagics)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOME))
