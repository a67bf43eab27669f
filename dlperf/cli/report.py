"""``dlperf report``: predict, measure, compare, and write it all down."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from dlperf.cli.inputs import (
    Answer,
    check_ops,
    is_trace,
    load_or_make_machine,
    predict_and_warn,
    predict_here,
    read_or_record,
    split_batch,
    threads_for,
    use_threads,
)
from dlperf.core import child_process
from dlperf.core.errors import DlperfError
from dlperf.core.files import schema_of
from dlperf.core.streams import log, write_err

if TYPE_CHECKING:
    from dlperf.core.machine import Machine
    from dlperf.core.measurement import Measurement
    from dlperf.core.trace import Trace
    from dlperf.forecast.prediction import Prediction
    from dlperf.report.comparison import Report


def report(args: Namespace) -> Answer:
    """Predicted against actual for each target or measurement."""
    from dlperf.report.comparison import FORMATS, render, write
    from dlperf.report.export import reports_to_json
    from dlperf.report.writing import check_folder

    if args.output is not None:
        check_folder(args.output, args.force)
    use_threads(args.threads)
    reports: list[Report] = []
    status = 0
    try:
        for spec in args.targets:
            if args.measured is not None:
                reports.append(_report_measured(args, spec))
            elif schema_of(spec) == "dlperf.measurement":
                reports.append(_report_measurement(args, spec))
            else:
                for target, size in split_batch(spec):
                    reports.append(_report_target(args, target, size))
    except KeyboardInterrupt:
        if not reports:
            raise
        log(f"interrupted; what was finished ({len(reports)} of the targets) is reported")
        status = 130
    if args.output is None:
        text = "\n\n".join(render(reports, form) for form in args.format or ("text",))
    else:
        written = write(reports, args.output, args.format or FORMATS, args.force)
        text = render(reports, "text")
        log(f"wrote {', '.join(path.name for path in written)} to {args.output}")
    return Answer(text, reports_to_json(reports), status)


def _report_target(args: Namespace, spec: str, batch_size: int | None) -> Report:
    if is_trace(spec):
        raise DlperfError(
            f"{spec}: a trace file has no code to measure; name the target it was recorded from, or"
            " a measurement file"
        )
    recorded = read_or_record(
        args, spec, batch_size
    )  # before anything slow: a target that does not work is known at once
    machine = load_or_make_machine(args, use_threads(None))
    threads = threads_for(args, machine)
    predictions = _predict_all(args, recorded, machine, threads)
    log(
        f"measuring {spec} at batch size {recorded.batch_size}, {threads} thread(s), in a process"
        " of its own"
    )
    return _compare(predictions, measure_apart(args, spec, recorded.batch_size, threads))


def _report_measurement(args: Namespace, path: str) -> Report:
    """The report of a measurement file, predicted from its own trace: what it names as its target
    is text from a file and is not run.
    """
    from dlperf.core.measurement import Measurement

    measurement = Measurement.load(path)
    if measurement.trace is None:
        raise DlperfError(
            f"{path}: contains no trace of its step, and its target is not run; name it yourself:"
            f" dlperf report TARGET --measured {path}"
        )
    return _report_against(args, measurement, check_ops(path, measurement.trace, "trace."))


def _report_measured(args: Namespace, spec: str) -> Report:
    """The report of a target, or a trace file, beside the measurement that --measured names."""
    from dlperf.core.measurement import Measurement

    measurement = Measurement.load(args.measured)
    ((target, asked),) = split_batch(spec)[:1]
    size = asked or args.batch_size
    if size not in (None, measurement.batch_size):
        raise DlperfError(
            f"{args.measured}: was measured at batch size {measurement.batch_size}, not {size};"
            " leave the batch size out, or measure again"
        )
    if args.inference and not measurement.inference:
        raise DlperfError(
            f"{args.measured}: is of a training step; leave --inference out, or measure again"
        )
    recorded = read_or_record(
        Namespace(**{**vars(args), "inference": measurement.inference}),
        target,
        measurement.batch_size,
    )
    if recorded.inference != measurement.inference:
        raise DlperfError(
            f"{spec}: is a forward pass and {args.measured} a training step; record the step with"
            " dlperf trace"
        )
    return _report_against(args, measurement, recorded)


def _report_against(args: Namespace, measurement: Measurement, recorded: Trace) -> Report:
    machine = load_or_make_machine(args, measurement.threads)
    return _compare(_predict_all(args, recorded, machine, measurement.threads), measurement)


def _compare(predictions: list[Prediction], measurement: Measurement) -> Report:
    from dlperf.report.comparison import compare

    return compare(predictions, measurement, command=shlex.join(["dlperf", *sys.argv[1:]]))


def _predict_all(
    args: Namespace, recorded: Trace, machine: Machine, threads: int
) -> list[Prediction]:
    """The predictors asked for; without a wish calibrated, roofline, and gemm-table where it can
    speak.
    """
    first, *others = args.predictor or ("calibrated", "roofline", "gemm-table")
    predictions = [predict_and_warn(recorded, machine, threads, first)]
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


def measure_apart(args: Namespace, spec: str, batch_size: int, threads: int) -> Measurement:
    """A measurement from a fresh process, whose memory no recording has touched.

    Raises DlperfError where the target is unusable, WorkFailed where measuring it failed.
    """
    from dlperf.core.measurement import Measurement

    command = [
        sys.executable,
        "-m",
        "dlperf",
        "measure",
        spec,
        "--batch-size",
        str(batch_size),
        "--threads",
        str(threads),
    ]
    command += [
        "--seconds",
        str(args.seconds),
        "--no-trace",
        "--json",
        "-",
        *(["--inference"] if args.inference else []),
    ]
    command += ["--input", ",".join(map(str, args.input))] if args.input else []
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise child_process.failure(
            done.returncode,
            child_process.last_line(done.stderr).partition("error: ")[2] or done.stderr,
        )
    for line in done.stderr.splitlines():
        write_err(line)
    return Measurement.from_json(json.loads(done.stdout))
