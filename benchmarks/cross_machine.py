"""How right ``predict --profiled-on`` is: steps on one machine from the kernels of another.

    python benchmarks/cross_machine.py --case SOURCE.json MACHINE.json REFERENCE ... [-o FOLDER]

REFERENCE is a table of steps that were measured on the machine (CSV with the columns target,
batch_size and actual_s, such as an accuracy study writes), or the machine's own full file, whose
predictions are then the reference. Each case has three rows: the machine's own file without the
source; the source's kernels carried over by roofs alone, the machine's file cut down to its costs,
bandwidths and the fastest matrix product of each dtype; the source's kernels with all of the
machine's file. ``--measured FOLDER`` adds two rows for steps that were measured on the source
(files NAME.json of ``dlperf measure`` for networks of that name): without and with them.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from dlperf.core.machine import Machine
from dlperf.core.measurement import Measurement
from dlperf.core.trace import Trace
from dlperf.ops import counts
from dlperf.predictors.calibrated import Calibrated
from dlperf.recorder import recording, targets

Key = tuple[str, int]


@dataclass(frozen=True)
class Row:
    """Errors of predicted steps against their reference."""

    known: str
    errors: tuple[float, ...]
    n_inside: int

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        sizes = sorted(map(abs, self.errors))
        spread = math.sqrt(statistics.fmean(math.log1p(error) ** 2 for error in self.errors))
        percents = (
            statistics.median(sizes),
            sizes[int(0.9 * len(sizes))],
            sizes[-1],
            self.n_inside / len(sizes),
        )
        return (
            self.known,
            str(len(sizes)),
            *(f"{100 * value:.1f} %" for value in percents),
            f"{100 * statistics.median(self.errors):+.1f} %",
            f"{spread:.2f}",
        )


def bare(machine: Machine) -> Machine:
    """The machine without kernels, but for the fastest matrix product of each dtype."""
    best: dict[tuple[str, int], tuple[float, int]] = {}
    for index, kernel in enumerate(machine.kernels):
        flops = counts.op_flops(kernel.op) if kernel.family == "gemm" else None
        if flops:
            key = kernel.op.inputs[-1].dtype, kernel.threads
            best[key] = max(best.get(key, (0.0, 0)), (flops / kernel.seconds, index))
    kept = tuple(machine.kernels[index] for _, index in best.values())
    return replace(machine, kernels=kept, kernel_models=())


def step_s(
    trace: Trace, machine: Machine, source: Machine | None, measured: Measurement | None = None
) -> tuple[float, float, float]:
    """Seconds of a step with its interval, at the reference states."""
    prices = Calibrated(source, measured).price(trace, machine, 1)
    total_s = math.fsum(item.seconds for item in prices.items)
    return total_s, total_s * (prices.low_factor or 0.0), total_s * (prices.high_factor or math.inf)


def rows(
    source: Machine,
    machine: Machine,
    traces: dict[Key, Trace],
    actual_s: dict[Key, float],
    measured: dict[Key, Measurement],
) -> Iterator[Row]:
    """The rows of a case."""
    nothing = bare(machine)
    found = {key: measured[key] for key in actual_s if key in measured}
    for known, target, of, there in (
        (f"{machine.mode} calibration, without the source", machine, None, {}),
        ("roofs and costs", nothing, source, {}),
        (f"{machine.mode} calibration", machine, source, {}),
        (f"{machine.mode} calibration, steps with a measurement there", machine, source, found),
        (f"{machine.mode} calibration and the measurements there", machine, source, found),
    ):
        keys = list(there or actual_s)
        if "steps with" in known:
            there = {}
        if "measurement" in known and not found:
            continue
        pairs = [(actual_s[key], step_s(traces[key], target, of, there.get(key))) for key in keys]
        if pairs:
            errors = tuple(found_s / real_s - 1.0 for real_s, (found_s, _, _) in pairs)
            inside = sum(low_s <= real_s <= high_s for real_s, (_, low_s, high_s) in pairs)
            yield Row(known, errors, inside)


def references(path: str, traces: dict[Key, Trace]) -> tuple[str, dict[Key, float]]:
    """What a case is compared with, in words, and the steps' seconds."""
    if path.endswith(".csv"):
        table = pd.read_csv(path)
        steps = zip(table["target"], table["batch_size"], table["actual_s"])
        found = {(str(name), int(size)): float(seconds) for name, size, seconds in steps}
        return f"measured steps ({Path(path).name})", found
    machine = Machine.load(path)
    own = {key: step_s(trace, machine, None)[0] for key, trace in traces.items()}
    return f"steps predicted from its {machine.mode} calibration of {machine.created}", own


def lines_of(options: argparse.Namespace) -> Iterator[str]:
    """The page."""
    traces: dict[Key, Trace] = {}
    for path in (path for *_, path in options.case if path.endswith(".csv")):
        for name, size in references(path, {})[1]:
            if (name, size) not in traces:
                traces[name, size] = recording.record_target(targets.resolve(name, size))
    measured = {}
    for path in sorted(options.measured.glob("*.json")) if options.measured else ():
        one = Measurement.load(path)
        key = dict(targets_of(traces)).get((path.stem, one.batch_size))
        if key is not None:
            measured[key] = one
    date = time.strftime("%Y-%m-%d", time.gmtime())
    yield "# Steps of one machine from the kernels of another"
    yield ""
    cases = " ".join(
        f"--case {' '.join(Path(one).name for one in files)}" for files in options.case
    )
    yield f"Made by `python benchmarks/cross_machine.py {cases}`, {date}, 1 thread."
    yield "Errors of the predicted step; spread: root of the mean squared logarithm of predicted"
    yield "over reference. A table of measured steps says in its rows where and when they are from."
    for source_path, machine_path, reference in options.case:
        source, machine = Machine.load(source_path), Machine.load(machine_path)
        words, actual_s = references(reference, traces)
        own = {key: one for key, one in measured.items() if one.machine == source.cpu.model}
        yield ""
        yield f"## {machine.cpu.model} from {source.cpu.model}"
        yield ""
        for what, one in (("Source", source), ("Machine", machine)):
            versions = ", ".join(f"{name} {value}" for name, value in one.versions.items())
            yield f"- {what}: {one.mode} calibration of {one.created}; {versions}."
        yield f"- Reference: {words}."
        yield ""
        yield "| known of the machine | steps | median | 9 of 10 | worst | inside | bias | spread |"
        yield f"| :--- {'| ---: ' * 7}|"
        for row in rows(source, machine, traces, actual_s, own):
            yield f"| {' | '.join(row.cells)} |"


def targets_of(traces: dict[Key, Trace]) -> Iterator[tuple[tuple[str, int], Key]]:
    """Short names and sizes of the cases."""
    for name, size in traces:
        yield (name.rpartition(":")[2], size), (name, size)


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--case",
        nargs=3,
        action="append",
        required=True,
        metavar=("SOURCE", "MACHINE", "REFERENCE"),
    )
    parser.add_argument("--measured", type=Path, metavar="FOLDER")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    page = "\n".join(lines_of(options)) + "\n"
    print(page)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "cross-machine.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
