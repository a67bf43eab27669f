"""What ``dlperf run`` adds to a training script: at its start and end, and to its later steps.

    python benchmarks/overhead.py [--rounds 5] [--steps 1000] [--threads 1] [--machine FILE]
        [--compile] [-o reports/overhead]

The scripts in benchmarks/training do not know dlperf. In each round one runs plainly, under
``dlperf run`` and plainly again, each in a process of its own. Times of processes include importing
torch, on both sides; dlperf's modules are compiled, as pip leaves them. The scripts note the median
of their own steps after the watched ones. A difference counts where it is larger than that of any
two plain runs of a round. Run it on a quiet machine. The exit status is 1 where dlperf adds more
than a second, or slows a step.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("mlp", "cnn", "gan", "lstm")
MOST_ADDED_S = 1.0


@dataclass(frozen=True)
class Run:
    """One process, in seconds.

    `before_s`: until the script's first line. `wall_s`, `cpu_s`: of the whole process. `step_s`:
    the median of its later steps.
    """

    before_s: float
    wall_s: float
    cpu_s: float
    step_s: float


@dataclass(frozen=True)
class Round:
    """A run under dlperf, between two plain ones."""

    before: Run
    watched: Run
    after: Run

    def added(self, name: str) -> float:
        """The difference of a quantity to the mean of the plain runs."""
        plain = statistics.fmean(getattr(run, name) for run in (self.before, self.after))
        return float(getattr(self.watched, name) - plain)


@dataclass(frozen=True)
class Spread:
    """The median of some values, the least and the most."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of values, at least one."""
        return cls(statistics.median(values), min(values), max(values))

    def text(self) -> str:
        """The three numbers, with two digits behind the point."""
        return f"{self.median:.2f} ({self.least:.2f} .. {self.most:.2f})"


@dataclass(frozen=True)
class Overhead:
    """What dlperf adds to one script.

    `step_s`, `watched_step_s`: medians over the runs of the later steps' median. `step_frac`: added
    to a step, as a fraction of the plain ones; `repeatability_frac`: the largest such difference
    between the two plain runs of a round.
    """

    script: str
    before_s: Spread
    wall_s: Spread
    cpu_s: Spread
    step_s: float
    watched_step_s: float
    step_frac: float
    repeatability_frac: float

    @classmethod
    def of(cls, script: str, rounds: Sequence[Round]) -> Overhead:
        """The overhead over several rounds, at least one."""
        steps_s = [run.step_s for one in rounds for run in (one.before, one.after)]
        fractions = [
            one.added("step_s") / (one.watched.step_s - one.added("step_s")) for one in rounds
        ]
        return cls(
            script,
            *(
                Spread.of([one.added(name) for one in rounds])
                for name in ("before_s", "wall_s", "cpu_s")
            ),
            statistics.median(steps_s),
            statistics.median(one.watched.step_s for one in rounds),
            statistics.median(fractions),
            max(abs(one.after.step_s / one.before.step_s - 1.0) for one in rounds),
        )

    @property
    def is_short(self) -> bool:
        """Whether it adds at most a second to the run."""
        return self.wall_s.median <= MOST_ADDED_S

    @property
    def slows_steps(self) -> bool:
        """Whether later steps take longer, by more than plain runs differ."""
        return self.step_frac > self.repeatability_frac

    def to_row(self) -> tuple[str, ...]:
        """The cells of its row in the report."""
        return (
            self.script,
            self.before_s.text(),
            f"{self.wall_s.text()}{'' if self.is_short else ' **too much**'}",
            self.cpu_s.text(),
            f"{1e6 * self.step_s:.0f} us",
            f"{1e6 * self.watched_step_s:.0f} us",
            f"{self.step_frac:+.1%}{' **slower**' if self.slows_steps else ''}",
            f"{self.repeatability_frac:.1%}",
        )


COLUMNS = (
    "script",
    "added before its first line, s",
    "added to the run, s",
    "added processor time, s",
    "later step, plain",
    "with dlperf",
    "difference",
    "plain runs differ by up to",
)


def to_markdown(found: Sequence[Overhead], n_rounds: int, where: str) -> str:
    """The report."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(one.to_row() for one in found)]
    long = [one.script for one in found if not one.is_short]
    slow = [one.script for one in found if one.slows_steps]
    verdicts = [
        f"- Added to a run: {'more than' if long else 'at most'} {MOST_ADDED_S:g} s"
        + (f" in {', '.join(long)}." if long else " in every script."),
        "- Steps after the watched ones: "
        + (
            f"slower, by more than plain runs differ, in {', '.join(slow)}."
            if slow
            else "no slower than plain runs differ."
        ),
    ]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    text = (
        f"Medians of {n_rounds} rounds, with the least and the most. Each is a run under `dlperf"
        " run` less the mean of the plain runs before and after it."
    )
    command = "`python benchmarks/overhead.py`"
    return "\n".join(
        [
            "# Overhead of dlperf run",
            "",
            *verdicts,
            "",
            table,
            "",
            text,
            "",
            f"{command}, {where}",
            "",
        ]
    )


def run_script(prefix: list[str], name: str, n_steps: int, environment: dict[str, str]) -> Run:
    """Run one script in a process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "steps.json"
        script = str(ROOT / "benchmarks" / "training" / f"{name}.py")
        used, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(
            [*prefix, script, str(n_steps), str(out)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        ended, use = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode or not out.exists():
            sys.exit(f"{' '.join(prefix)} {name}: status {done.returncode}: {done.stderr[-500:]}")
        data = json.loads(out.read_text(encoding="utf-8"))
    cpu_s = use.ru_utime + use.ru_stime - used.ru_utime - used.ru_stime
    return Run(data["began_s"] - began, ended - began, cpu_s, data["step_s"])


def main() -> int:
    """Measure every script, print and write the report; 1 where the overhead is too large."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000, help="of each script, over 200")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--machine", help="machine file (default: this machine's)")
    parser.add_argument("--compile", action="store_true", help="a script with torch.compile, too")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "reports" / "overhead")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from dlperf.core import host

    for folder in ("dlperf", "microbench"):
        compileall.compile_dir(ROOT / folder, quiet=1)
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    plain = [sys.executable]
    machine = ["--machine", args.machine] if args.machine else []
    watched = [sys.executable, "-m", "dlperf", "run", *machine]
    found, samples = [], {}
    for name in (*SCRIPTS, *(["compiled"] if args.compile else [])):
        rounds = []
        for number in range(args.rounds + 1):  # the first fills caches of files, and does not count
            order = (plain, watched, plain)
            runs = (run_script(prefix, name, args.steps, environment) for prefix in order)
            rounds += [Round(*runs)]
            print(f"{name}, round {number} of {args.rounds}", file=sys.stderr, flush=True)
        found.append(Overhead.of(name, rounds[1:]))
        samples[name] = [asdict(one) for one in rounds[1:]]
    cpu, versions = host.this_cpu(), host.versions()
    listed = ", ".join(f"{key} {value}" for key, value in versions.items())
    where = f"{cpu.model}, {cpu.n_cores} cores, {args.threads} thread(s); {listed}"
    page = to_markdown(found, args.rounds, where)
    data = {
        "cpu": cpu.model,
        "versions": versions,
        "threads": args.threads,
        "steps": args.steps,
        "scripts": [asdict(one) for one in found],
        "rounds": samples,
    }
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "overhead.md").write_text(page, encoding="utf-8")
    (args.output / "overhead.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(page)
    return int(any(not one.is_short or one.slows_steps for one in found))


if __name__ == "__main__":
    sys.exit(main())
