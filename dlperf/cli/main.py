"""The command line: what may be typed, where answers go, what a failure looks like.
:mod:`dlperf.cli.commands` does the work.

Nothing heavy is imported here, so that ``dlperf --help`` and a mistyped option answer at once.

Data goes to stdout, narration to stderr. Exit status: 0 done, 1 the work failed, 2 unusable input
or usage, 130 interrupted (143 by SIGTERM); ``dlperf run`` passes on the script's own.
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

from dlperf.cli.run_options import add_run, split_run
from dlperf.cli.scale_options import add_scale
from dlperf.cli.validate_options import add_validate, check_validate
from dlperf.core import streams
from dlperf.core.argument_types import (
    count,
    count_or_none,
    counts,
    counts_or_none,
    formats,
    loader,
    names,
    seconds,
    shape,
    size,
)
from dlperf.core.errors import DlperfError, Interrupted, WorkFailed, check_room, is_shortage
from dlperf.core.streams import write_err
from dlperf.core.text import visible
from dlperf.core.version import VERSION

OK, FAILED, UNUSABLE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
MALLOCS = ("default", "tuned", "huge-pages", "jemalloc", "tcmalloc")
_TARGET = (
    "FILE.py:CALLABLE, MODULE:CALLABLE, a trace file or, in a checkout, a short name such as lenet"
)


# -- what may be typed -----------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """argparse with errors of one line, and without abbreviated options (a new option must not
    break an old command).
    """

    def __init__(self, **options: object) -> None:
        super().__init__(**{"allow_abbrev": False, **options})  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """One line that names what is wrong and where help is; exit status 2."""
        self.exit(
            UNUSABLE, f"{self.prog}: error: {_one_line(message)}; {self.prog} --help shows how\n"
        )


def _parser() -> _Parser:
    parser = _Parser(
        prog="dlperf",
        description=(
            "Predicts how long a PyTorch training step, epoch or run takes on a CPU, layer by"
            " layer, without running it."
        ),
    )
    parser.add_argument("--version", action="version", version=f"dlperf {VERSION}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=_Parser
    )

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")

    calibrate = command(
        "calibrate", "measure this machine: create, resume or extend its machine file"
    )
    depth = calibrate.add_mutually_exclusive_group()
    depth.add_argument(
        "--quick",
        dest="mode",
        action="store_const",
        const="quick",
        default="full",
        help="a rough one in seconds",
    )
    depth.add_argument(
        "--thorough",
        dest="mode",
        action="store_const",
        const="thorough",
        help="more shapes and samples than usual",
    )
    calibrate.add_argument(
        "--for",
        dest="targets",
        metavar="TARGET@BATCH",
        nargs="+",
        action="extend",
        default=[],
        help="also measure the exact operations of a target's step at that batch size",
    )
    calibrate.add_argument(
        "--threads",
        type=counts,
        metavar="T,T",
        help="thread counts to measure (default: 1 and torch's own number)",
    )
    calibrate.add_argument(
        "--workers",
        type=counts,
        metavar="P,P",
        default=(),
        help=(
            "also measure what P processes of one thread each cost one another, for predict"
            " --workers"
        ),
    )
    _output(calibrate, "machine file to write (default: --machine)")
    _common(calibrate, threads=False)
    _what(calibrate)

    machine = command("machine", "show, check or compare machine files")
    actions = machine.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=_Parser
    )
    for action, n_files, text in (
        ("show", "?", "what a machine file, or a cluster file, says"),
        ("check", "?", "whether a machine file can be trusted here; exit status 1 if not"),
        ("diff", 2, "how two machine files differ"),
    ):
        one = actions.add_parser(action, help=text, description=text[0].upper() + text[1:] + ".")
        one.add_argument(
            "files",
            metavar="FILE",
            nargs=n_files,
            help="machine file" + (" (default: --machine)" if n_files == "?" else ""),
        )
        _common(one, threads=False, batch_size=False)

    trace = command("trace", "record a step and save it")
    trace.add_argument("target", metavar="TARGET", help=_TARGET)
    _output(trace, "trace file to write")
    _common(trace)
    _what(trace)

    predict = command("predict", "predict layers, step, memory and epoch without running the model")
    predict.add_argument("target", metavar="TARGET", help=_TARGET)
    predict.add_argument(
        "--predictor",
        default="calibrated",
        metavar="NAME",
        help="calibrated (default), roofline, gemm-table, viebke-a or viebke-b",
    )
    predict.add_argument(
        "--point",
        metavar="MEASUREMENT",
        help=(
            "measurement of the target (dlperf measure -o) that viebke-a and viebke-b rest on "
            "(default: the step that calibrated predicts)"
        ),
    )
    predict.add_argument(
        "--malloc",
        choices=MALLOCS,
        default="default",
        help=f"whose memory the process uses: {', '.join(MALLOCS)}",
    )
    predict.add_argument(
        "--samples",
        type=count,
        metavar="N",
        help="training samples of an epoch: forecast the epoch",
    )
    predict.add_argument("--epochs", type=count, metavar="E", help="number of epochs (1)")
    predict.add_argument(
        "--val-samples",
        type=count_or_none,
        metavar="V",
        help="validation samples after each epoch (0)",
    )
    predict.add_argument(
        "--test-samples", type=count_or_none, metavar="S", help="test samples at the end (0)"
    )
    predict.add_argument(
        "--loader-workers",
        type=count_or_none,
        metavar="W",
        help="worker processes of the data loader (0)",
    )
    predict.add_argument(
        "--workers",
        type=count,
        metavar="P",
        help=(
            "processes that train an instance each on a share of the samples, with one thread: "
            "the step beside the others, and with --samples the whole run from their start"
        ),
    )
    predict.add_argument(
        "--persistent-workers", action="store_true", help="they stay from epoch to epoch"
    )
    predict.add_argument(
        "--loader",
        type=loader,
        metavar="FILE.py:CALLABLE",
        help=(
            "CALLABLE(batch_size, num_workers) -> DataLoader or Dataset, sampled apart (default:"
            " tensors in memory)"
        ),
    )
    predict.add_argument(
        "--drop-last", action="store_true", help="leave out an epoch's last, smaller batch"
    )
    predict.add_argument(
        "--accumulate", type=count, metavar="K", help="batches to one step of the optimizer (1)"
    )
    predict.add_argument("--clip", action="store_true", help="the gradients' norm is clipped")
    predict.add_argument(
        "--scheduler",
        action="store_true",
        help="a learning rate scheduler steps with the optimizer",
    )
    predict.add_argument(
        "--accuracy", action="store_true", help="right answers are counted at each batch"
    )
    predict.add_argument(
        "--checkpoint", action="store_true", help="the parameters are saved after each epoch"
    )
    _common(predict)
    _what(predict)

    measure = command("measure", "time per step and its layers")
    measure.add_argument("target", metavar="TARGET", help=_TARGET)
    measure.add_argument(
        "--seconds", type=seconds, default=4.0, metavar="S", help="how long to time the step (4)"
    )
    measure.add_argument(
        "--memory",
        action="store_true",
        help="also count the most memory that three steps add to a fresh process",
    )
    measure.add_argument(
        "--no-trace",
        action="store_true",
        help="leave the trace of the step out of the file; report then asks for the target",
    )
    _output(measure, "measurement file to write")
    _common(measure)
    _what(measure)

    report = command("report", "predicted against actual, per layer")
    report.add_argument(
        "targets",
        metavar="TARGET|MEASUREMENT",
        nargs="+",
        help=f"{_TARGET}; or a measurement file. TARGET@BATCH gives one its own batch size",
    )
    report.add_argument(
        "--measured",
        metavar="FILE",
        help=(
            "compare with this measurement of TARGET, which may be a trace file, instead of"
            " measuring now"
        ),
    )
    report.add_argument(
        "--predictor", type=names, metavar="NAME,NAME", help="predictors to compare (default: all)"
    )
    report.add_argument(
        "--seconds", type=seconds, default=4.0, metavar="S", help="how long to time the step (4)"
    )
    report.add_argument(
        "--format",
        type=formats,
        default=None,
        metavar="FORMAT,...",
        help="text, md, html, csv, json (default: text; with -o all of them)",
    )
    _output(report, "folder to write the reports and plots to", "DIR")
    _common(report)
    _what(report)

    validate = command(
        "validate",
        "the accuracy study: predicted against actual over many networks, or over single ops",
    )
    add_validate(validate)
    _output(validate, "folder to write tables and plots to", "DIR")
    _common(validate, threads=False)
    _what(validate)

    explain = command("explain", "what a step's time is made of, and which changes would pay")
    explain.add_argument("target", metavar="TARGET", help=_TARGET)
    explain.add_argument(
        "--try",
        dest="trial",
        action="store_true",
        help="measure each change that can be made here beside its prediction",
    )
    explain.add_argument(
        "--runs",
        type=count,
        metavar="N",
        help=(
            "with --try: processes for each change, and as many of the step as it is between"
            " them (3)"
        ),
    )
    explain.add_argument(
        "--seconds",
        type=seconds,
        metavar="S",
        help="with --try: how long each process times the step (2)",
    )
    _output(explain, "folder to write the explanation and its plots to", "DIR")
    _common(explain)
    _what(explain)

    tune = command(
        "tune", "which threads, batch size, loading workers and worker processes train fastest"
    )
    tune.epilog = (
        "It seeks speed, not convergence: a larger batch, or more workers, update the weights less"
        " often in an epoch."
    )
    tune.add_argument("target", metavar="TARGET", help=_TARGET)
    tune.add_argument(
        "--objective",
        choices=("epoch", "throughput"),
        help="the shortest epoch (default with --samples) or the most samples per second",
    )
    tune.add_argument("--samples", type=count, metavar="N", help="training samples of an epoch")
    tune.add_argument(
        "--memory-limit",
        type=size,
        metavar="BYTES",
        help="2GiB, 500MB: what all processes together may take beyond importing torch",
    )
    tune.add_argument(
        "--threads",
        type=counts,
        metavar="T,T",
        help="threads to compare (default: those of the machine file)",
    )
    tune.add_argument(
        "--batch-sizes",
        type=counts,
        metavar="B,B",
        help="batch sizes to compare (8,16,32,64,128,256)",
    )
    tune.add_argument(
        "--loader-workers",
        type=counts_or_none,
        metavar="W,W",
        help="loading workers to compare (0,1,2)",
    )
    tune.add_argument(
        "--loader",
        type=loader,
        metavar="FILE.py:CALLABLE",
        help=(
            "CALLABLE(batch_size, num_workers) -> DataLoader or Dataset, sampled apart (default:"
            " tensors in memory)"
        ),
    )
    tune.add_argument(
        "--workers",
        type=counts,
        metavar="P,P",
        help=(
            "worker processes to compare, each with its share of the samples (powers of 2 up to the"
            " cores)"
        ),
    )
    tune.add_argument(
        "--try",
        dest="trial",
        action="store_true",
        help="measure the best few, and say which one really won",
    )
    tune.add_argument("--best", type=count, metavar="K", help="with --try: how many (3)")
    tune.add_argument(
        "--runs", type=count, metavar="N", help="with --try: how often each is measured (3)"
    )
    tune.add_argument(
        "--seconds", type=seconds, metavar="S", help="with --try: how long each is timed (3)"
    )
    _output(tune, "folder to write the comparison and its plot to", "DIR")
    _common(tune, threads=False)
    _what(tune)

    scale = command(
        "scale", "forecast data-parallel training (DistributedDataParallel) on several ranks"
    )
    add_scale(scale, _TARGET, count, counts, shape)
    _output(scale, "folder to write the forecast and its plots to", "DIR")
    _common(scale)

    run = command("run", "run a training script as it is, and predict it while it runs")
    add_run(run, count)
    _output(run, "report to write: .html, .md, or text")
    _common(run, batch_size=False)

    reproduce = command(
        "reproduce", "recompute the papers' tables and print them beside the printed values"
    )
    reproduce.add_argument("paper", metavar="PAPER", nargs="?", help="one paper (default: all)")
    _output(reproduce, "folder to write the tables and the figures that follow from them to", "DIR")
    _common(reproduce, threads=False, batch_size=False)
    return parser


def _common(parser: argparse.ArgumentParser, threads: bool = True, batch_size: bool = True) -> None:
    parser.add_argument(
        "--machine",
        metavar="FILE",
        help="machine file (default: this machine's, in the user's data folder)",
    )
    if batch_size:
        parser.add_argument("--batch-size", type=count, metavar="B", help="samples of a step (32)")
    if threads:
        parser.add_argument(
            "--threads",
            type=count,
            metavar="T",
            help=(
                "threads (default: torch's own number if the machine file holds it, else its"
                " nearest)"
            ),
        )
    parser.add_argument("--json", metavar="FILE", help="write the answer as JSON; - is stdout")
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace what dlperf did not write, and a machine file of another machine or torch",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def _what(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--inference", action="store_true", help="one forward pass instead of a training step"
    )
    parser.add_argument(
        "--input",
        type=shape,
        metavar="3,224,224",
        help="input shape of a bare nn.Module, without the batch",
    )


def _output(parser: argparse.ArgumentParser, text: str, metavar: str = "FILE") -> None:
    parser.add_argument("-o", "--output", dest="output", metavar=metavar, help=text)


_OF_AN_EPOCH = (
    "epochs",
    "val_samples",
    "test_samples",
    "loader_workers",
    "persistent_workers",
    "loader",
    "drop_last",
    "accumulate",
    "clip",
    "scheduler",
    "accuracy",
    "checkpoint",
)
_OF_TRAINING = ("accumulate", "clip", "scheduler", "checkpoint")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line as a namespace; ``script`` holds what ``run`` passes on. Exits with one line
    where it cannot be understood.
    """
    parser = _parser()
    own, script = split_run(list(argv))
    args = parser.parse_args(own)
    args.script = script
    if args.command == "run" and not script:
        _fail(args, "names no script; dlperf run --help shows how")
    if args.command == "run" and args.communication == "-":
        _fail(args, "--communication - is no file; name one")
    if args.command in ("trace", "measure"):
        if args.output is None and args.json is None:
            _fail(args, "names no file to write; give -o FILE (or --json -)")
        if args.output == "-":
            args.output, args.json = None, "-"
    if args.command == "report" and args.measured is not None and len(args.targets) > 1:
        _fail(
            args,
            f"--measured {args.measured} is of one target, not of {len(args.targets)}; name one",
        )
    if args.command == "validate":
        problem = check_validate(args)
        if problem:
            _fail(args, problem)
    if args.command in ("validate", "tune") and args.batch_sizes and args.batch_size:
        _fail(args, "--batch-size and --batch-sizes say the same; give one of them")
    answers = {
        "report": "report",
        "validate": "report",
        "explain": "explanation",
        "tune": "comparison",
        "reproduce": "list of tables",
        "scale": "forecast",
    }
    if args.command in answers and args.output == "-":
        _fail(args, f"-o - is no folder; without -o the {answers[args.command]} goes to stdout")
    if args.command in ("explain", "tune") and not args.trial:
        for option in _given(args, ("runs", "seconds", "best")):
            _fail(args, f"{option} is for the measuring of --try")
    if args.command == "predict" and args.workers:
        if args.threads not in (None, 1):
            _fail(args, f"--workers have one thread each; leave --threads {args.threads} out")
        if args.samples is not None and args.workers > args.samples:
            _fail(
                args,
                f"--workers {args.workers} are more than the {args.samples} samples; give each at"
                " least one",
            )
    if args.command == "predict" and args.inference:
        for option in _given(args, _OF_TRAINING):
            _fail(args, f"{option} belongs to training; leave it or --inference out")
    if args.command == "predict" and args.samples is None:
        for option in _given(args, _OF_AN_EPOCH):
            _fail(args, f"{option} forecasts an epoch and needs --samples N")
    return args


def _given(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Those of the options that stand on the command line."""
    return [
        f"--{name.replace('_', '-')}"
        for name in names
        if getattr(args, name, None) not in (None, False)
    ]


def _fail(args: argparse.Namespace, message: str) -> NoReturn:
    write_err(f"dlperf {args.command}: error: {message}")
    raise SystemExit(UNUSABLE)


# -- what comes of it ------------------------------------------------------------------------------


class _Interrupts:
    """Notices Ctrl-C and SIGTERM, which both raise KeyboardInterrupt: children are ended and what
    is finished is kept on the way out.

    A compiled module that is interrupted while it is imported turns KeyboardInterrupt into another
    error, so what was seen is remembered.
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
                check_room(with_torch=args.command not in ("machine", "reproduce"))
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
    if args.command == "run":
        return _run(args, release_interrupts)
    if args.json is not None:
        from dlperf.core.files import check_writable

        check_writable(args.json, args.force)
    # what a target prints is narration
    with (
        streams.stdout_to_stderr(),
        contextlib.redirect_stdout(sys.stderr),
        _short_warnings(args.debug),
    ):
        from dlperf.cli import commands

        answer = commands.COMMANDS[args.command](args)
    if args.json is not None:
        from dlperf.core.files import write_json

        write_json(args.json, answer.data, indent=answer.indent)
    if args.json != "-" and answer.text:
        with streams.escaping():
            streams.write_out(visible(answer.text))
    return answer.status


def _run(args: argparse.Namespace, release_interrupts: Callable[[], None]) -> int:
    """The script gets this process: its stdout, its warnings and its Ctrl-C are its own."""
    from dlperf.cli import commands
    from dlperf.core.files import check_writable

    if (
        os.environ.get("RANK", "0") == "0"
    ):  # the others write nothing, and may run where such a folder is not
        for path in (args.json, args.communication):
            if path is not None:
                check_writable(path, args.force)
        if args.output is not None:
            ours = os.path.isfile(args.output) and _is_report(args.output)
            check_writable(args.output, args.force or ours)
    run_script = commands.prepare_run(args)
    release_interrupts()
    return run_script()


def _is_report(path: str) -> bool:
    from pathlib import Path

    from dlperf.report.writing import is_ours

    return is_ours(Path(path))


@contextlib.contextmanager
def _short_warnings(debug: bool) -> Iterator[None]:
    """Python's warnings as one line each; with --debug as they are."""
    import warnings

    before = warnings.formatwarning
    if not debug:

        def one_line(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            line: str | None = None,
        ) -> str:
            return visible(f"dlperf: warning: {_one_line(str(message))} ({category.__name__})\n")

        warnings.formatwarning = one_line
    try:
        yield
    finally:
        warnings.formatwarning = before


def _explain(error: BaseException, args: argparse.Namespace | None, interrupts: _Interrupts) -> int:
    """Say in one line what went wrong, and give the exit status for it."""
    name = "dlperf" if args is None else f"dlperf {args.command}"
    if args is not None and args.debug and not isinstance(error, BrokenPipeError):
        import traceback

        traceback.print_exception(type(error), error, error.__traceback__)
    _drop_stdout(error)
    status, line = FAILED, ""
    if interrupts.seen or isinstance(error, KeyboardInterrupt):
        kept = f"; {error}" if isinstance(error, Interrupted) and str(error) else ""
        status, line = (
            interrupts.status,
            f"dlperf: {'ended by SIGTERM' if interrupts.terminated else 'interrupted'}{kept}",
        )
    elif isinstance(error, BrokenPipeError):  # the reader has seen enough
        status = OK
    elif is_shortage(error):
        told = "out of memory; a smaller --batch-size needs less"
        line = f"{name}: error: {error if 'out of memory' in str(error) else told}"
    elif isinstance(error, DlperfError):
        status, line = (
            (FAILED if isinstance(error, WorkFailed) else UNUSABLE),
            f"{name}: error: {error}",
        )
    elif isinstance(error, OSError):
        line = (
            f"{name}: error:"
            f" {f'{error.filename}: ' if error.filename else ''}{error.strerror or error}"
        )
    else:
        line = f"{name}: internal error: {type(error).__name__}: {error}; --debug shows where"
    if line:
        with contextlib.suppress(OSError):
            write_err(_one_line(line))
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
