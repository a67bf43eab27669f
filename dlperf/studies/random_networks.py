"""Random networks: nobody's architectures, of the layers and sizes that networks are made of.

A network is a function of its seed, on any machine. Its training step takes some 0.3 to 60 ms on
one core; its data lie on both sides of a core's own caches and of the shared cache. A calibration
times their steps (:mod:`dlperf.studies.random_steps`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dlperf.recorder.targets import Built
from dlperf.studies.random_layers import (
    ACTIVATIONS,
    Attention,
    AttentionOptions,
    Convolutions,
    Pooling,
    Positions,
    Recurrent,
    Residual,
    SkipConnection,
    log_uniform,
    width_of,
)

_LEAST_WORK, _MOST_WORK = 8e5, 5e8
"""Multiply-adds of a forward pass, an element written counted as :data:`_ELEMENT_WORK`."""
_ELEMENT_WORK = 12.0
_PARAMETER_WORK = 4.0
"""What a parameter's gradient and update take, in multiply-adds of a forward pass."""
_LEAST_BATCH, _MOST_BATCH, _MOST_VECTORS = 2, 64, 512
_MOST_TRIES = 12
_NEAR = 0.7
"""A logarithm: within a factor of 2 of the work that is wanted."""


@dataclass(frozen=True)
class _Network:
    """A model and its random inputs at a batch size."""

    model: nn.Module
    inputs: Callable[[int], Tensor]


# -- kinds of networks -----------------------------------------------------------------------------


def _dense(rng: random.Random) -> _Network:
    """A network of linear layers on vectors."""
    activation = rng.choice(ACTIVATIONS)
    norm = rng.choice((None, None, nn.BatchNorm1d, nn.LayerNorm))
    dropout = rng.choice((0.0, 0.0, rng.uniform(0.05, 0.5)))
    has_bias = rng.random() < 0.9
    width = n_features = width_of(rng, 12, 1500)
    layers: list[nn.Module] = []
    for _ in range(rng.randint(2, 7)):
        out = width if rng.random() < 0.25 else width_of(rng, 12, 1500)
        block = nn.Sequential(nn.Linear(width, out, bias=has_bias))
        if norm is not None:
            block.append(norm(out))
        block.append(activation())
        if dropout:
            block.append(nn.Dropout(dropout))
        layers.append(Residual(block) if out == width else block)
        width = out
    layers.append(nn.Linear(width, rng.choice((1, 4, 10, 100, 1000))))
    return _Network(nn.Sequential(*layers), lambda batch: torch.randn(batch, n_features))


def _convolutional(rng: random.Random) -> _Network:
    """A convolutional network on images or signals, or one whose output is an image."""
    blocks = Convolutions(
        rng, rng.choice(ACTIVATIONS), rng.choice(("batch", "batch", "group", "none"))
    )
    part = rng.random()
    if part < 0.2:
        return _up_sampling(blocks)
    if part < 0.3:
        blocks.n_dims = 1
    channels = rng.choice((1, 3, 3) if blocks.n_dims == 2 else (1, 4, 12))
    side = rng.choice((8, 12, 16, 20, 28, 32, 40, 56, 64, 96))
    length = side if blocks.n_dims == 2 else 8 * side
    width = width_of(rng, 8, 80)
    stride = 2 if side > 48 or rng.random() < 0.2 else 1
    layers: list[nn.Module] = [blocks.conv(channels, width, rng.choice((3, 3, 5, 7)), stride)]
    left = length // stride
    for _ in range(rng.randint(1, 5)):
        out = width if rng.random() < 0.4 else min(384, width_of(rng, width, 2 * width))
        layers.append(blocks.block(width, out))
        width = out
        if left >= 8 and rng.random() < 0.7:
            layers.append(blocks.halving(width))
            left //= 2
    pooled = rng.choice((1, 1, 3))
    kind = nn.AdaptiveAvgPool2d if blocks.n_dims == 2 else nn.AdaptiveAvgPool1d
    n_features = width * pooled**blocks.n_dims
    layers += [kind(pooled), nn.Flatten()]
    if rng.random() < 0.4:
        hidden = width_of(rng, 32, 512)
        layers += [nn.Linear(n_features, hidden), blocks.activation()]
        layers += [nn.Dropout(rng.uniform(0.05, 0.5))] if rng.random() < 0.5 else []
        n_features = hidden
    layers.append(nn.Linear(n_features, rng.choice((2, 10, 100))))
    shape = (channels, *(length,) * blocks.n_dims)
    return _Network(nn.Sequential(*layers), lambda batch: torch.randn(batch, *shape))


def _up_sampling(blocks: Convolutions) -> _Network:
    """A network that halves its images' sides and doubles them again; its output is an image."""
    rng = blocks.rng
    channels, side = rng.choice((1, 3)), 4 * rng.randint(4, 20)
    width, inner = width_of(rng, 8, 40), width_of(rng, 16, 64)
    down = nn.Sequential(blocks.halving(width), blocks.block(width, inner))
    up = blocks.doubling(inner, width)
    middle: nn.Module = blocks.block(inner, inner)
    if rng.random() < 0.5:
        deep = nn.Sequential(blocks.halving(inner), blocks.block(inner, inner))
        middle = nn.Sequential(
            SkipConnection(deep, blocks.block(inner, inner), blocks.doubling(inner, inner)),
            blocks.conv(2 * inner, inner, 3),
        )
    if rng.random() < 0.6:
        outer: nn.Module = SkipConnection(down, middle, up)
        last = 2 * width
    else:
        outer, last = nn.Sequential(down, middle, up), width
    model = nn.Sequential(
        blocks.conv(channels, width, 3),
        outer,
        blocks.conv(last, width, 3),
        nn.Conv2d(width, rng.choice((1, 3, 8)), 1),
    )
    return _Network(model, lambda batch: torch.randn(batch, channels, side, side))


@dataclass(frozen=True)
class _Sequences:
    """The two ends of a network on sequences: layers that make vectors of `width` of the inputs,
    and those that make the output of vectors of any width.
    """

    rng: random.Random
    length: int
    width: int
    vocabulary: int
    n_features: int

    @classmethod
    def at_random(cls, rng: random.Random, width: int) -> _Sequences:
        """Sequences of tokens, of a small or large vocabulary, or of vectors (vocabulary 0)."""
        tokens = log_uniform(rng, 60, min(30_000, 4e6 / width)) if rng.random() < 0.75 else 0
        return cls(rng, log_uniform(rng, 8, 160), width, tokens, width_of(rng, 4, 128))

    def first(self, has_positions: bool) -> list[nn.Module]:
        """Embedding or linear layer, and positions where asked for."""
        layers: list[nn.Module] = [
            nn.Embedding(self.vocabulary, self.width)
            if self.vocabulary
            else nn.Linear(self.n_features, self.width)
        ]
        return [*layers, Positions(self.length, self.width)] if has_positions else layers

    def last(self, width: int) -> list[nn.Module]:
        """A head on a pooled vector, or on every position."""
        if self.rng.random() < 0.5:
            n_out = self.vocabulary or self.rng.choice((1, 8, 64))
            return [nn.Linear(width, n_out, bias=self.rng.random() < 0.5)]
        pooling = Pooling(self.rng.choice(("mean", "maximum", "last")))
        return [pooling, nn.Linear(width, self.rng.choice((1, 2, 10, 100)))]

    def network(self, layers: list[nn.Module]) -> _Network:
        """The network of these layers and its sequences."""
        tokens, length, n_features = self.vocabulary, self.length, self.n_features

        def inputs(batch: int) -> Tensor:
            if tokens:
                return torch.randint(0, tokens, (batch, length))
            return torch.randn(batch, length, n_features)

        return _Network(nn.Sequential(*layers), inputs)


def _attention(rng: random.Random) -> _Network:
    """Blocks of self-attention and of feed-forward layers on residual paths."""
    n_heads = rng.choice((2, 3, 4, 6, 8))
    width = n_heads * rng.choice((8, 16, 24, 32, 48, 64))
    ends = _Sequences.at_random(rng, width)
    options = AttentionOptions(n_heads, rng.random() < 0.4, rng.random() < 0.5, rng.random() < 0.5)
    wide = width * rng.choice((2, 3, 4))
    dropout = rng.choice((0.0, 0.0, rng.uniform(0.05, 0.3)))
    is_norm_first = rng.random() < 0.6
    activation = rng.choice(ACTIVATIONS)
    is_of_torch = rng.random() < 0.2

    def around(body: list[nn.Module]) -> list[nn.Module]:
        body += [nn.Dropout(dropout)] if dropout else []
        if is_norm_first:
            return [Residual(nn.Sequential(nn.LayerNorm(width), *body))]
        return [Residual(nn.Sequential(*body)), nn.LayerNorm(width)]

    layers = ends.first(has_positions=rng.random() < 0.6)
    for _ in range(rng.randint(1, 4)):
        if is_of_torch:
            layers.append(
                nn.TransformerEncoderLayer(
                    width, n_heads, wide, dropout, batch_first=True, norm_first=is_norm_first
                )
            )
        else:
            layers += around([Attention(width, options)])
            layers += around([nn.Linear(width, wide), activation(), nn.Linear(wide, width)])
    layers += [nn.LayerNorm(width)] if is_norm_first else []
    return ends.network([*layers, *ends.last(width)])


def _recurrent(rng: random.Random) -> _Network:
    """LSTM or GRU layers."""
    ends = _Sequences.at_random(rng, width_of(rng, 16, 256))
    hidden = width_of(rng, 24, 256)
    is_bidirectional = rng.random() < 0.25
    kind = rng.choice((nn.LSTM, nn.GRU))
    layer = kind(
        ends.width, hidden, rng.randint(1, 2), batch_first=True, bidirectional=is_bidirectional
    )
    width = hidden * (1 + is_bidirectional)
    layers = [*ends.first(has_positions=False), Recurrent(layer)]
    layers += [nn.LayerNorm(width)] if rng.random() < 0.3 else []
    layers += [nn.Dropout(rng.uniform(0.05, 0.5))] if rng.random() < 0.3 else []
    return ends.network([*layers, *ends.last(width)])


_MAKERS: dict[str, Callable[[random.Random], _Network]] = {
    "dense network": _dense,
    "convolutional network": _convolutional,
    "attention network": _attention,
    "recurrent network": _recurrent,
}
KINDS = tuple(_MAKERS)
"""Kinds of random networks."""


def kind_of(seed: int) -> str:
    """The kind of a seed's network: by turns dense, convolutional and, on sequences, twice in three
    times attention.

    >>> [kind_of(seed).split()[0] for seed in range(6)]
    ['dense', 'convolutional', 'attention', 'dense', 'convolutional', 'recurrent']
    """
    on_sequences = 3 if seed // 3 % 3 == 1 else 2
    return KINDS[seed % 3 if seed % 3 < 2 else on_sequences]


# -- loss and optimizer ----------------------------------------------------------------------------


def _loss(rng: random.Random, shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """A loss for an output of a shape, with random targets. Channels of images are dimension 1,
    else classes are the last.
    """
    is_image = len(shape) == 4
    n_classes = shape[1] if is_image else shape[-1]
    if n_classes > 1 and rng.random() < 0.7:
        if is_image:
            labels = torch.randint(0, n_classes, (shape[0], *shape[2:]))
            return lambda output: F.cross_entropy(output, labels)
        labels = torch.randint(0, n_classes, shape[:-1]).flatten()
        return lambda output: F.cross_entropy(output.reshape(-1, n_classes), labels)
    loss: Callable[[Tensor, Tensor], Tensor] = rng.choice(
        (F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy_with_logits)
    )
    wanted = torch.rand(shape)
    return lambda output: loss(output, wanted)


_OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=1e-4),
    lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
    lambda parameters: torch.optim.Adam(parameters, lr=1e-4, foreach=True),
    lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    lambda parameters: torch.optim.RMSprop(parameters, lr=1e-4),
)


# -- batch size ------------------------------------------------------------------------------------


def _work_and_output(network: _Network, batch: int) -> tuple[float, tuple[int, ...]]:
    """Roughly the work of a network's forward pass and updates, in multiply-adds, and the shape of
    its output. It lies on the meta device, where nothing is computed.
    """
    parameters = network.model.parameters()
    work = [_PARAMETER_WORK * sum(parameter.numel() for parameter in parameters)]

    def count(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        found = output[0] if isinstance(output, tuple) else output
        width = found.shape[1] if found.dim() == 4 or _is_1d(module) else found.shape[-1]
        n_positions = found.numel() / width
        if isinstance(module, nn.ConvTranspose2d):
            n_positions = inputs[0].numel() / inputs[0].shape[1]
        if not isinstance(module, (nn.Embedding, Positions)):
            own = module.parameters(recurse=isinstance(module, Recurrent))
            matrices = (parameter for parameter in own if parameter.dim() > 1)
            work[0] += n_positions * sum(matrix.numel() for matrix in matrices)
        work[0] += _ELEMENT_WORK * found.numel()
        if isinstance(module, Attention):
            scores = found.numel() / width * found.shape[1]
            n_written = module.options.n_heads * (4 if module.options.is_eager else 1)
            work[0] += scores * (2 * width + _ELEMENT_WORK * n_written)

    hooks = [module.register_forward_hook(count) for module in network.model.modules()]
    output = network.model(network.inputs(batch))
    for hook in hooks:
        hook.remove()
    work[0] += 4 * _ELEMENT_WORK * output.numel()  # the loss
    return work[0], tuple(output.shape)


def _is_1d(module: nn.Module) -> bool:
    return isinstance(module, (nn.Conv1d, nn.BatchNorm1d, nn.MaxPool1d, nn.AvgPool1d))


def draw(seed: int) -> Built:
    """The random network of a seed with inputs, loss and optimizer; torch's random state is the
    seed's afterwards.

    Its work and its batch size are log-uniform. Networks are drawn until one has about that work,
    or the nearest of some is taken.
    """
    make, rng = _MAKERS[kind_of(seed)], random.Random(seed)
    wanted = log_uniform(rng, _LEAST_WORK, _MOST_WORK)
    batch = log_uniform(rng, _LEAST_BATCH, _MOST_VECTORS if make is _dense else _MOST_BATCH)
    tried = []
    for _ in range(_MOST_TRIES):
        sizes = rng.getrandbits(32)
        with torch.device("meta"):
            work, shape = _work_and_output(make(random.Random(sizes)), batch)
        tried.append((abs(math.log(work / wanted)), sizes, shape))
        if tried[-1][0] < _NEAR:
            break
    _, sizes, shape = min(tried)
    torch.manual_seed(seed)
    network = make(random.Random(sizes))
    inputs = network.inputs(batch)
    loss = _loss(rng, shape)
    optimizer = rng.choice(_OPTIMIZERS)(network.model.parameters())
    return Built(network.model, (inputs,), loss, optimizer)
