"""Settings of malloc: what a user puts into the environment, and what a step is predicted to take under each."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dlperf.machine import Machine
from dlperf.prediction import Prediction, predict
from dlperf.trace import Trace
from dlperf.units import MIB

_NEVER = str(2**40)


@dataclass(frozen=True)
class Malloc:
    """A setting: its name, the environment that brings it about, and what it costs."""

    name: str
    environment: Mapping[str, str]
    caveat: str

    @property
    def how(self) -> str:
        """What a user writes in front of the command."""
        return " ".join(f"{name}={value}" for name, value in self.environment.items())


MALLOCS = (
    Malloc(
        "tuned",
        {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": _NEVER, "MALLOC_TOP_PAD_": str(64 * MIB)},
        "freed memory stays with the process (glibc alone reads these variables)",
    ),
)
VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE", "LD_PRELOAD")
"""What decides how a process gets its memory; a baseline has none of them."""


def malloc_of(name: str) -> Malloc:
    """The setting called `name`."""
    return next(malloc for malloc in MALLOCS if malloc.name == name)


def predict_under(trace: Trace, machine: Machine, threads: int, malloc: str | None = None) -> Prediction:
    """A step predicted under a setting of malloc (None: the system's default). A tuned malloc keeps what it has, so that a steady step faults no page in."""
    prediction = predict(trace, machine, threads)
    if malloc is None:
        return prediction
    kept = tuple(item for item in prediction.prices.items if item.bound != "page-faults")
    return replace(prediction, prices=replace(prediction.prices, items=kept))
