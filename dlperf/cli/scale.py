"""``dlperf scale``: what a step of data-parallel training takes on so many ranks, predicted, or
replayed from a trace of communication.
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from dlperf.cli.inputs import (
    BATCH_SIZE,
    Answer,
    is_trace,
    load_machine,
    predict_and_warn,
    read_or_record,
    threads_for,
)
from dlperf.cli.scale_options import misuse
from dlperf.core.errors import DlperfError
from dlperf.core.streams import log, warn

if TYPE_CHECKING:
    from pathlib import Path

    from dlperf.core.cluster import Cluster
    from dlperf.core.trace import Trace
    from dlperf.distributed.scaling import CommunicationReplay, Scaling
    from dlperf.forecast.prediction import Prediction


def scale(args: Namespace) -> Answer:
    """Forecast a target over numbers of ranks, or replay a trace."""
    from dlperf.core.units import MIB
    from dlperf.distributed.forecast import (
        ScalingScenario,
        forecast,
        hosts_per_system_of,
        ranks_per_node_of,
    )
    from dlperf.distributed.what_if import WhatIf
    from dlperf.models.buckets import ReducerOptions
    from dlperf.report.scaling_pages import scaling_to_text, write
    from dlperf.report.writing import check_folder

    if problem := misuse(args):
        raise DlperfError(problem)
    if args.output is not None:
        check_folder(args.output, args.force)
    if args.trace is not None:
        return _replay(args)
    what_if = WhatIf.of(dict(args.what_if))
    cluster = _cluster(args)
    machine = load_machine(args)
    recorded = read_or_record(args, args.target) if is_trace(args.target) else None
    batch_size = args.batch_size or (BATCH_SIZE if recorded is None else recorded.batch_size)
    options = ReducerOptions(
        None if args.bucket_cap_mb is None else int(args.bucket_cap_mb * MIB),
        args.gradient_as_bucket_view,
        args.static_graph,
        args.find_unused_parameters,
        not args.no_broadcast_buffers,
        args.accumulate or 1,
    )
    question = ScalingScenario(
        args.ranks,
        batch_size,
        args.scaling or "weak",
        args.ranks_per_node or ranks_per_node_of(cluster, args.ranks),
        hosts_per_system_of(cluster),
        what_if,
        options,
        args.samples,
    )
    threads = threads_for(args, machine)

    def predict_at(size: int) -> Prediction:
        return predict_and_warn(_trace_at(args, recorded, size), machine, threads, "calibrated")

    found = forecast(predict_at, cluster, question)
    written = [] if args.output is None else write(found, args.output, args.force)
    return _answer(args, found, scaling_to_text(found), written)


def _replay(args: Namespace) -> Answer:
    """Replay a trace of communication over another cluster."""
    from dlperf.core.cluster import Cluster
    from dlperf.core.communication import Communication
    from dlperf.distributed.communication_replay import replay_communication
    from dlperf.distributed.what_if import WhatIf
    from dlperf.report.scaling_pages import scaling_to_text, write

    links = WhatIf.of(dict(args.what_if)).links
    trace = Communication.load(args.trace)
    recorded_on = None if args.recorded_on is None else Cluster.load(args.recorded_on)
    found = replay_communication(
        trace, Cluster.load(args.cluster), recorded_on, args.ranks or (), args.ranks_per_node, links
    )
    written = [] if args.output is None else write(found, args.output, args.force)
    return _answer(args, found, scaling_to_text(found), written)


def _answer(
    args: Namespace, found: Scaling | CommunicationReplay, text: str, written: list[Path]
) -> Answer:
    for note in found.notes:
        warn(note)
    if written:
        log(f"wrote {', '.join(path.name for path in written)} to {args.output}")
    return Answer(text, found.to_json())


def _cluster(args: Namespace) -> Cluster | None:
    from dlperf.core.cluster import Cluster

    return None if args.cluster is None else Cluster.load(args.cluster)


def _trace_at(args: Namespace, recorded: Trace | None, size: int) -> Trace:
    if recorded is None:
        return read_or_record(args, args.target, size)
    if size != recorded.batch_size:
        raise DlperfError(
            f"{args.target}: is a step at batch size {recorded.batch_size}, and strong scaling"
            f" needs it at {size}; name the target it was recorded from"
        )
    return recorded
