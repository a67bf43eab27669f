"""How true malloc's replay is: page faults of a step counted in plain training loops of random networks, against the replay of their traces.

    python benchmarks/page_faults.py [--networks 26]

Each random network trains in a fresh process for 25 steps; the median of the last 17 steps' faults is the truth. Printed beside it: the replay with the heap's
top free, with it pinned, and the mean that predictions use; at the end the weight of the free history that the counts ask for (least sum of errors), from which
allocator.FREE_TOP_WEIGHT was taken. Counts, not times: a busy machine does not change them.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dlperf import allocator
from dlperf.clock import minor_faults
from dlperf.predictors.onednn import scratch
from dlperf.recorder import record


class Recurrent(nn.Module):
    """A GRU and a classifier on its last state."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(48, hidden, batch_first=True), nn.Linear(hidden, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, time, 48) -> (batch, 10)."""
        return self.head(self.rnn(x)[0][:, -1])  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """Two transformer layers and a classifier on their mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(2)])
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, time, width) -> (batch, 10)."""
        return self.head(self.layers(x).mean(1))  # type: ignore[no-any-return]


def build(seed: int, batch: int) -> tuple[nn.Module, torch.Tensor, Callable[[Any], torch.Tensor], torch.optim.Optimizer]:
    """A random network of a common kind, its input, loss and optimizer."""
    dice = random.Random(seed)
    kind = dice.choice(["mlp", "cnn", "cnn", "rnn", "encoder"])
    optimizer = dice.choice([{"momentum": 0.0}, {"momentum": 0.9}, None])
    model: nn.Module
    if kind == "mlp":
        widths = [dice.choice([64, 256, 700, 1500]) for _ in range(dice.randint(2, 5))]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), dice.choice([nn.ReLU, nn.Tanh, nn.GELU])()]
        model, x = nn.Sequential(*layers, nn.Linear(widths[-1], 10)), torch.randn(batch, widths[0])
    elif kind == "cnn":
        channels, layers, size = 3, [], dice.choice([24, 40])
        for _ in range(dice.randint(2, 5)):
            wider = dice.choice([8, 24, 48, 96])
            layers += [nn.Conv2d(channels, wider, dice.choice([3, 5]), padding=1, stride=dice.choice([1, 1, 2])), nn.BatchNorm2d(wider), nn.ReLU()]
            channels = wider
        model, x = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 10)), torch.randn(batch, 3, size, size)
    elif kind == "rnn":
        model, x = Recurrent(dice.choice([64, 200])), torch.randn(batch, dice.choice([20, 50]), 48)
    else:
        width = dice.choice([64, 192])
        model, x = Encoder(width), torch.randn(batch, dice.choice([16, 50]), width)
    y = torch.randint(0, 10, (batch,))
    steps = torch.optim.Adam(model.parameters()) if optimizer is None else torch.optim.SGD(model.parameters(), lr=0.01, **optimizer)
    return model, x, lambda out: F.cross_entropy(out, y), steps


def count(seed: int, batch: int) -> float:
    """Faults of a steady step in a plain training loop in this process."""
    torch.set_num_threads(1)
    model, x, loss, optimizer = build(seed, batch)
    losses, faults = [], []
    for _ in range(25):
        before = minor_faults()
        optimizer.zero_grad()
        value = loss(model(x))
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(value.item())
        faults.append(minor_faults() - before)
    return statistics.median(faults[8:])


def main() -> None:
    """Count, replay, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", type=int, default=26)
    parser.add_argument("--child", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(count(*options.child))
        return
    rows = []
    print(f"{'network':>8}{'batch':>6}{'counted':>10}{'free':>10}{'pinned':>10}{'predicted':>11}")
    for seed in range(options.networks):
        batch = (16, 64)[seed % 2]
        child = subprocess.run([sys.executable, __file__, "--child", str(seed), str(batch)], capture_output=True, text=True, check=True)
        model, x, loss, optimizer = build(seed, batch)
        trace = record(model, (x,), loss=loss, optimizer=optimizer)
        replay = allocator.replay(trace, scratch)
        counted = float(child.stdout)
        rows.append((counted, replay.most_faults, replay.fewest_faults))
        print(f"{seed:8}{batch:6}{counted:10.0f}{replay.most_faults:10}{replay.fewest_faults:10}{sum(replay.faults):11.0f}", flush=True)

    def error(weight: float) -> float:
        return sum(abs(weight * free + (1 - weight) * pinned - counted) for counted, free, pinned in rows)

    best = min((step / 20 for step in range(21)), key=error)
    total = sum(counted for counted, _, _ in rows)
    for name, weight in (("free", 1.0), ("pinned", 0.0), ("in use", allocator.FREE_TOP_WEIGHT), ("best", best)):
        print(f"weight of the free history {weight:.2f} ({name}): sum of errors / sum of faults {error(weight) / total:.3f}")


if __name__ == "__main__":
    main()
