"""The three CNNs that Viebke et al. 2019 train on the Xeon Phi.

29x29 input, valid convolutions with stride 1, fully connected feature maps, disjoint max pooling,
activation 1.7159 tanh(2x/3) after each convolution and the hidden layer, ten outputs. C, M, F, O as
in the paper:

| net    | layers                                                    | parameters | forward FLOP an
image |
|--------|-----------------------------------------------------------|------------|-----------------------|
| small  | C5 4x4 - M2 - C10 5x5 - M3 - F50 - O10                    | 6,405      | 320,660
| | medium | C20 4x4 - M2 - C40 5x5 - M3 - F150 - O10                  | 76,040     | 3,783,640
| | large  | C20 4x4 - M1 - C60 5x5 - M2 - C100 6x6 - M2 - F150 - O10  | 383,160    | 45,297,640
|

FLOP are those of convolutions and fully connected layers, 2 a multiply-add.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

INPUT_SIZE = 29


class ScaledTanh(nn.Module):
    """1.7159 tanh(2x/3), elementwise: near 1 at x = 1, where its second derivative is largest
    (LeCun et al. 1998, "Efficient BackProp").
    """

    def forward(self, x: Tensor) -> Tensor:
        """The activation, in the shape of `x`."""
        return 1.7159 * torch.tanh(x * (2 / 3))


@dataclass(frozen=True)
class Stage:
    """A convolution to `channels` maps with a square `kernel`, its activation, and max pooling over
    disjoint `pool` x `pool` squares.
    """

    channels: int
    kernel: int
    pool: int


class PhiCnn(nn.Sequential):
    """Convolution stages, one hidden fully connected layer, ten outputs.

    Input (batch, 1, 29, 29), output (batch, 10) logits for cross-entropy. Layers are named
    ``conv1``, ``tanh1``, ``pool1``, ..., ``flatten``, ``fc``, ``tanh``, ``output``; a pooling over
    1x1 is the identity and left out.
    """

    def __init__(self, *stages: Stage, hidden: int) -> None:
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        channels, size = 1, INPUT_SIZE
        for number, stage in enumerate(stages, 1):
            layers[f"conv{number}"] = nn.Conv2d(channels, stage.channels, stage.kernel)
            layers[f"tanh{number}"] = ScaledTanh()
            if stage.pool > 1:
                layers[f"pool{number}"] = nn.MaxPool2d(stage.pool)
            channels, size = stage.channels, (size - stage.kernel + 1) // stage.pool
        layers["flatten"] = nn.Flatten()
        layers["fc"] = nn.Linear(channels * size * size, hidden)
        layers["tanh"] = ScaledTanh()
        layers["output"] = nn.Linear(hidden, 10)
        super().__init__(layers)


def small() -> PhiCnn:
    """The small network: 6,405 parameters."""
    return PhiCnn(Stage(5, 4, 2), Stage(10, 5, 3), hidden=50)


def medium() -> PhiCnn:
    """The medium network: 76,040 parameters."""
    return PhiCnn(Stage(20, 4, 2), Stage(40, 5, 3), hidden=150)


def large() -> PhiCnn:
    """The large network: 383,160 parameters."""
    return PhiCnn(Stage(20, 4, 1), Stage(60, 5, 2), Stage(100, 6, 2), hidden=150)
