"""A reading of a machine's state as a file, so that a prediction can be made for it later."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlperf.core import files, host
from dlperf.core.conversion import convert
from dlperf.core.errors import DlperfError
from dlperf.core.records.state import StateRecord
from dlperf.core.state import SCHEMA, SCHEMA_VERSION, Reading, State


@dataclass(frozen=True)
class ProbedState:
    """A reading, and the identity (:attr:`dlperf.core.machine.Cpu.identity`) and versions of the
    machine that it is of. `state` are its factors over the reference of the machine file that was
    there; None without one.
    """

    reading: Reading
    identity: tuple[str, str, int]
    versions: dict[str, str]
    state: State | None = None

    def save(self, path: str | Path) -> None:
        """Write the state file, whole or not at all."""
        files.write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> ProbedState:
        """Read a state file. Raises DlperfError naming the file, the entry and the way out."""
        try:
            return files.load(
                path, SCHEMA, SCHEMA_VERSION, cls.from_json, "Probe the machine again"
            )
        except DlperfError as error:
            raise DlperfError(
                f"{error}; dlperf machine state -o FILE makes a state file"
            ) from error

    def to_json(self) -> dict[str, Any]:
        """The state as JSON data."""
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "machine": dict(zip(("model", "family", "n_cores"), self.identity)),
            "versions": dict(self.versions),
            "reading": vars(self.reading),
            "state": None if self.state is None else dataclasses.asdict(self.state),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ProbedState:
        """The state that :meth:`to_json` wrote."""
        record = convert(data, StateRecord)
        factors, machine = record.state, record.machine
        state = None
        if factors is not None:
            state = State(
                factors.core,
                factors.interpreter,
                factors.private_cache,
                factors.shared_cache,
                factors.dram,
                factors.page_fault,
            )
        identity = machine.model, machine.family, machine.n_cores
        return cls(record.reading, identity, record.versions, state)


def probed_state(reading: Reading, reference: Reading | None) -> ProbedState:
    """A reading of this machine, over the reference of its machine file."""
    state = None if reference is None else reading.over(reference)
    return ProbedState(reading, host.this_cpu().identity, host.versions(), state)
