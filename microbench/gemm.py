"""The GEMM table f(M, N, K): rates of matrix products as PyTorch reaches them, by dtype,
orientation and threads.

Orientation names the memory order of the two operands, row-major N or transposed T. A Linear
layer's forward is NT (``addmm(bias, x, weight.t())``), its gradients NN (with respect to the input)
and TN (to the weight).
"""

from __future__ import annotations

from dlperf.core.clock import Repeats
from dlperf.core.trace import Op, TensorSpec
from dlperf.microbench.plan import Group, Point, design, log_pick, repeats, share, turn

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


def batched(b: int, m: int, n: int, k: int, transposed: bool, dtype: str = "float32") -> Op:
    """b independent products (m x k)(k x n), the second operand transposed or not."""
    second = TensorSpec((b, k, n), (k * n, 1, k) if transposed else (k * n, n, 1), dtype)
    return Op("aten.bmm.default", (TensorSpec.contiguous(b, m, k, dtype=dtype), second))


def _fits(m: int, n: int, k: int, mode: str) -> bool:
    return 2.0 * m * n * k <= _MAX_FLOP[mode] and max(m * n, n * k, m * k) <= _MAX_ELEMENTS


def _sizes(mode: str, grid: tuple[int, ...], count: int, start: int) -> list[tuple[int, int, int]]:
    """Shapes (m, n, k): a lattice of the powers of two that networks are full of, then an even
    filling from the design's point `start` on.
    """
    lattice = [(m, n, k) for m in grid for n in grid for k in grid if _fits(m, n, k, mode)]
    filling: list[tuple[int, int, int]] = []
    for index, (u, v, w) in enumerate(design(3, start)):
        if len(filling) >= count:
            break
        # A third are skinny; layers rarely are.
        least = 1 if turn(index, 3) == 0 else 12
        shape = (log_pick(u, least, 4096), log_pick(v, least, 4096), log_pick(w, least, 4096))
        # Every other point has the multiples of 16 that people choose; the rest falls where it
        # falls.
        if turn(index, 2, 1):
            shape = tuple(max(16, 16 * round(size / 16)) if size > 8 else size for size in shape)  # type: ignore[assignment]
        if _fits(*shape, mode):
            filling.append(shape)
    return lattice + filling


def _tiny(count: int) -> list[Point]:
    """Batches of products so small (below 400 multiplications) that torch goes through them in
    plain loops.
    """
    found: list[Point] = []
    for index, (u, v, w, x) in enumerate(design(4, 5000)):
        if len(found) >= count:
            break
        b, m, n, k = (
            log_pick(u, 2, 4096),
            log_pick(v, 1, 32),
            log_pick(w, 1, 32),
            log_pick(x, 1, 64),
        )
        if m * n * k < 400:
            found.append(Point("bmm", batched(b, m, n, k, turn(index, 2) == 1)))
    return found


def groups(mode: str, dtypes: tuple[str, ...], times: int = 1) -> list[Group]:
    """One group a dtype and orientation, and the batched products; with `times` as many points of
    their designs.
    """
    found = []
    for dtype in dtypes:
        main = dtype == "float32"
        if mode == "quick" and not main:
            continue
        grid = (1, 64, 512) if mode == "quick" else (1, 8, 64, 512, 4096) if main else (1, 32, 1024)
        for number, orientation in enumerate(ORIENTATIONS):
            # Each orientation has shapes of its own: what they share, the curve learns from all of
            # them.
            count = share(
                mode, 24 if main else 0, 190 if main else 45 if dtype == "bfloat16" else 25, times
            )
            sizes = _sizes(mode, grid, count, 1 + 1000 * number)
            points = [
                Point(
                    "gemm",
                    linear(*s, dtype) if orientation == "NT" else product(*s, orientation, dtype),
                )
                for s in sizes
            ]
            if main and orientation == "NT":
                points += [
                    Point("gemm", product(*s, "NT", dtype))
                    for s in sizes[:: 5 if mode != "quick" else 8]
                ]
            found.append(Group(f"gemm {dtype} {orientation}", tuple(points), repeats(mode)))
    small: list[Point] = []
    for index, (u, v, w, x) in enumerate(design(4)):
        if len(small) >= share(mode, 12, 150, times):
            break
        least = 1 if turn(index, 3) == 0 else 8
        b, m, n, k = (
            log_pick(u, 2, 512),
            log_pick(v, least, 512),
            log_pick(w, least, 512),
            log_pick(x, 4, 512),
        )
        if (
            2.0 * b * m * n * k <= _MAX_FLOP[mode] / 4
            and b * max(m * n, n * k, m * k) <= _MAX_ELEMENTS / 2
        ):
            small.append(Point("bmm", batched(b, m, n, k, turn(index, 2, 1) == 1)))
    found.append(Group("batched gemm", (*small, *_tiny(share(mode, 4, 24, times))), repeats(mode)))
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
