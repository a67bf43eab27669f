"""The GEMM table f(M, N, K): rates of matrix products as PyTorch reaches them, by dtype,
orientation and threads.

Orientation names the memory order of the two operands, row-major N or transposed T. A Linear
layer's forward is NT (``addmm(bias, x, weight.t())``), its gradients NN (with respect to the input)
and TN (to the weight).
"""

from __future__ import annotations

import itertools
from functools import partial

from dlperf.core.clock import Repeats
from dlperf.core.trace import Op, TensorSpec
from dlperf.microbench.plan import Group, Point, filled, log_pick, repeats, share, turn

ORIENTATIONS = ("NN", "NT", "TN")
_MAX_FLOP = {"quick": 6e8, "full": 2.5e9, "thorough": 2e10}
_MAX_ELEMENTS = 2**24


def operand(rows: int, columns: int, transposed: bool, dtype: str) -> TensorSpec:
    """A rows x columns matrix, row-major or (transposed) column-major."""
    return TensorSpec((rows, columns), (1, rows) if transposed else (columns, 1), dtype)


def product(m: int, n: int, k: int, orientation: str = "NN", dtype: str = "float32") -> Op:
    """(m x k)(k x n) without bias."""
    return Op(
        "aten.mm.default",
        (operand(m, k, orientation[0] == "T", dtype), operand(k, n, orientation[1] == "T", dtype)),
    )


def linear(m: int, n: int, k: int, dtype: str = "float32", orientation: str = "NT") -> Op:
    """A Linear layer's forward for a batch of m: bias (n) + (m x k)(k x n)."""
    bias = TensorSpec.contiguous(n, dtype=dtype)
    return Op(
        "aten.addmm.default",
        (bias, operand(m, k, False, dtype), operand(k, n, orientation[1] == "T", dtype)),
    )


def batched(b: int, m: int, n: int, k: int, orientation: str = "NN") -> Op:
    """b independent products (m x k)(k x n)."""
    first, second = (
        TensorSpec((b, *one.shape), (one.numel, *one.strides), one.dtype)
        for one in (
            operand(m, k, orientation[0] == "T", "float32"),
            operand(k, n, orientation[1] == "T", "float32"),
        )
    )
    return Op("aten.bmm.default", (first, second))


def _fits(mode: str, m: int, n: int, k: int) -> bool:
    return 2.0 * m * n * k <= _MAX_FLOP[mode] and max(m * n, n * k, m * k) <= _MAX_ELEMENTS


def _sizes(mode: str, grid: tuple[int, ...], count: int, start: int) -> list[tuple[int, ...]]:
    """Shapes (m, n, k): a lattice of the powers of two that networks are full of, then an even
    filling from the design's point `start` on.
    """

    def shape(index: int, *point: float) -> tuple[int, ...] | None:
        # A third are skinny; layers rarely are.
        least = 1 if turn(index, 3) == 0 else 12
        sizes = tuple(log_pick(u, least, 4096) for u in point)
        # Every other point has the multiples of 16 that people choose; the rest falls where it
        # falls.
        if turn(index, 2, 1):
            sizes = tuple(max(16, 16 * round(size / 16)) if size > 8 else size for size in sizes)
        return sizes if _fits(mode, *sizes) else None

    lattice = [sizes for sizes in itertools.product(grid, repeat=3) if _fits(mode, *sizes)]
    return lattice + filled(count, 3, shape, start)


def _large_result(mode: str, index: int, u: float, v: float, w: float) -> tuple[int, ...] | None:
    """A product whose result is of a size at which it leaves the caches, with rows that begin
    within a vector, as those of a vocabulary's scores often do: there it is computed more slowly.
    """
    elements, n, k = (
        log_pick(u, 2**19, _MAX_ELEMENTS),
        log_pick(v, 24, 2**15),
        log_pick(w, 4, 512),
    )
    n += (n % 8 == 0) * (1 + turn(index, 7))
    sizes = max(1, elements // n), n, k
    return sizes if min(sizes[:2]) >= 24 and _fits(mode, *sizes) else None


def _batched(mode: str, index: int, u: float, v: float, w: float, x: float) -> Point | None:
    least = 1 if turn(index, 3) == 0 else 8
    b, m, n, k = (
        log_pick(u, 2, 512),
        log_pick(v, least, 512),
        log_pick(w, least, 512),
        log_pick(x, 4, 512),
    )
    if (
        2.0 * b * m * n * k > _MAX_FLOP[mode] / 4
        or b * max(m * n, n * k, m * k) > _MAX_ELEMENTS / 2
    ):
        return None
    return Point("bmm", batched(b, m, n, k, ORIENTATIONS[turn(index, 3, 1)]))


def _tiny(index: int, u: float, v: float, w: float, x: float) -> Point | None:
    """A batch of products so small (below 400 multiplications) that torch goes through them in
    plain loops.
    """
    b, m, n, k = log_pick(u, 2, 4096), log_pick(v, 1, 32), log_pick(w, 1, 32), log_pick(x, 1, 64)
    if m * n * k >= 400:
        return None
    return Point("bmm", batched(b, m, n, k, ORIENTATIONS[turn(index, 3)]))


def groups(mode: str, dtypes: tuple[str, ...], times: int = 1) -> list[Group]:
    """One group a dtype and orientation, and the batched products; with `times` as many points of
    their designs.
    """
    found = []
    for dtype in dtypes if mode != "quick" else ("float32",):
        main = dtype == "float32"
        grid = (1, 64, 512) if mode == "quick" else (1, 8, 64, 512, 4096) if main else (1, 32, 1024)
        count = share(mode, 24, 76 if main else 24 if dtype == "bfloat16" else 12, times)
        for number, orientation in enumerate(ORIENTATIONS):
            # Each orientation has shapes of its own: what they share, the curve learns from all of
            # them.
            sizes = _sizes(mode, grid, count, 1 + 1000 * number)
            if main:
                large = partial(_large_result, mode)
                sizes += filled(share(mode, 1, 8, times), 3, large, 1 + 1000 * number)
            make = linear if orientation == "NT" else partial(product, orientation=orientation)
            ops = [make(m, n, k, dtype=dtype) for m, n, k in sizes]
            if main and orientation == "NT":
                some = sizes[:: 5 if mode != "quick" else 8]
                ops += [product(m, n, k, "NT") for m, n, k in some]
            points = tuple(Point("gemm", op) for op in ops)
            found.append(Group(f"gemm {dtype} {orientation}", points, repeats(mode)))
    batches = filled(share(mode, 12, 60, times), 4, partial(_batched, mode))
    batches += filled(share(mode, 6, 18, times), 4, _tiny, 5000)
    found.append(Group("batched gemm", tuple(batches), repeats(mode)))
    # The peak: large square products, long enough to reach it; every mode needs this ceiling.
    peak = tuple(
        Point("gemm", product(n, n, n, "NN", dtype))
        for dtype in dtypes
        for n in (768, 1280) + ((2048,) if mode != "quick" else ())
    )
    found.append(
        Group("gemm peak", peak, Repeats(sample_s=1e-3, n_samples=5 if mode == "quick" else 9))
    )
    return found
