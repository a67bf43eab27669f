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
)
from dlperf.core.costs import Cost, CostKey

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
    return dict(
        zip(
            ("loop_item", "loop_accuracy", "loop_scheduler"), sample_in_turns(calls, repeats, clock)
        )
    )


def _with_gradients(n: int, n_elements: int) -> list[torch.Tensor]:
    parameters = [torch.zeros(n_elements, requires_grad=True) for _ in range(n)]
    for parameter in parameters:
        parameter.grad = torch.zeros(n_elements)
    return parameters


def _clipping(repeats: Repeats, clock: Clock) -> dict[str, Samples]:
    """``clip_grad_norm_``: a call, a parameter tensor, a byte of a gradient."""
    few, many, big = (_with_gradients(n, size) for n, size in ((_FEW, 4), (_MANY, 4), (_FEW, _BIG)))
    calls: list[Call] = [
        partial(torch.nn.utils.clip_grad_norm_, p, 1.0)
        for p in (few, many, big)  # type: ignore[misc]
    ]
    small_s, many_s, big_s = sample_in_turns(calls, repeats, clock)
    each = many_s.minus(small_s.minimum, _MANY - _FEW)
    return {
        "loop_clip_call": small_s.minus(_FEW * each.minimum),
        "loop_clip_tensor": each,
        "loop_clip_byte": big_s.minus(small_s.minimum, 4 * _FEW * _BIG),
    }


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
        states = [
            {str(i): torch.zeros(size) for i in range(n)}
            for n, size in ((_FEW, 4), (_MANY, 4), (_FEW, _BIG))
        ]
        small_s, many_s, big_s = (
            take_single(lambda state=state: lambda: torch.save(state, path), n_samples, clock)  # type: ignore[misc]
            for state in states
        )
    each = many_s.minus(small_s.minimum, _MANY - _FEW)
    return {
        "loop_save_call": small_s.minus(_FEW * each.minimum),
        "loop_save_tensor": each,
        "loop_save_byte": big_s.minus(small_s.minimum, 4 * _FEW * _BIG),
    }


def _first_convolutions(n_samples: int, clock: Clock) -> Samples:
    """What a convolution's first forward and backward take more than the next ones: the library
    makes kernels for every shape that it has not seen.
    """
    pairs = []
    for number in range(n_samples):
        x = torch.rand(2, 8, 17 + number, 17 + number, requires_grad=True)
        layer = torch.nn.Conv2d(8, 16, 3)
        times = []
        for _ in range(3):
            before, begin = clock.switches(), clock.now()
            layer(x).sum().backward()
            times.append((clock.now() - begin, clock.switches() != before))
        pairs.append((max(0.0, times[0][0] - min(times[1][0], times[2][0])), times[0][1]))
    clean = [value for value, disturbed in pairs if not disturbed] or [value for value, _ in pairs]
    return Samples(tuple(clean), len(pairs) - len(clean))


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
    done = [
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
        for _ in range(n_processes)
    ]
    return Samples(tuple(max(0.0, float(process.stdout)) for process in done))


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
