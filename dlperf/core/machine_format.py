"""The file format of a measured machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import structs

from dlperf.core.clock import samples_from_record, samples_to_json
from dlperf.core.co_run import co_run_from_record, co_run_to_json
from dlperf.core.conversion import convert
from dlperf.core.files import MACHINE
from dlperf.core.machine_entries import (
    Bandwidth,
    Cpu,
    Footprint,
    Kernel,
    bandwidth_to_json,
    cost_from_record,
    cost_to_json,
    state_to_json,
)
from dlperf.core.operators import (
    Op,
    TensorTable,
    arguments_from_json,
    op_to_json,
    tensors_from_records,
)
from dlperf.core.records.machine import KernelRecord, MachineRecord

if TYPE_CHECKING:
    from dlperf.core.machine import Machine

SCHEMA, SCHEMA_VERSION = MACHINE, 5


def machine_to_json(machine: Machine) -> dict[str, Any]:
    """A machine as JSON data."""
    table = TensorTable()
    kernels = []
    for kernel in machine.kernels:
        name, args, kwargs, *_ = op_to_json(kernel.op, table)
        kernels.append(
            {
                "family": kernel.family,
                "op": [name, args, kwargs],
                "threads": kernel.threads,
                **samples_to_json(kernel.samples),
                **state_to_json(kernel),
                **({"shared_core": kernel.shared_core} if kernel.shared_core else {}),
                **({} if kernel.core_to_core is None else {"core_to_core": kernel.core_to_core}),
            }
        )
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "created": machine.created,
        "versions": dict(machine.versions),
        "cpu": {
            **vars(machine.cpu),
            "caches_bytes": list(machine.cpu.caches_bytes),
            "flags": list(machine.cpu.flags),
        },
        "mode": machine.mode,
        "groups": list(machine.groups),
        "complete": machine.complete,
        "notes": list(machine.notes),
        "bandwidths": [bandwidth_to_json(bandwidth) for bandwidth in machine.bandwidths],
        "costs": [cost_to_json(cost) for cost in machine.costs],
        "kernel_models": [
            {
                **vars(c),
                "variant": list(c.variant),
                "length_scales": list(c.length_scales),
                "signal": float(f"{c.signal:.4g}"),
                "noise": float(f"{c.noise:.4g}"),
                "leave_one_out_fracs": [float(f"{v:.4g}") for v in c.leave_one_out_fracs],
                "weights": list(c.weights),
                "noises": list(c.noises),
            }
            for c in machine.kernel_models
        ],
        "footprints": [{"name": f.name, "bytes": f.n_bytes} for f in machine.footprints],
        "co_runs": [co_run_to_json(co_run) for co_run in machine.co_runs],
        "coverage": [vars(one) for one in machine.coverage],
        "disturbances": [vars(one) for one in machine.disturbances],
        "self_tests": [vars(test) for test in machine.self_tests],
        "page_tests": [vars(test) for test in machine.page_tests],
        "reference": None if machine.reference is None else vars(machine.reference),
        "readings": [vars(reading) for reading in machine.readings],
        "data_sheet": None if machine.data_sheet is None else vars(machine.data_sheet),
        "kernels": kernels,
        "tensors": table.to_json(),
    }


def fields_from_json(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of the machine that :func:`machine_to_json` wrote. Raises DlperfError naming the
    entry that no measurement can have made.
    """
    record = convert(data, MachineRecord)
    tensors = tensors_from_records(record.tensors)

    def kernel(entry: str, row: KernelRecord) -> Kernel:
        op = Op(row.op.name, *arguments_from_json(row.op.args, row.op.kwargs, tensors, entry))
        state = row.readings, row.slowdown, row.shared_core or 0.0, row.core_to_core
        return Kernel(op, row.family, row.threads, samples_from_record(row), *state)

    return {
        "cpu": Cpu(**structs.asdict(record.cpu)),
        "kernels": tuple(
            kernel(f"kernels[{number}].op", row) for number, row in enumerate(record.kernels)
        ),
        "bandwidths": tuple(
            Bandwidth(
                b.kernel,
                b.threads,
                b.working_set_bytes,
                b.moved_bytes,
                samples_from_record(b),
                b.readings,
                b.slowdown,
            )
            for b in record.bandwidths
        ),
        "costs": tuple(
            cost_from_record(row, f"costs[{number}]") for number, row in enumerate(record.costs)
        ),
        "kernel_models": record.kernel_models,
        "footprints": tuple(Footprint(row.name, round(row.bytes)) for row in record.footprints),
        "mode": record.mode,
        "groups": record.groups,
        "co_runs": tuple(
            co_run_from_record(row, f"co_runs[{number}]")
            for number, row in enumerate(record.co_runs)
        ),
        "complete": record.complete,
        "notes": record.notes,
        "versions": record.versions,
        "created": record.created,
        "coverage": record.coverage,
        "disturbances": record.disturbances,
        "self_tests": record.self_tests,
        "page_tests": record.page_tests,
        "reference": record.reference,
        "readings": record.readings,
        "data_sheet": record.data_sheet,
    }
