"""``dlperf scale``: data-parallel training on several ranks, predicted or replayed from a trace."""

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
    write_folder,
)
from dlperf.cli.options import (
    INPUT,
    TARGET_HELP,
    Command,
    Problems,
    common,
    given,
    option,
    output,
    what_if,
)
from dlperf.core.argument_types import count, counts, positive
from dlperf.core.errors import DlperfError
from dlperf.core.streams import warn

if TYPE_CHECKING:
    from dlperf.core.cluster import Cluster
    from dlperf.core.trace import Trace
    from dlperf.distributed.scaling import CommunicationReplay, Scaling
    from dlperf.distributed.scenario import WhatIf
    from dlperf.forecast.prediction import Prediction


_TARGET_OPTIONS = (
    "batch_size",
    "machine",
    "threads",
    "scaling",
    "samples",
    "accumulate",
    "bucket_cap_mb",
    "gradient_as_bucket_view",
    "static_graph",
    "find_unused_parameters",
    "no_broadcast_buffers",
    "input",
    "timeline",
)


def check(args: Namespace) -> Problems:
    """Options that exclude one another."""
    replays, option = args.trace is not None, given(args, _TARGET_OPTIONS)
    computing = [name for name, _ in args.what_if if not name.startswith("link_")]
    return (
        (
            not replays and args.target is None,
            "names no target; give one, or --trace FILE to replay a trace of communication",
        ),
        (
            not replays and args.ranks is None,
            "names no --ranks; give numbers of ranks, such as --ranks 1,2,4,8",
        ),
        (
            not replays and args.recorded_on is not None,
            "--recorded-on is for a --trace; give both",
        ),
        (
            replays and args.target is not None,
            f"names {args.target} and --trace {args.trace}; give one of them",
        ),
        (
            replays and args.cluster is None,
            "--trace replays over the links of a cluster file; give it with --cluster",
        ),
        (
            replays and option,
            f"{option} is for a target; what --trace recorded stays as it is",
        ),
        (
            replays and computing,
            (
                f"--what-if {', '.join(computing[:1])}: a trace does not contain what bounds its"
                " computing; it supports link_bandwidth and link_latency"
            ),
        ),
    )


def scale(args: Namespace) -> Answer:
    """Forecast a target over numbers of ranks, or replay a trace."""
    from dlperf.core.cluster import Cluster
    from dlperf.distributed.scaling import Scaling
    from dlperf.distributed.scenario import WhatIf
    from dlperf.report.scaling_pages import scaling_to_text, write

    factors = WhatIf.of_pairs(args.what_if)
    cluster = None if args.cluster is None else Cluster.load(args.cluster)
    forecast = _forecast if args.trace is None else _replay
    found = forecast(args, cluster, factors)
    for note in found.notes:
        warn(note)
    write_folder(args, lambda to, force: write(found, to, force))
    if args.timeline is not None and isinstance(found, Scaling):
        from dlperf.core.files import write_json
        from dlperf.report.timeline import rank_timeline

        write_json(args.timeline, rank_timeline(found), indent=None)
    return Answer(scaling_to_text(found), found.to_json())


def _forecast(args: Namespace, cluster: Cluster | None, factors: WhatIf) -> Scaling:
    """Forecast a target over numbers of ranks."""
    from dlperf.core.units import MIB
    from dlperf.distributed import scenario
    from dlperf.distributed.forecast import forecast
    from dlperf.models.buckets import ReducerOptions

    machine = load_machine(args)
    recorded = read_or_record(args, args.target) if is_trace(args.target) else None
    options = ReducerOptions(
        None if args.bucket_cap_mb is None else int(args.bucket_cap_mb * MIB),
        args.gradient_as_bucket_view,
        args.static_graph,
        args.find_unused_parameters,
        not args.no_broadcast_buffers,
        args.accumulate or 1,
    )
    asked = scenario.ScalingScenario(
        args.ranks,
        args.batch_size or (BATCH_SIZE if recorded is None else recorded.batch_size),
        args.scaling or "weak",
        args.ranks_per_node or scenario.ranks_per_node_of(cluster, args.ranks),
        scenario.hosts_per_system_of(cluster),
        factors,
        options,
        args.samples,
    )
    threads = threads_for(args, machine)

    def predict_at(size: int) -> Prediction:
        return predict_and_warn(_trace_at(args, recorded, size), machine, threads, "calibrated")

    return forecast(predict_at, cluster, asked)


def _replay(args: Namespace, cluster: Cluster | None, factors: WhatIf) -> CommunicationReplay:
    """Replay a trace of communication over another cluster."""
    from dlperf.core.cluster import Cluster
    from dlperf.core.communication import Communication
    from dlperf.distributed.communication_replay import replay_communication

    assert cluster is not None
    trace = Communication.load(args.trace)
    recorded_on = None if args.recorded_on is None else Cluster.load(args.recorded_on)
    ranks = args.ranks or ()
    return replay_communication(trace, cluster, recorded_on, ranks, args.ranks_per_node, factors)


def _trace_at(args: Namespace, recorded: Trace | None, size: int) -> Trace:
    if recorded is None:
        return read_or_record(args, args.target, size)
    if size != recorded.batch_size:
        raise DlperfError(
            f"{args.target}: is a step at batch size {recorded.batch_size}, and strong scaling"
            f" needs it at {size}; name the target it was recorded from"
        )
    return recorded


COMMAND = Command(
    "scale",
    "forecast data-parallel training (DistributedDataParallel) on several ranks",
    options=(
        option("target", metavar="TARGET", nargs="?", help=TARGET_HELP),
        option(
            "--ranks",
            type=counts,
            metavar="N,N",
            help=(
                "numbers of ranks, such as 1,2,4,8 (with --trace default: as many as were recorded)"
            ),
        ),
        option(
            "--ranks-per-node",
            type=count,
            metavar="K",
            help=(
                "ranks that share a node (default: as the cluster file was measured; all "
                "where it has no link between nodes; 1 by hand)"
            ),
        ),
        option(
            "--cluster",
            metavar="FILE",
            help=(
                "cluster file: torchrun ... -m dlperf.microbench.network -o FILE "
                "measures one, or write it by hand"
            ),
        ),
        option(
            "--trace",
            metavar="FILE",
            help="instead of a target: a trace of communication, to be replayed over the cluster",
        ),
        option(
            "--recorded-on",
            metavar="FILE",
            help=(
                "with --trace: cluster file of the links it was recorded over (default: "
                "its calls' own times)"
            ),
        ),
        option(
            "--scaling",
            choices=("weak", "strong"),
            help="--batch-size is each rank's (weak, default) or is divided (strong)",
        ),
        what_if(
            "flops, memory_bandwidth, l3_bandwidth, link_bandwidth: so many times as much;"
            " overhead, page_faults, link_latency: so many times the cost"
        ),
        option(
            "--samples",
            type=count,
            metavar="N",
            help="training samples of an epoch: forecast the epoch",
        ),
        option(
            "--accumulate",
            type=count,
            metavar="K",
            help="batches to one synchronisation, the others under no_sync (1)",
        ),
        option(
            "--bucket-cap-mb",
            type=positive,
            metavar="MIB",
            help="DDP's bucket_cap_mb (default: 1 MiB first, then 25)",
        ),
        *(
            option(f"--{flag}", action="store_true", help=f"DDP's option: {text}")
            for flag, text in (
                ("gradient-as-bucket-view", "gradients are views of the buckets"),
                ("static-graph", "the graph is static"),
                ("find-unused-parameters", "look for unused parameters"),
                ("no-broadcast-buffers", "buffers are not broadcast"),
            )
        ),
        INPUT,
        output("folder to write the forecast and its plots to", "DIR"),
        option(
            "--timeline",
            metavar="FILE.json",
            help="write the step on most ranks as a timeline: computing and collectives of each",
        ),
        *common(),
    ),
    work=scale,
    check=check,
    defaults={"inference": False},
    folder_answer="forecast",
)
