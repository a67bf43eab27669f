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
    from dlperf.core.trace import Trace
    from dlperf.forecast.prediction import Prediction
    from dlperf.predictors.allocator.device_memory import DeviceMemory

DEVICE_MEMORY = option(
    "--device-memory",
    type=size,
    metavar="BYTES",
    help=(
        "24GiB, 80GB: predict whether the step fits into the memory of a CUDA device (default: that"
        " of --device)"
    ),
)


def memory_on_device(args: Namespace, prediction: Prediction) -> DeviceMemory | None:
    """Memory of the step on the device of the options; None without one.

    Where there is code, the step is recorded as a device runs it, and other batch sizes are if it
    does not fit.
    """
    from dlperf.predictors.allocator.device_memory import (
        device_memory,
        largest_batch_size,
        workspace_bytes_of,
    )
    from dlperf.recorder.device_defaults import with_device_defaults
    from dlperf.recorder.recording import record_target

    found, recorded = prediction.device_memory, prediction.trace
    capacity_bytes = args.device_memory
    if capacity_bytes is None:
        capacity_bytes = None if found is None else found.capacity_bytes
    if capacity_bytes is None:
        return found
    workspace_bytes = workspace_bytes_of(prediction.machine.cpu.model)

    def memory_of(trace: Trace) -> DeviceMemory:
        return device_memory(trace, capacity_bytes, workspace_bytes=workspace_bytes)

    def memory_at(batch_size: int) -> DeviceMemory:
        target = resolve(args, args.target).at(batch_size).changed(with_device_defaults)
        found = memory_of(record_target(target))
        log(f"batch size {batch_size}: needs {format_bytes(found.needed_bytes)} of the device")
        return found

    has_code = not is_trace(args.target)
    if found is None:
        found = memory_at(recorded.batch_size) if has_code else memory_of(recorded)
        for note in found.notes:
            warn(note)
    elif capacity_bytes != found.capacity_bytes:
        found = memory_of(recorded)
    if found.fits or not has_code:
        return found
    of_step = found.needed_bytes

    def needed_bytes(batch_size: int) -> int:
        return of_step if batch_size == recorded.batch_size else memory_at(batch_size).needed_bytes

    try:
        fitting = largest_batch_size(
            needed_bytes, recorded.batch_size, capacity_bytes - found.context_bytes
        )
    except DlperfError as error:
        warn(f"the batch size that fits is unknown: {error}")
        return found
    return replace(found, fitting_batch_size=fitting or 0)
