"""The process of a self-test: reads a job as JSON from stdin, writes what it timed to stdout.
Started as ``python -m dlperf.studies.self_test_process``.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dlperf.core import child_process
from dlperf.core.clock import Clock, undisturbed
from dlperf.recorder.recording import record
from dlperf.recorder.targets import Built

_SECONDS, _WARM_UP_S, _LEAST_STEPS = 0.3, 0.1, 7
_CLASSES = 10


def _dense(draw: random.Random) -> tuple[nn.Module, Tensor]:
    """A multilayer perceptron and its inputs."""
    widths = [draw.choice((48, 96, 130, 200, 256, 384, 500)) for _ in range(draw.randint(3, 5))]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), draw.choice((nn.ReLU, nn.Tanh, nn.GELU))()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], _CLASSES)), torch.randn(
        draw.choice((24, 64, 100)), widths[0]
    )


def _convolutional(draw: random.Random) -> tuple[nn.Module, Tensor]:
    """A convolutional network and its images."""
    channels, side = draw.choice((1, 3)), draw.choice((16, 20, 28))
    layers: list[nn.Module] = []
    before = channels
    for width in (draw.choice((8, 12, 16)), draw.choice((16, 24, 32))):
        layers += [
            nn.Conv2d(before, width, 3, padding=1),
            nn.BatchNorm2d(width),
            draw.choice((nn.ReLU, nn.SiLU))(),
            nn.MaxPool2d(2),
        ]
        before = width
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(before * (side // 4) ** 2, _CLASSES)
    ), torch.randn(draw.choice((6, 12, 16)), channels, side, side)


class _Attention(nn.Module):
    """Self-attention and a feed-forward network around residual paths, then the mean over the
    sequence.
    """

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm, self.qkv, self.mix = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)
        )
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.n_heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        x = x + self.mix(
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        )
        return self.head((x + self.feed(x)).mean(1))  # type: ignore[no-any-return]


def _attention(draw: random.Random) -> tuple[nn.Module, Tensor]:
    """A block of a transformer and its sequences."""
    n_heads = draw.choice((2, 4))
    width = n_heads * draw.choice((16, 24, 32))
    return _Attention(width, n_heads), torch.randn(
        draw.choice((4, 8, 12)), draw.choice((20, 32, 50)), width
    )


NETWORKS: dict[str, Callable[[random.Random], tuple[nn.Module, Tensor]]] = {
    "MLP": _dense,
    "convolutional network": _convolutional,
    "attention block": _attention,
}
"""What is made at random, by name."""
_OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
)


def draw(name: str, seed: int) -> Built:
    """One of NETWORKS with random sizes, its inputs, loss and optimizer: the same for the same
    seed. A step takes some milliseconds on one core.
    """
    torch.manual_seed(seed)
    generator = random.Random(f"{name} {seed}")
    model, x = NETWORKS[name](generator)
    labels = torch.randint(0, _CLASSES, (len(x),))
    return Built(
        model,
        (x,),
        lambda output: F.cross_entropy(output, labels),
        generator.choice(_OPTIMIZERS)(model.parameters()),
    )


def time_step(built: Built, clock: Clock = Clock()) -> float:
    """The median undisturbed step after warm-up, in seconds."""
    begin = clock.now()
    while clock.now() - begin < _WARM_UP_S:
        built.step()
    pairs: list[tuple[float, bool]] = []
    begin = clock.now()
    while len(pairs) < _LEAST_STEPS or clock.now() - begin < _SECONDS:
        switches, from_s = clock.switches(), clock.now()
        built.step()
        pairs.append((clock.now() - from_s, clock.switches() != switches))
    return median(undisturbed(pairs).values)


def do(job: dict[str, Any]) -> str:
    """Time and record the networks of a job's seed. Every step is timed before any is recorded:
    recording takes memory of its own.
    """
    torch.set_num_threads(job["threads"])
    networks = {name: draw(name, job["seed"]) for name in NETWORKS}
    measured_s = {name: time_step(built) for name, built in networks.items()}
    traces = {
        name: record(
            built.model, built.inputs, loss=built.loss, optimizer=built.optimizer, target=name
        )
        for name, built in networks.items()
    }
    return json.dumps(
        [
            {"measured_s": measured_s[name], "trace": trace.to_json()}
            for name, trace in traces.items()
        ]
    )


if __name__ == "__main__":
    sys.exit(child_process.run(lambda: do(child_process.read_job())))
