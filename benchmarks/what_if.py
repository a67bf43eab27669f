"""How right ``predict --what-if`` is where a neighbour takes bandwidth away: steps alone and beside
STREAM on another core, against predictions with the bandwidth that is left.

    python benchmarks/what_if.py --machine MACHINE.json [TARGET@BATCH ...] [--rounds 5] [-o FOLDER]

This process has one core, the neighbour another; the neighbour sweeps a triad over arrays far
larger than the caches. It is stopped and continued, so that times alone and beside it alternate,
round by round. The same triad, timed here before and after the steps over sets in the shared cache
and one in DRAM, says which fractions of both bandwidths are left: the what-if factors. Both
processes keep their memory (``malloc`` tuned), so page faults take no part.

A row compares the slowdown of a step: measured (median of the rounds' ratios; the repeatability is
their largest distance from it) against predicted, at the file's usual state. `-o` writes
``what-if.csv`` and ``what-if.md``.
"""

from __future__ import annotations

import argparse
import csv
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import dlperf
from dlperf.core.units import MIB, format_bytes
from dlperf.microbench.stream import kernel
from dlperf.predictors.allocator.policies import policy_of
from dlperf.recorder import recording, targets

OWN = (
    "wide@8 wide@64 wide@512 pointwise@64 pointwise@2048 normalised@16 normalised@512 embedded@256"
)
OWN = "wide@8 wide@32 wide@128 embedded@256 pointwise@1024 normalised@256"
TARGETS = (
    *"lenet@64 fc4096@8 dlrm-top@512".split(),
    *(f"{__file__}:{name}" for name in OWN.split()),
)
NEIGHBOUR_BYTES = 1024 * MIB
TRIADS = {
    "l3_bandwidth": (24 * MIB, 96 * MIB, 384 * MIB),
    "memory_bandwidth": (NEIGHBOUR_BYTES,),
}
"""Bytes of all arrays of the triads that stand for a level, on a machine with 480 MiB of L3."""
ROUND_S = 0.3
POLICY = "tuned"


class _Pointwise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.relu(x * 1.5 + 1.0) - x)


def pointwise(batch_size: int) -> tuple[object, ...]:
    """Elementwise operators on large tensors behind a small layer."""
    net = nn.Sequential(nn.Linear(64, 8192), _Pointwise(), _Pointwise())
    return net, (torch.randn(4 * batch_size, 64),), torch.mean


def normalised(batch_size: int) -> tuple[object, ...]:
    """Convolutions of one pixel with batch norms between them."""
    layers = [nn.Conv2d(16, 32, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 16, 1)]
    net = nn.Sequential(*layers, nn.BatchNorm2d(16), nn.ReLU(), nn.AvgPool2d(2))
    return net, (torch.randn(batch_size, 16, 64, 64),), torch.mean


def wide(batch_size: int) -> tuple[object, ...]:
    """Matrices of 256 MiB: parameters and gradients are far larger than the caches."""
    net = nn.Sequential(nn.Linear(8192, 8192), nn.ReLU(), nn.Linear(8192, 8192))
    return net, (torch.randn(batch_size, 8192),), torch.mean


def embedded(batch_size: int) -> tuple[object, ...]:
    """A table of 256 MiB with dense gradients: most of its time is the optimizer's."""
    net = nn.Sequential(nn.EmbeddingBag(2**20, 64), nn.Linear(64, 64), nn.ReLU())
    return net, (torch.randint(2**20, (batch_size, 16)),), torch.mean


@dataclass(frozen=True)
class Row:
    """A step alone, beside the neighbour, and as predicted; slowdowns are ratios of times."""

    target: str
    alone_s: float
    measured: float
    repeatability_frac: float
    predicted: float
    low: float
    high: float
    error_frac: float
    inside: bool
    predicted_alone_s: float


def neighbour() -> None:
    """Sweep for ever."""
    sweep = kernel("triad", NEIGHBOUR_BYTES // 12)
    while True:
        sweep()


class Neighbour:
    """The process on the other core; it stands still outside of :meth:`beside`."""

    def __init__(self, core: int) -> None:
        command = [sys.executable, __file__, "--neighbour"]
        self.process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        os.sched_setaffinity(self.process.pid, {core})
        time.sleep(5.0)  # it imports torch, and touches its arrays
        self.process.send_signal(signal.SIGSTOP)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """While it sweeps."""
        self.process.send_signal(signal.SIGCONT)
        time.sleep(0.05)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def median_s(call: Callable[[], object]) -> float:
    """Median seconds of a call over a round."""
    taken, end = [], time.perf_counter() + ROUND_S
    while len(taken) < 2 or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def slowdowns(
    call: Callable[[], object], other: Neighbour, rounds: int
) -> tuple[float, float, float]:
    """Median seconds alone, median ratio beside over alone, and the ratios' largest distance from
    it.
    """
    alone, ratios = [], []
    call()
    for _ in range(rounds):
        alone.append(median_s(call))
        with other.beside():
            ratios.append(median_s(call) / alone[-1])
    middle = statistics.median(ratios)
    return statistics.median(alone), middle, max(abs(ratio - middle) for ratio in ratios) / middle


def step_of(target: targets.Target) -> Callable[[], object]:
    """A training step of a target."""
    built = target.build()
    optimizer = built.optimizer
    inputs = built.inputs if isinstance(built.inputs, tuple) else tuple(built.inputs.values())

    def step() -> None:
        optimizer.zero_grad()
        built.loss(built.model(*inputs)).backward()
        optimizer.step()

    return step


def bandwidths(other: Neighbour) -> list[tuple[str, int, float, float]]:
    """The triad over each set: its factor's name, bytes, bytes/s alone, and the fraction left."""
    found = []
    for name, sizes in TRIADS.items():
        for n_bytes in sizes:
            taken_s, slower, _ = slowdowns(kernel("triad", n_bytes // 12), other, 3)
            found.append((name, n_bytes, n_bytes / taken_s, 1.0 / slower))
    return found


def left_of(found: list[tuple[str, int, float, float]]) -> dict[str, float]:
    """The what-if factors: median fractions that are left."""
    return {
        wanted: statistics.median(left for name, *_, left in found if name == wanted)
        for wanted in TRIADS
    }


def row_of(
    spec: str, machine: dlperf.Machine, other: Neighbour, rounds: int, factors: dict[str, float]
) -> Row:
    """The row of a target."""
    name, _, size = spec.rpartition("@")
    target = targets.resolve(name, int(size))
    trace = recording.record_target(target)
    alone, changed = (
        dlperf.predict(trace, machine, 1, malloc=POLICY, what_if=what_if).step
        for what_if in (None, factors)
    )
    assert alone.total_s and changed.total_s and changed.low_s and changed.high_s  # noqa: PT018
    alone_s, measured, spread = slowdowns(step_of(target), other, rounds)
    predicted, low, high = (
        seconds / alone.total_s for seconds in (changed.total_s, changed.low_s, changed.high_s)
    )
    return Row(
        f"{Path(name).name.rpartition(':')[2]}@{size}",
        alone_s,
        measured,
        spread,
        predicted,
        low,
        high,
        predicted / measured - 1.0,
        low <= measured <= high,
        alone.total_s,
    )


def write(folder: Path, rows: list[Row], lines: list[str]) -> None:
    """Write the table as CSV and as a page."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "what-if.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    page = ["# Steps beside a neighbour that takes bandwidth away", "", *lines, ""]
    (folder / "what-if.md").write_text("\n".join(page), encoding="utf-8")


def page(rows: list[Row], facts: list[str]) -> list[str]:
    """The table as Markdown."""
    head = "step | alone, ms | slowdown | repeatability | predicted | interval | error | inside"
    lines = [*facts, "", f"| {head} |", f"| :--- {'| ---: ' * 7}|"]
    for row in rows:
        cells = (
            row.target,
            f"{1e3 * row.alone_s:.3g}",
            f"{row.measured:.3f}",
            f"{100 * row.repeatability_frac:.1f} %",
            f"{row.predicted:.3f}",
            f"{row.low:.2f} to {row.high:.2f}",
            f"{100 * row.error_frac:+.1f} %",
            "yes" if row.inside else "no",
        )
        lines.append(f"| {' | '.join(cells)} |")
    errors = [abs(row.error_frac) for row in rows]
    unchanged = [abs(1.0 / row.measured - 1.0) for row in rows]
    lines += [
        "",
        (
            f"Error of the slowdown: median {100 * statistics.median(errors):.1f} %, worst"
            f" {100 * max(errors):.1f} %. Without the factors: median"
            f" {100 * statistics.median(unchanged):.1f} %, worst {100 * max(unchanged):.1f} %."
        ),
    ]
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("targets", nargs="*", default=TARGETS, metavar="TARGET@BATCH")
    parser.add_argument("--machine")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--neighbour", action="store_true")
    options = parser.parse_args()
    if options.neighbour:
        neighbour()
    wanted = dict(one.split("=") for one in policy_of(POLICY).settings.split())
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        environment = {**os.environ, **wanted, "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    first, *_, last = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {first})
    torch.set_num_threads(1)
    machine = dlperf.Machine.load(options.machine)
    other = Neighbour(last)
    try:
        before = bandwidths(other)
        rows = []
        for one in options.targets:
            rows.append(row_of(one, machine, other, options.rounds, left_of(before)))
            print(rows[-1], file=sys.stderr)
        after = bandwidths(other)
    finally:
        other.end()
    versions = ", ".join(f"{name} {value}" for name, value in machine.versions.items())
    made = f"python benchmarks/what_if.py --rounds {options.rounds} -o reports/what-if"
    date = time.strftime("%Y-%m-%d", time.gmtime())
    facts = [
        f"Measured on {machine.cpu.model} with 1 thread and {POLICY} malloc: {versions}; {date}.",
        f"Machine file: {machine.mode} calibration of {machine.created}. Made by `{made}`.",
    ]
    facts += ["", "| STREAM triad | alone, GB/s | left beside, before | after |"]
    facts += ["| :--- | ---: | ---: | ---: |"]
    facts += [
        f"| {level}, {format_bytes(n_bytes)} | {rate / 1e9:.1f} | {one:.3f} | {other:.3f} |"
        for (level, n_bytes, rate, one), (*_, other) in zip(before, after)
    ]
    told = " ".join(f"{name}={factor:.3f}" for name, factor in left_of(before).items())
    facts += ["", f"Predicted with the medians before: `--what-if {told}`."]
    lines = page(rows, facts)
    print("\n".join(lines))
    if options.output is not None:
        write(options.output, rows, lines)


if __name__ == "__main__":
    main()
