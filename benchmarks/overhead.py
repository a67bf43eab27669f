"""What ``dlperf run`` adds to a training script between the script's first and last line.

    python benchmarks/overhead.py [--seconds 60] [--pairs 3] [--threads 1] [--machine FILE]

The same script (LeNet-5's layers on generated digits, a DataLoader, Adam, batch 64) runs plainly
and under ``dlperf run`` in turn; it notes the time of its own first and last line. The ratio of
each pair is printed, and the ratio of two plain runs beside it: what differs between two runs of
the same thing is no overhead.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import sys, time
first = time.perf_counter()
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
n_epochs = int(sys.argv[1])
model = nn.Sequential(
    nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
)
samples = TensorDataset(torch.rand(6400, 1, 28, 28), torch.randint(0, 10, (6400,)))
data = DataLoader(samples, batch_size=64, shuffle=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loss_function = nn.CrossEntropyLoss()
for epoch in range(n_epochs):
    for images, labels in data:
        optimizer.zero_grad()
        loss = loss_function(model(images), labels)
        loss.backward()
        optimizer.step()
open(sys.argv[2], "w").write(repr(time.perf_counter() - first))
"""


def script_s(prefix: list[str], folder: Path, n_epochs: int, environment: dict[str, str]) -> float:
    """Seconds between the script's first and last line."""
    out = folder / "seconds"
    out.unlink(missing_ok=True)
    command = [*prefix, str(folder / "train.py"), str(n_epochs), str(out)]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if done.returncode or not out.exists():
        sys.exit(f"{' '.join(prefix)} ended with status {done.returncode}: {done.stderr[-500:]}")
    return float(out.read_text())


def main() -> None:
    """Print each pair's times and ratios, and their medians."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="about how long the script trains"
    )
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--machine")
    args = parser.parse_args()
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        plain = [sys.executable]
        wrapped = [
            sys.executable,
            "-m",
            "dlperf",
            "run",
            *(["--machine", args.machine] if args.machine else []),
        ]
        short_s, longer_s = (script_s(plain, folder, n_epochs, environment) for n_epochs in (2, 6))
        n_epochs = max(3, round((args.seconds - short_s) / ((longer_s - short_s) / 4)) + 2)
        print(f"{n_epochs} epochs of 100 steps, {args.threads} thread(s)")
        print(
            f"{'pair':>4} {'plain s':>9} {'run s':>9} {'plain s':>9} {'run / plain':>12}"
            f" {'plain / plain':>14}"
        )
        ratios, floors = [], []
        for pair in range(args.pairs):
            before, watched, after = (
                script_s(prefix, folder, n_epochs, environment)
                for prefix in (plain, wrapped, plain)
            )
            ratios.append(watched / statistics.mean((before, after)))
            floors.append(after / before)
            print(
                f"{pair + 1:4} {before:9.2f} {watched:9.2f} {after:9.2f} {ratios[-1]:12.4f}"
                f" {floors[-1]:14.4f}",
                flush=True,
            )
        print(
            f"median run / plain {statistics.median(ratios):.4f}; two plain runs differ by up to"
            f" {max(abs(f - 1) for f in floors):.2%}"
        )


if __name__ == "__main__":
    main()
