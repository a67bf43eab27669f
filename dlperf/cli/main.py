"""The command line: assembles the commands, emits their answers, explains failures.

Nothing heavy is imported here or beside a command's options, so that ``dlperf --help`` and a
mistyped option answer at once.

Data goes to stdout, progress to stderr. Exit status: 0 done, 1 the work failed, 2 unusable input or
usage, 130 interrupted (143 by SIGTERM); ``dlperf run`` passes on the script's own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

from dlperf.cli import (
    calibration,
    comparison,
    explanation,
    machine,
    measurement,
    prediction,
    report,
    reproduction,
    roofline,
    run,
    scaling,
    trace,
    tuning,
    validation,
)
from dlperf.cli.options import UNUSABLE, Command, Parser, add_commands
from dlperf.core import streams
from dlperf.core.errors import DlperfError, Interrupted, WorkFailed, check_room, is_shortage, refuse
from dlperf.core.files import check_writable, write_json
from dlperf.core.text import visible
from dlperf.core.version import VERSION

OK, FAILED, INTERRUPTED, TERMINATED = 0, 1, 130, 143
_COMMANDS = (
    calibration,
    machine,
    trace,
    prediction,
    measurement,
    report,
    comparison,
    validation,
    explanation,
    tuning,
    scaling,
    run,
    roofline,
    reproduction,
)


def _parser() -> Parser:
    parser = Parser(
        prog="dlperf",
        description=(
            "Predicts how long a PyTorch training step, epoch or run takes on a CPU, layer by"
            " layer, without running it."
        ),
    )
    parser.add_argument("--version", action="version", version=f"dlperf {VERSION}")
    add_commands(parser, "command", [module.COMMAND for module in _COMMANDS])
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line as a namespace; ``script`` holds what ``run`` passes on. Exits with one line
    on a word that no parser takes.
    """
    own, script = run.split(list(argv))
    args, unknown = _parser().parse_known_args(own)
    if unknown:
        args.refuse_usage(f"unrecognized arguments: {' '.join(unknown)}")
    args.script = script
    return args


def _check(args: argparse.Namespace) -> None:
    """Raise DlperfError for options that exclude one another and outputs that cannot be written."""
    command: Command = args.command_data
    refuse(*command.check(args))
    if command.folder_answer and args.output == "-":
        raise DlperfError(
            f"-o - is no folder; without -o the {command.folder_answer} goes to stdout"
        )
    timeline = getattr(args, "timeline", None)
    refuse((timeline == "-", "--timeline - is no file; name one"))
    written: dict[str, str] = {"-o": args.output} if getattr(args, "output", None) else {}
    for name in ("json", "timeline", "communication"):
        path = getattr(args, name, None)
        if path in (None, "-"):
            continue
        for other, taken in written.items():
            if os.path.realpath(path) == os.path.realpath(taken):
                raise DlperfError(f"{path}: --{name} and {other} name the same file; name two")
        written[f"--{name}"] = path
    for path, schema in ((args.json, command.schema), (timeline, "")):
        if path is not None and args.command != "run":
            check_writable(path, args.force, schema)


class _Interrupts:
    """Handlers of Ctrl-C and SIGTERM that raise KeyboardInterrupt, so that children are ended and
    finished work is kept on the way out.

    A compiled module that is interrupted while it is imported turns KeyboardInterrupt into another
    error, so the signal is remembered.
    """

    def __init__(self) -> None:
        self.seen = self.terminated = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Interrupts:
        with contextlib.suppress(ValueError):  # not the main thread: nothing to install
            for number, default in (
                (signal.SIGINT, signal.default_int_handler),
                (signal.SIGTERM, signal.SIG_DFL),
            ):
                if signal.getsignal(number) is default:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    @property
    def status(self) -> int:
        """The exit status of an interrupted command: 128 and the signal's number."""
        return TERMINATED if self.terminated else INTERRUPTED

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Put the handlers back that were there."""
        while self._before:
            signal.signal(*self._before.popitem())

    def _handle(self, number: int, frame: FrameType | None) -> NoReturn:
        self.seen = True
        self.terminated = number == signal.SIGTERM
        raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; a failure is one line on stderr."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args: argparse.Namespace | None = None
    streams.open_closed()
    with _Interrupts() as interrupts:
        try:
            try:
                args = parse(argv)
                _check(args)
                check_room(with_torch=args.command not in ("machine", "reproduce", "roofline"))
                status = _dispatch(args, interrupts.release)
            except SystemExit as stop:
                if args is not None and args.command == "run":
                    raise
                status = stop.code if isinstance(stop.code, int) else UNUSABLE if stop.code else OK
            streams.flush_out()
            return interrupts.status if status == INTERRUPTED and interrupts.seen else status
        except SystemExit:
            raise
        except BaseException as error:
            return _explain(error, args, interrupts)


def _dispatch(args: argparse.Namespace, release_interrupts: Callable[[], None]) -> int:
    if args.command == "run":  # the script gets this process with its stdout, warnings and Ctrl-C
        run_script = run.prepare(args)
        release_interrupts()
        return run_script()
    # what a target prints goes to stderr
    with (
        streams.stdout_to_stderr(),
        contextlib.redirect_stdout(sys.stderr),
        _short_warnings(args.debug),
    ):
        if args.command_data.folder_answer and args.output is not None:
            from dlperf.report.writing import check_folder

            check_folder(args.output, args.force)
        answer = args.command_data.work(args)
    if args.json is not None:
        write_json(args.json, answer.data, indent=answer.indent)
    if args.json != "-" and answer.text:
        with streams.escaping():
            streams.write_out(visible(answer.text))
    return int(answer.status)


@contextlib.contextmanager
def _short_warnings(debug: bool) -> Iterator[None]:
    """Python's warnings as one line each; with --debug as they are."""
    import warnings

    def one_line(message: Warning | str, category: type[Warning], *_: object) -> str:
        return visible(f"dlperf: warning: {_one_line(str(message))} ({category.__name__})\n")

    before = warnings.formatwarning
    warnings.formatwarning = before if debug else one_line  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.formatwarning = before


def _explain(error: BaseException, args: argparse.Namespace | None, interrupts: _Interrupts) -> int:
    """Write one line on what went wrong; the exit status for it."""
    name = "dlperf" if args is None else f"dlperf {args.command}"
    if args is not None and args.debug and not isinstance(error, BrokenPipeError):
        import traceback

        traceback.print_exception(type(error), error, error.__traceback__)
    _drop_stdout(error)
    status, line = FAILED, f"{name}: error: {error}"
    if interrupts.seen or isinstance(error, KeyboardInterrupt):
        how = "ended by SIGTERM" if interrupts.terminated else "interrupted"
        kept = f"; {error}" if isinstance(error, Interrupted) and str(error) else ""
        status, line = interrupts.status, f"dlperf: {how}{kept}"
    elif isinstance(error, BrokenPipeError):  # the reader has seen enough
        return OK
    elif is_shortage(error):
        if "out of memory" not in str(error):
            line = f"{name}: error: out of memory; a smaller --batch-size needs less"
    elif isinstance(error, DlperfError):
        status = FAILED if isinstance(error, WorkFailed) else UNUSABLE
    elif isinstance(error, OSError):
        file = f"{error.filename}: " if error.filename else ""
        line = f"{name}: error: {file}{error.strerror or error}"
    elif isinstance(error, ModuleNotFoundError) and not (error.name or "dlperf").startswith(
        "dlperf"
    ):
        status = UNUSABLE
        line = f"{name}: error: the package {error.name} is missing; pip install it"
    else:
        line = f"{name}: internal error: {type(error).__name__}: {error}; --debug shows where"
    with contextlib.suppress(OSError):
        streams.write_err(_one_line(line))
    return status


def _drop_stdout(error: BaseException) -> None:
    """Where stdout refuses, what is left in its buffer must not fail once more when Python ends."""
    if isinstance(error, OSError):
        try:
            streams.flush_out()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _one_line(text: str) -> str:
    return " ".join(text.split())
