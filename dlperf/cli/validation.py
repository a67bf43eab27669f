"""``dlperf validate``: studies of predicted against measured times."""

from __future__ import annotations

from argparse import Namespace

from dlperf.cli.inputs import Answer
from dlperf.cli.options import (
    DEVICE,
    MODEL,
    Command,
    Problems,
    common,
    flag,
    given,
    option,
    output,
)
from dlperf.core.argument_types import count, count_or_none, counts, names, rates, seconds

MOST_OPS = 2000
_ACCURACY_OPTIONS = ("held_out_ops", "peers", "ablation", "predictor", "threads")
"""Options that the studies of trainings and of several ranks lack."""
PARTS = {
    "--training": ("workers", "oversubscribed", "wrapped", "epoch", "choice", "memory"),
    "--distributed": ("all-reduce", "steps", "bound", "replay"),
}
"""Parts of these studies: kinds of forecasts."""


def check(args: Namespace) -> Problems:
    """Options that exclude one another."""
    study = "--training" if args.training else "--distributed" if args.distributed else ""
    chosen = [name for name in _ACCURACY_OPTIONS if getattr(args, name)]
    known = PARTS.get(study, ())
    for_ranks = given(args, ("rates", "ranks", "quick_links"))
    random = {"seed": "chooses random ops", "ops": "is the number of random ops"}
    of_studies = study or given(args, _ACCURACY_OPTIONS) or ("-o" if args.output else "targets")
    return (
        *(
            (
                args.held_out_ops and not args.targets and getattr(args, name),
                f"--{name} needs targets; name some, or all",
            )
            for name in ("peers", "ablation")
        ),
        (args.batch_sizes and args.batch_size, "give one of --batch-size and --batch-sizes"),
        (
            args.training and args.distributed,
            "--training and --distributed are two studies; ask for one at a time",
        ),
        (
            study and chosen,
            f"{study} has no --held-out-ops, --peers, --ablation, --predictor or --threads",
        ),
        (
            args.table and (study or chosen or args.targets or args.output),
            f"--table judges by a table of kernels alone; leave {of_studies} out",
        ),
        (args.device and not args.table, "--device is for --table; other studies measure here"),
        (args.parts and not study, "--parts are those of --training and of --distributed"),
        *(
            (part not in known, f"--parts {part}: is unknown; known are {', '.join(known)}")
            for part in args.parts or ()
        ),
        (not args.distributed and for_ranks, f"{for_ranks} is for --distributed"),
        (args.distributed and args.inference, "--distributed trains; leave --inference out"),
        (
            args.distributed and min(args.ranks or (2,)) < 2,
            "--ranks 1: one rank has no link; name numbers from 2 on",
        ),
        *(
            (
                getattr(args, name) is not None and not args.held_out_ops,
                f"--{name} {what} and needs --held-out-ops",
            )
            for name, what in random.items()
        ),
        (
            (args.ops or 0) > MOST_OPS,
            f"--ops {args.ops} is more than {MOST_OPS} of a family, which would take hours",
        ),
    )


def validate(args: Namespace) -> Answer:
    """The study of networks and single ops, of trainings, of steps on several ranks, or of a table
    of kernels.
    """
    if args.table:
        from dlperf.cli.table_validation import validate_table as study
    elif args.training:
        from dlperf.cli.training_validation import validate_trainings as study
    elif args.distributed:
        from dlperf.cli.distributed_validation import validate_distributed as study
    else:
        from dlperf.cli.accuracy_validation import validate_accuracy as study
    return study(args)


COMMAND = Command(
    "validate",
    "the accuracy study: predicted against actual over many networks, or over single ops",
    options=(
        option(
            "targets",
            metavar="TARGET[@BATCH,...]",
            nargs="*",
            help=(
                "networks (default, or the word all: every network of the checkout; nothing with"
                " --held-out-ops; a choice of them with --distributed)"
            ),
        ),
        option(
            "--table",
            metavar="TABLE.csv",
            help="judge the machine file, or a device, by a table of measured kernels instead",
        ),
        DEVICE,
        option(
            "--batch-sizes",
            type=counts,
            metavar="B,B",
            help="batch sizes of targets without one of their own (16,64)",
        ),
        option(
            "--threads",
            type=counts,
            metavar="T,T",
            help="thread counts (default: those of the machine file)",
        ),
        option("--predictor", type=names, metavar="NAME,NAME", help="predictors (default: all)"),
        option(
            "--runs",
            type=count,
            metavar="N",
            help="fresh processes a case (2; 5 with several threads)",
        ),
        option(
            "--seconds",
            type=seconds,
            metavar="S",
            help=(
                "how long to time the step in each (4; 1.5 with --distributed), or about how long a"
                " training takes (10)"
            ),
        ),
        flag(
            "--peers",
            "also ask torch's RuntimeEstimator, neural-cost and FLOPs / peak",
        ),
        flag("--ablation", "also predict without each term"),
        flag(
            "--held-out-ops",
            "random single ops that the machine file does not hold, timed now",
        ),
        option(
            "--ops",
            type=count,
            metavar="N",
            help="with --held-out-ops: how many of each family (100 of three, 200 of the rest)",
        ),
        flag(
            "--training",
            (
                "whole trainings instead: on several workers, epochs under run, the choice of tune,"
                " peak memory"
            ),
        ),
        flag(
            "--distributed",
            (
                "data-parallel steps instead: on ranks with a host each (network "
                "namespaces, which need root; else loopback); some 16 minutes"
            ),
        ),
        option(
            "--rates",
            type=rates,
            metavar="RATE,...",
            help=(
                "with --distributed: rates of the links, such as 300mbit; none for links "
                "as they are (1gbit,300mbit,none)"
            ),
        ),
        option(
            "--ranks",
            type=counts,
            metavar="N,N",
            help=(
                "with --distributed: numbers of ranks; steps run on the first, "
                "all-reduces on all (2,4)"
            ),
        ),
        flag(
            "--quick-links",
            "with --distributed: measure the links roughly, in 15 s instead of 60",
        ),
        option(
            "--parts",
            type=names,
            metavar="PART,...",
            help=(
                "with --training: workers, oversubscribed, wrapped, epoch, choice, memory; "
                "with --distributed: all-reduce, steps, bound, replay (all)"
            ),
        ),
        option(
            "--seed",
            type=count_or_none,
            metavar="N",
            help="which random ops (default: others each time)",
        ),
        option(
            "--cache",
            metavar="DIR",
            help=(
                "where measurements are kept, each with its --seconds, so that an interrupted study"
                " goes on"
            ),
        ),
        flag("--fresh", "measure again what is kept"),
        output("folder to write tables and plots to", "DIR"),
        *common(threads=False),
        *MODEL,
    ),
    work=validate,
    check=check,
    folder_answer="report",
)
