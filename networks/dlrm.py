"""The two MLPs of DLRM (Naumov et al. 2019) in the sizes of MLPerf's reference on Criteo's terabyte
of clicks.

Embeddings and interaction are left out: with 26 embeddings of width 128 beside the bottom MLP's
output, the top MLP reads 128 + 27*26/2 = 479 numbers.
"""

from __future__ import annotations

from itertools import pairwise

from torch import nn


class BottomMlp(nn.Sequential):
    """13-512-256-128, ReLU after each layer, the last included, as in the reference.

    Input (batch, 13) dense features, output (batch, 128). Parameters: 7,168 + 131,328 + 32,896 =
    171,392.
    """

    def __init__(self) -> None:
        super().__init__(*_layers(13, 512, 256, 128), nn.ReLU())


class TopMlp(nn.Sequential):
    """479-1024-1024-512-256-1, ReLU between the layers.

    Input (batch, 479), output (batch, 1), a logit: the sigmoid is left to the loss (binary
    cross-entropy with logits), where it cannot overflow. Parameters: 491,520 + 1,049,600 + 524,800
    + 131,328 + 257 = 2,197,505.
    """

    def __init__(self) -> None:
        super().__init__(*_layers(479, 1024, 1024, 512, 256, 1))


def _layers(*widths: int) -> list[nn.Module]:
    """Linear layers of these widths with a ReLU between each two."""
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return layers[:-1]
