"""The process of a trial: one change of a step, or one worker of a configuration, timed.

Started by :func:`dlperf.advice.trials.run_apart` as ``python -m dlperf.advice.trial_process``. It
reads an order from stdin, writes ``ready`` when it is warm, starts on ``go``, and answers as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import torch
from torch.utils import data

from dlperf.advice.transformations import edit_built
from dlperf.advice.variants import Edit
from dlperf.core import child_process
from dlperf.core.clock import Clock
from dlperf.core.errors import DlperfError, WorkFailed
from dlperf.profiler.loader_sampling import make_loader
from dlperf.profiler.step_profiler import measure_target
from dlperf.recorder.targets import Built, Target, resolve

_WARM_UP_STEPS, _LEAST_STEPS, _WARM_UP_FRAC = 3, 5, 0.3
_DATASET_BATCHES = 32
_DATASET_BYTES = 2**28


def _samples(built: Built, batch_size: int) -> data.TensorDataset | None:
    """Samples like the target's inputs, some batches of them; None where the inputs are not tensors
    with a sample in each row.
    """
    inputs = list(built.inputs.values()) if isinstance(built.inputs, dict) else list(built.inputs)
    if not inputs or not all(
        isinstance(one, torch.Tensor) and one.dim() and one.shape[0] == batch_size for one in inputs
    ):
        return None
    n_bytes = sum(one.numel() * one.element_size() for one in inputs)
    n_batches = max(2, min(_DATASET_BATCHES, _DATASET_BYTES // max(1, n_bytes)))
    return data.TensorDataset(*(torch.cat([one] * n_batches) for one in inputs))


def _batches(built: Built, order: dict[str, Any]) -> Iterator[Any]:
    """The inputs of one step after another, for ever.

    They are the target's own, each after a batch was fetched from the user's loader where there is
    one; else batches of a loader over samples in memory, where the order asks for it.
    """
    batch_size, n_loading, spec = order["batch_size"], order["loader_workers"], order["loader"]
    samples = _samples(built, batch_size) if order["with_loader"] and not spec else None
    if spec:
        loader = make_loader(spec, batch_size, n_loading)
    elif samples is not None:
        loader = data.DataLoader(
            samples,
            batch_size=batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=n_loading,
            persistent_workers=n_loading > 0,
        )
    else:
        yield from itertools.repeat(built.inputs)
    while True:
        n_batches = 0
        for batch in loader:
            n_batches += 1
            if spec:
                yield built.inputs
            else:
                is_dict = isinstance(built.inputs, dict)
                yield dict(zip(built.inputs, batch)) if is_dict else tuple(batch)
        if not n_batches:
            raise WorkFailed(f"loader {spec}: is empty; nothing can be trained with it")


def run_steps(once: Callable[[], None], seconds: float, least: int, clock: Clock) -> float:
    """Steps a second: `once` again and again for `seconds`, at least `least` times."""
    begin, n_steps = clock.now(), 0
    while True:
        once()
        n_steps += 1
        elapsed = clock.now() - begin
        if n_steps >= least and elapsed >= seconds:
            return n_steps / elapsed


def time_worker(
    order: dict[str, Any], target: Target, wait: Callable[[], None]
) -> dict[str, float]:
    """Samples per second of one worker: build, warm up, `wait` for the others, train.

    Raises what building and stepping raise.
    """
    built, batch_size = target.build(), order["batch_size"]
    built.model.train(not order["inference"])
    batches = _batches(built, order)

    def once() -> None:
        built.step(next(batches))

    clock, seconds = Clock(), order["seconds"]
    with torch.set_grad_enabled(not order["inference"]):
        run_steps(once, _WARM_UP_FRAC * seconds, _WARM_UP_STEPS, clock)
        wait()
        return {"samples_per_s": batch_size * run_steps(once, seconds, _LEAST_STEPS, clock)}


def measure_change(
    order: dict[str, Any], target: Target, wait: Callable[[], None]
) -> dict[str, Any]:
    """The measurement of a changed step, as JSON data."""
    edits = [Edit(**edit) for edit in order["edits"]]
    changed = target.changed(lambda built: edit_built(built, edits))
    wait()
    return measure_target(changed, seconds=order["seconds"], with_layers=False).to_json()


def run_order(order: dict[str, Any], source: TextIO, out: TextIO) -> dict[str, Any]:
    """The answer to an order: of a worker's rate, or where it names edits, of a changed step."""

    def wait() -> None:
        out.write("ready\n")
        out.flush()
        if source.readline().strip() != "go":
            raise DlperfError("the process that started this one went away")

    torch.set_num_threads(order["threads"])
    target = resolve(
        order["spec"],
        order["batch_size"],
        inference=order["inference"],
        input_shape=tuple(order["input"]) if order["input"] else None,
    )
    return (measure_change if "edits" in order else time_worker)(order, target, wait)


def main() -> int:
    """The process's exit status, as :func:`dlperf.core.child_process.run` has it."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a target's loading workers print is not the answer either
    return child_process.run(
        lambda: json.dumps(run_order(child_process.read_job(), sys.stdin, out)), out
    )


if __name__ == "__main__":
    sys.exit(main())
