"""How long recording and predicting a ResNet-50 step take in a warm process, beside the step
itself.

    python benchmarks/record_speed.py [--machine FILE] [--batch-size 32] [--rounds 5] [--step]

The target's builder runs under fake tensors and is part of the recording. ``--step`` also runs the
real step once (the second of two), for the ratio.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import dlperf
from dlperf.core.machine import default_path
from dlperf.recorder import recording, targets

TARGET = f"{Path(__file__).resolve().parent / 'resnet50.py'}:resnet50"


def step_s(target: targets.Target) -> float:
    """Seconds of the second real step."""
    built = target.build()
    seconds = 0.0
    for _ in range(2):
        begin = time.perf_counter()
        built.optimizer.zero_grad()
        built.loss(built.model(*built.inputs)).backward()
        built.optimizer.step()
        seconds = time.perf_counter() - begin
    return seconds


def main() -> None:
    """Print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--machine", default=str(default_path()))
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--predictor", default="calibrated")
    parser.add_argument("--step", action="store_true")
    args = parser.parse_args()
    try:
        machine = dlperf.Machine.load(args.machine)
        target = targets.resolve(TARGET, args.batch_size)
        columns: dict[str, list[float]] = {
            "record": [],
            "predict": [],
            "record + predict": [],
            "predict for other threads": [],
        }
        first_s = 0.0
        for index in range(args.rounds + 1):
            begin = time.perf_counter()
            trace = recording.record_target(target)
            recorded = time.perf_counter()
            one = dlperf.predict(trace, machine, threads=1, predictor=args.predictor)
            total_s = one.step.total_s
            predicted = time.perf_counter()
            two = dlperf.predict(trace, machine, threads=2, predictor=args.predictor)
            _ = two.step.total_s
            end = time.perf_counter()
            if index == 0:
                first_s = predicted - begin
                continue
            for name, seconds in zip(
                columns,
                (recorded - begin, predicted - recorded, predicted - begin, end - predicted),
            ):
                columns[name].append(seconds)
    except dlperf.DlperfError as error:
        sys.exit(str(error))
    sizes = f"{len(trace.layers)} layers, {len(trace.ops)} ops, {trace.n_parameters:,} parameters"
    print(
        f"ResNet-50, batch {args.batch_size}: {sizes}; {args.predictor} predicts {total_s:.3f} s a"
        " step"
    )
    whole = statistics.median(columns["record + predict"])
    print(f"{'what':28} {'median s':>9}  of record + predict")
    print(f"{'first record + predict':28} {first_s:9.3f}  {first_s / whole:.2f}")
    for name, samples in columns.items():
        print(
            f"{name:28} {statistics.median(samples):9.4f}  {statistics.median(samples) / whole:.3f}"
        )
    if args.step:
        seconds = step_s(target)
        print(f"{'the real step':28} {seconds:9.3f}  {seconds / whole:.2f}")


if __name__ == "__main__":
    main()
