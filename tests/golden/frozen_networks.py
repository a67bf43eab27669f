"""The networks behind the frozen traces. ``python tests/golden/frozen_networks.py`` records them.

A recording depends on torch's version, so the tests load the traces and record few of them anew.
"""

from __future__ import annotations

import gzip
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

FOLDER = Path(__file__).parent / "frozen" / "traces"
TARGETS = {
    "mlp-32": "networks.targets:mlp",
    "mlp-4": "networks.targets:mlp",
    "lenet-16": "networks.targets:lenet",
    "lenet-inference-16": "networks.targets:lenet",
    "cnn-small-8": "networks.targets:cnn_small",
    "cnn-medium-64": "networks.targets:cnn_medium",
    "dlrm-bottom-16": "networks.targets:dlrm_bottom",
    "dlrm-top-128": "networks.targets:dlrm_top",
    "fc4096-8": "networks.targets:fc4096",
    "click-predictor-16": "networks.uncommon:click_predictor",
    "segmenter-4": "networks.uncommon:segmenter",
    "recurrent-8": "frozen_networks:recurrent",
    "attention-8": "frozen_networks:attention",
    "norms-8": "frozen_networks:norms",
    "convolutions-4": "frozen_networks:convolutions",
    "checkpointed-8": "frozen_networks:checkpointed",
    "autocast-16": "frozen_networks:autocast",
    "bfloat16-16": "frozen_networks:bfloat16",
    "channels-last-4": "frozen_networks:channels_last",
    "branches-16": "frozen_networks:branches",
    "losses-16": "frozen_networks:losses",
    "sorting-16": "frozen_networks:sorting",
    "unpriced-16": "frozen_networks:unpriced",
    "encoder-inference-4": "networks.uncommon:encoder",
    "large-batch-512": "frozen_networks:large_batch",
}
"""Trace -> target; the number is the batch size."""

RECORDED_WITH = "2.13."
"""The torch that recorded the traces. Another one may record other operators."""

Built = tuple[nn.Module, Any, Callable[[Any], Tensor], torch.optim.Optimizer]


def record(name: str, path: Path) -> None:
    from dlperf.__main__ import main

    mode = ["--inference"] if "inference" in name else []
    words = [
        "trace",
        TARGETS[name],
        "--batch-size",
        name.rpartition("-")[2],
        *mode,
        "-o",
        str(path),
    ]
    if main(words):
        raise SystemExit(f"{name} was not recorded")


def _mean(output: Tensor) -> Tensor:
    return output.float().mean()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(200, 24)
        self.lstm = nn.LSTM(24, 32, bidirectional=True, batch_first=True)
        self.gru, self.cell = nn.GRU(64, 32, batch_first=True), nn.LSTMCell(32, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        states = self.gru(self.lstm(self.tokens(x))[0])[0]
        state = None
        for time in range(3):
            state = self.cell(states[:, time], state)
        return self.head(state[0])


def recurrent(batch_size: int) -> Built:
    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    return model, (torch.randint(0, 200, (batch_size, 12)),), _mean, optimizer


class Attention(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(width, 4, 64, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(width, 4, 64, batch_first=True, norm_first=True)
        self.qkv, self.gate = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, other: Tensor, padding: Tensor) -> Tensor:
        memory = self.encoder(other, src_key_padding_mask=padding)
        x = self.decoder(x, memory)
        q, k, v = self.qkv(x).unflatten(-1, (4, 24)).transpose(1, 2).chunk(3, -1)
        own = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        crossed = F.scaled_dot_product_attention(
            q, v, k, attn_mask=torch.ones(20, 20).tril().bool()
        )
        return F.gelu(self.gate((own + crossed).transpose(1, 2).flatten(2)))


def attention(batch_size: int) -> Built:
    model, padding = Attention(), torch.zeros(batch_size, 14, dtype=torch.bool)
    padding[:, -2:] = True
    inputs = (torch.randn(batch_size, 20, 32), torch.randn(batch_size, 14, 32), padding)
    return model, inputs, _mean, torch.optim.AdamW(model.parameters(), lr=1e-3)


def norms(batch_size: int) -> Built:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.GroupNorm(4, 16),
        nn.InstanceNorm2d(16, affine=True),
        nn.MaxPool2d(2),
        nn.LayerNorm(15),
        nn.LocalResponseNorm(3),
        nn.AvgPool2d(2),
        nn.Dropout2d(0.2),
        nn.Softplus(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.BatchNorm1d(16),
        nn.Linear(16, 4),
    )
    return model, (torch.randn(batch_size, 3, 32, 32),), _mean, torch.optim.Adam(model.parameters())


def convolutions(batch_size: int) -> Built:
    model = nn.Sequential(
        nn.Conv1d(4, 16, 3, padding=1),
        nn.ConvTranspose1d(16, 8, 4, 2, 1),
        nn.Unflatten(2, (16, 16)),
        nn.Conv2d(8, 24, 1),
        nn.Conv2d(24, 24, 3, padding=1, groups=24),
        nn.Hardswish(),
        nn.Conv2d(24, 24, 3, padding=2, dilation=2, groups=4, bias=False),
        nn.SiLU(),
        nn.ConvTranspose2d(24, 8, 2, 2),
        nn.Unflatten(2, (4, 8)),
        nn.Conv3d(8, 4, 3, stride=2, padding=1),
    )
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    return model, (torch.randn(batch_size, 4, 128),), _mean, optimizer


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(100, 24), nn.Linear(24, 100, bias=False)
        self.out.weight = self.tokens.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(2))
        self.frozen = nn.Linear(24, 24).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.tokens(x))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.out(x)


def checkpointed(batch_size: int) -> Built:
    model, wanted = Checkpointed(), torch.randint(0, 100, (batch_size * 10,))
    inputs = (torch.randint(0, 100, (batch_size, 10)),)
    return model, inputs, lambda y: F.cross_entropy(y.flatten(0, 1), wanted), _sgd(model)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 16, 3), nn.Linear(16 * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.head(F.relu(self.conv(x)).flatten(1)).float()


def autocast(batch_size: int) -> Built:
    model = Autocast()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return model, (torch.randn(batch_size, 3, 8, 8),), _mean, optimizer


def bfloat16(batch_size: int) -> Built:
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
    return model, (torch.randn(batch_size, 64, dtype=torch.bfloat16),), _mean, optimizer


def channels_last(batch_size: int) -> Built:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 36, 10),
    ).to(memory_format=torch.channels_last)
    x = torch.randn(batch_size, 3, 24, 24).to(memory_format=torch.channels_last)
    return model, (x,), _mean, torch.optim.RMSprop(model.parameters(), lr=1e-3)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)
        self.weight = nn.Parameter(torch.randn(9, dtype=torch.cfloat))
        self.energy = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, *, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        left = self.shared(torch.tanh(x))
        right = self.shared(left.masked_fill(mask, 0.0))
        waves = torch.fft.irfft(torch.fft.rfft(right) * self.weight, n=16)
        point = x.detach().requires_grad_()
        force = torch.autograd.grad(self.energy(point).sum(), point, create_graph=True)[0]
        return {"out": torch.cat((left, waves, force), 1) * x.sum(1, keepdim=True)}


def branches(batch_size: int) -> Built:
    model = Branches()
    inputs = {"x": torch.randn(batch_size, 16), "mask": torch.rand(batch_size, 16) > 0.5}
    used = [p for name, p in model.named_parameters() if "unused" not in name]
    return model, inputs, lambda found: found["out"].square().mean(), torch.optim.SGD(used, lr=0.01)


class Upsampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.shuffle = nn.Conv2d(3, 16, 3, padding=1), nn.PixelShuffle(2)
        self.pad, self.act = nn.ReflectionPad2d(1), nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.shuffle(self.conv(self.pad(x))))
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        x = F.interpolate(x, size=(30, 30), mode="bilinear", align_corners=False)
        return F.interpolate(x, size=(20, 20), mode="bicubic", align_corners=False).flatten(1)


def losses(batch_size: int) -> Built:
    model, wanted = Upsampled(), torch.rand(batch_size, 1600)
    classes, signs = torch.randint(0, 1600, (batch_size,)), torch.ones(batch_size)

    def loss(y: Tensor) -> Tensor:
        smooth = F.smooth_l1_loss(y, wanted) + F.mse_loss(y, wanted) + F.l1_loss(y, wanted)
        by_class = F.nll_loss(F.log_softmax(y, 1), classes) + F.multi_margin_loss(y, classes)
        logits = F.binary_cross_entropy_with_logits(y, wanted) + F.soft_margin_loss(y, wanted)
        spread = F.kl_div(F.log_softmax(y, 1), wanted) + F.huber_loss(y, wanted)
        return smooth + by_class + logits + spread + F.cosine_embedding_loss(y, wanted, signs)

    return model, (torch.rand(batch_size, 3, 8, 8),), loss, torch.optim.NAdam(model.parameters())


class Sorting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores, self.table = nn.Linear(32, 24), nn.Parameter(torch.randn(24, 12))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(x)
        values, indices = scores.topk(6, 1)
        ordered, order = scores.sort(1)
        chosen = self.table[indices].mul(values.unsqueeze(-1)).sum(1)
        spread = torch.zeros_like(scores).scatter_add(1, order, ordered.cumsum(1))
        picked = torch.gather(spread, 1, indices)
        pooled = torch.zeros(4, 6).index_add(0, torch.arange(x.shape[0]) % 4, picked)
        best = torch.where(scores > scores.median(1, keepdim=True)[0], scores, -scores).amax(1)
        rolled = torch.roll(chosen, 1, 1).flip(1).clamp(-1, 1)
        return rolled.sum(1) + best + pooled.prod(1).sum() + F.one_hot(indices, 24).sum()


def sorting(batch_size: int) -> Built:
    model = Sorting()
    return model, (torch.randn(batch_size, 32),), _mean, _sgd(model)


class Unpriced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        square = y.t() @ y + 12 * torch.eye(12)
        return torch.linalg.cholesky(square).sum() + torch.linalg.solve(square, y.t()).mean()


def unpriced(batch_size: int) -> Built:
    model = Unpriced()
    optimizer = torch.optim.Adadelta(model.parameters())
    return model, (torch.randn(batch_size, 12),), _mean, optimizer


def large_batch(batch_size: int) -> Built:
    model = nn.Sequential(
        nn.Unflatten(1, (1, 64, 64)),
        nn.Conv2d(1, 8, 5, 2),
        nn.Sigmoid(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(1800, 256),
        nn.LeakyReLU(),
        nn.Dropout(),
        nn.Linear(256, 10),
        nn.LogSoftmax(1),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    wanted = torch.randint(0, 10, (batch_size,))
    return model, (torch.randn(batch_size, 4096),), lambda y: F.nll_loss(y, wanted), optimizer


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or TARGETS:
        with tempfile.TemporaryDirectory() as folder:
            record(name, path := Path(folder) / "trace.json")
            packed = gzip.compress(path.read_bytes(), 9, mtime=0)
            (FOLDER / f"{name}.json.gz").write_bytes(packed)
