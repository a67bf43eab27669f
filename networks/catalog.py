"""The networks under their short names, each with what it takes to train it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from networks.dlrm import BottomMlp, TopMlp
from networks.lenet5 import LeNet5
from networks.mlp import Mlp
from networks.phi_cnn import large, medium, small
from networks.ridgeline import FullyConnected

N_CLASSES = 10


@dataclass(frozen=True)
class Network:
    """A network and its task.

    `build()` makes the model, which reads float32 tensors of (batch, *`input_shape`). A network
    that `reads_digits` is to tell a digit's class, and `make_wanted` turns the labels (int64,
    (batch,)) into what `loss` compares with; any other network is to learn a function of its own
    inputs, and `make_wanted` is that function. `loss(output, wanted)` is a mean over the batch.
    `count_right(output, wanted)` is the number of right answers, None where there is no right and
    wrong. `learning_rate` suits plain SGD at a batch of some tens.
    """

    name: str
    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    make_wanted: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    count_right: Callable[[Tensor, Tensor], Tensor] | None
    learning_rate: float
    reads_digits: bool = False


def _labels(labels: Tensor) -> Tensor:
    return labels


def _one_hot(labels: Tensor) -> Tensor:
    # torch's own one_hot looks at the labels' values, which fake tensors do not have
    return (labels.unsqueeze(-1) == torch.arange(N_CLASSES)).to(torch.float32)


def _count_labels(output: Tensor, wanted: Tensor) -> Tensor:
    return (output.argmax(1) == wanted).sum()


def _count_one_hot(output: Tensor, wanted: Tensor) -> Tensor:
    return (output.argmax(1) == wanted.argmax(1)).sum()


def _count_clicks(logits: Tensor, wanted: Tensor) -> Tensor:
    return ((logits > 0) == (wanted > 0.5)).sum()


def _shifted(x: Tensor) -> Tensor:
    return x.roll(1, -1)


def _repeated(x: Tensor) -> Tensor:
    """The positive part of 13 features, repeated over 128 outputs."""
    return x[..., torch.arange(128) % 13].clamp(min=0)


def _clicked(x: Tensor) -> Tensor:
    return (x.mean(-1, keepdim=True) > 0).to(torch.float32)


NETWORKS: dict[str, Network] = {
    network.name: network
    for network in (
        Network(
            "mlp",
            Mlp,
            (784,),
            _one_hot,
            F.binary_cross_entropy,
            _count_one_hot,
            0.5,
            reads_digits=True,
        ),
        Network(
            "lenet",
            LeNet5,
            (1, 28, 28),
            _labels,
            F.cross_entropy,
            _count_labels,
            0.05,
            reads_digits=True,
        ),
        Network(
            "cnn-small",
            small,
            (1, 29, 29),
            _labels,
            F.cross_entropy,
            _count_labels,
            0.02,
            reads_digits=True,
        ),
        Network(
            "cnn-medium",
            medium,
            (1, 29, 29),
            _labels,
            F.cross_entropy,
            _count_labels,
            0.02,
            reads_digits=True,
        ),
        Network(
            "cnn-large",
            large,
            (1, 29, 29),
            _labels,
            F.cross_entropy,
            _count_labels,
            0.02,
            reads_digits=True,
        ),
        Network("fc4096", FullyConnected, (4096,), _shifted, F.mse_loss, None, 1.0),
        Network("dlrm-bottom", BottomMlp, (13,), _repeated, F.mse_loss, None, 0.5),
        Network(
            "dlrm-top",
            TopMlp,
            (479,),
            _clicked,
            F.binary_cross_entropy_with_logits,
            _count_clicks,
            0.1,
        ),
    )
}
"""By short name."""
