"""Time of an operator's kernel on a device that is known by its data sheet.

    t = t_launch + 3 t_latency + max(W / P, b / B)

A kernel starts (t_launch), and loads its code, its arguments and its operands one after another
(three latencies of the memory, as none of them is in a cache). b are the bytes of all operands, B
the bandwidth of the memory. P is the peak at the sustained clock. W is the arithmetic that the
busiest multiprocessor does, times their number: whole tiles of a product, in whole waves (NVIDIA,
"Matrix Multiplication Background User's Guide": tile and wave quantization).
A processor has no launch, and its libraries cut a product into parts of any size.

Contractions are products of m x k and k x n. Tiles have 128 x 128, 128 x 64 or 128 x 32 results:
the sizes in the names of cuBLAS's and cuDNN's kernels (volta_sgemm_128x32_nn). Tiles of a matrix
product may lie the other way, too (ampere_sgemm_32x128_tn). Where they leave multiprocessors idle,
k may be cut into parts, whose results a second kernel adds up (splitKreduce_kernel). A convolution
of 3 x 3 taps and stride 1 may take Winograd's F(2x2, 3x3) instead, 16 products for 4 results (Lavin
and Gray 2016, arXiv 1509.09308): a block has 32 tiles of the image and 32 channels, as in their
kernel; the accumulators of more would leave no registers for a second block. The fastest counts, as
cudnnFind does it. The gradient of a weight sums over the image's pixels, which kernels split, so
that it has no waves. Neither has a depthwise convolution, a thread of which computes one result
(ATen/native/cuda/DepthwiseConv2d.cu).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dlperf.core.data_sheet import DataSheet
from dlperf.core.machine import Machine
from dlperf.core.trace import Op, TensorSpec
from dlperf.ops import counts
from dlperf.ops.blocking import is_contraction, matrices_of
from dlperf.predictors.kernels.description import KernelDescription, log2
from dlperf.predictors.kernels.onednn import ConvolutionCall, convolution_call

_TILES = ((128, 128), (128, 64), (128, 32))
"""Results of a product that one block of threads computes."""
_LYING_TILES = tuple((columns, rows) for rows, columns in _TILES if rows != columns)
"""More tiles of a product of matrices."""
_WINOGRAD_BLOCK, _WINOGRAD_POINTS, _WINOGRAD_SIDE = 32, 16, 2
"""F(2x2, 3x3): tiles and channels of a block, products of a tile, its results along a side."""
_COLD_LOADS = 3
"""Loads from the memory one after another before a kernel computes: code, arguments, operands."""
_VECTOR = 8
"""Channels that kernels load at once; others go one by one."""


@dataclass(frozen=True, slots=True)
class DeviceProduct:
    """A product of m x k and k x n on a device, `batch` times; `winograd` is the shape of the same
    work in Winograd's domain (tiles, channels out, channels in), None where it does not apply. One
    that `is_direct` has neither tiles nor waves. One `of_matrices` takes tiles of either direction.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    winograd: tuple[int, int, int] | None = None
    is_direct: bool = False
    of_matrices: bool = False

    def work(self, n_units: int) -> tuple[float, str]:
        """Multiply-adds of the busiest unit times the number of units, and the kernel's name: its
        tile, and whether one wave is all.

        >>> DeviceProduct(128, 33, 10).work(1)  # two tiles of 128 x 32, or one of 128 x 64
        (81920.0, '128x64, one wave')
        """
        if self.is_direct:
            return float(self.batch * self.m * self.n * self.k), "direct"
        found = [
            (self.m, self.n, rows, columns, self.k, f"{rows}x{columns}")
            for rows, columns in (*_TILES, *(_LYING_TILES if self.of_matrices else ()))
        ]
        if self.winograd is not None:
            tiles, out, channels = self.winograd
            sides = _WINOGRAD_BLOCK, _WINOGRAD_BLOCK
            found.append((tiles, out, *sides, _WINOGRAD_POINTS * channels, "winograd"))
        works = []
        for m, n, rows, columns, k, name in found:
            waves = -(-self.batch * -(-m // rows) * -(-n // columns) // n_units)
            works.append((waves * n_units * rows * columns * k, waves, name))
        work, waves, name = min(works)
        return float(work), f"{name}, one wave" if waves == 1 else name

    def split(self, n_units: int) -> list[tuple[float, float]]:
        """For each tile of a product of matrices whose blocks leave units idle: the work
        (:meth:`work`) with k cut into as many parts as the units compute at once, and the partial
        results that these write.

        >>> DeviceProduct(128, 128, 1000, of_matrices=True).split(10)[0]  # ten parts of 100
        (16384000.0, 163840.0)
        """
        found = []
        for rows, columns in (*_TILES, *_LYING_TILES) if self.of_matrices else ():
            blocks = max(1, self.batch * -(-self.m // rows) * -(-self.n // columns))
            if (parts := min(n_units // blocks, self.k)) > 1:
                results = float(n_units * rows * columns)
                found.append((results * -(-self.k // parts), results))
        return found


def device_products(op: Op, call: ConvolutionCall | None = None) -> tuple[DeviceProduct, ...]:
    """Products that a matrix product or a convolution is made of; () for other operators."""
    call = call or convolution_call(op)
    if (matrices := matrices_of(op)) is not None:
        left, right = matrices
        k, n = left.shape[-1], right.shape[0 if op.packet == "aten.linear" else -1]
        batch = left.shape[0] if len(right.shape) == 3 else 1
        return (DeviceProduct(left.numel // max(k * batch, 1), n, k, batch, of_matrices=True),)
    if call is None:
        return ()
    convolution, window = call.convolution, call.convolution.window
    c_in, c_out, groups = convolution.c_in, convolution.c_out, convolution.groups
    n, taps = call.image.shape[0], math.prod(window.kernel)
    after, before = (math.prod(spec.shape[2:]) for spec in (call.after, call.before))
    is_dense = all(s == 1 for s in (*window.stride, *window.dilation))
    found = []
    for way in call.ways or ("weight",):
        pixels, out, contracted = {
            "output": (n * after, c_out, c_in * taps),
            "input": (n * before, c_in, c_out * taps * after // max(before, 1)),
            "weight": (c_out, c_in * taps, n * after),
        }[way]
        winograd = None
        if way != "weight" and tuple(window.kernel) == (3, 3) and is_dense:
            sides = (call.after if way == "output" else call.before).shape[2:]
            tiles = n * math.prod(math.ceil(side / _WINOGRAD_SIDE) for side in sides)
            winograd = (tiles, out, contracted // taps)
        is_direct = way == "weight" or (groups > 1 and c_in == 1)
        found.append(DeviceProduct(pixels, out, contracted, groups, winograd, is_direct))
    return tuple(found)


def sheet_of(machine: Machine) -> DataSheet:
    """The data sheet of a machine that has one."""
    assert machine.data_sheet is not None
    return machine.data_sheet


def dtype_of(op: Op) -> str:
    """The dtype that an operator computes in."""
    specs = (*op.inputs, *op.outputs)
    return next(
        (spec.dtype for spec in specs if spec.dtype.startswith(("float", "bfloat", "complex"))),
        specs[0].dtype if specs else "float32",
    )


def sheet_needs_s(
    machine: Machine, op: Op, flops: float, n_bytes: float, part: float = 1.0
) -> dict[str, float]:
    """Seconds of an operator's kernel by the data sheet (equation in the module's docstring), by
    what bounds it: its arithmetic, its bytes, and its start.

    `part` is the share of a processor's cores that compute.
    """
    sheet, dtype = sheet_of(machine), dtype_of(op)
    is_accelerator = sheet.kind == "accelerator"
    products = device_products(op)
    start_s, n_units = _start_s(machine), machine.cpu.n_cores
    ways = [(flops, n_bytes, start_s)]
    if products and is_accelerator:
        work = 2.0 * sum(product.work(n_units)[0] for product in products)
        ways = [(work, n_bytes, start_s)]
        sum_bytes = max((spec.item_bytes for spec in op.outputs), default=0)
        for product in products:  # matrices have one
            ways += [
                (2.0 * work, n_bytes + 2.0 * max(4, sum_bytes) * results, 2.0 * start_s)
                for work, results in product.split(n_units)
            ]
    contracts = bool(products) or is_contraction(op)
    peak = part * sheet.sustained_frac * sheet.peak_flops_per_s(dtype, contracts)
    bandwidth = sheet.dram_bytes_per_s
    work, n_bytes, start_s = min(
        ways, key=lambda way: way[2] + max(way[0] / peak, way[1] / bandwidth)
    )
    return {"compute": work / peak, "DRAM": n_bytes / bandwidth, "overhead": start_s}


def sheet_s(
    machine: Machine, op: Op, flops: float, n_bytes: float, part: float = 1.0
) -> tuple[float, str]:
    """Seconds of an operator's kernel by the data sheet, and what bounds it: the start, then the
    longer of arithmetic and bytes (:func:`sheet_needs_s`).
    """
    needs_s = sheet_needs_s(machine, op, flops, n_bytes, part)
    start_s = needs_s.pop("overhead")
    bound = max(needs_s, key=lambda name: needs_s[name])
    return start_s + needs_s[bound], "overhead" if start_s > needs_s[bound] else bound


def _start_s(machine: Machine) -> float:
    """Seconds from a kernel's launch to its first operands; 0 on a processor."""
    sheet = sheet_of(machine)
    if sheet.kind == "processor":
        return 0.0
    return sheet.launch_s + _COLD_LOADS * sheet.dram_latency_s


def is_possible(machine: Machine, op: Op, flops: float, n_bytes: float, seconds: float) -> bool:
    """Whether a device can have taken a measured time.

    Not in less than the second cache needs for the operands, and not with fewer multiply-adds than
    one for each channel that goes in and comes out: fast convolutions spare taps alone.
    """
    sheet = sheet_of(machine)
    weight = op.args[1] if op.packet == "aten.convolution" else None
    taps = math.prod(weight.shape[2:]) if isinstance(weight, TensorSpec) else 1
    peak = sheet.peak_flops_per_s(dtype_of(op), bool(device_products(op)))
    fastest = max(sheet.dram_bytes_per_s, *sheet.caches_bytes_per_s)
    return seconds >= max(flops / taps / peak, n_bytes / fastest)


# -- kernel models --------------------------------------------------------------------------------


def describe_on(machine: Machine, op: Op) -> KernelDescription | None:
    """Description of an operator's kernel on a device, for the kernel models of measured ones: its
    variant is the kernel that the data sheet's model takes. None for an operator that is neither a
    product, a convolution's forward nor elementwise.
    """
    call = convolution_call(op)
    dtype = dtype_of(op) if call is None else call.image.dtype
    products = device_products(op, call)
    if not products:
        return _elementwise(machine, op, dtype)
    if len(products) > 1 or products[0].is_direct or "backward" in op.packet:
        return None
    (product,) = products
    work, kernel = product.work(machine.cpu.n_cores)
    m, n, k, batch = product.m, product.n, product.k, product.batch
    features = [
        *(log2(m), log2(n), log2(k), log2(batch), log2(math.ceil(m / 128) * math.ceil(n / 64))),
        0.5 * (n % _WINOGRAD_BLOCK != 0),
    ]
    name, moved, kind = op.packet, [m * k, m * n, n * k], "product"
    if call is not None:
        window, image = call.convolution.window, call.image
        stride, taps = math.prod(window.stride), math.prod(window.kernel)
        c_in = call.convolution.c_in
        features += [
            *(log2(c_in), log2(taps), log2(stride), log2(math.prod(image.shape[2:]))),
            *(log2(image.shape[0]), 0.5 * (c_in % _VECTOR != 0)),
        ]
        moved[0] = image.numel
        kind = "strided" if stride > 1 else "1x1" if taps == 1 else "dense"
    terms = (1.0, work, batch * m * n * k, moved[0], batch * moved[1], batch * moved[2])
    return KernelDescription((name, dtype, kind, kernel), tuple(features), tuple(map(float, terms)))


def _elementwise(machine: Machine, op: Op, dtype: str) -> KernelDescription | None:
    """An elementwise kernel: bound by its start, by the second cache, or by the memory."""
    shapes = {spec.shape for spec in (*op.inputs, *op.outputs)}
    if len(shapes) != 1 or counts.is_view(op):
        return None
    (spec, *_) = op.inputs or op.outputs
    moved = 2 * spec.numel * spec.item_bytes
    if moved < _start_s(machine) * sheet_of(machine).dram_bytes_per_s:
        bound = "overhead"
    else:
        bound = "L2" if moved <= machine.cpu.caches_bytes[1] else "DRAM"
    return KernelDescription(
        (op.packet.rstrip("_"), dtype, bound), (log2(spec.numel),), (1.0, float(spec.numel))
    )
