"""A reading of a machine's state as a file, so that a prediction can be made for it later."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlperf.core import files, host
from dlperf.core.conversion import convert
from dlperf.core.errors import DlperfError
from dlperf.core.records.state import StateRecord
from dlperf.core.state import SCHEMA, SCHEMA_VERSION, Reading


@dataclass(frozen=True)
class ProbedState:
    """A reading, and the identity (:attr:`dlperf.core.machine.Cpu.identity`) and versions of the
    machine that it is of. Its factors are those over the reference of the machine file with which
    it is used.
    """

    reading: Reading
    identity: tuple[str, str, int]
    versions: dict[str, str]

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
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ProbedState:
        """The state that :meth:`to_json` wrote."""
        record = convert(data, StateRecord)
        machine = record.machine
        identity = machine.model, machine.family, machine.n_cores
        return cls(record.reading, identity, record.versions)


def probed_state(reading: Reading) -> ProbedState:
    """A reading of this machine."""
    return ProbedState(reading, host.this_cpu().identity, host.versions())
