"""What each command does. The command line (:mod:`dlperf.cli.main`) parses, emits the answer and
explains failures.

Every command takes the parsed arguments and returns an :class:`Answer`; heavy modules are imported
where they are needed.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dlperf.cli.epochs import forecast_epoch
from dlperf.cli.explain import explain
from dlperf.cli.inputs import (
    Answer,
    check_predictors,
    default_threads,
    is_trace,
    load_machine,
    load_point,
    machine_path,
    make_folder,
    naming_unfit_kernels,
    predict_and_warn,
    read_or_record,
    repeat_self_test,
    resolve,
    run_calibration,
    split_batch,
    threads_for,
    use_threads,
    warn_of_threads,
)
from dlperf.cli.report import report
from dlperf.cli.scale import scale
from dlperf.cli.tune import tune
from dlperf.cli.validate import validate
from dlperf.core.cluster import SCHEMA as CLUSTER
from dlperf.core.cluster import Cluster
from dlperf.core.errors import DlperfError
from dlperf.core.files import check_writable, schema_of
from dlperf.core.streams import warn
from dlperf.core.text import fit


def calibrate(args: Namespace) -> Answer:
    """Measure this machine."""
    from dlperf.report.machine_summary import conclude, summarize

    path = Path(args.output) if args.output else machine_path(args)
    if not args.output and not args.machine:
        make_folder(path.parent)
    check_writable(path, args.force)
    threads = args.threads or default_threads(use_threads(None))
    traces = [
        read_or_record(args, target, size)
        for spec in args.targets
        for target, size in split_batch(spec)
    ]
    begin = time.monotonic()
    machine = replace(
        run_calibration(path, args.mode, threads, traces, args.force, args.workers), path=str(path)
    )
    seconds, summary = time.monotonic() - begin, summarize(machine)
    return Answer(fit(conclude(summary, seconds)), summary.to_json())


def machine(args: Namespace) -> Answer:
    """Show, check or compare machine files."""
    from dlperf.core import host
    from dlperf.report import machine_check, machine_difference, machine_summary

    if args.action == "diff":
        machines = [load_machine(args, file) for file in args.files]
        with naming_unfit_kernels(*machines):
            difference = machine_difference.compare_machines(*machines)
        return Answer(fit(difference.to_text()), difference.to_json())
    if args.action == "show" and args.files and schema_of(args.files) == CLUSTER:
        from dlperf.distributed.cluster_summary import summarize_cluster

        page = summarize_cluster(Cluster.load(args.files))
        return Answer(page.to_text(), page.to_json())
    file = load_machine(args, args.files)
    if args.action == "show":
        with naming_unfit_kernels(file):
            summary = machine_summary.summarize(file)
        return Answer(fit(summary.to_text()), summary.to_json())
    cpu, versions = host.this_cpu(), host.versions()
    if file.kernels and not machine_check.find_mismatches(file, cpu, versions):
        file = repeat_self_test(file)
    problems = machine_check.find_problems(file, cpu, versions)
    verdict = "cannot be trusted here" if problems else "can be trusted here"
    remarks = machine_check.find_remarks(file)
    tests = machine_check.self_test_lines(file)
    lines = [
        *(f"  {problem}" for problem in problems),
        *(f"  {line}" for line in tests),
        *(f"  note: {remark}" for remark in remarks),
    ]
    text = "\n".join([f"{file.path}: {verdict}", *dict.fromkeys(lines)])
    data = {
        "schema": "dlperf.machine-check",
        "schema_version": 1,
        "machine": file.path,
        "trusted": not problems,
        "problems": problems,
        "remarks": remarks,
        "self_tests": [{**vars(test), "error_frac": test.error_frac} for test in file.self_tests],
    }
    return Answer(fit(text), data, status=1 if problems else 0)


def trace(args: Namespace) -> Answer:
    """Record a step."""
    _check_outputs(args)
    recorded = read_or_record(args, args.target)
    if args.output is not None:
        recorded.save(args.output)
    what = (
        f"a {'forward pass' if recorded.inference else 'training step'} at batch size"
        f" {recorded.batch_size}"
    )
    sizes = (
        f"{len(recorded.layers)} layers, {recorded.n_parameters:,} parameters,"
        f" {len(recorded.ops)} ops"
    )
    text = f"{recorded.target}: {what}, {sizes}, recorded on {recorded.recorded_on}"
    return Answer(
        fit(text + (f"; written to {args.output}" if args.output else "")),
        recorded.to_json(),
        indent=None,
    )


def predict(args: Namespace) -> Answer:
    """Predict a step and an epoch."""
    from dlperf.report.step_pages import prediction_to_text

    check_predictors([args.predictor])
    machine, point = load_machine(args), load_point(args)
    recorded = read_or_record(args, args.target)
    threads = 1 if args.workers else threads_for(args, machine)
    prediction = predict_and_warn(recorded, machine, threads, args.predictor, args.malloc, point)
    epoch = None if args.samples is None else forecast_epoch(args, prediction)
    if args.workers:
        from dlperf.forecast.worker_processes import predict_co_run

        prediction = predict_co_run(prediction, args.workers)
    return Answer(prediction_to_text(prediction, epoch), prediction.to_json(epoch))


def measure(args: Namespace) -> Answer:
    """Time a step and its layers, in this fresh process."""
    _check_outputs(args)
    if is_trace(args.target):
        raise DlperfError(
            f"{args.target}: a trace file has no code to run; measure the target it was recorded"
            " from"
        )
    from dlperf.core.host import usual_threads_of_file

    use_threads(args.threads)
    threads = use_threads(args.threads or usual_threads_of_file(machine_path(args)))
    warn_of_threads(threads)
    target = resolve(args, args.target)
    from dlperf.profiler import step_profiler
    from dlperf.report.step_pages import measurement_to_text

    measurement = step_profiler.measure_target(
        target, seconds=args.seconds, with_trace=not args.no_trace
    )
    if args.memory:
        from dlperf.profiler.peak_memory import measure_peak_memory

        size = measure_peak_memory(
            args.target,
            measurement.batch_size,
            threads,
            inference=args.inference,
            input_shape=args.input,
        )
        measurement = replace(measurement, peak_memory_bytes=size)
    if args.output is not None:
        measurement.save(args.output)
    for note in measurement.notes:
        warn(note)
    return Answer(measurement_to_text(measurement), measurement.to_json())


def _check_outputs(args: Namespace) -> None:
    if args.output is not None:
        check_writable(args.output, args.force)


def reproduce(args: Namespace) -> Answer:
    """Recompute the papers' tables; with -o also draw their figures."""
    from dlperf.studies.papers import reproduction as reproduce

    by_paper = {
        paper: reproduce.reproduce(paper)
        for paper in ([args.paper] if args.paper else reproduce.PAPERS)
    }
    tables = [table for own in by_paper.values() for table in own]
    data = {
        "schema": "dlperf.reproduction",
        "schema_version": 1,
        "tables": [table.to_json() for table in tables],
    }
    text = "\n\n".join(table.to_text() for table in tables)
    if args.output is not None:
        from dlperf.studies.papers import figures

        text += "".join(
            f"\n{path}" for path in ["", *figures.write(by_paper, args.output, args.force)]
        )
    return Answer(text, data)


def prepare_run(args: Namespace) -> Callable[[], int]:
    """Everything before the script starts; the result runs it and returns its exit status."""
    if args.threads is not None:
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
        cluster_path=args.cluster,
        communication=args.communication,
    )


COMMANDS: dict[str, Callable[[Namespace], Answer]] = {
    "calibrate": calibrate,
    "machine": machine,
    "trace": trace,
    "predict": predict,
    "measure": measure,
    "report": report,
    "explain": explain,
    "tune": tune,
    "reproduce": reproduce,
    "validate": validate,
    "scale": scale,
}
"""The commands but ``run``, which has the process to itself."""
