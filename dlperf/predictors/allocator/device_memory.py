"""Memory of a step on a CUDA device: the caching allocator run on the storages of a trace."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from dlperf.core.machine import Machine
from dlperf.core.text import counted
from dlperf.core.trace import Op, Storage, TensorSpec, Trace
from dlperf.core.units import MIB, format_bytes
from dlperf.predictors.allocator.caching import SIZES, CachingAllocator, OutOfDeviceMemory
from dlperf.predictors.allocator.process import Script

CUBLAS_WORKSPACE_BYTES = 8_519_680
"""Workspace of a cuBLAS handle, ``CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8`` in KiB times count
(aten/src/ATen/cuda/CublasHandlePool.cpp).
"""
_WORKSPACES = (
    (r"\bG?H(100|200|800|20)\b", 32 * MIB),  # compute capability 9
    (r"\bMI3\d\d", 128 * MIB),  # gfx94, gfx95
)
"""The same on other devices, by a pattern of their names (the same file)."""
CONTEXT_BYTES = 526_000_000
"""Device memory of a CUDA context and its kernels, outside the allocator: a process's memory less
the reserved one in messages of torch.OutOfMemoryError, 0.49 GiB in TianheWu/CoSeR issue 10 and in
lianqi1008/Control-GIC issue 6 (A100). Before kernels were loaded lazily it was 1343 MB
(transformers, *Model memory anatomy*); collectives take more.
"""
KINDS = (
    *("parameter", "buffer", "input", "gradient", "optimizer", "activation", "temporary"),
    *("workspace", "rounding"),
)
"""Kinds of memory. Storages without a kind in the trace are activations if the forward makes them,
else temporaries. Rounding is what blocks have more than was asked for.
"""
_PRODUCTS = frozenset(
    f"aten.{name}"
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "addr", "dot", "linear"),
        *("_addmm_activation", "_int_mm", "_scaled_mm"),
    )
)
_ZEROS = ("aten.new_zeros", "aten.zeros", "aten.zeros_like")
_SCATTERS = frozenset(
    f"aten.{name}"
    for name in ("scatter_add", "scatter", "index_put", "index_add", "index_fill", "put")
)
_N_LINES = 6


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a step on a device.

    `peak_allocated_bytes` and `peak_reserved_bytes` are ``torch.cuda.max_memory_allocated`` and
    ``max_memory_reserved`` after some steps, without a limit. `needed_bytes` is the least capacity
    with which the steps run: segments without a block in use go back to the device when it has no
    memory left. `peak_bytes` are the bytes by kind at the peak of the allocated memory (see
    :data:`KINDS`). `context_bytes` are taken by the process outside the allocator.
    `fitting_batch_size` is the largest batch size that fits where the step's own does not: None if
    it is unknown, 0 if not even one sample does.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    needed_bytes: int
    peak_bytes: tuple[tuple[str, int], ...]
    capacity_bytes: int | None = None
    context_bytes: int = CONTEXT_BYTES
    notes: tuple[str, ...] = ()
    fitting_batch_size: int | None = None

    @property
    def lacking_bytes(self) -> int:
        """Bytes that the device lacks; 0 if the step fits or the capacity is unknown."""
        if self.capacity_bytes is None:
            return 0
        return max(0, self.needed_bytes + self.context_bytes - self.capacity_bytes)

    @property
    def fits(self) -> bool:
        """Whether the step runs on the device."""
        return not self.lacking_bytes

    def to_json(self) -> dict[str, Any]:
        """The result as JSON data."""
        return {
            "capacity_bytes": self.capacity_bytes,
            "context_bytes": self.context_bytes,
            "needed_bytes": self.needed_bytes,
            "lacking_bytes": self.lacking_bytes,
            "fitting_batch_size": self.fitting_batch_size,
            "peak_bytes": dict(self.peak_bytes),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        needs = (
            f"{format_bytes(self.peak_allocated_bytes)} allocated,"
            f" {format_bytes(self.peak_reserved_bytes)} reserved at the peak"
        )
        if self.capacity_bytes is None:
            return needs
        room = (
            f"{format_bytes(self.capacity_bytes)} less {format_bytes(self.context_bytes)} of the"
            " CUDA context"
        )
        if self.fits:
            return f"{needs}; fits into {room}"
        way_out = {None: "", 0: "; not even one sample fits"}.get(
            self.fitting_batch_size, f"; batch size {self.fitting_batch_size} fits"
        )
        return f"{needs}; lacks {format_bytes(self.lacking_bytes)} in {room}{way_out}"


def device_memory(
    trace: Trace,
    capacity_bytes: int | None = None,
    *,
    workspace_bytes: int = CUBLAS_WORKSPACE_BYTES,
    context_bytes: int = CONTEXT_BYTES,
) -> DeviceMemory:
    """Memory of a recorded step on a CUDA device of `capacity_bytes`.

    PyTorch's caching allocator (:class:`dlperf.CachingAllocator`) runs on the storages of several
    steps. Each thread that multiplies matrices, the forward's and the backward's, holds a cuBLAS
    workspace of `workspace_bytes` from its first product on. Assumed: PyTorch 2.7 to 2.13, one
    stream, eager mode. Not counted: workspaces of cuDNN and of other kernels, and what a kernel of
    the device allocates otherwise than that of the CPU that was recorded; `notes` name both.

    Raises DlperfError for a capacity that is no positive number of bytes.
    """
    CachingAllocator(capacity_bytes)  # refuses what is no capacity
    on_device = _as_on_a_device(trace)
    script = Script(
        on_device,
        lambda _: (),
        lasting=[(index, workspace_bytes) for index in _first_products(trace) if workspace_bytes],
    )
    heap = CachingAllocator()
    highest, live = 0, ()  # type: int, tuple[int, ...]

    def watch(_: int, storages: Collection[int]) -> None:
        nonlocal highest, live
        if heap.allocated_bytes > highest:
            highest, live = heap.allocated_bytes, tuple(storages)

    script.run_on(heap, watch)
    by_kind: dict[str, int] = defaultdict(int)
    for index in live:
        if index < len(on_device.storages):
            by_kind[_kind(trace, on_device.storages[index])] += on_device.storages[index].nbytes
        else:
            by_kind["workspace"] += workspace_bytes
    by_kind["rounding"] = heap.peak_allocated_bytes - sum(by_kind.values())
    free_bytes = math.inf if capacity_bytes is None else capacity_bytes - context_bytes
    needed = heap.peak_reserved_bytes
    if needed > free_bytes:
        needed = _least_capacity(script, needed)
    return DeviceMemory(
        heap.peak_allocated_bytes,
        heap.peak_reserved_bytes,
        needed,
        tuple((kind, by_kind[kind]) for kind in KINDS),
        capacity_bytes,
        context_bytes,
        tuple(_notes(trace)),
    )


def workspace_bytes_of(model: str) -> int:
    """Default workspace of cuBLAS, or of hipBLAS, on a device.

    >>> workspace_bytes_of("NVIDIA A100 PCIe 80GB"), workspace_bytes_of("NVIDIA H100 PCIe 80GB")
    (8519680, 33554432)
    """
    found = (n_bytes for pattern, n_bytes in _WORKSPACES if re.search(pattern, model))
    return next(found, CUBLAS_WORKSPACE_BYTES)


def memory_on(trace: Trace, machine: Machine) -> DeviceMemory | None:
    """Memory of a step on an accelerator that a data sheet describes; None on other machines, and
    where the trace does not hold its memory.
    """
    sheet = machine.data_sheet
    if sheet is None or sheet.kind != "accelerator" or not trace.storages:
        return None
    return device_memory(
        trace,
        machine.cpu.memory_bytes or None,
        workspace_bytes=workspace_bytes_of(machine.cpu.model),
    )


def largest_batch_size(
    needed_bytes: Callable[[int], int], batch_size: int, free_bytes: int
) -> int | None:
    """The largest batch size up to `batch_size` whose need is at most `free_bytes`; None if not
    even one sample fits.

    `needed_bytes` gives the need of a batch size. As each call may be slow, sizes are halved until
    one fits; then the next one is where the line through the two nearest needs crosses the limit,
    and after some calls the middle.

    >>> largest_batch_size(lambda n: 100 + 7 * n, 64, 200)
    14
    """
    high, above = batch_size, needed_bytes(batch_size)
    if above <= free_bytes:
        return batch_size
    low, below = high, above
    while below > free_bytes:
        if low == 1:
            return None
        high, above = low, below
        low //= 2
        below = needed_bytes(low)
    n_calls = 0
    while high - low > 1:
        share = 0.5 if n_calls >= _N_LINES else (free_bytes - below) / (above - below)
        guess = min(max(low + math.floor(share * (high - low)), low + 1), high - 1)
        need, n_calls = needed_bytes(guess), n_calls + 1
        if need <= free_bytes:
            low, below = guess, need
        else:
            high, above = guess, need
    return low


def _least_capacity(script: Script, enough_bytes: int) -> int:
    """The least capacity with which a script runs, to a segment's rounding."""
    unit = SIZES.segment_rounding_bytes
    low, high = 0, math.ceil(enough_bytes / unit)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            script.run_on(CachingAllocator(middle * unit))
            high = middle
        except OutOfDeviceMemory:
            low = middle
    return high * unit


def _first_products(trace: Trace) -> Iterator[int]:
    """The first product of matrices of each thread: the backward has a thread of its own."""
    threads: dict[bool, int] = {}
    for index, op in enumerate(trace.ops):
        if op.packet in _PRODUCTS:
            threads.setdefault(op.phase == "backward", index)
    yield from threads.values()


def _as_on_a_device(trace: Trace) -> Trace:
    """The trace with the storages of a device that no mode watches.

    A mask of dropout has one byte for each element: a CPU draws it in the input's number format, in
    place, and divides it (aten/src/ATen/native/Dropout.cpp). Backwards scatter into zeros in place;
    while a dispatch mode records, they make a copy (torch/csrc/autograd/FunctionsManual.cpp,
    areAnyTensorSubclassLike).
    """
    storages = list(trace.storages)
    for before, op in itertools.pairwise(trace.ops):
        drawn, first = _first(before), _first(op)
        if first is None or first.storage < 0:
            continue
        if (before.packet, op.packet) == ("aten.bernoulli_", "aten.div_") and drawn == first:
            storages[first.storage] = replace(storages[first.storage], nbytes=first.numel)
        zeros = [output.storage for output in before.outputs if before.packet in _ZEROS]
        if op.packet in _SCATTERS and zeros == [first.storage] and op.phase == "backward":
            copy = op.outputs[0].storage
            storages[first.storage] = replace(storages[copy], born=storages[first.storage].born)
            storages[copy] = replace(storages[copy], nbytes=0)
    return replace(trace, storages=tuple(storages))


def _first(op: Op) -> TensorSpec | None:
    return op.args[0] if op.args and isinstance(op.args[0], TensorSpec) else None


def _kind(trace: Trace, storage: Storage) -> str:
    if storage.kind:
        return storage.kind
    made_in = trace.ops[storage.born].phase if storage.born >= 0 else "forward"
    return "activation" if made_in == "forward" else "temporary"


def _notes(trace: Trace) -> Iterator[str]:
    n_convolutions = sum("convolution" in op.packet for op in trace.ops)
    if n_convolutions:
        yield (
            "workspaces of cuDNN are unknown and not counted:"
            f" {counted(n_convolutions, 'convolution')} may take more memory for a moment"
        )
    recurrent = sorted({op.packet for op in trace.ops if "rnn" in op.packet or "lstm" in op.packet})
    if recurrent:
        yield f"cuDNN keeps other memory for a backward than {', '.join(recurrent)} on a CPU"
    optimizer = trace.optimizer
    if optimizer is not None and optimizer.implementation == "for-loop" and optimizer.n_tensors > 1:
        yield (
            f"{optimizer.type} was recorded as a for-loop; where PyTorch chooses, a device runs"
            " foreach=True, whose temporaries may be as large as all parameters"
        )
