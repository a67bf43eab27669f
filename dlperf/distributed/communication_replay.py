"""Communication replay: a trace of communication over another cluster (trace-driven prediction,
Choi et al. 2020).

Recorded computation between calls stays, less the interference of the calls beside it there, plus
their interference here. Calls take the time that the cluster's forecast gives them. Ranks wait for
one another as in the trace (:mod:`dlperf.models.communication_replay`). The recorded step less its
replay over the cluster of the recording is a constant overhead, added to every replay.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from dlperf.core.clock import Samples, quantile
from dlperf.core.cluster import Cluster
from dlperf.core.communication import Communication
from dlperf.core.errors import DlperfError
from dlperf.core.variation import Z90, log_sigma, slowest_factor
from dlperf.distributed.collective_costs import (
    CallCosts,
    Interference,
    as_recorded,
    interference_of,
    link_sigma,
)
from dlperf.distributed.collective_times import LinkFactors, collective_s
from dlperf.distributed.forecast import COLLECTIVE_BYTES, DOUBLED, FASTER, NO_WIRE, is_network_bound
from dlperf.distributed.programs import Call, ReplayedSteps, lanes_of, recorded_segments
from dlperf.distributed.rank_shares import rank_shares, step_shares
from dlperf.distributed.scaling import (
    CallTimes,
    CollectiveTime,
    CommunicationReplay,
    RankReplay,
    ReplayPoint,
    Shares,
)
from dlperf.models.communication_replay import Collective, Operation, Replayed, replay

_MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, for a normal distribution."""
_ROUNDING, _DOUBTFUL_FRAC = 1e-6, 0.01
_ANY_RANKS = ("all_reduce", "broadcast", "barrier")
"""Collectives whose vector does not depend on the number of ranks."""


def replay_communication(
    trace: Communication,
    cluster: Cluster,
    recorded_on: Cluster | None = None,
    ranks: Sequence[int] = (),
    ranks_per_node: int | None = None,
    what_if: LinkFactors = LinkFactors(),
) -> CommunicationReplay:
    """The trace's step over `cluster` with the factors of `what_if` on its links.

    `recorded_on` is the cluster of the recording, without factors; without it the recorded times of
    the calls are used. `ranks_per_node` ranks share a node (default: nodes as recorded). Other
    numbers of `ranks` need calls that are all-reduces, broadcasts and barriers of all ranks: every
    rank then computes as a recorded one, and the slowest of n follows from the variation of the
    recorded steps.

    Raises DlperfError where the trace has no step or its calls do not match, a cluster lacks a
    needed link, ranks do not fill their nodes, and for numbers of ranks that cannot be answered.
    """
    return _Replaying(
        trace, cluster, recorded_on, tuple(ranks) or (trace.n_ranks,), ranks_per_node, what_if
    ).run()


class _Replaying:
    def __init__(
        self,
        trace: Communication,
        cluster: Cluster,
        recorded_on: Cluster | None,
        ranks: tuple[int, ...],
        ranks_per_node: int | None,
        what_if: LinkFactors,
    ) -> None:
        if not trace.n_steps:
            raise DlperfError(
                f"{trace.path or 'the trace'}: contains no step; record a run that trains longer"
            )
        if min(ranks) < 1:
            raise DlperfError(f"ranks are {ranks}; they must be at least 1")
        self.trace, self.cluster, self.recorded_on = trace, cluster, recorded_on
        self.what_if, self.asked = what_if, ranks
        self.hosts = [list(dict.fromkeys(trace.hosts)).index(host) for host in trace.hosts]
        self.per_node = ranks_per_node or max(trace.hosts.count(host) for host in trace.hosts)
        self.nodes = (
            self.hosts
            if ranks_per_node is None
            else [rank // ranks_per_node for rank in range(trace.n_ranks)]
        )
        self.segments, notes = recorded_segments(trace)
        self.calls = [call for segment in self.segments for call in segment.calls]
        self.notes = [*trace.notes, *notes]
        self._check_other_ranks()
        self.interferences = self._interferences()
        # what calls cost the recorded computing
        self.stealing = CallCosts(
            recorded_on or cluster,
            () if recorded_on is None else self.calls,
            self.hosts,
            interference=self.interferences[1],
        )
        self.was = None if recorded_on is None else self.stealing

    def stolen_s(self, call: Call) -> float:
        """Processor time that a recorded call took from each of its ranks."""
        return self.stealing.stolen_s(self.stealing.shape(call))

    def _check_other_ranks(self) -> None:
        others = [n for n in self.asked if n != self.trace.n_ranks]
        if not others:
            return
        world = set(range(self.trace.n_ranks))
        odd = next(
            (
                call
                for call in self.calls
                if call.kind not in _ANY_RANKS or set(call.ranks) != world
            ),
            None,
        )
        if odd is not None:
            what = f"{odd.kind} of ranks {', '.join(map(str, sorted(odd.ranks)))}"
            raise DlperfError(
                f"--ranks {others[0]}: {self.trace.path or 'the trace'} was recorded on"
                f" {self.trace.n_ranks} ranks, and its calls ({what}) do not say what other numbers"
                f" of ranks would send; leave --ranks out, or record it on {others[0]}"
            )
        self.notes.append(
            f"other numbers of ranks than {self.trace.n_ranks}: every rank is taken to compute as"
            " the recorded ones do, and to reduce and broadcast vectors of the same size, as"
            " DistributedDataParallel does under weak scaling"
        )

    def _interferences(self) -> tuple[Interference | None, Interference | None]:
        """Interference per byte on the other cluster, and on that of the recording; where one file
        contains none, that of the other.
        """
        here = interference_of(self.cluster, self.trace.threads)
        there = (
            None
            if self.recorded_on is None
            else interference_of(self.recorded_on, self.trace.threads)
        )
        if here is None and there is None:
            self.notes.append(
                "no cluster file contains the interference of collectives with computing: the"
                " recorded interference stays"
            )
        elif self.recorded_on is not None and (here is None or there is None):
            silent = self.recorded_on if there is None else self.cluster
            self.notes.append(
                f"{silent.path or 'one cluster'} contains no interference of collectives with"
                " computing: taken from the other cluster file"
            )
        return here or there, there or here

    def lines(
        self,
        operation: Callable[[Call], Operation],
        backend: str,
        slow: float = 1.0,
        bucket_s: float = 0.0,
    ) -> ReplayedSteps:
        """Every segment replayed; `slow` is a slowdown of the script's computing, `bucket_s` what
        an idle link saves the next call.
        """
        return ReplayedSteps(
            tuple(
                (
                    segment,
                    replay(
                        segment.programs(self.stolen_s, slow),
                        [operation(call) for call in segment.calls],
                        lanes_of(backend),
                        segment.starts_s,
                        bucket_s,
                    ),
                )
                for segment in self.segments
            )
        )

    def run(self) -> CommunicationReplay:
        trace = self.trace
        if self.was is None:
            again = self.lines(lambda call: as_recorded(call, self.stolen_s(call)), trace.backend)
        else:
            again = self.lines(self.was.operation, trace.backend, bucket_s=self.was.bucket_s())
        recorded_s = max(
            statistics.median(again.steady([step.seconds for step in steps]))
            for steps in trace.steps
        )
        self.overhead_s = recorded_s - again.step_s
        recorded_first = max(
            (step.seconds for steps in trace.steps for step in steps if step.first), default=None
        )
        self.first_overhead_s = (
            0.0
            if recorded_first is None or again.first_s is None
            else recorded_first - again.first_s
        )
        # of a rank's computing from step to step
        self.sigma = statistics.median(
            log_sigma(Samples(tuple(max(s.compute_s, 0.0) for s in again.steady(steps))))
            for steps in step_shares(trace)
        )
        alone = self.alone(self.slower(1))
        self.alone_s = self.with_overhead(alone, alone)
        main = trace.n_ranks if trace.n_ranks in self.asked else self.asked[0]
        costs = self.costs(main)
        usual = self.lines(
            costs.operation, self.cluster.backend, self.slower(main), costs.bucket_s()
        )
        rows = tuple(self.row(n) for n in self.asked)
        if self.what_if.changed and len(set(self.nodes)) == 1:
            self.notes.append(NO_WIRE)
        if self.overhead_s < -_DOUBTFUL_FRAC * recorded_s:
            self.notes.append(
                "the replay over the cluster of the recording is slower than the recorded step: the"
                " constant overhead is negative"
            )
        return CommunicationReplay(
            target=trace.script or trace.path or "trace",
            threads=trace.threads,
            ranks_per_node=self.per_node,
            n_steps=len(again.mean_steps_s),
            recorded_step_s=recorded_s,
            replayed_step_s=again.step_s,
            # DistributedDataParallel's buckets and the script's own all-reduces
            buckets_bytes=tuple(
                event.n_bytes for event in trace.steps[0][-1].launches if event.kind == "all_reduce"
            ),
            collectives=self.collectives(),
            rows=rows,
            ranks=tuple(
                RankReplay(
                    own.rank,
                    own.host,
                    Shares(own.step_s, own.compute_s, own.exposed_s, own.waiting_s),
                    usual.shares(own.rank),
                )
                for own in rank_shares(trace)
            ),
            calls=self.call_times(costs),
            trace=trace.path,
            cluster=self.cluster.path,
            recorded_on="" if self.recorded_on is None else self.recorded_on.path,
            machine=trace.machine,
            what_if=self.what_if.changed,
            sigma=self.sigma,
            link_sigma=link_sigma(self.cluster),
            notes=tuple(self.notes),
            versions=dict(trace.versions),
        )

    def costs(self, n: int, better: LinkFactors = LinkFactors()) -> CallCosts:
        """The calls over the other cluster, on n ranks; `better` are further factors."""
        other = None if n == self.trace.n_ranks else n
        return CallCosts(
            self.cluster,
            self.calls,
            self.nodes,
            self.what_if.times(better),
            self.interferences[0],
            other,
            min(n, self.per_node),
        )

    def slower(self, n: int) -> float:
        """Slowdown of the slowest of n ranks over the slowest of the recorded ones."""
        return slowest_factor(n, self.sigma) / slowest_factor(self.trace.n_ranks, self.sigma)

    def row(self, n: int) -> ReplayPoint:
        backend, slow, costs = self.cluster.backend, self.slower(n), self.costs(n)

        def at(own: CallCosts, factor: float = 1.0) -> ReplayedSteps:
            return self.lines(
                lambda call: own.operation(call, factor), backend, slow, own.bucket_s()
            )

        def spread(fraction: float) -> float:
            return (
                quantile(mean_steps.values, fraction) / mean_steps.median
                if mean_steps.median
                else 1.0
            )

        if n == 1:
            lines = free = doubled = faster = low = high = self.alone(slow)
        else:
            vary = math.exp(Z90 * link_sigma(self.cluster))
            lines, low, high = at(costs), at(costs, 1 / vary), at(costs, vary)
            doubled, faster = (at(self.costs(n, better)) for better in (DOUBLED, FASTER))
            free = self.lines(
                lambda call: replace(costs.operation(call), collective=Collective(0.0)),
                backend,
                slow,
            )
        step_s = self.with_overhead(lines, free)
        compute_s = min(step_s, free.step_s + max(0.0, self.overhead_s))
        own_s = max(
            shares.compute_s + shares.exposed_communication_s
            for shares in map(free.shares, free.ranks)
        )
        waiting_s = free.step_s - own_s
        mean_steps = Samples(tuple(lines.mean_steps_s))
        error = math.exp(
            Z90 * _MEDIAN_ERROR * log_sigma(mean_steps) / math.sqrt(len(mean_steps.values))
        )
        gain_frac, faster_frac = (
            1 - self.with_overhead(better, free) / step_s if step_s else 0.0
            for better in (doubled, faster)
        )
        efficiency = self.alone_s / step_s if step_s else 1.0
        per_step = len(lines.firsts)
        first_s = (
            None
            if lines.first_s is None
            else max(lines.first_s + self.first_overhead_s, free.first_s or 0.0)
        )
        return ReplayPoint(
            ranks=n,
            step_s=step_s,
            low_s=self.with_overhead(low, free) / error,
            high_s=self.with_overhead(high, free) * error,
            first_step_s=first_s,
            compute_s=compute_s,
            communication_s=0.0 if n == 1 else max(map(lines.busy_s, lines.ranks)),
            exposed_communication_s=step_s - compute_s,
            waiting_s=waiting_s if waiting_s > _ROUNDING * free.step_s else 0.0,
            overhead_s=self.overhead_s,
            efficiency=efficiency,
            speedup=n * efficiency,
            steps_per_s=1 / step_s if step_s else 0.0,
            bound=(
                "network"
                if is_network_bound(gain_frac, faster_frac, step_s - compute_s, step_s)
                else "compute"
            ),
            network_gain_frac=gain_frac,
            p10_s=step_s * spread(0.1),
            p90_s=step_s * spread(0.9),
            network_bytes=max(
                math.fsum(
                    costs.sent_bytes(costs.shape(call)) for call in self.calls if rank in call.ranks
                )
                / per_step
                for rank in lines.ranks
            ),
        )

    def alone(self, slow: float) -> ReplayedSteps:
        """Every rank replayed alone."""
        found = []
        for segment in self.segments:
            own = [Operation((0,), Collective(0.0))] * len(segment.calls)
            apart = [replay([program], own) for program in segment.programs(self.stolen_s, slow)]
            ends, marks = zip(*((line.ends_s[0], line.marks_s[0]) for line in apart))
            found.append((segment, Replayed(ends, marks, ((),) * len(apart), ())))
        return ReplayedSteps(tuple(found))

    def with_overhead(self, lines: ReplayedSteps, free: ReplayedSteps) -> float:
        """The replayed step with the constant overhead; at least the step over a network that takes
        no time.
        """
        return max(lines.step_s + self.overhead_s, free.step_s)

    def call_times(self, costs: CallCosts) -> tuple[CallTimes, ...]:
        """By kind, size and number of ranks, the largest total time first."""

        def seconds(own: CallCosts, calls: Sequence[Call]) -> float:
            return statistics.median(own.seconds(own.shape(call)) for call in calls)

        alike: dict[tuple[str, int, int], list[Call]] = {}
        for call in self.calls:
            alike.setdefault((call.kind, call.n_bytes, len(call.ranks)), []).append(call)
        found = [
            CallTimes(
                kind,
                n_bytes,
                n,
                len(calls) / self.trace.n_steps,
                statistics.median(call.seconds for call in calls),
                None if self.was is None else seconds(self.was, calls),
                seconds(costs, calls),
            )
            for (kind, n_bytes, n), calls in alike.items()
        ]
        return tuple(sorted(found, key=lambda one: -one.per_step * one.replayed_s))

    def collectives(self) -> tuple[CollectiveTime, ...]:
        largest = max(self.asked)
        per_node = min(largest, self.per_node)
        if largest == self.trace.n_ranks and largest % per_node:  # uneven nodes, as recorded
            per_node = 1
        times = collective_s(
            self.cluster, "all_reduce", COLLECTIVE_BYTES, largest, per_node, self.what_if
        )
        return tuple(
            CollectiveTime("all_reduce", size, largest, float(seconds))
            for size, seconds in zip(COLLECTIVE_BYTES, times)
        )
