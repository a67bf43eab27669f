"""The network of Cardwell 2019, chapter 3: 784-50-10."""

from __future__ import annotations

from torch import Tensor, nn


class Mlp(nn.Module):
    """Fully connected 784-50 with ReLU, then 50-10 with sigmoid: the paper's four timed operations,
    each a layer of its own.

    Input (batch, 784), output (batch, 10) in 0..1: the sigmoid belongs to the network, so its loss
    is binary cross-entropy against one-hot labels (the paper times the forward pass alone and names
    no loss). 784*50 + 50 + 50*10 + 10 = 39,760 parameters; 2 * (784*50 + 50*10) = 79,400 FLOP
    forward an image.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 50)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(50, 10)
        self.sigmoid = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the ten classes."""
        scores: Tensor = self.sigmoid(self.fc2(self.relu(self.fc1(x))))
        return scores
