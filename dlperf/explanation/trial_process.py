"""The process in which one variant is timed: reads an order as JSON from stdin, writes the measurement as JSON to stdout.

Started by :func:`dlperf.explanation.trials.measure_apart` as ``python -m dlperf.explanation.trial_process``.
"""
from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import torch

from dlperf import stopwatch
from dlperf.errors import DlperfError
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


def main() -> int:
    """Exit status 0, or 1 with one line on stderr that says why."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what a target prints is not the answer
            answer = measure_order(json.load(sys.stdin))
    except KeyboardInterrupt:
        return 130
    except DlperfError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    except Exception as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
