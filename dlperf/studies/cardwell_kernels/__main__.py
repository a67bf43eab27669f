"""``torchrun --nproc-per-node 2 -m dlperf.studies.cardwell_kernels -o DIR``:
every rank comes through here; rank 0 speaks and writes.
"""

from __future__ import annotations

import argparse
import os
import sys

from dlperf.core.errors import DlperfError, WorkFailed
from dlperf.core.rank_program import Parser, Watch, limit, missing_variable
from dlperf.core.streams import log

FAILED, UNUSABLE = 1, 2
MARK = "cardwell_kernels"
_START = f"torchrun --nproc-per-node 2 -m dlperf.studies.{MARK} -o DIR"


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure, write. Exit status: 0, 1 a rank failed, 2 unusable."""
    parser = Parser(
        prog=MARK,
        allow_abbrev=False,
        description=(
            "Cardwell's seven algorithms on these ranks, under the roofline with communication."
            f" {_START}"
        ),
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        required=True,
        help="folder for the page, its plots and the JSON file, written by rank 0",
    )
    parser.add_argument(
        "--seconds",
        type=limit,
        default=40.0,
        metavar="S",
        help="time for all measurements together, roughly (40)",
    )
    parser.add_argument(
        "--limit",
        type=limit,
        default=60.0,
        metavar="S",
        help="seconds that a single step may take before all ranks end (60)",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="write into a folder that holds files which dlperf did not write",
    )
    options = parser.parse_args(arguments)
    if missing := missing_variable():
        return _refuse(f"{missing} is not set; start it with torchrun, for example {_START}", 0)
    rank, n_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if n_ranks < 2:
        return _refuse(
            f"{n_ranks} rank has no network; start at least 2, for example {_START}", rank
        )
    from dlperf.report.writing import check_folder

    try:
        check_folder(options.output, options.force)
    except DlperfError as error:
        return _refuse(str(error), rank)
    return _measure(options, rank)


def _measure(options: argparse.Namespace, rank: int) -> int:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # another rank's end is told in one line
    watch = Watch(MARK, rank, options.limit, "nothing was written")
    watch.start()
    from dlperf.studies.cardwell_kernels.study import run_study

    def say(step: str) -> None:
        if rank == 0:
            log(step, MARK)

    try:
        findings = run_study(watch, options.seconds, say=say)
        if rank == 0:
            from dlperf.studies.cardwell_kernels.findings import write_findings

            watch.begin("writing")
            for path in write_findings(findings, options.output):
                print(path)
    except (DlperfError, WorkFailed) as error:
        return _refuse(str(error), rank, FAILED)
    except (
        RuntimeError,
        ValueError,
        MemoryError,
    ) as error:  # torch.distributed's errors are RuntimeErrors
        watch.fail(str(error) or type(error).__name__)
    return 0


def _refuse(line: str, rank: int, status: int = UNUSABLE) -> int:
    if rank == 0:
        log(f"error: {line}", MARK)
    return status


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # gloo's threads may outlive their group and would abort an ordinary exit
