"""What was measured stays: one measurement file a run, so that an interrupted study resumes and
further predictors cost only a prediction.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from dlperf.core.errors import DlperfError
from dlperf.core.files import read_json, write_json
from dlperf.core.host import this_cpu, versions
from dlperf.core.measurement import Measurement
from dlperf.core.trace import Trace
from dlperf.report.writing import slug
from dlperf.studies.accuracy.baselines import BaselineEstimate
from dlperf.studies.accuracy.cases import Case

BASELINES_SCHEMA = "dlperf.baselines"
Kept = TypeVar("Kept")


def what_is_kept(n_kept: int, what: str, folder: Path, fresh: bool) -> str:
    """What an interrupted study leaves behind in its folder; empty where that is nothing.

    >>> what_is_kept(2, "case", Path("cache"), fresh=False)
    '2 finished cases are kept in cache, and the same command goes on from there'
    """
    if not n_kept:
        return ""
    again = "the same command without --fresh" if fresh else "the same command"
    return (
        f"{n_kept} finished {what}{'s are' if n_kept != 1 else ' is'} kept in {folder}, and {again}"
        " goes on from there"
    )


class Archive:
    """A folder of measurements, each under a name that says what was measured, of which ops, where
    and with which torch.

    A network whose code has changed, another machine or another torch find nothing here. `fresh`
    keeps what is taken but does not look for older ones.
    """

    def __init__(self, folder: str | Path, fresh: bool = False) -> None:
        self.folder = Path(folder)
        self.fresh = fresh
        self.n_taken = 0
        self._dates: list[float] = []

    def path(self, kind: str, case: Case, trace: Trace, detail: str) -> Path:
        """The file of one run; `kind` and `detail` (``"run 2, 4 s"``) tell several of one case
        apart.
        """
        name = f"{case.target}@{case.batch_size} threads {case.threads} inference {case.inference}"
        where = (
            *map(str, this_cpu().identity),
            *(f"{k}={v}" for k, v in sorted(versions().items()) if k in ("torch", "python")),
        )
        ops = "\n".join(sorted({op.signature for op in trace.ops}))
        digest = hashlib.sha256(
            "\n".join((name, kind, detail, *where, ops)).encode(errors="backslashreplace")
        ).hexdigest()[:12]
        threads = f"t{case.threads}" + ("-inference" if case.inference else "")
        return (
            self.folder
            / f"{slug(case.network, 40)}-b{case.batch_size}-{threads}-{slug(kind)}-{digest}.json"
        )

    def measurement(
        self, case: Case, trace: Trace, run: int, seconds: float, take: Callable[[], Measurement]
    ) -> Measurement:
        """The measurement of one run: the one that is kept, else a new one, which is then kept."""
        path = self.path(f"run{run}", case, trace, f"{seconds:g} s")
        return self.keep(path, Measurement.load, take, lambda taken: taken.save(path))

    def estimates(
        self, case: Case, trace: Trace, detail: str, ask: Callable[[], Sequence[BaselineEstimate]]
    ) -> tuple[BaselineEstimate, ...]:
        """What the peers say: as it is kept, else asked anew and then kept. `detail` says what they
        were given.
        """
        path = self.path("peers", case, trace, detail)

        def load(found: Path) -> tuple[BaselineEstimate, ...]:
            return tuple(
                BaselineEstimate.from_json(row)
                for row in read_json(found, BASELINES_SCHEMA, 1)["estimates"]
            )

        def save(asked: tuple[BaselineEstimate, ...]) -> None:
            rows = [estimate.to_json() for estimate in asked]
            write_json(
                path,
                {
                    "schema": BASELINES_SCHEMA,
                    "schema_version": 1,
                    "versions": versions(),
                    "machine": this_cpu().model,
                    "estimates": rows,
                },
            )

        return self.keep(path, load, lambda: tuple(ask()), save)

    def holds(self, path: Path) -> bool:
        """Whether :meth:`keep` would look at a file of this folder before it takes anything."""
        return not self.fresh and path.exists()

    def keep(
        self,
        path: Path,
        load: Callable[[Path], Kept],
        take: Callable[[], Kept],
        save: Callable[[Kept], None],
    ) -> Kept:
        """What a file of this folder holds, else what `take` gives, which `save` then keeps; a
        damaged file is taken anew and replaced.
        """
        if self.holds(path):
            try:
                found = load(path)
            except (DlperfError, KeyError, TypeError, ValueError):
                pass
            else:
                self._dates.append(path.stat().st_mtime)
                return found
        taken = take()
        self.folder.mkdir(parents=True, exist_ok=True)
        save(taken)
        self.n_taken += 1
        return taken

    @property
    def kept(self) -> str:
        """What an interrupted study leaves behind; empty where nothing was measured and nothing was
        there.
        """
        return what_is_kept(self.n_taken + len(self._dates), "measurement", self.folder, self.fresh)

    @property
    def remark(self) -> str:
        """How many of the measurements are older than this study, and from when; empty where none
        is.
        """
        if not self._dates:
            return ""
        dates = (
            datetime.datetime.fromtimestamp(date, datetime.timezone.utc)
            for date in (min(self._dates), max(self._dates))
        )
        first, last = (date.isoformat(timespec="minutes") for date in dates)
        return (
            f"{len(self._dates)} of {len(self._dates) + self.n_taken} measurements were kept from"
            f" before, taken between {first} and {last}"
        )
