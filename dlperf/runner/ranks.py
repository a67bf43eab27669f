"""The findings of the ranks of a training, merged: trace of communication, table, missing ranks."""

from __future__ import annotations

import datetime
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from msgspec import structs

from dlperf.core import host, units
from dlperf.core.communication import Communication, RankStep
from dlperf.core.errors import DlperfError, one_line
from dlperf.core.text import counted, fit, text_width
from dlperf.distributed.rank_shares import RankShares, rank_shares
from dlperf.report.document import Column, format_table
from dlperf.runner.communication_recording import WHOLE_RUN, RecordedStep

if TYPE_CHECKING:
    from dlperf.runner.collectives import CollectiveRecorder


@dataclass(frozen=True)
class RankFindings:
    """The findings of one rank.

    `status`: its script's exit status. `reason`: why it has no steps. `groups`: its process groups,
    by torch's name.
    """

    rank: int
    host: str
    status: int
    reason: str = ""
    steps: tuple[RecordedStep, ...] = ()
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    backend: str = ""
    threads: int = 1

    @classmethod
    def of(
        cls, rank: int, status: int, reason: str, recorder: CollectiveRecorder | None, threads: int
    ) -> RankFindings:
        """This process's own."""
        name = platform.node()
        if recorder is None:
            return cls(rank, name, status, reason or "torch was never imported", threads=threads)
        if recorder.error is not None:
            reason = reason or f"recording its calls failed: {one_line(recorder.error)}"
            return cls(rank, name, status, " ".join(reason.split()), threads=threads)
        steps = recorder.steps
        if recorder.has_forgotten and not steps:
            reason += (
                f"; without one at most {recorder.most_calls:,} calls are kept, and there were more"
            )
        elif not steps and not recorder.groups:
            reason += "; no call on a process group was seen"
        return cls(
            rank,
            name,
            status,
            reason,
            steps,
            tuple(recorder.groups.items()),
            recorder.backend,
            threads,
        )

    def to_json(self) -> dict[str, Any]:
        """The findings as JSON data, for rank 0."""
        return {**vars(self), "steps": [step.to_json() for step in self.steps]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RankFindings:
        """The findings that :meth:`to_json` wrote."""
        steps = tuple(RecordedStep.from_json(step) for step in data["steps"])
        groups = tuple((name, tuple(ranks)) for name, ranks in data["groups"])
        return cls(**{**data, "steps": steps, "groups": groups})


@dataclass(frozen=True)
class RankStepTimes:
    """A rank's step without what its loop does around it, in seconds: medians of plain steps.

    `compute_s`: the part without communication.
    """

    step_s: float
    compute_s: float


class MergedRanks:
    """The findings of all ranks of a world of `n_ranks`, some of which may be missing."""

    def __init__(self, found: Mapping[int, RankFindings], n_ranks: int, script: str = "") -> None:
        self.found, self.n_ranks, self.script = dict(found), n_ranks, script
        self._misfit = ""

    @property
    def remarks(self) -> list[str]:
        """Ranks whose script failed, and the reason where there is no comparison."""
        failed = [
            f"rank {one.rank} ended with status {one.status}"
            for one in self.found.values()
            if one.status and self.n_ranks > 1
        ]
        alone = (
            sum(not meeting.complete for meeting in self.trace.meetings)
            if self.trace is not None and self.is_whole_run
            else 0
        )
        if alone:
            failed.append(
                f"{counted(alone, 'call')} not issued by all of the ranks: what others"
                " waited for that is in their exposed communication"
            )
        return [
            *failed,
            *(
                [f"no comparison of the {self.n_ranks} ranks: {self.problem}"]
                if self.problem
                else []
            ),
        ]

    @property
    def is_whole_run(self) -> bool:
        """Whether the ranks never trained: their runs are compared, first call to last."""
        return not self._lacking and self._numbers == (WHOLE_RUN,)

    @cached_property
    def problem(self) -> str:
        """The reason why the findings do not fit together; empty where they do."""
        return self._lacking or (self._misfit if self.trace is None else "")

    @cached_property
    def _lacking(self) -> str:
        missing = [str(rank) for rank in range(self.n_ranks) if rank not in self.found]
        if missing:
            return (
                f"rank{'s' * (len(missing) != 1)} {', '.join(missing)} left no findings (dead,"
                " still running, or out of reach)"
            )
        for rank in sorted(self.found):
            if not self.found[rank].steps:
                return f"rank {rank} saw no training to watch" + (
                    f" ({reason})" if (reason := self.found[rank].reason) else ""
                )
        return "" if self._numbers else "they have no watched step in common"

    @cached_property
    def _numbers(self) -> tuple[int, ...]:
        """The numbers of the steps that every rank has."""
        own = [{step.number for step in one.steps} for one in self.found.values()]
        return tuple(sorted(set.intersection(*own))) if own else ()

    @cached_property
    def trace(self) -> Communication | None:
        """The trace of their communication; None where the findings do not fit together."""
        if self._lacking:
            return None
        names = {one: number for number, one in enumerate(self._groups())}
        try:
            trace = Communication(
                hosts=tuple(self.found[rank].host for rank in range(self.n_ranks)),
                groups=tuple(ranks for _, ranks in names),
                steps=tuple(self._steps(self.found[rank], names) for rank in range(self.n_ranks)),
                script=self.script,
                backend=next((one.backend for one in self.found.values() if one.backend), "none"),
                threads=self.found[0].threads,
                machine=host.this_cpu().model,
                versions=host.versions(),
                created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            )
            trace.meetings  # noqa: B018  raises where calls do not fit together
        except DlperfError as error:
            self._misfit = f"their calls do not fit together: {error}"
            return None
        return trace

    def _groups(self) -> list[tuple[str, tuple[int, ...]]]:
        """Every group of any rank, the world first: the default one's, else one without calls."""
        met = dict.fromkeys(
            group for rank in range(self.n_ranks) for group in self.found[rank].groups
        )
        world = tuple(range(self.n_ranks))
        first = next((group for group in met if group[1] == world), ("", world))
        return [first, *(group for group in met if group != first)]

    def _steps(
        self, one: RankFindings, names: Mapping[tuple[str, tuple[int, ...]], int]
    ) -> tuple[RankStep, ...]:
        own = [names[group] for group in one.groups]
        steps, launched = [], set()
        for recorded in one.steps:
            if recorded.number not in self._numbers:
                continue
            launched |= {event.call for event in recorded.step.launches}
            events = (
                structs.replace(event, group=own[event.group])
                for event in recorded.step.events
                if event.call in launched
            )
            steps.append(replace(recorded.step, events=tuple(events)))
        return tuple(steps)

    @cached_property
    def shares(self) -> tuple[RankShares, ...]:
        """A row for each rank; none where the findings do not fit together."""
        return () if self.trace is None else rank_shares(self.trace)

    @cached_property
    def step_times(self) -> tuple[RankStepTimes, ...]:
        """Each rank's own step, over the plain ones."""
        if self._lacking:
            return ()
        plain = [
            [step for step in self.found[rank].steps if step.own_s and step.number in self._numbers]
            for rank in range(self.n_ranks)
        ]
        if not all(plain):
            return ()
        return tuple(
            RankStepTimes(
                statistics.median(s.own_s for s in steps),
                statistics.median(s.own_s - s.own_communication_s for s in steps),
            )
            for steps in plain
        )

    # -- as text and data --------------------------------------------------------------------------

    def lines(self, width: int | None = None) -> list[str]:
        """The table of the ranks, `width` columns wide (default: the terminal's), if any."""
        if self.trace is None:
            return []
        n = sum(not step.first for step in self.trace.steps[0]) or 1
        hosts = len(set(self.trace.hosts))
        where = f"{self.n_ranks} ranks on {counted(hosts, 'host')}, {self.trace.backend}"
        if self.is_whole_run:
            title = f"{where}: the run from its first call to its last, as one step"
        else:
            title = (
                f"{where}: medians of {counted(n, 'step')}, each column by itself, all that the"
                " loop does included"
            )
        width = text_width() if width is None else width
        return [fit(title, width), format_table(columns_of(self.shares), width)]

    def to_json(self) -> dict[str, Any]:
        """The ranks as JSON data."""
        if self.trace is None:
            return {"ranks": self.n_ranks, "reason": self.problem, "rows": []}
        return {
            "ranks": self.n_ranks,
            "reason": "",
            "backend": self.trace.backend,
            "rows": [{"rank": row.rank, "host": row.host, **asdict(row)} for row in self.shares],
        }


def columns_of(rows: Sequence[RankShares]) -> list[Column]:
    """The columns of the ranks' table; shares as in Cardwell's Figure 2.4."""

    def seconds(title: str, name: str) -> Column:
        return Column(title, tuple(units.format_seconds(getattr(row, name)) for row in rows))

    return [
        Column("rank", tuple(str(row.rank) for row in rows)),
        Column("host", tuple(row.host for row in rows), rank=1, align_left=True),
        seconds("step", "step_s"),
        seconds("compute", "compute_s"),
        seconds("exposed communication", "exposed_s"),
        seconds("waiting", "waiting_s"),
        Column(
            "communication share",
            tuple(units.format_percent(row.communication_frac) for row in rows),
        ),
    ]
