"""LeNet-5 (LeCun et al. 1998) on 28x28 digits, in the form that people train today."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


class LeNet5(nn.Sequential):
    """Convolutions 6 @ 5x5 (padded by 2) and 16 @ 5x5, each with ReLU and 2x2 max pooling, then
    400-120-84-10.

    Input (batch, 1, 28, 28), output (batch, 10) logits for cross-entropy. ReLU, max pooling and
    full connections between the convolutions stand where the original had tanh, trained subsampling
    and a sparse table of connections. Parameters: 156 + 2,416 + 48,120 + 10,164 + 850 = 61,706.
    """

    def __init__(self) -> None:
        super().__init__(
            OrderedDict(
                conv1=nn.Conv2d(1, 6, 5, padding=2),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(6, 16, 5),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                fc1=nn.Linear(400, 120),
                relu3=nn.ReLU(),
                fc2=nn.Linear(120, 84),
                relu4=nn.ReLU(),
                fc3=nn.Linear(84, 10),
            )
        )
