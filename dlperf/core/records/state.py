"""The format of a state file."""

from __future__ import annotations

from msgspec import Struct

from dlperf.core.conversion import Text, Threads
from dlperf.core.state import Reading


class IdentityRecord(Struct, gc=False):
    """The processor that was probed."""

    model: Text  #: Name of the model.
    family: Text  #: Vendor, family, model, stepping.
    n_cores: Threads  #: Cores that the process may use.


class StateRecord(Struct, gc=False):
    """A reading of a machine's state."""

    machine: IdentityRecord  #: The processor.
    versions: dict[str, Text]  #: dlperf, Python, system, torch, numpy.
    reading: Reading  #: The probes.
