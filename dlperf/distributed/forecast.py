"""Scaling forecast: predicted steps and a cluster -> the step of DistributedDataParallel over
numbers of ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from dlperf.core.cluster import Cluster
from dlperf.core.errors import DlperfError
from dlperf.core.text import counted
from dlperf.core.units import KIB, MIB
from dlperf.core.variation import Z90, machine_log_sigma, mean_factor, slowest_factor
from dlperf.distributed.collective_costs import (
    CollectiveCosts,
    Shape,
    interference_of,
    link_sigma,
)
from dlperf.distributed.collective_times import LinkFactors, collective_s, find_path
from dlperf.distributed.programs import lanes_of
from dlperf.distributed.scaling import CollectiveTime, Scaling, ScalingPoint, StepTimeLine
from dlperf.distributed.scenario import ScalingScenario, WhatIf, is_one_computer
from dlperf.distributed.step_profile import (
    Profile,
    arrivals_of,
    between,
    buffer_copies_s,
    gradients_of,
    profile_of,
)
from dlperf.forecast.loop import first_step_s
from dlperf.forecast.prediction import Prediction
from dlperf.forecast.worker_processes import predict_co_run, unmeasured, with_co_runs
from dlperf.models import buckets as bucketing
from dlperf.models.buckets import ReducerOptions
from dlperf.models.communication_replay import Collective
from dlperf.models.overlap import Synchronisation, TimeLine, ddp_program, simulate
from dlperf.models.ridgeline import RESOURCES, Rates, bounding_resource
from dlperf.ops.roofs import roofs_of

DOUBLED, FASTER = LinkFactors(2.0), LinkFactors(2.0, 0.5)
NETWORK_GAIN_FRAC = 0.10
EXPOSED_FRAC = 0.5
"""The network bounds a step where DOUBLED or FASTER links shorten it by more than
NETWORK_GAIN_FRAC, or where more than EXPOSED_FRAC of it is exposed communication: among many ranks
that may be the software's latency, which no faster link shortens.
"""
ONE_COMPUTER = (
    "the cluster file contains no link between computers, so all ranks share one;"
    " measure on several, or add a link of distance network"
)
NO_WIRE = (
    "ranks of one node exchange nothing over a link: link_bandwidth and link_latency change nothing"
    " there"
)
COLLECTIVE_BYTES = (64 * KIB, 512 * KIB, 4 * MIB, 16 * MIB)
_USED_ITEM_BYTES = 4
_ROUNDS = 3
"""Iterations of a step's time line: waiting cools the caches, slower computing shortens the wait.
"""


class _Network:
    """What a network sends: gradients, buckets of the first and later steps, buffers by dtype."""

    def __init__(self, prediction: Prediction, options: ReducerOptions) -> None:
        trace = prediction.trace
        self.gradients, arrivals = gradients_of(trace), arrivals_of(trace)
        self.notes: list[str] = []
        unused = tuple(sorted(set(range(len(self.gradients))) - set(arrivals)))
        if unused and options.rebuilds and not options.static_graph:
            names = [parameter.name for parameter in trace.parameters if parameter.trained]
            self.notes.append(
                f"{counted(len(unused), 'trained parameter')} without a gradient"
                f" ({names[unused[0]]}, ...), which DDP refuses: predicted with"
                " find_unused_parameters"
            )
            options = replace(options, static_graph=False, find_unused_parameters=True)
        if any(gradient.sparse for gradient in self.gradients):
            self.notes.append(
                "sparse gradients are priced as dense ones of the whole parameter: an upper bound"
            )
        by_dtype: Counter[str] = Counter()
        for _, spec in trace.buffers if options.broadcast_buffers else ():
            by_dtype[spec.dtype] += spec.numel * spec.item_bytes
        self.options, self.unused = options, unused
        self.used_map_bytes = _USED_ITEM_BYTES * len(self.gradients)
        self.buffers_bytes = tuple(by_dtype.values())
        self.first = bucketing.first_buckets(self.gradients, options)
        self.later = bucketing.rebuilt_buckets(self.gradients, arrivals, options)
        self.later_bytes = bucketing.sizes_bytes(self.gradients, self.later)

    @property
    def reduced_bytes(self) -> set[int]:
        return {
            *bucketing.sizes_bytes(self.gradients, self.first),
            *self.later_bytes,
            self.used_map_bytes,
            *COLLECTIVE_BYTES,
        }

    def sent_bytes(self, n: int) -> float:
        """Bytes that a rank of n sends in a step."""
        return 2 * (n - 1) / n * sum(self.later_bytes) + (sum(self.buffers_bytes) if n > 1 else 0)


def forecast(
    predict_at: Callable[[int], Prediction], cluster: Cluster | None, question: ScalingScenario
) -> Scaling:
    """The forecast of a scenario. `predict_at(batch_size)` predicts one rank's step; it is called
    for a few batch sizes, between which profiles are linear.

    Raises DlperfError where the cluster file is missing or lacks a link, where the network trains
    nothing, and as :class:`ScalingScenario` does.
    """
    if cluster is None and max(question.ranks) > 1:
        raise DlperfError(
            "several ranks need a cluster file: torchrun --nproc-per-node 2 -m"
            " dlperf.microbench.network -o cluster.json measures one; give it with --cluster"
        )
    several = [n for n in question.ranks if n > 1]
    if cluster is not None and several:  # raises for a missing link before anything is predicted
        collective_s(cluster, "all_reduce", 0, several, question.ranks_per_node)
    return _Forecast(predict_at, cluster, question).run()


class _Forecast:
    def __init__(
        self,
        predict_at: Callable[[int], Prediction],
        cluster: Cluster | None,
        question: ScalingScenario,
    ) -> None:
        self.cluster, self.question = cluster, question
        self.notes: list[str] = []
        self.alone = {
            size: predict_at(size).under(question.what_if.machine)
            for size in question.recorded_sizes()
        }
        self.any = self.alone[max(self.alone)]
        self.network = _Network(self.any, question.options)
        self.notes += self.network.notes
        self._profiles: dict[int, list[Profile]] = {}
        self._lines: dict[int, TimeLine] = {}
        self.sigma = machine_log_sigma(self.any.machine)
        self.link_sigma = 0.0 if cluster is None else link_sigma(cluster)
        self._rates = {
            far: rates_of(self.any, cluster, far, question.what_if)
            for far in {n > question.ranks_per_node for n in question.ranks if n > 1}
        }
        self.traffic = self._traffic(question.what_if)
        self.doubled, self.faster = (
            self._traffic(question.what_if.times(better)) for better in (DOUBLED, FASTER)
        )
        self._note_doubts()

    def _traffic(self, factors: LinkFactors) -> CollectiveCosts:
        network, cluster = self.network, self.cluster
        shapes = [
            self._shape(kind, size, n)
            for kind, sizes in (
                ("all_reduce", network.reduced_bytes),
                ("broadcast", network.buffers_bytes),
            )
            for size in sizes
            for n in self.question.ranks
        ]
        interference = None if cluster is None else interference_of(cluster, self.any.threads)
        return CollectiveCosts(cluster, shapes, factors, interference)

    def _shape(self, kind: str, n_bytes: int, n: int) -> Shape:
        per_node = self.question.ranks_per_node
        return Shape(kind, n_bytes, n, per_node, n > per_node)

    def _note_doubts(self) -> None:
        asked, cluster = self.question, self.cluster
        sizes = {asked.own_batch_size(n) for n in (1, *asked.ranks)}
        most, crowd = max(asked.ranks), max(asked.side_by_side(n) for n in asked.ranks)
        doubts = {
            f"steps were recorded at batch sizes {', '.join(map(str, sorted(self.alone)))} and are"
            " linear between them": len(sizes) > len(self.alone),
            "where a batch cannot be divided evenly, the rank with the most samples counts": (
                asked.scaling == "strong" and any(asked.batch_size % n for n in asked.ranks)
            ),
        }
        if cluster is not None:
            inside = any(1 < n <= asked.ranks_per_node for n in asked.ranks)
            held = max((c.n_ranks for c in cluster.collectives), default=0)
            doubts |= {
                "the cluster file contains no interference of collectives with computing: taken as"
                " none": most > 1 and not cluster.interferences,
                NO_WIRE: bool({"link_bandwidth", "link_latency"} & asked.what_if.changed.keys())
                and inside,
                ONE_COMPUTER: is_one_computer(cluster) and most > cluster.ranks_per_host,
                f"collectives were measured on up to {held} ranks; beyond, they follow the"
                " algorithm's model": 0 < held < most,
            }
        doubts |= {
            "the machine file contains no measured peak or bandwidth, so there is no Ridgeline"
            " plane": None in self._rates.values(),
            f"hosts of the cluster file stand {asked.hosts_per_system} on one computer: up to"
            f" {crowd} ranks compute side by side on it": crowd > asked.hosts_per_system > 1,
        }
        self.notes += [note for note, holds in doubts.items() if holds]

    def profile(self, n: int, side_by_side: int) -> Profile:
        """One rank's step at its batch size while `side_by_side` ranks run on its computer."""
        if side_by_side not in self._profiles:
            self._profiles[side_by_side] = [
                profile_of(self._beside(prediction, side_by_side), self.network.options)
                for prediction in self.alone.values()
            ]
        return between(self._profiles[side_by_side], self.question.own_batch_size(n))

    def _beside(self, prediction: Prediction, workers: int) -> Prediction:
        """The prediction of one of so many ranks on a computer, slowed down as the cluster's own
        ranks were or else as the machine's processes.
        """
        if workers == 1:
            return prediction
        co_runs = () if self.cluster is None else self.cluster.co_runs
        if co_runs:
            prediction = replace(prediction, machine=with_co_runs(prediction.machine, co_runs))
        reason = ""
        if prediction.threads != 1:
            reason = "what ranks of several threads cost one another is not known"
        elif unknown := unmeasured(prediction):
            reason = (
                "neither the cluster file nor the machine file contains their co-run slowdown"
                f" ({', '.join(unknown)}; dlperf.microbench.network on ranks of one computer"
                f" measures it, and so does {prediction.machine.calibration('--workers 1,2,4')})"
            )
        if reason:
            self.notes.append(f"{workers} ranks share a computer, and {reason}: taken for nothing")
            return prediction
        own, known = (
            {co_run.workers for co_run in measured}
            for measured in (co_runs, prediction.machine.co_runs)
        )
        if own and workers in known - own:
            self.notes.append(
                f"what {workers} ranks of a computer cost one another is the machine file's; the"
                " cluster file, which counts first, has it of"
                f" {' and '.join(map(str, sorted(own)))} ranks"
            )
        return predict_co_run(prediction, workers)

    def run(self) -> Scaling:
        question, largest = self.question, max(self.question.ranks)
        base = self.profile(1, 1).step_s
        collectives = tuple(
            CollectiveTime(
                "all_reduce",
                size,
                largest,
                self.traffic.seconds(self._shape("all_reduce", size, largest)),
            )
            for size in COLLECTIVE_BYTES
        )
        rows = tuple(self.row(n, base) for n in question.ranks)
        return Scaling(
            target=self.any.trace.target,
            batch_size=question.batch_size,
            scaling=question.scaling,
            threads=self.any.threads,
            ranks_per_node=question.ranks_per_node,
            buckets_bytes=self.network.later_bytes,
            collectives=collectives,
            rows=rows,
            what_if=question.what_if.changed,
            samples=question.samples,
            machine=self.any.machine.path or self.any.machine.cpu.model,
            cluster="" if self.cluster is None else self.cluster.path,
            sigma=self.sigma,
            link_sigma=self.link_sigma,
            rates=self.rates(largest),
            step=StepTimeLine(largest, self._lines[largest], self._sent(largest)),
            notes=tuple(dict.fromkeys(self.notes)),
            versions=dict(self.any.trace.versions),
        )

    def row(self, n: int, base_s: float) -> ScalingPoint:
        question = self.question
        profile = self.profile(n, question.side_by_side(n))
        slow = slowest_factor(n, self.sigma)
        link = (
            1.0
            if n == 1
            else slowest_factor(n, self.link_sigma)
            / slowest_factor(self._measured_ranks(n), self.link_sigma)
        )
        line = self._lines[n] = self.line(profile, n, slow, link)
        compute_s = slow * (profile.step_s if n == 1 else profile.computation.alone_s)
        step_s = line.total_s
        exposed_s = max(0.0, step_s - compute_s)
        gain_frac, with_latency_frac = (
            1 - self.line(profile, n, slow, link, better).total_s / step_s if step_s else 0.0
            for better in (self.doubled, self.faster)
        )
        around = {
            name: self.line(profile, n, compute, link * math.exp(z * self.link_sigma)).total_s
            for name, compute, z in (
                ("low", slow * profile.low_factor, -Z90),
                ("high", slow * profile.high_factor, Z90),
                ("p10", slowest_factor(n, self.sigma, 0.1), -Z90),
                ("p90", slowest_factor(n, self.sigma, 0.9), Z90),
            )
        }
        first_s = self.line(profile, n, slow, link, first=True).total_s + (
            first_step_s(self.any) or 0.0
        )
        speedup = base_s / step_s * (n if question.scaling == "weak" else 1)
        epoch_s = None
        if question.samples is not None:
            n_steps = math.ceil(question.samples / question.step_samples(n))
            epoch_s = n_steps * (step_s + (mean_factor(n, self.sigma) - 1) * compute_s)
        network_bytes, rates = self.network.sent_bytes(n), self.rates(n)
        return ScalingPoint(
            ranks=n,
            batch_size=question.own_batch_size(n),
            step_s=step_s,
            low_s=around["low"],
            high_s=around["high"],
            first_step_s=first_s,
            compute_s=compute_s,
            communication_s=line.communication_s,
            exposed_communication_s=exposed_s,
            efficiency=speedup / n,
            samples_per_s=question.step_samples(n) / step_s,
            speedup=speedup,
            bound=(
                "network"
                if is_network_bound(gain_frac, with_latency_frac, exposed_s, step_s)
                else profile.bound
            ),
            network_gain_frac=gain_frac,
            p10_s=around["p10"],
            p90_s=around["p90"],
            epoch_s=epoch_s,
            flops=profile.flops,
            memory_bytes=profile.memory_bytes,
            network_bytes=network_bytes,
            arithmetic_intensity=(
                profile.flops / profile.memory_bytes if profile.memory_bytes else None
            ),
            memory_intensity=profile.memory_bytes / network_bytes if network_bytes else None,
            ridgeline=(
                None
                if rates is None
                else RESOURCES[
                    int(
                        bounding_resource(profile.flops, profile.memory_bytes, network_bytes, rates)
                    )
                ]
            ),
        )

    def _sent(self, n: int) -> tuple[tuple[str, int], ...]:
        """Kind and bytes of a step's collectives, in the order of :func:`ddp_program`."""
        network = self.network
        if n == 1:
            return ()
        sizes = [("broadcast", size) for size in network.buffers_bytes]
        sizes += [("all_reduce", size) for size in (*network.later_bytes, *self._closing_bytes())]
        return tuple(sizes)

    def _closing_bytes(self, delayed: bool = False) -> tuple[int, ...]:
        """What follows the last bucket: the map of used parameters."""
        options = self.network.options
        has_map = options.find_unused_parameters and not options.static_graph
        return (self.network.used_map_bytes,) if delayed or has_map else ()

    def rates(self, n: int) -> Rates | None:
        """The rates of one of n ranks; None for a single one."""
        return None if n == 1 else self._rates[n > self.question.ranks_per_node]

    def _measured_ranks(self, n: int) -> int:
        """The most ranks, up to n, whose collectives were measured: the measurement contains their
        slowest.
        """
        measured = self.cluster.collectives if self.cluster is not None else ()
        return max((c.n_ranks for c in measured if c.n_ranks <= n), default=n)

    def line(
        self,
        profile: Profile,
        n: int,
        slow: float,
        link: float,
        traffic: CollectiveCosts | None = None,
        first: bool = False,
    ) -> TimeLine:
        """The time line of a step; `slow` and `link` are slowdowns of computing and collectives."""
        if n == 1 or self.cluster is None:
            return TimeLine(slow * profile.step_s, 0.0, ())
        traffic, network = traffic or self.traffic, self.network
        buckets = network.first if first else network.later

        def sent(kind: str, n_bytes: int) -> Collective:
            return traffic.collective(self._shape(kind, n_bytes, n), profile.memory_frac, link)

        delayed = first and network.options.static_graph
        closing = self._closing_bytes(delayed)
        sync = Synchronisation(
            buckets,
            tuple(
                sent("all_reduce", size)
                for size in bucketing.sizes_bytes(network.gradients, buckets)
            ),
            tuple(sent("broadcast", size) for size in network.buffers_bytes),
            buffer_copies_s(self.any, sum(network.buffers_bytes)),
            tuple(sent("all_reduce", size) for size in closing),
            network.unused,
            delayed,
        )
        cold = 1.0
        for _ in range(_ROUNDS):
            computation = profile.computation.scaled(slow * cold)
            found = simulate(
                ddp_program(computation, sync),
                lanes_of(self.cluster.backend),
                traffic.bucket_s(n > self.question.ranks_per_node),
                rested_s=computation.after_s,
            )
            before, cold = cold, profile.cold_factor(found.waited_s)
            if cold == before:
                break
        return found


def is_network_bound(
    doubled_gain_frac: float, faster_gain_frac: float, exposed_s: float, step_s: float
) -> bool:
    """Whether the network bounds a step, by what links that are DOUBLED and FASTER gain and by the
    seconds of exposed communication in it.

    >>> is_network_bound(0.0, 0.02, 9.9, 10.0), is_network_bound(0.2, 0.2, 3.0, 10.0)
    (True, True)
    >>> is_network_bound(0.05, 0.05, 3.0, 10.0)
    False
    """
    return (
        max(doubled_gain_frac, faster_gain_frac) > NETWORK_GAIN_FRAC
        or exposed_s > EXPOSED_FRAC * step_s
    )


def rates_of(
    prediction: Prediction, cluster: Cluster | None, between_nodes: bool, what_if: WhatIf
) -> Rates | None:
    """Rates of one rank for the Ridgeline plane: the measured peak at the dtype of most of its
    parameters' bytes, DRAM's bandwidth and the link's, times the factors of `what_if`.

    The link is that between nodes, or inside one. None where the machine file has no peak or
    bandwidth, or there is no cluster. Too high where ranks of a node share a resource. Raises
    DlperfError where the cluster lacks the link.
    """
    roofs = roofs_of(prediction.machine, prediction.threads)
    memory = next((roof.bytes_per_s for roof in roofs.bandwidths if roof.level == "DRAM"), None)
    n_bytes: Counter[str] = Counter()
    for parameter in prediction.trace.parameters:
        n_bytes[parameter.spec.dtype] += parameter.spec.nbytes
    peak = roofs.ceiling(max(n_bytes, key=n_bytes.__getitem__, default="float32"))
    if cluster is None or memory is None or peak is None:
        return None
    link = find_path(cluster, between_nodes).changed(what_if).bytes_per_s
    flops = what_if.flops * peak.fma_flops_per_s
    return None if link is None else Rates(flops, what_if.memory_bandwidth * memory, link)
