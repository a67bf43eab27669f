"""``dlperf run``: runs a training script as it is, and predicts it."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable

from dlperf.cli.options import (
    TIMELINE,
    Command,
    Problems,
    common,
    option,
    output,
)
from dlperf.core.argument_types import count

_WITH_VALUE = frozenset(
    "-o --output --machine --threads --json --timeline --epochs --steps --cluster"
    " --communication".split()
)


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """dlperf's own arguments and, for ``run``, the script with its: they part at the first word
    that is no option of dlperf.

    >>> split(["run", "--epochs", "3", "train.py", "--epochs", "4"])
    (['run', '--epochs', '3'], ['train.py', '--epochs', '4'])
    """
    if not argv or argv[0] != "run":
        return argv, []
    index = 1
    while index < len(argv) and argv[index].startswith("-"):
        word = argv[index]
        index += 2 if word in _WITH_VALUE else 1
        if word in ("-m", "--"):
            break
    return [word for word in argv[:index] if word != "--"], argv[index:]


def check(args: Namespace) -> Problems:
    """What is missing or excludes one another."""
    return (
        (not args.script, "names no script; dlperf run --help shows how"),
        (args.steps and args.epochs, "--steps and --epochs exclude one another"),
        (args.communication == "-", "--communication - is no file; name one"),
    )


def prepare(args: Namespace) -> Callable[[], int]:
    """Check everything before the script starts; the result runs it and returns its exit status."""
    from pathlib import Path

    from dlperf.core.files import check_writable
    from dlperf.core.host import check_threads
    from dlperf.report.writing import is_ours

    if os.environ.get("RANK", "0") == "0":  # other ranks write nothing
        for path in (args.json, args.communication, args.timeline):
            if path is not None:
                check_writable(path, args.force)
        if args.output is not None:
            ours = os.path.isfile(args.output) and is_ours(Path(args.output))
            check_writable(args.output, args.force or ours)
    if args.threads is not None:
        check_threads(args.threads)
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
    from dlperf.runner.wrapping import run_script

    return lambda: run_script(
        args.script,
        module=args.module,
        machine_path=args.machine,
        threads=args.threads,
        output=args.output,
        json_path=args.json,
        debug=args.debug,
        n_epochs=args.epochs,
        n_steps=args.steps,
        cluster_path=args.cluster,
        communication=args.communication,
        timeline_path=args.timeline,
    )


COMMAND = Command(
    "run",
    "run a training script as it is, and predict it while it runs",
    options=(
        option("-m", dest="module", action="store_true", help="run a module, as python -m does"),
        option(
            "--epochs",
            type=count,
            metavar="E",
            help="epochs of the whole run, for its forecast (default: those of the script's loops)",
        ),
        option(
            "--steps",
            type=count,
            metavar="N",
            help="steps of the whole run, for loops that count steps (default: those of the loops)",
        ),
        option(
            "--cluster",
            metavar="FILE",
            help=(
                "several ranks: cluster file, to predict the distributed step beside what it takes"
            ),
        ),
        option(
            "--communication",
            metavar="FILE",
            help=(
                "several ranks: write the collectives and messages they issued, and when "
                "they waited"
            ),
        ),
        output("report to write: .html, .md, or text"),
        TIMELINE,
        *common(batch_size=False),
    ),
    check=check,
    usage=(
        "%(prog)s [options] SCRIPT.py [ARGUMENTS]\n       %(prog)s [options] -m MODULE [ARGUMENTS]"
    ),
    epilog="Options of dlperf stand before the script; everything behind it is the script's own."
    " The report is at the state that the machine had after the watched steps, where the machine"
    " file has a reference; the blind prediction stands beside."
    " Under torchrun (torchrun ... -m dlperf run SCRIPT.py) every rank is watched, and rank 0"
    " reports for all.",
)
