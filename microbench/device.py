"""An accelerator, timed by its events: kernels of a spread of shapes, and the roofs that they show.

A kernel's time is that in a stream of kernels: work that is given to the device before keeps it
busy while the host issues the calls. So the roofs are the best of the kernels: arithmetic of matrix
products, bandwidth of elementwise kernels beyond the second cache and inside it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F

from dlperf.core import host
from dlperf.core.clock import Clock, Repeats, Samples, sample_in_turns
from dlperf.core.data_sheet import DataSheet
from dlperf.core.device_clock import DeviceClock
from dlperf.core.errors import WorkFailed, one_line
from dlperf.core.kernel_table import KernelTable, TableRow, row_of
from dlperf.core.machine_entries import Cpu
from dlperf.core.operators import Op
from dlperf.core.shelf import data_sheet_machine
from dlperf.core.text import counted
from dlperf.core.units import format_seconds
from dlperf.microbench.plan import design, log_pick
from dlperf.microbench.progress import progress_of
from dlperf.ops import counts

Cells = dict[str, int | str]
DTYPES = ("float32", "float16", "bfloat16")
_TF32_CAPABILITY = 8
_SQUARES = (1024, 2048, 4096, 8192)
_UNARY = {"quick": ("relu",), "full": ("relu", "sigmoid", "tanh"), "thorough": ("relu", "sigmoid",
          "tanh", "exp", "silu")}  # fmt: skip
N_PRODUCTS = {"quick": 12, "full": 240, "thorough": 480}
N_CONVOLUTIONS = {"quick": 16, "full": 240, "thorough": 480}
"""Of each dtype."""
_LARGEST_FRAC = 0.1
"""Share of the memory that the operands of a kernel may take."""
_MOST_FLOPS = 1.2e12
"""Of a kernel: the largest square product's, some 0.1 s on a device of 10 TFLOP/s."""
_HOST_CALL_S = 2e-5
"""Longer than the host takes to issue a call; the head start of the device is so long for each."""
_HEAD_BYTES = 2**27
_HEAD_FRAC = 0.05
"""Bytes of the copies that are the head start, at most this share of the memory."""
_MOST_CALLS = 256
"""Fewer than a device's queue holds, so that the host can run ahead."""
_BEYOND_CACHE, _IN_CACHE = 4.0, 0.5
"""A sweep of so many times the second cache comes from the memory; of so little, from the cache."""
_CLOCK = Clock(switches=lambda: 0)
"""A device computes on while the host loses its core."""
_NO_TIME = (RuntimeError, ValueError)


@dataclass(frozen=True)
class DevicePoint:
    """One kernel to time, as the cells of a row of a table of kernels."""

    family: str
    cells: Cells

    @property
    def name(self) -> str:
        """The kernel in one line."""
        cells = " ".join(f"{name}={value}" for name, value in self.cells.items())
        return f"{self.family} {cells}"

    def rows(self, samples: Samples) -> list[TableRow]:
        """The rows of its samples."""
        cells = {name: str(value) for name, value in self.cells.items()}
        return [row_of(self.family, cells, seconds) for seconds in samples.values]

    @cached_property
    def op(self) -> Op:
        """The kernel's operator."""
        (row,) = self.rows(Samples((1.0,)))
        return row.op

    def bytes(self) -> int:
        """Bytes of its operands and results."""
        return sum(spec.numel * spec.item_bytes for spec in (*self.op.inputs, *self.op.outputs))

    def flops(self) -> float:
        """Floating-point operations of the kernel."""
        return counts.op_flops(self.op) or 0

    def call(self, device: Any) -> Callable[[], object]:
        """The kernel on operands of its own."""
        settings = {"device": device, "dtype": getattr(torch, str(self.cells["dtype"]))}
        operands = [torch.rand(spec.shape, **settings).sub_(0.5) for spec in self.op.inputs]
        if self.family == "elementwise":
            function = getattr(torch.ops.aten, str(self.cells["op"]))
            return lambda: function(operands[0])
        if self.family == "gemm":
            product = torch.bmm if "batch" in self.cells else torch.mm
            return lambda: product(operands[0], operands[1])
        settings_of_row: Any = self.op.args[3:9]
        stride, padding, _, _, _, groups = settings_of_row
        return lambda: F.conv2d(
            operands[0],
            operands[1],
            None,
            stride,
            padding,
            1,
            groups,
        )


@dataclass(frozen=True)
class DeviceMeasurement:
    """What was measured of an accelerator: its roofs as a machine, and its kernels as a table.
    `left_out` names why kernels are missing.
    """

    machine: Any
    table: KernelTable
    n_done: int
    n_planned: int
    left_out: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether every planned kernel was tried."""
        return self.n_done == self.n_planned


def plan(mode: str, memory_bytes: int) -> list[DevicePoint]:
    """The kernels of a calibration, those of the roofs first, without what takes too much memory.

    >>> len(plan("quick", 10**9)) < len(plan("full", 10**9)) < len(plan("thorough", 10**9))
    True
    """
    points = [*_squares(), *_elementwise(mode)]
    for dtype in DTYPES:
        points += islice(_products(dtype), N_PRODUCTS[mode])
        points += islice(_convolutions(dtype), N_CONVOLUTIONS[mode])
    most_bytes = _LARGEST_FRAC * memory_bytes
    return [
        point for point in points if point.bytes() <= most_bytes and point.flops() <= _MOST_FLOPS
    ]


def _squares() -> Iterator[DevicePoint]:
    for dtype in DTYPES:
        for side in _SQUARES:
            yield DevicePoint("gemm", {"m": side, "n": side, "k": side, "dtype": dtype})


def _elementwise(mode: str) -> Iterator[DevicePoint]:
    per_octave = {"quick": 0.5, "full": 1.0, "thorough": 2.0}[mode]
    for dtype in DTYPES[:2]:
        for name in _UNARY[mode]:
            for step in range(round(per_octave * 20) + 1):
                size = round(2 ** (8 + step / per_octave))
                yield DevicePoint("elementwise", {"shape": f"{size}", "op": name, "dtype": dtype})


def _between(low: int, high: int, part: float, multiple: int = 1) -> int:
    """A size of a log-uniform spread, a multiple of a number."""
    return multiple * log_pick(part, low / multiple, high / multiple)


def _products(dtype: str) -> Iterator[DevicePoint]:
    for number, (m, n, k, b) in enumerate(design(4)):
        multiple = 8 if number % 2 else 1  # tensor cores take whole eights
        sides = [_between(8, 8192, part, multiple) for part in (m, n, k)]
        cells: Cells = dict(zip("mnk", sides), dtype=dtype)
        if number % 4 == 3:
            sides = [_between(8, 512, part, multiple) for part in (m, n, k)]
            cells = dict(zip("mnk", sides), batch=_between(2, 256, b), dtype=dtype)
        yield DevicePoint("gemm", cells)


def _convolutions(dtype: str) -> Iterator[DevicePoint]:
    for number, (n, c, out, side, taps, stride) in enumerate(design(6)):
        kernel = (1, 3, 3, 3, 5, 7)[int(6 * taps)]
        channels = _between(1, 1024, c, 8 if number % 3 else 1)
        yield DevicePoint(
            "conv2d",
            {
                **{"n": _between(1, 128, n), "c_in": channels},
                **dict.fromkeys("hw", max(kernel, _between(7, 224, side))),
                **{"c_out": _between(8, 1024, out, 8), "kh": kernel, "kw": kernel},
                **dict.fromkeys(("stride_h", "stride_w"), 1 + (stride > 0.75)),
                **dict.fromkeys(("pad_h", "pad_w"), kernel // 2),
                "dtype": dtype,
            },
        )


def repeats(mode: str) -> Repeats:
    """How a kernel is sampled; warm calls choose the library's kernel."""
    length_s, n_samples = {"quick": (1e-3, 3), "full": (2e-3, 5), "thorough": (4e-3, 9)}[mode]
    return Repeats(sample_s=length_s, n_samples=n_samples, warmup=3, max_calls=_MOST_CALLS)


def measure_device(
    device: Any, mode: str, known: Mapping[str, Samples], clock: Clock = _CLOCK
) -> DeviceMeasurement:
    """Time an accelerator. `known` are samples of an earlier calibration by the kernel's signature.

    Ctrl-C ends it early, with what was measured until then. Raises WorkFailed where not even the
    roofs could be measured.
    """
    module = torch.get_device_module(device)
    properties = module.get_device_properties(device)
    timer = DeviceClock(module, device)
    ahead = replace(
        clock, device=replace(timer, head_start=_head_start(timer, properties.total_memory))
    )
    points, how = plan(mode, properties.total_memory), repeats(mode)
    rows: list[TableRow] = []
    left_out: Counter[str] = Counter()
    first: dict[str, str] = {}
    n_done = 0
    try:
        launch = _launch(device, ahead, replace(clock, device=timer), how)
        tf32_flops_per_s = _tf32(device, properties, ahead, how)
        with progress_of(len(points), "kernel", f"calibrating {device}") as progress:
            for point in points:
                progress.set_postfix_str(point.family)
                signature = point.op.signature
                try:
                    samples = known.get(signature) or _sample(point, device, ahead, how)
                    rows += point.rows(samples)
                except torch.OutOfMemoryError:
                    left_out[reason := "the device is out of memory"] += 1
                    first.setdefault(reason, point.name)
                    module.empty_cache()
                except _NO_TIME as error:
                    left_out[reason := one_line(error)[:120]] += 1
                    first.setdefault(reason, point.name)
                n_done += 1
                progress.update(1)
    except KeyboardInterrupt:
        if not _has_roofs(rows):
            raise
    if not _has_roofs(rows):
        reason = next(iter(left_out), "no kernel was timed")
        raise WorkFailed(f"{device}: neither products nor elementwise kernels run: {reason}")
    cpu = Cpu(
        str(properties.name),
        int(properties.multi_processor_count),
        (0, int(getattr(properties, "L2_cache_size", 0)), 0),
        int(properties.total_memory),
    )
    sheet = _sheet(cpu, rows, launch, tf32_flops_per_s)
    capability = getattr(properties, "major", 0) + 0.1 * getattr(properties, "minor", 0)
    if device.type == "cuda" and torch.version.cuda:
        sheet = replace(sheet, compute_capability=round(capability, 1))
    notes = [
        f"{counted(n, 'kernel')} left out, the first {first[reason]}: {reason}"
        for reason, n in left_out.items()
    ]
    machine = replace(
        data_sheet_machine(cpu, sheet),
        mode=mode,
        complete=n_done == len(points),
        versions=host.versions(),
        notes=(launch.sentence, *notes),
    )
    table = KernelTable(f"{device} ({cpu.model})", tuple(rows))
    return DeviceMeasurement(machine, table, n_done, len(points), tuple(notes))


def _sample(point: DevicePoint, device: Any, clock: Clock, how: Repeats) -> Samples:
    (samples,) = sample_in_turns([point.call(device)], how, clock)
    return samples


def _head_start(timer: DeviceClock, memory_bytes: int) -> Callable[[int], None]:
    """Work that keeps the device busy while the host issues a number of calls."""
    n_bytes = min(_HEAD_BYTES, round(_HEAD_FRAC * memory_bytes))
    source = torch.zeros(n_bytes, dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)

    def copy() -> object:
        return target.copy_(source)

    copy()
    copy_s = max(timer.time(copy, 3) / 3, 1e-6)

    def start(n_calls: int) -> None:
        for _ in range(min(_MOST_CALLS, math.ceil(n_calls * _HOST_CALL_S / copy_s))):
            copy()

    return start


@dataclass(frozen=True)
class _Launch:
    """Seconds of the smallest kernel: in a stream that runs behind the host, from the host as fast
    as it can, and with the host waiting for each.
    """

    stream_s: float
    host_s: float
    alone_s: float

    @property
    def sentence(self) -> str:
        """The three in words."""
        return (
            f"a kernel of one element takes {format_seconds(self.stream_s)} in a full queue,"
            f" {format_seconds(self.host_s)} as the host issues them, and"
            f" {format_seconds(self.alone_s)} where it waits for each"
        )


def _launch(device: Any, ahead: Clock, timer: Clock, how: Repeats) -> _Launch:
    one = torch.zeros(1, device=device)
    module = torch.get_device_module(device)

    def wait_for_each() -> None:
        one.relu_()
        module.synchronize(device)

    found = [
        sample_in_turns([call], how, clock)[0].median
        for call, clock in (
            (one.relu_, ahead),
            (one.relu_, timer),
            (wait_for_each, replace(timer, device=None)),
        )
    ]
    return _Launch(*found)


def _tf32(device: Any, properties: Any, clock: Clock, how: Repeats) -> float:
    """FLOP/s of the fastest product in tf32; 0 on a device without it."""
    if device.type != "cuda" or getattr(properties, "major", 0) < _TF32_CAPABILITY:
        return 0.0
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        points = [point for point in _squares() if point.cells["dtype"] == "float32"]
        return max(_flops_per_s(point, _sample(point, device, clock, how)) for point in points)
    except (torch.OutOfMemoryError, *_NO_TIME):
        return 0.0
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _flops_per_s(point: DevicePoint, samples: Samples) -> float:
    return max(map(_product_rate, point.rows(samples)))


def _product_rate(row: TableRow) -> float:
    """FLOP/s of a product of matrices."""
    left, right = row.op.inputs
    return 2.0 * left.numel * right.shape[-1] / row.seconds


def _has_roofs(rows: Sequence[TableRow]) -> bool:
    families = {row.family for row in rows}
    return "gemm" in families and bool(families - {"gemm", "conv2d"})


def _sheet(
    cpu: Cpu, rows: Sequence[TableRow], launch: _Launch, tf32_flops_per_s: float
) -> DataSheet:
    """The roofs that kernels show."""
    products: dict[str, float] = {}
    rates: list[tuple[int, float]] = []
    for row in rows:
        spec = row.op.inputs[0]
        if row.family == "gemm":
            products[spec.dtype] = max(products.get(spec.dtype, 0.0), _product_rate(row))
        elif row.family != "conv2d":
            moved = 2 * spec.numel * spec.item_bytes
            rates.append((moved, moved / row.seconds))
    largest, cache = max(moved for moved, _ in rates), cpu.caches_bytes[1]
    beyond = min(_BEYOND_CACHE * cache, largest) if cache else largest
    dram = max(rate for moved, rate in rates if moved >= beyond)
    inside = [rate for moved, rate in rates if moved <= _IN_CACHE * cache]
    best = max([dram, *inside])
    plain = products.pop("float32", None) or min(products.values())
    kernels = "measured: the fastest"
    return DataSheet(
        "accelerator",
        {"float32": plain},
        dram,
        products | ({"tf32": tf32_flops_per_s} if tf32_flops_per_s else {}),
        (0.0, max(best, max(rate for _, rate in rates)), 0.0) if cache else (0.0, 0.0, 0.0),
        launch_s=launch.stream_s,
        tf32=bool(tf32_flops_per_s) and torch.backends.cudnn.allow_tf32,
        sources={
            "flops_per_s": f"{kernels} product of float32 matrices",
            "matrix_flops_per_s": f"{kernels} product of matrices in this dtype",
            "dram_bytes_per_s": f"{kernels} elementwise kernel beyond the second cache",
            "caches_bytes_per_s": f"{kernels} elementwise kernel",
            "launch_s": "measured: a kernel of one element in a full queue, loads included",
            **dict.fromkeys(
                ("n_units", "caches_bytes", "memory_bytes"), "the device's properties in torch"
            ),
        },
    )
