"""``torchrun ... -m dlperf.microbench.network -o cluster.json``: every rank comes through here;
rank 0 speaks and writes.
"""

from __future__ import annotations

import argparse
import os
import sys

from dlperf.core.rank_program import Parser, limit, missing_variable

_MARK = "dlperf.microbench.network"


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure, say where the file is. Exit status: 0, 1 a rank failed, 2 unusable, 130
    interrupted.
    """
    what = (
        "Measure the links between the ranks, and what those of one computer cost one another, into"
        " a cluster file. Start it with torchrun on all nodes."
    )
    parser = Parser(prog=_MARK, allow_abbrev=False, description=what)
    parser.add_argument(
        "-o", "--output", metavar="FILE", required=True, help="the cluster file, written by rank 0"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer sizes and repeats: some 20 s instead of 75"
    )
    parser.add_argument(
        "--backend",
        choices=("gloo", "nccl"),
        help="of torch.distributed (nccl where every rank has a GPU, else gloo)",
    )
    parser.add_argument(
        "--limit",
        type=limit,
        default=30.0,
        metavar="S",
        help="seconds that a single step may take before all ranks end (30)",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace a file that dlperf did not write"
    )
    parser.add_argument(
        "--pair", action="store_true", help=argparse.SUPPRESS
    )  # the two processes that measure one host's own cost
    options = parser.parse_args(arguments)
    if missing := missing_variable():
        example = f"torchrun --nproc-per-node 2 -m {_MARK} -o cluster.json"
        print(
            f"{_MARK}: error: {missing} is not set; start it with torchrun, for example {example}",
            file=sys.stderr,
        )
        return 2
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a peer's end is told in one line
    from dlperf.microbench.network.suite import measure_cluster

    return measure_cluster(
        options.output,
        quick=options.quick,
        backend=options.backend,
        limit_s=options.limit,
        force=options.force,
        pair=options.pair,
    )


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # gloo's threads may outlive their group and would abort an ordinary exit
