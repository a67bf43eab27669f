"""The process in which one variant is timed: reads an order as JSON from stdin, writes the
measurement as JSON to stdout.

Started by :func:`dlperf.advice.change_trials.measure_apart` as ``python -m
dlperf.advice.change_trial_process``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from dlperf.advice.transformations import edit_built
from dlperf.advice.variants import Variant
from dlperf.core import child_process
from dlperf.profiler import step_profiler
from dlperf.recorder.targets import resolve


def measure_order(order: dict[str, Any]) -> dict[str, Any]:
    """The measurement that an order asks for, as JSON data."""
    torch.set_num_threads(order["threads"])
    variant = Variant.from_json(order["variant"])
    target = resolve(
        order["spec"],
        order["batch_size"],
        inference=order["inference"],
        input_shape=tuple(order["input"]) if order["input"] else None,
    )
    measurement = step_profiler.measure_target(
        target.changed(lambda built: edit_built(built, variant.edits)),
        seconds=order["seconds"],
        with_layers=False,
    )
    return measurement.to_json()


if __name__ == "__main__":
    sys.exit(child_process.run(lambda: json.dumps(measure_order(json.load(sys.stdin)))))
