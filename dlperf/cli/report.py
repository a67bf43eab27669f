"""``dlperf report``: predicted against measured, per layer."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from dlperf.cli.calibration import load_or_make_machine
from dlperf.cli.inputs import (
    Answer,
    check_ops,
    load_accelerator,
    predict_and_warn,
    predict_here,
    read_or_record,
    refuse_trace,
    split_batch,
    threads_for,
    use_threads,
    write_folder,
    write_timeline,
)
from dlperf.cli.measurement import measure_apart
from dlperf.cli.options import (
    ACCELERATOR,
    FORMAT,
    MODEL,
    TARGET_HELP,
    TIMELINE,
    Command,
    Problems,
    common,
    option,
    output,
)
from dlperf.core.argument_types import names, seconds
from dlperf.core.errors import DlperfError, refuse
from dlperf.core.files import MEASUREMENT, schema_of
from dlperf.core.streams import log, warn
from dlperf.core.text import counted

if TYPE_CHECKING:
    from dlperf.core.machine import Machine
    from dlperf.core.measurement import Measurement
    from dlperf.core.trace import Trace
    from dlperf.forecast.prediction import Prediction
    from dlperf.report.comparison import Report


def check(args: Namespace) -> Problems:
    """Options that exclude one another."""
    unused = "--device is where the step is measured now; --measured has been: leave one out"
    several = f"--measured {args.measured} is of one target, not of {len(args.targets)}; name one"
    return (
        (args.measured is not None and len(args.targets) > 1, several),
        (args.measured is not None and args.device is not None, unused),
    )


def report(args: Namespace) -> Answer:
    """Predicted against actual for each target or measurement."""
    from dlperf.report.comparison import FORMATS, compare, render, write
    from dlperf.report.step_comparison import reports_to_json

    use_threads(args.threads)
    command = shlex.join(["dlperf", *sys.argv[1:]])
    reports: list[Report] = []
    status, warn_once = 0, cache(warn)
    try:
        for spec in args.targets:
            file = args.measured or (spec if schema_of(spec) == MEASUREMENT else None)
            for target, size in split_batch(spec) if file is None else ((spec, None),):
                blind, measurement = (
                    _read(args, spec, file, warn_once)
                    if file
                    else _measure(args, target, size, warn_once)
                )
                predictions = _at_its_state(blind, measurement)
                if predictions is None:
                    reports.append(compare(blind, measurement, command=command))
                else:
                    reports.append(compare(predictions, measurement, command=command, blind=blind))
    except KeyboardInterrupt:
        if not reports:
            raise
        log(f"interrupted; what was finished ({len(reports)} of the targets) is reported")
        status = 130
    write_timeline(args, ((one.predictions, one.measurement) for one in reports))
    write_folder(args, lambda to, force: write(reports, to, args.format or FORMATS, force))
    shown = (args.format or ("text",)) if args.output is None else ("text",)
    text = "\n\n".join(render(reports, form) for form in shown)
    return Answer(text, reports_to_json(reports), status)


def _measure(
    args: Namespace, spec: str, batch_size: int | None, warn: Callable[[str], None]
) -> tuple[list[Prediction], Measurement]:
    """The predictions of a target, and its measurement of this moment."""
    refuse_trace(spec, "measure")
    if args.device is not None:
        return _measure_on(args.device, args, spec, batch_size, warn)
    recorded = read_or_record(args, spec, batch_size)  # first: an unusable target shows at once
    machine = load_or_make_machine(args, use_threads(None))
    threads = threads_for(args, machine)
    predictions = _predict_all(args, recorded, machine, threads, warn)
    log(
        f"measuring {spec} at batch size {recorded.batch_size}, {counted(threads, 'thread')}, in a"
        " process of its own"
    )
    return predictions, measure_apart(args, spec, recorded.batch_size, threads)


def _measure_on(
    device: str,
    args: Namespace,
    spec: str,
    batch_size: int | None,
    warn: Callable[[str], None],
) -> tuple[list[Prediction], Measurement]:
    """The same on an accelerator of this machine."""
    from dlperf.recorder.accelerator import device_clock, find_accelerator

    name = device_clock(find_accelerator(device)).name
    machine = load_accelerator(args, device)
    if machine.cpu.model != name:
        warn(f"{machine.path} is of {machine.cpu.model}, --device {device} is {name}")
    recorded = read_or_record(args, spec, batch_size, machine)
    threads = threads_for(args, machine)
    predictions = _predict_all(args, recorded, machine, threads, warn)
    log(f"measuring {spec} at batch size {recorded.batch_size} on {name}, in a process of its own")
    return predictions, measure_apart(args, spec, recorded.batch_size, threads)


def _read(
    args: Namespace, spec: str, file: str, warn: Callable[[str], None]
) -> tuple[list[Prediction], Measurement]:
    """The predictions of a target, or of a trace file, and the measurement of a file. Where `spec`
    is that file, its own trace is predicted; the target that it names is not run.
    """
    from dlperf.core.measurement import Measurement

    if schema_of(file) is None:
        return _read_profile(args, spec, file, warn)
    measurement = Measurement.load(file)
    for name in ("batch_size", "threads") if args.measured is None else ():
        asked, known = getattr(args, name), getattr(measurement, name)
        if asked not in (None, known):
            raise DlperfError(
                f"{file}: was measured at {name.replace('_', ' ')} {known}, not {asked}"
            )
    if args.measured is not None:
        recorded = _trace_of(args, spec, measurement.inference, measurement.batch_size)
    elif measurement.trace is not None:
        recorded = check_ops(file, measurement.trace, "trace.")
    else:
        raise DlperfError(
            f"{file}: contains no trace of its step, and its target is not run; name it yourself:"
            f" dlperf report TARGET --measured {file}"
        )
    if measurement.device_memory is not None:
        machine = load_accelerator(args, "cuda")
    else:
        machine = load_or_make_machine(args, measurement.threads)
    return _predict_all(args, recorded, machine, measurement.threads, warn), measurement


def _read_profile(
    args: Namespace, spec: str, file: str, warn: Callable[[str], None]
) -> tuple[list[Prediction], Measurement]:
    """The predictions of a target, and its measurement of a Chrome trace of torch.profiler."""
    from dlperf.profiler.chrome_trace import ChromeTrace

    profile = ChromeTrace.load(file)
    recorded = _trace_of(args, spec, profile.inference)
    machine = load_or_make_machine(args, use_threads(None))
    threads = threads_for(args, machine)
    measurement = profile.measurement(recorded, threads)
    return _predict_all(args, recorded, machine, threads, warn), measurement


def _trace_of(args: Namespace, spec: str, inference: bool, batch_size: int | None = None) -> Trace:
    """The step of a target that --measured is of."""
    ((target, asked),) = split_batch(spec)[:1]
    refuse(
        (
            batch_size is not None and (asked or args.batch_size) not in (None, batch_size),
            (
                f"{args.measured}: was measured at batch size {batch_size}, not"
                f" {asked or args.batch_size}; leave the batch size out, or measure again"
            ),
        ),
        (
            args.inference and not inference,
            f"{args.measured}: is of a training step; leave --inference out, or measure again",
        ),
    )
    same_kind = Namespace(**{**vars(args), "inference": inference})
    recorded = read_or_record(same_kind, target, batch_size or asked)
    if recorded.inference != inference:
        kinds = ("a training step", "a forward pass")
        raise DlperfError(
            f"{spec}: is {kinds[recorded.inference]} and {args.measured} {kinds[inference]}; record"
            " the step with dlperf trace"
        )
    return recorded


def _at_its_state(blind: Sequence[Prediction], measurement: Measurement) -> list[Prediction] | None:
    """The predictions at the state that the machine had during the measurement; None where it is
    unknown.
    """
    from dlperf.report.step_comparison import states_during

    states = states_during(measurement, blind[0].machine)
    if not states:
        return None
    return [
        predict_here(one.trace, one.machine, one.threads, one.predictor, one.malloc, state=states)
        for one in blind
    ]


def _predict_all(
    args: Namespace,
    recorded: Trace,
    machine: Machine,
    threads: int,
    warn: Callable[[str], None],
) -> list[Prediction]:
    """The given predictors; by default calibrated, roofline, and gemm-table where it supports a
    layer.
    """
    first, *others = args.predictor or ("calibrated", "roofline", "gemm-table")
    predictions = [predict_and_warn(recorded, machine, threads, first, warn=warn)]
    for name in others:
        try:
            prediction = predict_here(recorded, machine, threads, name)
        except DlperfError:
            if args.predictor:
                raise
            continue
        if args.predictor or prediction.layers["forward_s"].notna().any():
            predictions.append(prediction)
    return predictions


COMMAND = Command(
    "report",
    "predicted against actual, per layer",
    options=(
        option(
            "targets",
            metavar="TARGET|MEASUREMENT",
            nargs="+",
            help=f"{TARGET_HELP}; or a measurement file. TARGET@BATCH gives one its own batch size",
        ),
        option(
            "--measured",
            metavar="FILE",
            help=(
                "compare with this measurement of TARGET, which may be a trace file, instead of"
                " measuring now; or with a Chrome trace that torch.profiler exported of its step"
            ),
        ),
        option(
            "--predictor",
            type=names,
            metavar="NAME,NAME",
            help="predictors to compare (default: all)",
        ),
        option(
            "--seconds",
            type=seconds,
            default=4.0,
            metavar="S",
            help="how long to time the step (4)",
        ),
        ACCELERATOR,
        FORMAT,
        output("folder to write the reports and plots to", "DIR"),
        TIMELINE,
        *common(),
        *MODEL,
    ),
    work=report,
    check=check,
    folder_answer="report",
)
