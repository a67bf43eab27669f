"""Builders of networks that use what few others do: bags, weight and local response norms, smooth
upsampling, pixel shuffling, padding by reflection.

Named one by one (``dlperf validate networks.uncommon:segmenter``), not part of ``validate all``.
Nothing is fitted on them. Each takes a batch size and returns ``(model, inputs, loss, optimizer)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from networks.further import Built

NAMES = (
    "segmenter",
    "click_predictor",
    "response_norms",
    "weight_norms",
    "super_resolution",
    "contrastive",
    "encoder",
    "bidirectional_lstm",
)
"""Every builder of this module."""


def _built(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    loss: Callable[[Any], Tensor],
    optimizer: torch.optim.Optimizer | None = None,
) -> Built:
    return model, inputs, loss, optimizer or torch.optim.SGD(model.parameters(), lr=0.01)


def _classes(n: int, *shape: int) -> Callable[[Tensor], Tensor]:
    labels = torch.randint(0, n, shape)
    return lambda out: F.cross_entropy(out, labels)


class Segmenter(nn.Module):
    """A U of convolutions with group norm; the way up by bilinear upsampling."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            (
                self._block(3, width),
                self._block(width, 2 * width),
                self._block(2 * width, 4 * width),
            )
        )
        self.up = nn.ModuleList((self._block(6 * width, 2 * width), self._block(3 * width, width)))
        self.larger, self.head = (
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.Conv2d(width, 2, 1),
        )

    @staticmethod
    def _block(before: int, after: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, side, side) -> (batch, 2, side, side)."""
        fine = self.down[0](x)
        middle = self.down[1](F.max_pool2d(fine, 2))
        coarse = self.down[2](F.max_pool2d(middle, 2))
        x = self.up[0](torch.cat((self.larger(coarse), middle), 1))
        return cast(Tensor, self.head(self.up[1](torch.cat((self.larger(x), fine), 1))))


def segmenter(batch_size: int) -> Built:
    """Two classes for each of 40 x 40 pixels."""
    return _built(
        Segmenter(), (torch.randn(batch_size, 3, 40, 40),), _classes(2, batch_size, 40, 40)
    )


class ClickPredictor(nn.Module):
    """Bags of embeddings, their products with one another, and a perceptron, as DLRM has them
    (Naumov et al. 2019).
    """

    SIZES = (3000, 800, 12000, 150)

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(n, 24, mode="sum") for n in self.SIZES)
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 24), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(24 + 10, 80), nn.ReLU(), nn.Linear(80, 1))

    def forward(self, dense: Tensor, *ids: Tensor) -> Tensor:
        """(batch, 13) floats and, by table, (batch, length) ids -> (batch, 1)."""
        bottom = self.bottom(dense)
        vectors = torch.stack([bottom, *(bag(i) for bag, i in zip(self.bags, ids))], 1)
        rows, columns = torch.tril_indices(5, 5, -1)
        return cast(
            Tensor,
            self.top(
                torch.cat(
                    (bottom, torch.bmm(vectors, vectors.transpose(1, 2))[:, rows, columns]), 1
                )
            ),
        )


def click_predictor(batch_size: int) -> Built:
    """Adagrad."""
    model, clicked = ClickPredictor(), torch.rand(batch_size, 1).round()
    ids = (torch.randint(0, n, (batch_size, 6)) for n in ClickPredictor.SIZES)
    loss = lambda out: F.binary_cross_entropy_with_logits(out, clicked)  # noqa: E731
    return _built(
        model,
        (torch.randn(batch_size, 13), *ids),
        loss,
        torch.optim.Adagrad(model.parameters(), lr=0.01),
    )


def response_norms(batch_size: int) -> Built:
    """Large windows, groups and local response norms, as AlexNet has them (Krizhevsky et al. 2012);
    SGD with momentum.
    """
    model = nn.Sequential(
        nn.Conv2d(3, 24, 5, 2, 2),
        nn.ReLU(),
        nn.LocalResponseNorm(5),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(24, 48, 5, padding=2, groups=2),
        nn.ReLU(),
        nn.LocalResponseNorm(5),
        nn.MaxPool2d(3, 2),
        nn.Flatten(),
        nn.Linear(48 * 6 * 6, 200),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(200, 20),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    return _built(model, (torch.randn(batch_size, 3, 56, 56),), _classes(20, batch_size), optimizer)


class WeightNorms(nn.Module):
    """Dilated convolutions over the past, their weights of a set length."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            weight_norm(nn.Conv1d(40 if index else 6, 40, 3, dilation=2**index))
            for index in range(4)
        )
        self.head = nn.Linear(40, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6, time) -> (batch, 4)."""
        for index, layer in enumerate(self.layers):
            out = F.gelu(layer(F.pad(x, (2 * 2**index, 0))), approximate="tanh")
            x = x + out if index else out
        return cast(Tensor, self.head(x[:, :, -1]))


def weight_norms(batch_size: int) -> Built:
    """AdamW."""
    model = WeightNorms()
    return _built(
        model,
        (torch.randn(batch_size, 6, 180),),
        _classes(4, batch_size),
        torch.optim.AdamW(model.parameters(), lr=1e-3),
    )


class SuperResolution(nn.Module):
    """Residual blocks with instance norm and PReLU, then twice the size by pixel shuffling."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.ReflectionPad2d(2), nn.Conv2d(3, width, 5), nn.PReLU())
        blocks = (
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.InstanceNorm2d(width, affine=True),
                nn.PReLU(width),
            )
            for _ in range(3)
        )
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Sequential(
            nn.Conv2d(width, 4 * width, 3, padding=1),
            nn.PixelShuffle(2),
            nn.PReLU(),
            nn.Conv2d(width, 3, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, side, side) -> (batch, 3, 2 side, 2 side)."""
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return torch.tanh(self.head(x))


def super_resolution(batch_size: int) -> Built:
    """From 24 x 24 to 48 x 48 pixels."""
    image = torch.rand(batch_size, 3, 48, 48)
    return _built(
        SuperResolution(), (torch.rand(batch_size, 3, 24, 24),), lambda out: F.l1_loss(out, image)
    )


class Contrastive(nn.Module):
    """How alike the rows of two views are, as CLIP learns it (Radford et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(96, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 64)
        )
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        """(batch, 96) twice -> (batch, batch)."""
        return (
            F.normalize(self.encoder(one))
            @ F.normalize(self.encoder(other)).t()
            * self.temperature.exp()
        )


def contrastive(batch_size: int) -> Built:
    """Both views' cross entropies."""
    labels = torch.arange(batch_size)
    loss = lambda out: (F.cross_entropy(out, labels) + F.cross_entropy(out.t(), labels)) / 2  # noqa: E731
    return _built(Contrastive(), (torch.randn(batch_size, 96), torch.randn(batch_size, 96)), loss)


class Encoder(nn.Module):
    """torch's own transformer layers over tokens, and the mean of them."""

    def __init__(self, width: int = 72) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(900, width), nn.Parameter(torch.zeros(1, 48, width))
        layers = (
            nn.TransformerEncoderLayer(
                width, 6, 200, batch_first=True, activation="gelu", norm_first=True, dropout=0.1
            )
            for _ in range(2)
        )
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(width, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, 48) tokens -> (batch, 5)."""
        x = self.tokens(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        return cast(Tensor, self.head(x.mean(1)))


def encoder(batch_size: int) -> Built:
    """Adam."""
    model = Encoder()
    return _built(
        model,
        (torch.randint(0, 900, (batch_size, 48)),),
        _classes(5, batch_size),
        torch.optim.Adam(model.parameters(), lr=1e-3),
    )


class BidirectionalLstm(nn.Module):
    """Two layers of LSTM both ways, and what attention picks of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(500, 32, padding_idx=0)
        self.lstm = nn.LSTM(32, 48, 2, bidirectional=True, batch_first=True, dropout=0.2)
        self.attention, self.head = nn.Linear(96, 1), nn.Linear(96, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) tokens -> (batch, 3)."""
        states, _ = self.lstm(self.tokens(tokens))
        return cast(Tensor, self.head((states * self.attention(states).softmax(1)).sum(1)))


def bidirectional_lstm(batch_size: int) -> Built:
    """RMSprop."""
    model = BidirectionalLstm()
    return _built(
        model,
        (torch.randint(1, 500, (batch_size, 25)),),
        _classes(3, batch_size),
        torch.optim.RMSprop(model.parameters(), lr=1e-3),
    )
