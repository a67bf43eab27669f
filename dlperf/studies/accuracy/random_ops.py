"""Random matrix products and convolutions of realistic shapes, and what all draws rest on.

Nothing here follows the calibration's designs: shapes come from numpy's generator, logarithmically
uniform, half of them rounded to the multiples that people choose. A kind of op is a function that
draws one, or None where the shape that came up is too large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from dlperf.core.trace import Argument, Op, TensorSpec

MAX_FLOP = 1.5e9
MAX_ELEMENTS = 2**22

T = TensorSpec.contiguous
Random = np.random.Generator
Choice = TypeVar("Choice")
OpMaker = Callable[[Random], "Op | None"]


def log_uniform(random: Random, low: int, high: int) -> int:
    """A whole number in [low, high], uniform in its logarithm."""
    return int(np.clip(round(math.exp(random.uniform(math.log(low), math.log(high)))), low, high))


def size(random: Random, low: int, high: int) -> int:
    """As :func:`log_uniform`; every other one rounded to a multiple of 8 or 16 where it is large
    enough.
    """
    value = log_uniform(random, low, high)
    step = 16 if value >= 48 else 8
    return (
        min(high, step * round(value / step))
        if value >= 12 and random.random() < 0.5 and step <= high
        else value
    )


def pick(random: Random, choices: Sequence[Choice]) -> Choice:
    """One of the choices."""
    return choices[int(random.integers(len(choices)))]


# -- matrix products -------------------------------------------------------------------------------


def _operand(rows: int, columns: int, transposed: bool) -> TensorSpec:
    return TensorSpec((rows, columns), (1, rows) if transposed else (columns, 1))


def _fits(m: int, n: int, k: int, batch: int = 1) -> bool:
    return (
        2.0 * batch * m * n * k <= MAX_FLOP and batch * max(m * n, n * k, m * k) <= 4 * MAX_ELEMENTS
    )


def _product(orientation: str, random: Random) -> Op | None:
    m, n, k = (size(random, 1, 4096) for _ in range(3))
    a, b = _operand(m, k, orientation[0] == "T"), _operand(k, n, orientation[1] == "T")
    if not _fits(m, n, k):
        return None
    if orientation == "NT" and random.random() < 0.7:
        return Op("aten.addmm.default", (T(n), a, b))
    return Op("aten.mm.default", (a, b))


def _one_row(random: Random) -> Op | None:
    n, k = size(random, 1, 4096), size(random, 1, 4096)
    return Op("aten.addmm.default", (T(n), T(1, k), _operand(k, n, True)))


def _batched(random: Random) -> Op | None:
    b, m, n, k = (
        log_uniform(random, 2, 512),
        size(random, 1, 512),
        size(random, 1, 512),
        size(random, 4, 512),
    )
    second = TensorSpec((b, k, n), (k * n, 1, k)) if random.random() < 0.5 else T(b, k, n)
    return Op("aten.bmm.default", (T(b, m, k), second)) if _fits(m, n, k, b) else None


PRODUCTS: tuple[tuple[str, OpMaker, int], ...] = (
    ("NN", partial(_product, "NN"), 24),
    ("NT", partial(_product, "NT"), 28),
    ("TN", partial(_product, "TN"), 24),
    ("one row", _one_row, 10),
    ("batched", _batched, 14),
)
"""Kinds of matrix product (memory order of the operands, N row-major, T transposed), each with how
many of 100.
"""


# -- convolutions ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Conv:
    n: int
    c_in: int
    c_out: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1
    transposed: bool = False
    bias: bool = True

    @property
    def out(self) -> tuple[int, ...]:
        """Sizes of the output (PyTorch's documented formulas)."""
        if self.transposed:
            return tuple(
                (s - 1) * self.stride - 2 * self.padding + self.dilation * (k - 1) + 1
                for s, k in zip(self.size, self.kernel)
            )
        return tuple(
            (s + 2 * self.padding - self.dilation * (k - 1) - 1) // self.stride + 1
            for s, k in zip(self.size, self.kernel)
        )

    @property
    def fits(self) -> bool:
        """Whether it has an output, and not too much work."""
        if min(self.out) < 1:
            return False
        positions = math.prod(self.size if self.transposed else self.out)
        flop = (
            2.0 * self.n * positions * math.prod(self.kernel) * self.c_in * self.c_out / self.groups
        )
        return (
            flop <= MAX_FLOP
            and self.n * max(self.c_in * math.prod(self.size), self.c_out * math.prod(self.out))
            <= 2 * MAX_ELEMENTS
        )

    def op(self, needs: tuple[bool, ...] = ()) -> Op:
        """``aten.convolution``, or ``aten.convolution_backward`` with these gradients."""
        image, result = T(self.n, self.c_in, *self.size), T(self.n, self.c_out, *self.out)
        channels = (self.c_in, self.c_out) if self.transposed else (self.c_out, self.c_in)
        weight = T(channels[0], channels[1] // self.groups, *self.kernel)
        d = len(self.size)
        settings: tuple[Argument, ...] = (
            (self.stride,) * d,
            (self.padding,) * d,
            (self.dilation,) * d,
            self.transposed,
            (0,) * d,
            self.groups,
        )
        if not needs:
            bias = T(self.c_out) if self.bias else None
            return Op("aten.convolution.default", (image, weight, bias, *settings))
        bias_shape = (self.c_out,) if self.bias else None
        return Op(
            "aten.convolution_backward.default",
            (result, image, weight, bias_shape, *settings, (*needs, self.bias)),
        )


ConvMaker = Callable[[Random], _Conv]


def _square(random: Random, low: int = 1) -> tuple[int, int]:
    side = log_uniform(random, low, 128)
    return side, side


def _dense(random: Random) -> _Conv:
    kernel = pick(random, (2, 3, 3, 3, 4, 5, 7))
    padding = pick(random, (0, kernel // 2, kernel // 2))
    stride, dilation = pick(random, (1, 1, 1, 2)), pick(random, (1, 1, 1, 1, 2))
    return _Conv(
        log_uniform(random, 1, 128),
        size(random, 5, 512),
        size(random, 1, 512),
        _square(random, 2),
        (kernel,) * 2,
        stride,
        padding,
        dilation,
        bias=random.random() < 0.5,
    )


def _pointwise(random: Random) -> _Conv:
    return _Conv(
        log_uniform(random, 1, 128),
        size(random, 1, 512),
        size(random, 1, 512),
        _square(random),
        (1, 1),
        pick(random, (1, 1, 1, 2)),
        bias=random.random() < 0.5,
    )


def _first(random: Random) -> _Conv:
    kernel = pick(random, (3, 3, 5, 7))
    channels = pick(random, (1, 1, 3, 3, 2, 4))
    return _Conv(
        log_uniform(random, 1, 128),
        channels,
        size(random, 4, 128),
        _square(random, 8),
        (kernel,) * 2,
        pick(random, (1, 1, 2)),
        kernel // 2,
    )


def _depthwise(random: Random) -> _Conv:
    kernel, channels = pick(random, (3, 3, 5, 7)), size(random, 4, 512)
    return _Conv(
        log_uniform(random, 1, 128),
        channels,
        channels,
        _square(random, 4),
        (kernel,) * 2,
        pick(random, (1, 1, 2)),
        kernel // 2,
        groups=channels,
        bias=False,
    )


def _grouped(random: Random) -> _Conv:
    groups = pick(random, (2, 4, 8, 16, 32))
    c_in, c_out = groups * log_uniform(random, 2, 32), groups * log_uniform(random, 2, 32)
    return _Conv(
        log_uniform(random, 1, 128),
        c_in,
        c_out,
        _square(random, 4),
        (3, 3),
        pick(random, (1, 1, 2)),
        1,
        groups=groups,
        bias=False,
    )


def _one_dimension(random: Random) -> _Conv:
    kernel, dilation = pick(random, (1, 3, 3, 5, 7)), pick(random, (1, 1, 2, 4, 8))
    length = log_uniform(random, 8, 4096)
    return _Conv(
        log_uniform(random, 1, 128),
        size(random, 1, 256),
        size(random, 4, 256),
        (length,),
        (kernel,),
        pick(random, (1, 1, 2)),
        dilation * (kernel // 2),
        dilation,
    )


def _three_dimensions(random: Random) -> _Conv:
    side = log_uniform(random, 4, 32)
    return _Conv(
        log_uniform(random, 1, 16),
        size(random, 1, 64),
        size(random, 4, 64),
        (log_uniform(random, 2, 16), side, side),
        (3, 3, 3),
        1,
        1,
    )


def _transposed(random: Random) -> _Conv:
    kernel, padding = pick(random, ((2, 0), (4, 1), (3, 1)))
    return _Conv(
        log_uniform(random, 1, 128),
        size(random, 2, 256),
        size(random, 1, 256),
        _square(random, 2),
        (kernel,) * 2,
        2,
        padding,
        transposed=True,
    )


def _forward(make: ConvMaker, random: Random) -> Op | None:
    found = make(random)
    return found.op() if found.fits else None


def _backward(make: ConvMaker, random: Random) -> Op | None:
    found = make(random)
    if not found.fits:
        return None
    # few channels are mostly those of a network's own input, which needs no gradient
    input_needed = random.random() < (0.3 if found.c_in <= 4 else 0.9)
    return found.op(needs=(input_needed, True))


_KINDS: tuple[tuple[str, ConvMaker, int], ...] = (
    ("dense", _dense, 26),
    ("1x1", _pointwise, 14),
    ("first layer", _first, 10),
    ("depthwise", _depthwise, 12),
    ("grouped", _grouped, 10),
    ("1d", _one_dimension, 10),
    ("3d", _three_dimensions, 8),
    ("transposed", _transposed, 10),
)
CONVOLUTIONS: tuple[tuple[str, OpMaker, int], ...] = tuple(
    (name, partial(_forward, make), count) for name, make, count in _KINDS
)
"""Kinds of convolution, forward, each with how many of 100."""
CONVOLUTION_BACKWARDS: tuple[tuple[str, OpMaker, int], ...] = tuple(
    (name, partial(_backward, make), count) for name, make, count in _KINDS
)
"""The same backward; with other shapes."""
