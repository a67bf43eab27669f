"""Epochs forecast from a machine file alone, loading included, beside measured ones.

    python benchmarks/epochs.py --machine machine.json mlp/0 mlp/1 lenet/0 cnn-medium/2
    (NETWORK/LOADER WORKERS)

Each case trains in a fresh process on generated data as networks/train.py does: one epoch to warm
up, then some that count. Batches that began and ended on a core at full speed count apart
("quiet"): on a shared machine the others measure the co-tenants. The repeatability is the distance
of the two halves of the epochs from each other; a forecast can be no more exact.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def train(
    net: str, n_workers: int, machine_path: str, n_samples: int, batch_size: int, n_epochs: int
) -> dict[str, Any]:
    """One case, in this process."""
    import torch
    from torch.utils.data import DataLoader

    from dlperf import predict
    from dlperf.core.clock import CoreSpeed
    from dlperf.core.costs import CORE_SPEED
    from dlperf.core.machine import Machine
    from dlperf.profiler.loader_sampling import sample_loader
    from dlperf.recorder import recording, targets
    from networks.catalog import NETWORKS
    from networks.data import generate
    from networks.train import Tally, add

    torch.set_num_threads(1)
    machine = Machine.load(machine_path)
    speed = CoreSpeed(best_s=machine.cost_value(CORE_SPEED, 1, float("inf")), back_off_s=5.0)
    network = NETWORKS[net]
    data = generate(network, n_samples, 0, 0).train
    loader = DataLoader(
        data,
        batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=n_workers,
        persistent_workers=n_workers > 0,
    )
    prediction = predict(recording.record_target(targets.resolve(net, batch_size)), machine, 1)
    epoch = prediction.epoch(
        n_samples,
        n_epochs,
        loader=sample_loader(loader, batch_size, clock=speed.clock()),
        loader_workers=n_workers,
        persistent_workers=n_workers > 0,
        drop_last=True,
        accuracy=network.count_right is not None,
    )
    model = network.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    epochs: list[float] = []
    quiet: list[float] = []
    n_batches = 0
    for number in range(n_epochs + 1):
        tally = Tally()
        looked_s, was_slow, begin = 0.0, speed.slow(), time.perf_counter()
        batch_begin = begin
        for inputs, wanted in loader:
            optimizer.zero_grad()
            output = model(inputs)
            loss = network.loss(output, wanted)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            add(tally, loss.item(), output, wanted, network)
            end = time.perf_counter()
            slow = speed.slow()
            if number and not slow and not was_slow:
                quiet.append(end - batch_begin)
            was_slow, batch_begin = slow, time.perf_counter()
            looked_s += batch_begin - end
            n_batches += number > 0
        if number:
            epochs.append(time.perf_counter() - begin - looked_s)
    half = len(epochs) // 2
    first, second = statistics.fmean(epochs[:half]), statistics.fmean(epochs[half:])
    mean_s = statistics.fmean(epochs)
    quiet_s = epoch.steps_per_epoch * statistics.fmean(quiet) if len(quiet) >= 20 else None
    return {
        "network": net,
        "loader_workers": n_workers,
        "predicted_s": epoch.epoch_s,
        "epoch_s": mean_s,
        "error_frac": epoch.epoch_s / mean_s - 1.0,
        "quiet_epoch_s": quiet_s,
        "quiet_error_frac": None if quiet_s is None else epoch.epoch_s / quiet_s - 1.0,
        "quiet_frac": len(quiet) / n_batches,
        "repeatability_frac": abs(second / first - 1.0),
        "bound": epoch.bound,
    }


def main() -> None:
    """Print a line a case; ``--json`` for the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="+", metavar="NETWORK/WORKERS")
    parser.add_argument("--machine", required=True)
    parser.add_argument("--samples", type=int, default=3200)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        net, _, workers = args.cases[0].partition("/")
        print(
            json.dumps(
                train(
                    net, int(workers or 0), args.machine, args.samples, args.batch_size, args.epochs
                )
            )
        )
        return
    rows = []
    for case in args.cases:
        options = [
            "--machine",
            args.machine,
            "--samples",
            str(args.samples),
            "--batch-size",
            str(args.batch_size),
            "--epochs",
            str(args.epochs),
        ]
        done = subprocess.run(
            [sys.executable, __file__, case, "--one", *options],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        row = json.loads(done.stdout.splitlines()[-1])
        rows.append(row)
        quiet = (
            "-" if row["quiet_error_frac"] is None else f"{100 * row['quiet_error_frac']:+.1f} %"
        )
        print(
            f"{case:16} predicted {row['predicted_s']:7.3f} s, measured {row['epoch_s']:7.3f} s:"
            f" {100 * row['error_frac']:+6.1f} %, quiet batches {quiet}"
            f" ({100 * row['quiet_frac']:.0f} %), repeats {100 * row['repeatability_frac']:.1f} %,"
            f" bound by the {row['bound']}",
            flush=True,
        )
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
