"""Layers of random networks: residual paths, attention, recurrent layers, up-sampling, and random
choices of activation, normalisation and size.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Make = Callable[[], nn.Module]

ACTIVATIONS: tuple[Make, ...] = (
    nn.ReLU,
    lambda: nn.ReLU(inplace=True),
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.LeakyReLU,
    nn.ReLU6,
    nn.ELU,
    nn.Hardswish,
    nn.Sigmoid,
)


def log_uniform(rng: random.Random, low: float, high: float) -> int:
    """A whole number whose logarithm is uniform between those of `low` and `high`."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def width_of(rng: random.Random, low: float, high: float, multiple: int = 8) -> int:
    """A log-uniform width: in seven cases of ten a multiple of `multiple`, as most widths are."""
    width = log_uniform(rng, low, high)
    return max(multiple, multiple * round(width / multiple)) if rng.random() < 0.7 else width


class Residual(nn.Module):
    """A body beside its shortcut, which is the input itself where none is given."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.body = body
        self.shortcut = nn.Identity() if shortcut is None else shortcut

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both."""
        return self.shortcut(x) + self.body(x)  # type: ignore[no-any-return]


# -- images and signals ----------------------------------------------------------------------------


@dataclass
class Convolutions:
    """Convolutional blocks of one network: the same activation and normalisation in all.

    `norm` is batch, group or none. With `n_dims` 1 the data are signals, else images.
    """

    rng: random.Random
    activation: Make
    norm: str
    n_dims: int = 2

    def _norm(self, width: int) -> list[nn.Module]:
        if self.norm == "batch":
            return [nn.BatchNorm2d(width) if self.n_dims == 2 else nn.BatchNorm1d(width)]
        return [nn.GroupNorm(math.gcd(8, width), width)] if self.norm == "group" else []

    def conv(
        self,
        width: int,
        out: int,
        kernel: int,
        stride: int = 1,
        groups: int = 1,
        active: bool = True,
    ) -> nn.Sequential:
        """Convolution, normalisation and, if `active`, activation."""
        kind = nn.Conv2d if self.n_dims == 2 else nn.Conv1d
        layer = kind(
            width, out, kernel, stride, kernel // 2, groups=groups, bias=self.norm == "none"
        )
        return nn.Sequential(layer, *self._norm(out), *([self.activation()] if active else []))

    def plain(self, width: int, out: int) -> nn.Module:
        """One convolution, of any kernel size."""
        return self.conv(width, out, self.rng.choice((1, 3, 3, 5, 7)))

    def grouped(self, width: int, out: int) -> nn.Module:
        """A convolution in groups."""
        groups = math.gcd(math.gcd(width, out), self.rng.choice((2, 4, 8)))
        return self.conv(width, out, 3, groups=groups)

    def separable(self, width: int, out: int) -> nn.Module:
        """A depthwise separable convolution."""
        depthwise = self.conv(width, width, self.rng.choice((3, 5)), groups=width)
        return nn.Sequential(depthwise, self.conv(width, out, 1))

    def inverted(self, width: int, out: int) -> nn.Module:
        """An inverted residual: widen, depthwise convolution, narrow."""
        wide = width * self.rng.choice((2, 4, 6))
        body = nn.Sequential(
            self.conv(width, wide, 1),
            self.conv(wide, wide, 3, groups=wide),
            self.conv(wide, out, 1, active=False),
        )
        return Residual(body) if out == width else body

    def bottleneck(self, width: int, out: int) -> nn.Module:
        """A bottleneck residual: narrow, convolution, widen."""
        narrow = max(4, out // 4)
        body = nn.Sequential(
            self.conv(width, narrow, 1),
            self.conv(narrow, narrow, 3),
            self.conv(narrow, out, 1, active=False),
        )
        shortcut = None if out == width else self.conv(width, out, 1, active=False)
        return nn.Sequential(Residual(body, shortcut), self.activation())

    def block(self, width: int, out: int) -> nn.Module:
        """One of the blocks."""
        makers = (
            self.plain,
            self.plain,
            self.grouped,
            self.separable,
            self.inverted,
            self.bottleneck,
        )
        return self.rng.choice(makers)(width, out)

    def halving(self, width: int) -> nn.Module:
        """A layer that halves each side: maximum or average pooling or a strided convolution."""
        maximum, average = (
            (nn.MaxPool2d, nn.AvgPool2d) if self.n_dims == 2 else (nn.MaxPool1d, nn.AvgPool1d)
        )
        makers: tuple[Make, ...] = (
            lambda: maximum(2),
            lambda: maximum(3, 2, 1),
            lambda: average(2),
            lambda: self.conv(width, width, 3, stride=2),
        )
        return self.rng.choice(makers)()

    def doubling(self, width: int, out: int) -> nn.Module:
        """Layers that double each side of images: a transposed convolution, or interpolation and a
        convolution.
        """
        if self.rng.random() < 0.5:
            return nn.ConvTranspose2d(width, out, 2, 2)
        mode = self.rng.choice(("nearest", "bilinear"))
        return nn.Sequential(nn.Upsample(scale_factor=2, mode=mode), self.conv(width, out, 3))


class SkipConnection(nn.Module):
    """An inner network at half the side, up-sampled and joined to its input by torch.cat."""

    def __init__(self, down: nn.Module, inner: nn.Module, up: nn.Module) -> None:
        super().__init__()
        self.down, self.inner, self.up = down, inner, up

    def forward(self, x: Tensor) -> Tensor:
        """Input and up-sampled inner output, side by side in channels."""
        return torch.cat((x, self.up(self.inner(self.down(x)))), 1)


# -- sequences -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionOptions:
    """How a network's attention is written: with softmax and products (`eager`) or the fused
    function, with a causal mask or none, with one projection for queries, keys and values or three
    (`is_split`).
    """

    n_heads: int
    is_eager: bool
    is_causal: bool
    is_split: bool


class Attention(nn.Module):
    """Self-attention with several heads."""

    def __init__(self, width: int, options: AttentionOptions) -> None:
        super().__init__()
        self.options = options
        self.projections = nn.ModuleList(
            [nn.Linear(width, width) for _ in range(3)]
            if options.is_split
            else [nn.Linear(width, 3 * width)]
        )
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention of each position to the others."""
        batch, length, width = x.shape
        options = self.options
        found = [projection(x) for projection in self.projections]
        q, k, v = (
            part.view(batch, length, options.n_heads, -1).transpose(1, 2)
            for part in (found if options.is_split else found[0].chunk(3, -1))
        )
        if options.is_eager:
            scores = q @ k.transpose(-2, -1) * (width // options.n_heads) ** -0.5
            if options.is_causal:
                later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
                scores = scores.masked_fill(later, -math.inf)
            mixed = scores.softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=options.is_causal)
        return self.output(  # type: ignore[no-any-return]
            mixed.transpose(1, 2).reshape(batch, length, width)
        )


class Recurrent(nn.Module):
    """A recurrent layer's output at each position; on the meta device its shape alone, since torch
    takes one position after another there.
    """

    def __init__(self, layer: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """The outputs without the last state."""
        if x.device.type == "meta":
            return x.new_empty(
                *x.shape[:2], self.layer.hidden_size * (1 + self.layer.bidirectional)
            )
        return self.layer(x)[0]  # type: ignore[no-any-return]


class Positions(nn.Module):
    """Learnt positions, added to a sequence."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(length, width))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of sequence and positions."""
        return x + self.weight


class Pooling(nn.Module):
    """One vector of a sequence: mean, maximum or last position."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """The sequence's vector."""
        if self.kind == "mean":
            return x.mean(1)
        return x.amax(1) if self.kind == "maximum" else x[:, -1]
