"""How true malloc's replay is: page faults of a step and the memory of a process counted in plain
training loops of random networks, against the replay.

    python benchmarks/page_faults.py [--networks 40] [--first 0] [--processes 2] [--malloc
    default,tuned,huge-pages,jemalloc,tcmalloc]

Each random network trains in fresh processes for 40 steps under every policy that can be tried
here. The references are the mean of the last 30 steps' faults, and what the first three steps add
to the resident memory. Printed beside them: the simulation's faults with a tenth and nine tenths of
its steps, and its peak together with what torch takes for itself; after a stroke the faults of the
forward. At the end, for each policy, the sum of errors / sum of faults of the step and of its
forward, the repeatability (what the processes of a network differ from their median by), the share
of processes between the tenths, and the error of the memory. Counts, not times: a busy machine does
not change them.
"""

from __future__ import annotations

import argparse
import ctypes.util
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


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
        self.layers = nn.Sequential(
            *[
                nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
                for _ in range(2)
            ]
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, time, width) -> (batch, 10)."""
        return self.head(self.layers(x).mean(1))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, channels: int, norm: bool) -> None:
        super().__init__()
        between = [nn.BatchNorm2d(channels)] if norm else []
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            *between,
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, channels, height, width), unchanged."""
        return F.relu(x + self.body(x))


class Depthwise(nn.Module):
    """A depthwise convolution and two linear layers on its channels, with a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.spread = nn.Conv2d(channels, channels, 5, padding=2, groups=channels)
        self.mlp = nn.Sequential(
            nn.LayerNorm(channels),
            nn.Linear(channels, 3 * channels),
            nn.GELU(),
            nn.Linear(3 * channels, channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, channels, height, width), unchanged."""
        return x + self.mlp(self.spread(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # type: ignore[no-any-return]


class Patches(nn.Module):
    """Transformer layers on an image's patches, and a classifier on their mean."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 4, 4)
        layers = [
            nn.TransformerEncoderLayer(
                width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True
            )
            for _ in range(depth)
        ]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 3, height, width) -> (batch, 10)."""
        return self.head(self.layers(self.cut(x).flatten(2).transpose(1, 2)).mean(1))  # type: ignore[no-any-return]


def build(
    seed: int, batch: int
) -> tuple[nn.Module, torch.Tensor, Callable[[Any], torch.Tensor], torch.optim.Optimizer]:
    """A random network of a common kind, its input, loss and optimizer."""
    dice = random.Random(seed)
    kind = dice.choice(
        ["mlp", "cnn", "rnn", "encoder", "chain", "residual", "depthwise", "patches"]
    )
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
            layers += [
                nn.Conv2d(
                    channels, wider, dice.choice([3, 5]), padding=1, stride=dice.choice([1, 1, 2])
                ),
                nn.BatchNorm2d(wider),
                nn.ReLU(),
            ]
            channels = wider
        model, x = (
            nn.Sequential(
                *layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 10)
            ),
            torch.randn(batch, 3, size, size),
        )
    elif kind == "rnn":
        model, x = Recurrent(dice.choice([64, 200])), torch.randn(batch, dice.choice([20, 50]), 48)
    elif kind == "encoder":
        width = dice.choice([64, 192])
        model, x = Encoder(width), torch.randn(batch, dice.choice([16, 50]), width)
    else:
        size, width = dice.choice([20, 28, 32]), dice.choice([16, 32, 64])
        x = torch.randn(batch, 3, size, size)
        if kind == "chain":
            channels = [3, *(dice.choice([16, 32, 64]) for _ in range(dice.randint(3, 8)))]
            body = [
                part
                for pair in itertools.pairwise(channels)
                for part in (nn.Conv2d(*pair, 3, padding=1), dice.choice([nn.ReLU, nn.Tanh])())
            ]
            width = channels[-1]
        elif kind == "residual":
            body = [
                nn.Conv2d(3, width, 3, padding=1),
                *(Block(width, dice.random() < 0.6) for _ in range(dice.randint(2, 7))),
            ]
        else:
            body = [
                nn.Conv2d(3, width, 4, 4),
                *(Depthwise(width) for _ in range(dice.randint(2, 6))),
            ]
        ending = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
        model = (
            Patches(2 * width, dice.randint(1, 5))
            if kind == "patches"
            else nn.Sequential(*body, *ending)
        )
    y = torch.randint(0, 10, (batch,))
    steps = (
        torch.optim.Adam(model.parameters())
        if optimizer is None
        else torch.optim.SGD(model.parameters(), lr=0.01, **optimizer)
    )
    return model, x, lambda out: F.cross_entropy(out, y), steps


def resident_bytes(name: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (the most) of this process."""
    with Path("/proc/self/status").open(encoding="utf-8") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(name))


def train(seed: int, batch: int) -> tuple[float, float, int]:
    """(faults of a steady step, those of its forward, bytes that the first three steps add) in a
    plain training loop in this process, which has imported torch alone.
    """
    import resource

    def count() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the most from here on
    torch.set_num_threads(1)
    model, x, loss, optimizer = build(seed, batch)
    losses, faults, forward, added = [], [], [], 0
    for step in range(40):
        begin = count()
        optimizer.zero_grad()
        value = loss(model(x))
        forward.append(count() - begin)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(value.item())
        faults.append(count() - begin)
        if step == 2:
            added = resident_bytes("VmHWM") - before
    return statistics.mean(faults[10:]), statistics.mean(forward[10:]), added


@dataclass(frozen=True)
class Case:
    """One network under one policy: faults counted in processes, and those of the simulation."""

    counted: tuple[float, ...]
    forward_counted: tuple[float, ...]
    added_bytes: tuple[int, ...]
    faults: float
    forward: float
    fewest: float
    most: float
    peak_bytes: int


def environment_of(settings: str) -> dict[str, str] | None:
    """A policy's settings with its library found; None where it is not installed."""
    found = {}
    for setting in settings.split():
        name, _, value = setting.partition("=")
        if value.startswith("{"):
            library = ctypes.util.find_library(
                value.strip("{}").removeprefix("lib").split(".so")[0]
            )
            if library is None:
                return None
            value = library
        found[name] = value
    return found


def summary(policy: str, cases: list[Case]) -> str:
    """One line of errors over all networks."""
    total = sum(statistics.mean(case.counted) for case in cases)
    pairs = [(case, count) for case in cases for count in case.counted]
    share = 1 / max(1.0, total)
    error = share * sum(
        statistics.mean(abs(case.faults - count) for count in case.counted) for case in cases
    )
    forward = share * sum(
        statistics.mean(abs(case.forward - count) for count in case.forward_counted)
        for case in cases
    )
    repeatability = share * sum(
        statistics.mean(abs(statistics.median(case.counted) - count) for count in case.counted)
        for case in cases
    )
    inside = statistics.mean(
        0.95 * case.fewest - 50 <= count <= 1.05 * case.most + 50 for case, count in pairs
    )
    memory = [case.peak_bytes / statistics.median(case.added_bytes) - 1 for case in cases]
    worst = max(memory, key=abs)
    return (
        f"{policy}: {total:.0f} faults, error {error:.3f}, of the forward {forward:.3f},"
        f" repeatability {repeatability:.3f}, between the tenths {inside:.2f}; memory error median"
        f" {statistics.median(map(abs, memory)):.3f}, worst {worst:+.3f}"
    )


def main() -> None:
    """Count, replay, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="the first network's seed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--malloc", default="default,tuned,huge-pages,jemalloc,tcmalloc")
    parser.add_argument("--child", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(train(*options.child)))
        return
    compare(
        range(options.first, options.first + options.networks),
        options.processes,
        options.malloc.split(","),
    )


def compare(seeds: range, n_processes: int, policies: list[str]) -> None:
    """All networks under all policies; dlperf is imported here, so that the training processes know
    nothing of it.
    """
    from dlperf.core import host
    from dlperf.core.machine import Cpu, Machine
    from dlperf.microbench.memory import measure_footprints
    from dlperf.predictors.allocator.policies import POLICIES
    from dlperf.predictors.analysis import analyse
    from dlperf.predictors.kernels.onednn import block_of
    from dlperf.predictors.page_faults import peak_memory_bytes
    from dlperf.recorder.recording import record

    torch_itself = Machine(Cpu("", 1), footprints=tuple(measure_footprints()))
    found: dict[str, list[Case]] = {}
    for policy in policies:
        settings = environment_of(POLICIES[policy].settings)
        if settings is None:
            print(f"{policy}: its library is not installed")
        else:
            found[policy] = []
    print(
        f"{'network':>8}{'batch':>6}"
        f" {'malloc':<11}{'predicted':>14}{'fewest':>9}{'most':>9}{'MiB':>7}  counted (MiB added)"
    )
    for seed in seeds:
        batch = (16, 64)[seed % 2]
        model, x, loss, optimizer = build(seed, batch)
        trace = record(model, (x,), loss=loss, optimizer=optimizer)
        for policy, cases in found.items():
            runs = []
            for _ in range(n_processes):
                settings = environment_of(POLICIES[policy].settings)
                child = subprocess.run(
                    [sys.executable, __file__, "--child", str(seed), str(batch)],
                    capture_output=True,
                    text=True,
                    check=True,
                    env={**os.environ, **(settings or {}), "OMP_NUM_THREADS": "1"},
                )
                runs.append(json.loads(child.stdout))
            replay = analyse(trace, policy, block_of(host.this_cpu().flags)).allocator
            huge = sum(replay.huge_faults)
            fewest, _, most = replay.faults_of_a_step
            counts, of_forward, added = zip(*runs)
            forward = sum(
                small + large
                for op, small, large in zip(trace.ops, replay.faults, replay.huge_faults)
                if op.phase == "forward"
            )
            case = Case(
                counts,
                of_forward,
                added,
                sum(replay.faults) + huge,
                forward,
                fewest + huge,
                most + huge,
                peak_memory_bytes(trace, torch_itself, replay),
            )
            cases.append(case)
            counted = ", ".join(
                f"{count:.0f}/{first:.0f} ({more / 2**20:.0f})"
                for count, first, more in zip(counts, of_forward, added)
            )
            predicted = f"{case.faults:.0f}/{case.forward:.0f}"
            print(
                f"{seed:8}{batch:6}"
                f" {policy:<11}{predicted:>14}{case.fewest:9.0f}{case.most:9.0f}"
                f"{case.peak_bytes / 2**20:7.0f}"
                f"  {counted}",
                flush=True,
            )
    for policy, cases in found.items():
        print(summary(policy, cases))


if __name__ == "__main__":
    main()
