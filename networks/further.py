"""Builders of networks of other kinds than those of the papers, to validate predictions on. Nothing
is ever fitted on them.

Each takes a batch size and returns ``(model, inputs, loss, optimizer)``, as in
:mod:`networks.targets`. At batch sizes from 16 to 64 a training step takes some 2 to 200 ms on one
core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from networks import images, sequences, tables

Built = tuple[nn.Module, tuple[Tensor, ...], Callable[[Any], Tensor], torch.optim.Optimizer]

NAMES = (
    "gpt",
    "vision_transformer",
    "gru_language_model",
    "lstm_language_model",
    "tcn",
    "audio_net",
    "unet",
    "mobilenet",
    "resnext",
    "densenet",
    "convnext",
    "discriminator",
    "video_net",
    "vae",
    "recommender",
)
"""Every builder of this module."""


def gpt(batch_size: int) -> Built:
    """A causal transformer, AdamW."""
    return _language_model(sequences.Gpt(), batch_size, 40, 800, torch.optim.AdamW, 3e-4)


def gru_language_model(batch_size: int) -> Built:
    """Embedding and GRU, Adam."""
    return _language_model(
        sequences.RecurrentLanguageModel("gru", 1200, 64, 96, 1),
        batch_size,
        24,
        1200,
        torch.optim.Adam,
        1e-3,
    )


def lstm_language_model(batch_size: int) -> Built:
    """Embedding and two layers of LSTM, SGD."""
    return _language_model(
        sequences.RecurrentLanguageModel("lstm", 800, 80, 128, 2),
        batch_size,
        20,
        800,
        torch.optim.SGD,
        0.5,
    )


def tcn(batch_size: int) -> Built:
    """Dilated convolutions over time, RMSprop."""
    model = sequences.Tcn()
    return _classifier(
        model, (12, 128), batch_size, 10, torch.optim.RMSprop(model.parameters(), lr=1e-3)
    )


def audio_net(batch_size: int) -> Built:
    """1d convolutions with batch norm over a waveform, Adam."""
    model = sequences.AudioNet()
    return _classifier(
        model, (1, 4000), batch_size, 35, torch.optim.Adam(model.parameters(), lr=1e-3)
    )


def vision_transformer(batch_size: int) -> Built:
    """Attention over patches of an image, AdamW."""
    model = images.VisionTransformer()
    return _classifier(
        model, (3, 32, 32), batch_size, 10, torch.optim.AdamW(model.parameters(), lr=3e-4)
    )


def unet(batch_size: int) -> Built:
    """Segmentation with transposed convolutions, Adam."""
    model = images.UNet()
    wanted = torch.randint(0, 3, (batch_size, 24, 24))
    return (
        model,
        (torch.randn(batch_size, 1, 24, 24),),
        lambda output: F.cross_entropy(output, wanted),
        torch.optim.Adam(model.parameters(), lr=1e-3),
    )


def mobilenet(batch_size: int) -> Built:
    """Inverted residuals, SGD with momentum and weight decay."""
    model = images.MobileNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=4e-5)
    return _classifier(model, (3, 32, 32), batch_size, 10, optimizer)


def resnext(batch_size: int) -> Built:
    """Grouped convolutions, SGD with Nesterov momentum."""
    model = images.ResNext()
    return _classifier(
        model,
        (3, 32, 32),
        batch_size,
        10,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    )


def densenet(batch_size: int) -> Built:
    """Concatenations, SGD with momentum."""
    model = images.DenseNet()
    return _classifier(
        model,
        (3, 32, 32),
        batch_size,
        10,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    )


def convnext(batch_size: int) -> Built:
    """Depthwise 7x7 convolutions, LayerNorm and GELU, AdamW."""
    model = images.ConvNext()
    return _classifier(
        model, (3, 48, 48), batch_size, 10, torch.optim.AdamW(model.parameters(), lr=1e-3)
    )


def discriminator(batch_size: int) -> Built:
    """The judge of a GAN on one half of true and one of false images, fused Adam."""
    model = images.Discriminator()
    labels = (torch.arange(batch_size) % 2).to(torch.float32).unsqueeze(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
    return (
        model,
        (torch.randn(batch_size, 3, 32, 32),),
        lambda output: F.binary_cross_entropy_with_logits(output, labels),
        optimizer,
    )


def video_net(batch_size: int) -> Built:
    """3d convolutions, plain SGD."""
    model = images.VideoNet()
    return _classifier(
        model, (3, 8, 16, 16), batch_size, 10, torch.optim.SGD(model.parameters(), lr=0.01)
    )


def vae(batch_size: int) -> Built:
    """A variational autoencoder, Adam with foreach."""
    model = tables.Vae()
    x = torch.rand(batch_size, 784)

    def loss(output: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        made, mean, log_variance = output
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum()
        return (F.binary_cross_entropy(made, x, reduction="sum") + divergence) / batch_size

    return model, (x,), loss, torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True)


def recommender(batch_size: int) -> Built:
    """Embedding tables, Adagrad."""
    model = tables.Recommender()
    clicked = torch.zeros(batch_size, 1)
    inputs = (torch.randn(batch_size, 13), torch.randint(0, 10_000, (batch_size, 6)))
    return (
        model,
        inputs,
        lambda output: F.binary_cross_entropy_with_logits(output, clicked),
        torch.optim.Adagrad(model.parameters(), lr=0.01),
    )


def _language_model(
    model: nn.Module,
    batch_size: int,
    length: int,
    vocabulary: int,
    optimizer: Callable[..., torch.optim.Optimizer],
    learning_rate: float,
) -> Built:
    tokens = torch.randint(0, vocabulary, (batch_size, length))
    wanted = tokens.roll(-1, 1).flatten()
    return (
        model,
        (tokens,),
        lambda output: F.cross_entropy(output.flatten(0, 1), wanted),
        optimizer(model.parameters(), lr=learning_rate),
    )


def _classifier(
    model: nn.Module,
    shape: tuple[int, ...],
    batch_size: int,
    classes: int,
    optimizer: torch.optim.Optimizer,
) -> Built:
    labels = torch.randint(0, classes, (batch_size,))
    return (
        model,
        (torch.randn(batch_size, *shape),),
        lambda output: F.cross_entropy(output, labels),
        optimizer,
    )
