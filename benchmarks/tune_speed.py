"""How long ``dlperf tune`` takes for a grid: recording the traces, predicting at the recorded batch
sizes, and comparing thousands of configurations.

    python benchmarks/tune_speed.py MACHINE.json [TARGET] [--batch-sizes 64]

The grid is every batch size from 4 on in steps of 4, so many of them, times the machine file's
threads, 0 to 7 loading workers and 1 to 8 workers. What the machine file lacks is left
out, so the number of configurations is printed.
"""

from __future__ import annotations

import argparse
import time

from dlperf.advice.grid import EPOCH, Axes, Objective
from dlperf.advice.rates import Forecaster
from dlperf.advice.tuning import tune
from dlperf.core.machine import Machine
from dlperf.core.trace import Trace
from dlperf.recorder import recording, targets


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("machine")
    parser.add_argument("target", nargs="?", default="lenet")
    parser.add_argument("--batch-sizes", type=int, default=64)
    options = parser.parse_args()
    machine = Machine.load(options.machine)
    recording_s = 0.0

    def record(batch_size: int) -> Trace:
        nonlocal recording_s
        begin = time.perf_counter()
        trace = recording.record_target(targets.resolve(options.target, batch_size))
        recording_s += time.perf_counter() - begin
        return trace

    axes = Axes(
        machine.threads,
        tuple(range(4, 4 * options.batch_sizes + 1, 4)),
        tuple(range(8)),
        tuple(range(1, 9)),
    )
    forecaster = Forecaster(machine, record)
    begin = time.perf_counter()
    found = tune(
        options.target,
        machine.cpu.model,
        axes,
        Objective(EPOCH, samples=60_000),
        forecaster.rate_of,
        forecaster.knows,
    )
    total_s = time.perf_counter() - begin
    again = time.perf_counter()
    tune(
        options.target,
        machine.cpu.model,
        axes,
        Objective(EPOCH, samples=60_000),
        forecaster.rate_of,
        forecaster.knows,
    )
    print(
        f"{options.target}: {len(found.rows)} configurations, {len(found.recorded)} batch sizes"
        " recorded"
    )
    again_s = time.perf_counter() - again
    print(
        f"recording {recording_s:.2f} s, everything else {total_s - recording_s:.2f} s; once more"
        f" with the predictions at hand {again_s:.2f} s"
    )
    print(f"best: {found.best.configuration.label}, {found.best.samples_per_s:.0f} samples/s")


if __name__ == "__main__":
    main()
