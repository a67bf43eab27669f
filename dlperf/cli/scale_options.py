"""What may be typed after ``dlperf scale``. Nothing heavy is imported, as in
:mod:`dlperf.cli.main`.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable


def _factor(text: str) -> tuple[str, float]:
    """``link_bandwidth=2``: a name and a number."""
    name, equals, number = text.partition("=")
    with contextlib.suppress(ValueError):
        if name and equals:
            return name.strip(), float(number)
    raise argparse.ArgumentTypeError(f"{text!r} is no NAME=FACTOR, such as link_bandwidth=2")


def _positive(text: str) -> float:
    """A positive, finite number."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no positive number")


_OF_A_TARGET = (
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
)


def misuse(args: argparse.Namespace) -> str | None:
    """What does not fit together among the options, in words; None where all does."""
    if args.trace is None:
        if args.target is None:
            return "names no target; give one, or --trace FILE to replay a trace of communication"
        if args.ranks is None:
            return "names no --ranks; give numbers of ranks, such as --ranks 1,2,4,8"
        return (
            None
            if args.recorded_on is None
            else "--recorded-on says where a --trace was recorded; give both"
        )
    if args.target is not None:
        return f"names {args.target} and --trace {args.trace}; give one of them"
    if args.cluster is None:
        return "--trace replays over the links of a cluster file; give it with --cluster"
    given = next((name for name in _OF_A_TARGET if getattr(args, name) not in (None, False)), None)
    if given is not None:
        return f"--{given.replace('_', '-')} is for a target; what --trace recorded stays as it is"
    other = next((name for name, _ in args.what_if if name in ("flops", "memory_bandwidth")), None)
    return (
        None
        if other is None
        else (
            f"--what-if {other}: a trace does not say what bounds its computing; it knows"
            " link_bandwidth and link_latency"
        )
    )


def add_scale(
    scale: argparse.ArgumentParser,
    target_help: str,
    count: Callable[[str], int],
    counts: Callable[[str], tuple[int, ...]],
    shape: Callable[[str], tuple[int, ...]],
) -> None:
    """The command's own options; `count`, `counts` and `shape` read whole numbers from 1 on."""
    scale.add_argument("target", metavar="TARGET", nargs="?", help=target_help)
    scale.add_argument(
        "--ranks",
        type=counts,
        metavar="N,N",
        help="numbers of ranks, such as 1,2,4,8 (with --trace default: as many as were recorded)",
    )
    scale.add_argument(
        "--ranks-per-node",
        type=count,
        metavar="K",
        help=(
            "ranks that share a node (default: as the cluster file was measured; all where it has"
            " no link between nodes; 1 by hand)"
        ),
    )
    scale.add_argument(
        "--cluster",
        metavar="FILE",
        help=(
            "cluster file: torchrun ... -m dlperf.microbench.network -o FILE measures one, or write"
            " it by hand"
        ),
    )
    scale.add_argument(
        "--trace",
        metavar="FILE",
        help="instead of a target: a trace of communication, to be replayed over the cluster",
    )
    scale.add_argument(
        "--recorded-on",
        metavar="FILE",
        help=(
            "with --trace: cluster file of the links it was recorded over (default: its calls' own"
            " times)"
        ),
    )
    scale.add_argument(
        "--scaling",
        choices=("weak", "strong"),
        help="--batch-size is each rank's (weak, default) or is divided (strong)",
    )
    scale.add_argument(
        "--what-if",
        type=_factor,
        metavar="NAME=FACTOR",
        nargs="+",
        action="extend",
        default=[],
        help="flops, memory_bandwidth, link_bandwidth, link_latency: so many times as much",
    )
    scale.add_argument(
        "--samples",
        type=count,
        metavar="N",
        help="training samples of an epoch: forecast the epoch",
    )
    scale.add_argument(
        "--accumulate",
        type=count,
        metavar="K",
        help="batches to one synchronisation, the others under no_sync (1)",
    )
    scale.add_argument(
        "--bucket-cap-mb",
        type=_positive,
        metavar="MIB",
        help="DDP's bucket_cap_mb (default: 1 MiB first, then 25)",
    )
    for flag, text in (
        ("gradient-as-bucket-view", "gradients are views of the buckets"),
        ("static-graph", "the graph is static"),
        ("find-unused-parameters", "look for unused parameters"),
        ("no-broadcast-buffers", "buffers are not broadcast"),
    ):
        scale.add_argument(f"--{flag}", action="store_true", help=f"DDP's option: {text}")
    scale.add_argument(
        "--input",
        type=shape,
        metavar="3,224,224",
        help="input shape of a bare nn.Module, without the batch",
    )
    scale.set_defaults(inference=False)
