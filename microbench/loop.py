"""What a training script does around its steps: looking at the loss, schedulers, clipping, saving;
and what its first step takes more.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from dlperf.core.clock import (
    Clock,
    Repeats,
    Samples,
    sample_in_turns,
    take_single,
    timed,
    undisturbed,
)
from dlperf.core.costs import Cost, CostKey
from dlperf.microbench.framework import with_gradients

_FEW, _MANY = 8, 72
_BIG = 2**18
"""Elements of the tensors that show what a byte costs: 1 MiB, as a wide layer's weights."""
_N_CLASSES, _N_SAMPLES = 10, 32
Call = Callable[[], object]


def _item_costs(repeats: Repeats, clock: Clock) -> dict[str, Samples]:
    """``item`` of a loss, ``accuracy`` (right answers counted and looked at), a ``scheduler``'s
    step.
    """
    loss = torch.zeros(())
    output, labels = torch.rand(_N_SAMPLES, _N_CLASSES), torch.zeros(_N_SAMPLES, dtype=torch.int64)
    optimizer = torch.optim.SGD([torch.zeros(4, requires_grad=True)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)
    optimizer.step()  # a scheduler that steps first complains
    calls: list[Call] = [loss.item, lambda: int((output.argmax(1) == labels).sum()), scheduler.step]
    names = ("loop_item", "loop_accuracy", "loop_scheduler")
    return dict(zip(names, sample_in_turns(calls, repeats, clock)))


_SIZES = ((_FEW, 4), (_MANY, 4), (_FEW, _BIG))
"""Numbers and elements of tensors that tell a call, a tensor and a byte apart."""


def _by_size(name: str, few: Samples, many: Samples, big: Samples) -> dict[str, Samples]:
    """The costs of a call, a tensor and a byte, from the times for :data:`_SIZES`."""
    each = many.minus(few.minimum, _MANY - _FEW)
    return {
        f"loop_{name}_call": few.minus(_FEW * each.minimum),
        f"loop_{name}_tensor": each,
        f"loop_{name}_byte": big.minus(few.minimum, 4 * _FEW * _BIG),
    }


def _clipping(repeats: Repeats, clock: Clock) -> dict[str, Samples]:
    """``clip_grad_norm_``: a call, a parameter tensor, a byte of a gradient."""
    calls = [
        partial(torch.nn.utils.clip_grad_norm_, with_gradients(n, size), 1.0)  # type: ignore[misc]
        for n, size in _SIZES
    ]
    return _by_size("clip", *sample_in_turns(calls, repeats, clock))


@contextmanager
def _nameless_file() -> Iterator[str]:
    """The path of a file in the folder for temporary files; where /proc has one, of a file without
    a name there, which is gone with its process."""
    with tempfile.TemporaryFile() as file:
        path = f"/proc/self/fd/{file.fileno()}"
        if os.path.exists(path):
            yield path
            return
    with tempfile.TemporaryDirectory(prefix="dlperf-") as folder:
        yield str(Path(folder) / "state.pt")


def _saving(n_samples: int, clock: Clock) -> dict[str, Samples]:
    """``torch.save`` of a state: a call, a tensor, a byte. To the folder for temporary files, which
    may be faster or slower than a user's own.
    """
    with _nameless_file() as path:
        states = [{str(i): torch.zeros(size) for i in range(n)} for n, size in _SIZES]
        taken = [
            take_single(lambda state=state: partial(torch.save, state, path), n_samples, clock)  # type: ignore[misc]
            for state in states
        ]
    return _by_size("save", *taken)


def _first_convolutions(n_samples: int, clock: Clock) -> Samples:
    """What a convolution's first forward and backward take more than the next ones: the library
    makes kernels for every shape that it has not seen.
    """
    pairs = []
    for number in range(n_samples):
        x = torch.rand(2, 8, 17 + number, 17 + number, requires_grad=True)
        layer = torch.nn.Conv2d(8, 16, 3)
        times = [timed(lambda: layer(x).sum().backward(), clock) for _ in range(3)]  # noqa: B023
        (first_s, disturbed), *others = times
        pairs.append((max(0.0, first_s - min(seconds for seconds, _ in others)), disturbed))
    return undisturbed(pairs, least_frac=0.0)


_FIRST_STEP = """
import time
import torch

torch.set_num_threads(THREADS)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, labels = torch.randn(32, 64), torch.zeros(32, dtype=torch.int64)
times = []
for _ in range(12):
    begin = time.perf_counter()
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), labels).backward()
    optimizer.step()
    times.append(time.perf_counter() - begin)
print(times[0] - min(times[1:]))
"""


def _first_step(threads: int, n_processes: int) -> Samples:
    """What the first step of a process takes more than the next ones, whatever the network: code
    that is read in, an engine that starts, caches filled.
    """
    code = _FIRST_STEP.replace("THREADS", str(threads))
    printed = [
        subprocess.check_output([sys.executable, "-c", code], text=True) for _ in range(n_processes)
    ]
    return Samples(tuple(max(0.0, float(seconds)) for seconds in printed))


def measure(threads: int, mode: str, clock: Clock = Clock()) -> list[Cost]:
    """Every cost of a loop around its steps, in seconds each. A quick calibration leaves out
    ``first_step``, which takes a process of its own.
    """
    quick = mode == "quick"
    repeats = Repeats(sample_s=2e-4 if quick else 1e-3, n_samples=5 if quick else 11)
    found = (
        _item_costs(repeats, clock) | _clipping(repeats, clock) | _saving(3 if quick else 7, clock)
    )
    found["loop_first_convolution"] = _first_convolutions(4 if quick else 12, clock)
    if not quick:
        found["loop_first_step"] = _first_step(threads, 1 if mode == "full" else 3)
    return [Cost(CostKey(name), threads, samples) for name, samples in found.items()]
