"""The process in which one variant is timed: reads an order as JSON from stdin, writes the measurement as JSON to stdout.

Started by :func:`dlperf.explanation.trials.measure_apart` as ``python -m dlperf.explanation.trial_process``.
"""
from __future__ import annotations

import json
import sys
from typing import Any

import torch

from dlperf import child_process, stopwatch
from dlperf.explanation.transformations import edit_built
from dlperf.explanation.variants import Variant
from dlperf.targets import resolve


def measure_order(order: dict[str, Any]) -> dict[str, Any]:
    """The measurement that an order asks for, as JSON data."""
    torch.set_num_threads(order["threads"])
    variant = Variant.from_json(order["variant"])
    target = resolve(order["spec"], order["batch_size"], inference=order["inference"], input_shape=tuple(order["input"]) if order["input"] else None)
    measurement = stopwatch.measure_target(target.changed(lambda built: edit_built(built, variant.edits)), seconds=order["seconds"], with_layers=False)
    return measurement.to_json()


if __name__ == "__main__":
    sys.exit(child_process.run(lambda: json.dumps(measure_order(json.load(sys.stdin)))))
