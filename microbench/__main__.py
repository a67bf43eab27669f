"""``python -m microbench``: measure this machine without the rest of dlperf's commands."""

from __future__ import annotations

import argparse
import signal
import sys

from dlperf.core import streams
from dlperf.core.errors import DlperfError, WorkFailed
from dlperf.core.files import one_writer
from dlperf.core.machine import default_path
from dlperf.microbench.suite import calibrate


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure, say where the file is. Exit status as dlperf's: 0, 1 failed, 2 unusable, 130
    interrupted.
    """
    streams.open_closed()
    parser = argparse.ArgumentParser(
        prog="python -m microbench", description="Measure this machine into a machine file."
    )
    parser.add_argument(
        "-o",
        dest="output",
        default=None,
        help="the file (default: this machine's, in the user's data folder)",
    )
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument(
        "--quick",
        action="store_const",
        dest="mode",
        const="quick",
        help="within 20 s a thread count",
    )
    depth.add_argument(
        "--thorough",
        action="store_const",
        dest="mode",
        const="thorough",
        help="more shapes and samples",
    )
    parser.add_argument("--threads", default="1", help="thread counts, separated by commas (1)")
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace a file that is not of this machine or not of dlperf",
    )
    parser.set_defaults(mode="full")
    options = parser.parse_args(arguments)
    try:
        threads = tuple(int(count) for count in options.threads.split(","))
    except ValueError:
        parser.error(f"--threads is {options.threads!r}; write for example 1,2")
    path = options.output or default_path()
    try:
        if options.output is None:
            default_path().parent.mkdir(parents=True, exist_ok=True)
        with one_writer(path, "a calibration"):
            calibrate(path, mode=options.mode, threads=threads, force=options.force)
    except WorkFailed as error:
        print(f"dlperf: {error}", file=sys.stderr)
        return 1
    except DlperfError as error:
        print(f"dlperf: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print(f"dlperf: interrupted{f'; {error}' if str(error) else ''}", file=sys.stderr)
        return 130
    print(path)
    return 0


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # raises, so that the worker is ended too
    sys.exit(main())
