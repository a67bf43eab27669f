"""What may be typed after ``dlperf run``, and where the script's own words begin. Nothing heavy is
imported, as in :mod:`dlperf.cli.main`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

_WITH_VALUE = {
    "-o",
    "--output",
    "--machine",
    "--threads",
    "--json",
    "--epochs",
    "--cluster",
    "--communication",
}


def add_run(run: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    """The command's own options; `count` reads whole numbers from 1 on."""
    run.usage = (
        "%(prog)s [options] SCRIPT.py [ARGUMENTS]\n       %(prog)s [options] -m MODULE [ARGUMENTS]"
    )
    run.epilog = """Options of dlperf stand before the script; everything behind it is the script's own.
        Under torchrun (torchrun ... -m dlperf run SCRIPT.py) every rank is watched, and rank 0 reports for all."""
    run.add_argument(
        "-m", dest="module", action="store_true", help="run a module, as python -m does"
    )
    run.add_argument(
        "--epochs",
        type=count,
        metavar="E",
        help="epochs of the whole run, for its forecast (default: as the script's loops say)",
    )
    run.add_argument(
        "--cluster",
        metavar="FILE",
        help="several ranks: cluster file, to predict the distributed step beside what it takes",
    )
    run.add_argument(
        "--communication",
        metavar="FILE",
        help="several ranks: write the collectives and messages they issued, and when they waited",
    )


def split_run(argv: list[str]) -> tuple[list[str], list[str]]:
    """dlperf's own arguments and, for ``run``, the script with its: they part at the first word
    that is no option of dlperf.

    >>> split_run(["run", "--epochs", "3", "train.py", "--epochs", "4"])
    (['run', '--epochs', '3'], ['train.py', '--epochs', '4'])
    """
    if not argv or argv[0] != "run":
        return argv, []
    place = 1
    while place < len(argv) and argv[place].startswith("-"):
        word = argv[place]
        place += 2 if word in _WITH_VALUE else 1
        if word in ("-m", "--"):
            break
    return [word for word in argv[:place] if word != "--"], argv[place:]
