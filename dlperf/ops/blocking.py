"""What a contraction moves through a memory of a given size, if it is tiled as well as its shape
allows.

Matrix product of m x k and k x n, N = m n k multiply-adds, S elements of fast memory. Of the three
operands one stays in the fast memory, a tile at a time, and the other two stream past it (Goto and
van de Geijn, "Anatomy of high-performance matrix multiplication", ACM TOMS 34(3), 2008):

- a tile t_m x t_n of the result stays: m k (n / t_n) + k n (m / t_m) + m n elements move;
- a tile of the left stays: m k + k n (m / t_m) + m n (2 k / t_k - 1), the result being read and
  written again for each tile of k;
- a tile of the right stays: k n + m k (n / t_n) + m n (2 k / t_k - 1).

The least of the three, with the best tile, is taken. For large square products that is 2 N /
sqrt(S), the lower bound of Hong and Kung (1981) up to lower terms (Smith et al., arXiv 1702.02017);
a product that fits moves each operand once. Real libraries move more: their tiles are whole
registers and lines, and the streams need room too. So the model errs low, by some 10..30 % for
registers and up to twofold for caches.

A convolution is the product of its image, unfolded by taps, with its filters. Between registers and
the first cache every tap is loaded anew; from there outwards the taps of a pixel are still in the
cache, so that the image counts as often as its tiles are visited, not once a tap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dlperf.core.trace import Argument, Op, TensorSpec
from dlperf.ops import registry
from dlperf.ops.registry import argument


@dataclass(frozen=True, slots=True)
class Product:
    """`n_products` independent products (m x k)(k x n) on elements of `item_bytes`.

    `left_bytes`, `right_bytes`, `out_bytes` are those of the tensors behind all of them, which
    differ from the products' own sizes where a tensor is unfolded (convolution) or shared by
    several products (stride 0).
    """

    n_products: int
    m: int
    n: int
    k: int
    left_bytes: float
    right_bytes: float
    out_bytes: float
    item_bytes: int

    def moved_bytes(self, fast_bytes: float, unfolded: bool = False) -> float:
        """Bytes between a memory of `fast_bytes` and the next one outwards; with `unfolded` every
        use of a tap is a load of its own.
        """
        if not self.n_products * self.m * self.n * self.k:
            return self.left_bytes + self.right_bytes + self.out_bytes
        fast = max(fast_bytes / self.item_bytes, 1.0)
        sizes = (self.m * self.k, self.k * self.n, self.m * self.n)
        tensors = (self.left_bytes, self.right_bytes, self.out_bytes)
        left, right, out = (tensor / self.n_products for tensor in tensors)
        if unfolded:
            left, right, out = (
                max(tensor, size * self.item_bytes)
                for tensor, size in zip((left, right, out), sizes)
            )
        # Times that an operand moves: 1 where it stays, else the number of tiles it meets; a tile
        # costs 2 transfers of the result but for the first.
        result_stays = _streams(left, self.n, right, self.m, fast) + out
        left_stays = left + _streams(right, self.m, 2 * out, self.k, fast) - out
        right_stays = right + _streams(left, self.n, 2 * out, self.k, fast) - out
        return self.n_products * min(result_stays, left_stays, right_stays)


def _streams(
    first_bytes: float, first_size: int, second_bytes: float, second_size: int, fast: float
) -> float:
    """Least of first x (first_size / t) + second x (second_size / u) over tiles t u <= fast, 1 <= t
    <= first_size, 1 <= u <= second_size.
    """
    demand = first_bytes * first_size, second_bytes * second_size
    wanted = math.sqrt(fast * demand[0] / demand[1]) if demand[1] else math.inf
    t = min(max(wanted, fast / second_size, 1.0), first_size, max(fast, 1.0))
    u = min(max(fast / t, 1.0), second_size)
    return demand[0] / t + demand[1] / u


def bound_bytes(flops: float, item_bytes: int, fast_bytes: float) -> float:
    """Hong and Kung's bound for any contraction: 2 N / sqrt(S) elements, N multiply-adds (2 FLOP
    each), S elements of fast memory.

    >>> bound_bytes(2 * 1000, item_bytes=4, fast_bytes=4 * 100)  # 2000 / 10 elements
    800.0
    """
    return item_bytes * flops / math.sqrt(max(fast_bytes / item_bytes, 1.0))


def is_contraction(op: Op) -> bool:
    """Whether the op's FLOPs are multiply-adds: those of :mod:`dlperf.ops.contractions`."""
    formula = registry.find(registry.FLOPS, op.packet)
    return formula is not None and formula.__module__ == "dlperf.ops.contractions"


def products_of(op: Op) -> tuple[Product, ...]:
    """The matrix products that an op is made of; () where it is none, or a contraction whose shape
    is not spelled out here.
    """
    if (matrices := matrices_of(op)) is not None:
        left, right = matrices
        k, n = left.shape[-1], right.shape[0 if op.packet == "aten.linear" else -1]
        n_products = left.shape[0] if len(right.shape) == 3 else 1
        m = left.numel // max(k * n_products, 1)
        out_bytes = n_products * m * n * left.item_bytes
        sizes = left.nbytes, right.nbytes, out_bytes, left.item_bytes
        return (Product(n_products, m, n, k, *sizes),)
    if op.packet in ("aten.convolution", "aten._convolution") and op.outputs:
        transposed, groups = argument(op, 6, "transposed", False), argument(op, 8, "groups", 1)
        result = "filtered" if transposed else "pixels"
        return _convolution((op.outputs[0], *op.args[:2]), transposed, groups, (result,))
    if op.packet == "aten.convolution_backward":
        transposed, groups = argument(op, 7, "transposed", False), argument(op, 9, "groups", 1)
        mask = argument(op, 10, "output_mask", (True, True, True))
        ways = ("pixels" if transposed else "filtered", "weight")
        needed = tuple(way for way, wanted in zip(ways, mask) if wanted)
        return _convolution(op.args[:3], transposed, groups, needed)
    return ()


_MATRICES = {
    "aten.mm": 0,
    "aten.bmm": 0,
    "aten.addmm": 1,
    "aten.baddbmm": 1,
    "aten._addmm_activation": 1,
    "aten.linear": 0,
}
"""Index of the left matrix among the tensors."""


def matrices_of(op: Op) -> tuple[TensorSpec, TensorSpec] | None:
    """Left and right matrix of a product, or of each of a batch; None for other operators."""
    first = _MATRICES.get(op.packet)
    if first is None or len(op.inputs) < first + 2:
        return None
    left, right = op.inputs[first : first + 2]
    return (left, right) if left.shape and right.shape else None


def _convolution(
    tensors: tuple[Argument, ...], transposed: bool, groups: int, ways: tuple[str, ...]
) -> tuple[Product, ...]:
    """Products of a convolution, or of its backward, from its output (or the gradient of that), its
    image and its weight.

    `pixels` meet each filter once: the output's, or those of a transposed convolution's image. A
    weight is (channels on their side, channels of a group on the other side, taps ...). The result
    is on the side of the ``pixels``, on the ``filtered`` side, or the gradient of the ``weight``:
    pixels = unfolded(filtered) x weight; filtered = folded(pixels x weight); weight = pixels' x
    unfolded(filtered).
    """
    output, image, weight = tensors
    if not (
        isinstance(output, TensorSpec)
        and isinstance(image, TensorSpec)
        and isinstance(weight, TensorSpec)
    ):
        return ()
    pixels, filtered = (image, output) if transposed else (output, image)
    n_pixels = pixels.numel // max(weight.shape[0], 1)
    own, other, taps = weight.shape[0] // groups, weight.shape[1], math.prod(weight.shape[2:])
    kinds = {
        "pixels": ((n_pixels, own, other * taps), (filtered, weight, pixels)),
        # Each element of `filtered` gathers taps of `pixels`, as kernels do it: the unfolded side
        # is the pixels', which meet `other` channels.
        "filtered": ((n_pixels, other, own * taps), (pixels, weight, filtered)),
        "weight": ((own, other * taps, n_pixels), (pixels, filtered, weight)),
    }
    return tuple(
        Product(groups, m, n, k, left.nbytes, right.nbytes, out.nbytes, filtered.item_bytes)
        for (m, n, k), (left, right, out) in map(kinds.__getitem__, ways)
    )
