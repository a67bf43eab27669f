"""Whether a step fits into the memory of a device, and which batch size does."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING

from dlperf.cli.inputs import is_trace, resolve
from dlperf.cli.options import option
from dlperf.core.argument_types import size
from dlperf.core.errors import DlperfError
from dlperf.core.streams import log, warn
from dlperf.core.units import format_bytes

if TYPE_CHECKING:
    from dlperf.core.machine import Machine
    from dlperf.core.trace import Trace
    from dlperf.predictors.allocator.device_memory import DeviceMemory

DEVICE_MEMORY = option(
    "--device-memory",
    type=size,
    metavar="BYTES",
    help="24GiB, 80GB: memory of a CUDA device; predict whether the step fits into it",
)


def memory_on_device(args: Namespace, recorded: Trace, machine: Machine) -> DeviceMemory | None:
    """Memory of the step on the device of the options; None without one.

    Where there is code, the step is recorded as a device runs it, and other batch sizes are if it
    does not fit.
    """
    from dlperf.predictors.allocator.device_memory import (
        device_memory,
        largest_batch_size,
        workspace_bytes_of,
    )

    capacity_bytes = args.device_memory
    if capacity_bytes is None:
        return None
    workspace_bytes = workspace_bytes_of(machine.cpu.model)

    def memory_of(trace: Trace) -> DeviceMemory:
        return device_memory(trace, capacity_bytes, workspace_bytes=workspace_bytes)

    if is_trace(args.target):
        return _warned(memory_of(recorded))
    from dlperf.recorder.device_defaults import with_device_defaults
    from dlperf.recorder.recording import record_target

    def memory_at(batch_size: int) -> DeviceMemory:
        target = resolve(args, args.target).at(batch_size).changed(with_device_defaults)
        found = memory_of(record_target(target))
        log(f"batch size {batch_size}: needs {format_bytes(found.needed_bytes)} of the device")
        return found

    found = _warned(memory_at(recorded.batch_size))
    if found.fits:
        return found

    def needed_bytes(batch_size: int) -> int:
        is_known = batch_size == recorded.batch_size
        return found.needed_bytes if is_known else memory_at(batch_size).needed_bytes

    try:
        fitting = largest_batch_size(
            needed_bytes, recorded.batch_size, capacity_bytes - found.context_bytes
        )
    except DlperfError as error:
        warn(f"the batch size that fits is unknown: {error}")
        return found
    return replace(found, fitting_batch_size=fitting or 0)


def _warned(found: DeviceMemory) -> DeviceMemory:
    for note in found.notes:
        warn(note)
    return found
