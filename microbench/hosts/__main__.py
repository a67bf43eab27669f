"""``python -m dlperf.microbench.hosts --rate 1gbit --ranks 2 COMMAND ...``: the command once for
each rank, every rank on a host of its own.
"""

from __future__ import annotations

import argparse
import signal
import sys
from types import FrameType
from typing import NoReturn

from dlperf.core.argument_types import count, seconds
from dlperf.core.child_process import INTERRUPTED, UNUSABLE
from dlperf.core.errors import DlperfError
from dlperf.core.rank_program import Parser
from dlperf.core.streams import log
from dlperf.core.units import UNSHAPED, format_rate, parse_rate
from dlperf.microbench.hosts.namespaces import Unavailable
from dlperf.microbench.hosts.ranks import RankFailed, places_of, run_ranks

_MARK = "dlperf.microbench.hosts"
TERMINATED = 143


def _rate(text: str) -> str | None:
    return None if text == UNSHAPED else format_rate(parse_rate(text))


_rate.__name__ = "rate (such as 300mbit, 1gbit, or none)"


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(TERMINATED)


def main(arguments: list[str] | None = None) -> int:
    """Make the hosts, run the ranks, take the hosts away. Exit status: 0, a failed rank's own, 2
    unusable, 130 interrupted (143 by SIGTERM).
    """
    what = (
        "Run a command once for each rank, every rank on a host of its own: a network namespace"
        " behind a link of the rate. Needs root and iproute2."
    )
    parser = Parser(
        prog=_MARK,
        allow_abbrev=False,
        description=what,
        usage="%(prog)s [options] COMMAND [ARGUMENTS]",
    )
    parser.add_argument(
        "--rate",
        type=_rate,
        default=None,
        metavar="RATE",
        help="of each link and direction: 300mbit, 1gbit; none: as it is (none)",
    )
    parser.add_argument("--ranks", type=count, default=2, metavar="N", help="number of ranks (2)")
    parser.add_argument(
        "--limit",
        type=seconds,
        default=86_400.0,
        metavar="S",
        help="end all ranks after so many seconds (a day)",
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        help=(
            "what every rank runs; it finds RANK, WORLD_SIZE, MASTER_ADDR and so on, as under"
            " torchrun"
        ),
    )
    options = parser.parse_args(arguments)
    if not options.command:
        parser.error("names no command")
    signal.signal(signal.SIGTERM, _terminate)
    try:
        with places_of(options.ranks, options.rate, on_loopback=False) as places:
            run_ranks(places, options.command, limit_s=options.limit, quiet=False)
    except KeyboardInterrupt as error:
        _say("interrupted")
        return error.args[0] if error.args else INTERRUPTED
    except RankFailed as error:
        _say(f"error: {error}")
        return error.status
    except DlperfError as error:
        _say(
            "error:"
            f" {f'no hosts can be made here: {error}' if isinstance(error, Unavailable) else error}"
        )
        return UNUSABLE
    return 0


def _say(line: str) -> None:
    log(line, _MARK)


if __name__ == "__main__":
    sys.exit(main())
