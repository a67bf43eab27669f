"""A machine judged by a table of measured kernels, and a table made into kernel models."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dlperf.core.blas import one_blas_thread
from dlperf.core.errors import DlperfError
from dlperf.core.kernel_table import KernelTable, TableRow
from dlperf.core.machine import Machine
from dlperf.core.units import format_percent
from dlperf.ops import counts
from dlperf.predictors.data_sheet import DATA_SHEET
from dlperf.predictors.device_kernels import is_possible, sheet_s
from dlperf.predictors.kernel_cost_model import cost_model_of
from dlperf.predictors.kernel_fits import fit_kernel_models
from dlperf.report.document import Column, format_table

SCHEMA, SCHEMA_VERSION = "dlperf.kernel-validation", 1


@dataclass(frozen=True)
class FamilyAccuracy:
    """Relative absolute errors of one family's rows, and where their predictions are from."""

    name: str
    errors: tuple[float, ...]
    sources: dict[str, int]

    @property
    def median_error(self) -> float:
        """The median of |predicted / measured - 1|."""
        return statistics.median(self.errors)

    @property
    def mean_error(self) -> float:
        """The mean of |predicted / measured - 1|."""
        return statistics.fmean(self.errors)


@dataclass(frozen=True)
class TableAccuracy:
    """A machine's predictions of a table's kernels, by family."""

    machine: str
    table: str
    families: tuple[FamilyAccuracy, ...]
    n_doubtful: int

    def to_text(self) -> str:
        """The table of errors."""
        columns = [
            Column("kernels", tuple(one.name for one in self.families), align_left=True),
            Column("rows", tuple(f"{len(one.errors):,}" for one in self.families)),
            Column(
                "median error", tuple(format_percent(one.median_error) for one in self.families)
            ),
            Column("mean error", tuple(format_percent(one.mean_error) for one in self.families)),
            Column(
                "source",
                tuple(
                    ", ".join(f"{name} {n:,}" for name, n in sorted(one.sources.items()))
                    for one in self.families
                ),
                align_left=True,
            ),
        ]
        lines = [f"{self.table} by {self.machine}", format_table(columns, None)]
        if self.n_doubtful:
            lines.append(
                f"note: {self.n_doubtful:,} rows are faster than the device can be: they count here"
            )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The errors as JSON data."""
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "machine": self.machine,
            "table": self.table,
            "n_doubtful": self.n_doubtful,
            "families": [
                {
                    "name": one.name,
                    "rows": len(one.errors),
                    "median_error": one.median_error,
                    "mean_error": one.mean_error,
                    "sources": dict(one.sources),
                }
                for one in self.families
            ],
        }


@one_blas_thread
def judge(machine: Machine, table: KernelTable) -> TableAccuracy:
    """Errors of a machine's predictions of a table's kernels. The machine's own measurement of a
    kernel counts as its prediction. Raises DlperfError for an operator that it does not predict.
    """
    by_family: dict[str, list[float]] = defaultdict(list)
    sources: dict[str, Counter[str]] = defaultdict(Counter)
    predicted = _predict(machine, table.rows)
    for row, (seconds, source) in zip(table.rows, predicted):
        by_family[row.family].append(abs(seconds / row.seconds - 1.0))
        sources[row.family][source] += 1
    return TableAccuracy(
        machine.path or machine.cpu.model,
        table.path,
        tuple(
            FamilyAccuracy(name, tuple(errors), dict(sources[name]))
            for name, errors in by_family.items()
        ),
        sum(not ok for ok in _possible(machine, table.rows)),
    )


def _predict(machine: Machine, rows: Sequence[TableRow]) -> list[tuple[float, str]]:
    threads = machine.threads[0] if machine.threads else 1
    if machine.data_sheet is not None and not machine.kernels:
        return [(_sheet_s(machine, row), DATA_SHEET) for row in rows]
    cost_model = cost_model_of(machine, threads)
    ops = [row.op for row in rows]
    found = []
    for row, kernel in zip(rows, cost_model.modelled(ops)):
        exact = machine.exact(row.op, cost_model.threads)
        if exact is not None:
            found.append((exact.seconds, "measured"))
        elif kernel is not None:
            found.append((kernel.seconds, kernel.source))
        elif machine.data_sheet is not None:
            found.append((_sheet_s(machine, row), DATA_SHEET))
        else:
            work = counts.op_flops(row.op) or 0, counts.op_bytes(row.op)
            found.append((cost_model.unpriced_s(*work), "unpriced"))
    return found


def _sheet_s(machine: Machine, row: TableRow) -> float:
    return sheet_s(machine, row.op, counts.op_flops(row.op) or 0, counts.op_bytes(row.op))[0]


def _possible(machine: Machine, rows: Sequence[TableRow]) -> list[bool]:
    """Whether the device can have taken each row's time; all on a machine without a data sheet."""
    if machine.data_sheet is None:
        return [True] * len(rows)
    return [
        is_possible(
            machine, row.op, counts.op_flops(row.op) or 0, counts.op_bytes(row.op), row.seconds
        )
        for row in rows
    ]


def slowness(machine: Machine, table: KernelTable) -> float:
    """Median of a table's times over those of the device's data sheet."""
    return statistics.median(row.seconds / _sheet_s(machine, row) for row in table.rows)


def import_table(machine: Machine, table: KernelTable) -> tuple[Machine, int]:
    """A device with the kernels of a table and their kernel models, and how many rows were left out
    because the device cannot be so fast.

    Raises DlperfError for a machine without a data sheet, and where most rows are too fast.
    """
    if machine.data_sheet is None:
        raise DlperfError(
            f"{machine.path or machine.cpu.model}: is measured here, and its kernels are this"
            " machine's; name a device, such as --device a100"
        )
    possible = _possible(machine, table.rows)
    rows = tuple(row for row, ok in zip(table.rows, possible) if ok)
    if 2 * len(rows) < len(possible):
        raise DlperfError(
            f"{table.path}: {len(possible) - len(rows):,} of {len(possible):,} rows are faster than"
            f" {machine.cpu.model} can be; is the time in the unit of its column, and the device"
            " right?"
        )
    imported = replace(table, rows=rows).kernels(machine.threads[0])
    note = f"{len(rows):,} kernels imported from {table.path}"
    found = replace(machine.with_kernels(imported), notes=(*machine.notes, note), path="")
    return fit_kernel_models(found), len(possible) - len(rows)
