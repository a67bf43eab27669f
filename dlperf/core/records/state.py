"""The format of a state file."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from dlperf.core.conversion import Text, Threads
from dlperf.core.state import Reading

Slowdown = Annotated[float, Meta(ge=1e-6, le=1e6)]


class IdentityRecord(Struct, gc=False):
    """The processor that was probed."""

    model: Text  #: Name of the model.
    family: Text  #: Vendor, family, model, stepping.
    n_cores: Threads  #: Cores that the process may use.


class FactorsRecord(Struct, gc=False):
    """Slowdown factors; 1 is the reference."""

    core: Slowdown  #: Core clock.
    interpreter: Slowdown  #: Python.
    private_cache: Slowdown  #: A core's own caches.
    shared_cache: Slowdown  #: Shared cache.
    dram: Slowdown  #: DRAM.
    page_fault: Slowdown  #: First touches of pages.


class StateRecord(Struct, gc=False):
    """A reading of a machine's state, and its factors over a machine file's reference."""

    machine: IdentityRecord  #: The processor.
    versions: dict[str, Text]  #: dlperf, Python, system, torch, numpy.
    reading: Reading  #: The probes.
    state: FactorsRecord | None  #: Factors; null without a reference.
