"""Steps of random networks, timed layer by layer in a process of their own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dlperf.core import child_process
from dlperf.core.measurement import Measurement
from dlperf.predictors.allocator.policies import policy_of


@dataclass(frozen=True)
class TimedStep:
    """The measured step of a random network, of which `seed` is the seed.

    The measurement has its kind as target, its trace, and readings of the machine before and after
    it was timed; from a process of times only neither trace nor readings.
    """

    seed: int
    measurement: Measurement

    @property
    def measured_s(self) -> float:
        """The median step, in seconds."""
        return self.measurement.step["total"].median


class Process(child_process.Child):
    """A fresh process that times steps of random networks with so many threads, under an allocator
    policy, or under `settings` of malloc beside it, with `times_only` without traces and readings
    of the state. It starts at once and imports torch while others work.
    """

    def __init__(
        self, threads: int, malloc: str = "default", settings: str = "", times_only: bool = False
    ) -> None:
        self.threads, self.times_only = threads, times_only
        chosen = f"{policy_of(malloc).settings} {settings}".split()
        own = {"MKL_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1"}  # no pool of numpy's
        variables = {**os.environ, **dict(one.split("=") for one in chosen), **own}
        super().__init__(
            "dlperf.studies.random_step_process", threads=threads, environment=variables
        )

    def time_steps(self, seeds: Sequence[int], seconds: float) -> Iterator[TimedStep]:
        """The steps of the networks of these seeds, each timed for so many seconds, as they come.
        A network whose step takes too long, or whose child fails, is left out.

        Raises WorkFailed where the process fails, KeyboardInterrupt where it was interrupted.
        """
        assert self.stdout is not None
        job = {
            "seeds": list(seeds),
            "seconds": seconds,
            "threads": self.threads,
            "times_only": self.times_only,
        }
        self.write(json.dumps(job))
        for _ in seeds:
            line = self.stdout.readline()
            if not line.endswith("\n"):
                _, said = self.communicate()
                raise child_process.failure(
                    self.returncode or child_process.FAILED,
                    said or "",
                    "the process of the random networks",
                )
            if (answer := json.loads(line)) is not None:
                yield TimedStep(answer["seed"], Measurement.from_json(answer["measurement"]))
