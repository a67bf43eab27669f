"""The short names' builders.

Each takes a batch size and returns ``(model, inputs, loss, optimizer)``: a fresh model, a tuple of
inputs, a function from the model's output to a scalar, and SGD(lr=0.01) over the model's
parameters. Nothing depends on the values of a tensor, so the builders also run under fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from networks.catalog import N_CLASSES, NETWORKS

Built = tuple[nn.Module, tuple[Tensor, ...], Callable[[Tensor], Tensor], torch.optim.Optimizer]

SHORT_NAMES: dict[str, str] = {
    name: f"networks.targets:{name.replace('-', '_')}" for name in NETWORKS
}
"""Short name -> the builder's full name, for example ``cnn-small`` ->
``networks.targets:cnn_small``.
"""


def mlp(batch_size: int) -> Built:
    """Cardwell's 784-50-10 on flat digits."""
    return _build("mlp", batch_size)


def lenet(batch_size: int) -> Built:
    """LeNet-5 on 28x28 digits."""
    return _build("lenet", batch_size)


def cnn_small(batch_size: int) -> Built:
    """Viebke's small CNN on 29x29 digits."""
    return _build("cnn-small", batch_size)


def cnn_medium(batch_size: int) -> Built:
    """Viebke's medium CNN on 29x29 digits."""
    return _build("cnn-medium", batch_size)


def cnn_large(batch_size: int) -> Built:
    """Viebke's large CNN on 29x29 digits."""
    return _build("cnn-large", batch_size)


def fc4096(batch_size: int) -> Built:
    """Ridgeline's fully connected layer, 4096x4096."""
    return _build("fc4096", batch_size)


def dlrm_bottom(batch_size: int) -> Built:
    """DLRM's bottom MLP, 13-512-256-128."""
    return _build("dlrm-bottom", batch_size)


def dlrm_top(batch_size: int) -> Built:
    """DLRM's top MLP, 479-1024-1024-512-256-1."""
    return _build("dlrm-top", batch_size)


def _build(name: str, batch_size: int) -> Built:
    network = NETWORKS[name]
    model = network.build()
    x = torch.randn(batch_size, *network.input_shape)
    wanted = network.make_wanted(
        torch.randint(0, N_CLASSES, (batch_size,)) if network.reads_digits else x
    )
    return (
        model,
        (x,),
        lambda output: network.loss(output, wanted),
        torch.optim.SGD(model.parameters(), lr=0.01),
    )
