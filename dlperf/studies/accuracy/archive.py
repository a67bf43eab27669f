"""What was measured stays: one measurement file a run, so that an interrupted study resumes and
further predictors cost only a prediction.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from dlperf.core.conversion import convert
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


def environment() -> tuple[str, ...]:
    """This machine, its torch and its Python: those of a measurement."""
    found = versions()
    return (
        *map(str, this_cpu().identity),
        *(f"{k}={found[k]}" for k in ("python", "torch") if k in found),
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

    def path(self, name: str, *identity: str) -> Path:
        """The file ``NAME-DIGEST.json`` of what `identity` describes."""
        text = "\n".join(identity).encode(errors="backslashreplace")
        return self.folder / f"{name}-{hashlib.sha256(text).hexdigest()[:12]}.json"

    def _case_path(self, kind: str, case: Case, trace: Trace, detail: str) -> Path:
        """The file of one run; `kind` and `detail` (``"run 2, 4 s"``) tell several of one case
        apart.
        """
        threads = f"t{case.threads}" + ("-inference" if case.inference else "")
        return self.path(
            f"{slug(case.network, 40)}-b{case.batch_size}-{threads}-{slug(kind)}",
            f"{case.target}@{case.batch_size} threads {case.threads} inference {case.inference}",
            kind,
            detail,
            *environment(),
            *sorted({op.signature for op in trace.ops}),
        )

    def measurement(
        self, case: Case, trace: Trace, run: int, seconds: float, take: Callable[[], Measurement]
    ) -> Measurement:
        """The measurement of one run: the one that is kept, else a new one, which is then kept."""
        path = self._case_path(f"run{run}", case, trace, f"{seconds:g} s")
        return self.keep(path, Measurement.load, take, lambda taken: taken.save(path))

    def estimates(
        self, case: Case, trace: Trace, detail: str, ask: Callable[[], Sequence[BaselineEstimate]]
    ) -> tuple[BaselineEstimate, ...]:
        """What the baseline tools estimate: as it is kept, else asked anew and then kept. `detail`
        describes what they were given.
        """

        def take() -> dict[str, Any]:
            estimates = [asdict(estimate) for estimate in ask()]
            return {"versions": versions(), "machine": this_cpu().model, "estimates": estimates}

        return self.keep_json(
            self._case_path("peers", case, trace, detail),
            BASELINES_SCHEMA,
            lambda data: convert(data["estimates"], tuple[BaselineEstimate, ...]),
            take,
        )

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

    def keep_json(
        self,
        path: Path,
        schema: str,
        parse: Callable[[dict[str, Any]], Kept],
        take: Callable[[], dict[str, Any]],
    ) -> Kept:
        """The same of the content of a JSON file, parsed; `schema` is its first entry."""

        def load(found: Path) -> dict[str, Any]:
            data = read_json(found, schema, 1)
            parse(data)
            return data

        def save(taken: dict[str, Any]) -> None:
            write_json(path, {"schema": schema, "schema_version": 1, **taken})

        return parse(self.keep(path, load, take, save))

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
