"""How long dlperf takes to answer: ``dlperf --help``, and ``import dlperf`` on top of ``import
torch``.

    python benchmarks/startup.py [--rounds 10]

Each time is the least of several fresh processes, taken in turn so that a busy moment hits all of
them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

COMMANDS = {
    "python alone": ["-c", "pass"],
    "dlperf --help": ["-m", "dlperf", "--help"],
    "import torch": ["-c", "import torch"],
    "import torch, dlperf": ["-c", "import torch, dlperf"],
    "import torch, dlperf, every public name": [
        "-c",
        "import torch, dlperf\nfor name in dlperf.__all__: getattr(dlperf, name)",
    ],
}


def wall_s(arguments: list[str]) -> float:
    """Seconds from the start to the end of a Python process."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> None:
    """Print the times and their ratios to what they are held against."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    for arguments in COMMANDS.values():
        wall_s(arguments)  # files into the page cache
    samples = [
        {name: wall_s(arguments) for name, arguments in COMMANDS.items()} for _ in range(rounds)
    ]
    least = {name: min(sample[name] for sample in samples) for name in COMMANDS}
    alone, torch_s = least["python alone"], least["import torch"]
    print(f"{'process':42} {'seconds':>8} {'above':>8}   ratio")
    for name, base_s, base in (
        ("dlperf --help", alone, "python alone"),
        ("import torch, dlperf", torch_s, "import torch"),
        ("import torch, dlperf, every public name", torch_s, "import torch"),
    ):
        print(
            f"{name:42} {least[name]:8.3f} {least[name] - base_s:8.3f}   {least[name] / base_s:.2f}"
            f" x {base}"
        )


if __name__ == "__main__":
    main()
