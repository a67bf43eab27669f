"""What may be typed after ``dlperf validate``, and what of it fits together. Nothing heavy is
imported, as in :mod:`dlperf.cli.main`.
"""

from __future__ import annotations

import argparse

from dlperf.core.argument_types import count, count_or_none, counts, names, rates, seconds

MOST_OPS = 2000
_APART = ("held_out_ops", "peers", "ablation", "predictor", "threads")
"""What the studies of trainings and of several ranks do not have."""
PARTS = {
    "--training": ("workers", "oversubscribed", "wrapped", "epoch", "choice", "memory"),
    "--distributed": ("all-reduce", "steps", "bound", "replay"),
}
"""The parts of these studies: the kinds of forecasts that they judge."""


def add_validate(validate: argparse.ArgumentParser) -> None:
    """The command's own options."""
    validate.add_argument(
        "targets",
        metavar="TARGET[@BATCH,...]",
        nargs="*",
        help=(
            "networks (default, or the word all: every network of the checkout; nothing with"
            " --held-out-ops; a choice of them with --distributed)"
        ),
    )
    validate.add_argument(
        "--batch-sizes",
        type=counts,
        metavar="B,B",
        help="batch sizes of targets without one of their own (16,64)",
    )
    validate.add_argument(
        "--threads",
        type=counts,
        metavar="T,T",
        help="thread counts (default: those of the machine file)",
    )
    validate.add_argument(
        "--predictor", type=names, metavar="NAME,NAME", help="predictors (default: all)"
    )
    validate.add_argument(
        "--runs", type=count, metavar="N", help="fresh processes a case (2; 5 with several threads)"
    )
    validate.add_argument(
        "--seconds",
        type=seconds,
        metavar="S",
        help=(
            "how long to time the step in each (4; 1.5 with --distributed), or about how long a"
            " training takes (10)"
        ),
    )
    validate.add_argument(
        "--peers",
        action="store_true",
        help="also ask torch's RuntimeEstimator, neural-cost and FLOPs / peak",
    )
    validate.add_argument("--ablation", action="store_true", help="also predict without each term")
    validate.add_argument(
        "--held-out-ops",
        action="store_true",
        help="random single ops that the machine file does not hold, timed now",
    )
    validate.add_argument(
        "--ops",
        type=count,
        metavar="N",
        help="with --held-out-ops: how many of each family (100 of three, 200 of the rest)",
    )
    validate.add_argument(
        "--training",
        action="store_true",
        help=(
            "whole trainings instead: on several workers, epochs under run, the choice of tune,"
            " peak memory"
        ),
    )
    validate.add_argument(
        "--distributed",
        action="store_true",
        help=(
            "data-parallel steps instead: on ranks with a host each (network namespaces, which need"
            " root; else loopback); some 16 minutes"
        ),
    )
    validate.add_argument(
        "--rates",
        type=rates,
        metavar="RATE,...",
        help=(
            "with --distributed: rates of the links, such as 300mbit; none for links as they are"
            " (1gbit,300mbit,none)"
        ),
    )
    validate.add_argument(
        "--ranks",
        type=counts,
        metavar="N,N",
        help=(
            "with --distributed: numbers of ranks; steps run on the first, all-reduces on all (2,4)"
        ),
    )
    validate.add_argument(
        "--quick-links",
        action="store_true",
        help="with --distributed: measure the links roughly, in 15 s instead of 60",
    )
    validate.add_argument(
        "--parts",
        type=names,
        metavar="PART,...",
        help=(
            "with --training: workers, oversubscribed, wrapped, epoch, choice, memory; "
            "with --distributed: all-reduce, steps, bound, replay (all)"
        ),
    )
    validate.add_argument(
        "--seed",
        type=count_or_none,
        metavar="N",
        help="which random ops (default: others each time)",
    )
    validate.add_argument(
        "--cache",
        metavar="DIR",
        help=(
            "where measurements are kept, each with its --seconds, so that an interrupted study"
            " goes on"
        ),
    )
    validate.add_argument("--fresh", action="store_true", help="measure again what is kept")


def check_validate(args: argparse.Namespace) -> str:
    """What does not fit together, in words; empty where all does."""
    if args.held_out_ops and not args.targets:
        for name in ("peers", "ablation"):
            if getattr(args, name):
                return f"--{name} needs targets; name some, or all"
    if args.training and args.distributed:
        return "--training and --distributed are two studies; ask for one at a time"
    study = "--training" if args.training else "--distributed" if args.distributed else ""
    if study and any(getattr(args, name) for name in _APART):
        return f"{study} has no --held-out-ops, --peers, --ablation, --predictor or --threads"
    if args.parts and not study:
        return "--parts are those of --training and of --distributed"
    for part in args.parts or ():
        if part not in PARTS[study]:
            return f"--parts {part}: is unknown; known are {', '.join(PARTS[study])}"
    for name in ("rates", "ranks", "quick_links"):
        if getattr(args, name) and not args.distributed:
            return f"--{name.replace('_', '-')} is for --distributed"
    if args.distributed and args.inference:
        return "--distributed trains; leave --inference out"
    if args.distributed and min(args.ranks or (2,)) < 2:
        return "--ranks 1: one rank has no link; name numbers from 2 on"
    for name, what in (("seed", "chooses random ops"), ("ops", "is the number of random ops")):
        if getattr(args, name) is not None and not args.held_out_ops:
            return f"--{name} {what} and needs --held-out-ops"
    if (args.ops or 0) > MOST_OPS:
        return f"--ops {args.ops} is more than {MOST_OPS} of a family, which would take hours"
    return ""
