"""The fully connected layer of Ridgeline's case study (Checconi et al. 2022)."""

from __future__ import annotations

from torch import Tensor, nn


class FullyConnected(nn.Module):
    """One layer of `width` inputs and as many outputs, bias included: 4096 * 4096 + 4096 =
    16,781,312 parameters.

    Input and output (batch, width). The paper counts three GEMMs a step, as for a layer inside a
    network. Trained by itself the layer needs no gradient of its input, so a step runs two of them
    (forward and weight gradient).
    """

    def __init__(self, width: int = 4096) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output; no activation follows."""
        y: Tensor = self.fc(x)
        return y
