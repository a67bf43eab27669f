"""What commands work on, as the user named it: threads, targets, machine files; and what is said
while they work.
"""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlperf.core.errors import DlperfError, Interrupted, WorkFailed
from dlperf.core.files import check_writable, kind_of, schema_of
from dlperf.core.streams import log, warn

if TYPE_CHECKING:
    from dlperf.core.machine import Machine
    from dlperf.core.measurement import Measurement
    from dlperf.core.trace import Op, Trace
    from dlperf.forecast.prediction import Prediction
    from dlperf.recorder.targets import Target

BATCH_SIZE = 32
_UNFIT = (
    DlperfError,
    ArithmeticError,
    AssertionError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
)
"""What a formula of an operator raises for arguments that the operator does not take."""


@dataclass(frozen=True)
class Answer:
    """What a command found: `text` for stdout, `data` for ``--json`` (written with `indent`), and
    the exit status.
    """

    text: str
    data: dict[str, Any]
    status: int = 0
    indent: int | None = 1


def use_threads(threads: int | None) -> int:
    """Make torch use so many threads, and say how many it uses. OMP_NUM_THREADS must stand before
    torch is imported.
    """
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    return int(torch.get_num_threads())


def threads_for(args: Namespace, machine: Machine) -> int:
    """The thread count asked for, else torch's own where the machine file holds it, else the
    nearest that it holds.
    """
    if args.threads is not None:
        return int(args.threads)
    from dlperf.core.host import usual_threads

    use_threads(None)  # torch's own number is that of a process that has imported it
    return usual_threads(machine)


def warn_of_threads(threads: int) -> None:
    """Warn of more threads than cores."""
    from dlperf.core.host import available_cores

    if threads > available_cores():
        warn(f"{threads} threads asked for, this process may use {available_cores()} core(s)")


def resolve(
    args: Namespace, spec: str, batch_size: int | None = None, inference: bool | None = None
) -> Target:
    """The target as the options say; `batch_size` and `inference` come before them."""
    from dlperf.recorder import targets

    size = batch_size or args.batch_size or BATCH_SIZE
    return targets.resolve(
        spec,
        size,
        inference=args.inference if inference is None else inference,
        input_shape=args.input,
    )


def is_trace(spec: str) -> bool:
    """Whether a target is a trace file (known without torch). Raises DlperfError for a JSON file
    that is none, naming what it is.
    """
    from dlperf.core import trace

    schema = schema_of(spec)
    if schema is not None and schema != trace.SCHEMA:
        way_out = (
            "give it with --machine, and name a target"
            if schema == "dlperf.machine"
            else "name a builder or a trace file"
        )
        raise DlperfError(f"{spec}: is {kind_of(schema)}, no target; {way_out}")
    if schema is None and spec.endswith(".json"):
        trace.Trace.load(spec)  # raises, and says what is wrong with it
    return schema == trace.SCHEMA


def read_or_record(args: Namespace, spec: str, batch_size: int | None = None) -> Trace:
    """The step of a target: read where the target is a trace file, recorded otherwise."""
    if not is_trace(spec):
        from dlperf.recorder import recording

        trace = recording.record_target(resolve(args, spec, batch_size))
        for note in trace.notes:
            log(note)
        return trace
    from dlperf.core.trace import Trace

    trace = check_ops(spec, Trace.load(spec))
    asked = batch_size or args.batch_size
    if asked not in (None, trace.batch_size):
        raise DlperfError(
            f"{spec}: was recorded at batch size {trace.batch_size}, not {asked}; record it anew"
            f" with dlperf trace --batch-size {asked}"
        )
    if args.inference and not trace.inference:
        raise DlperfError(
            f"{spec}: is a training step; record the forward pass with dlperf trace --inference"
        )
    if args.input:
        raise DlperfError(
            f"{spec}: --input {','.join(map(str, args.input))} is for a bare nn.Module; a trace"
            " file has its shapes"
        )
    return trace


def check_ops(path: str | Path, trace: Trace, where: str = "") -> Trace:
    """The trace of a file. Raises DlperfError naming the operator whose arguments are not those
    that it takes.
    """
    from dlperf.ops import counts
    from dlperf.predictors.kernels.catalog import describe
    from dlperf.predictors.kernels.sub_kernels import sub_kernels

    def check(op: Op) -> None:
        counts.op_flops(op)
        counts.op_bytes(op)
        for part in sub_kernels(op):
            describe(part)

    for number, op in enumerate(trace.ops):
        _check_op(f"{path}: {where}ops[{number}]", op, check, "Record it again.")
    return trace


@contextlib.contextmanager
def naming_unfit_kernels(*machines: Machine) -> Iterator[None]:
    """Where the work on machine files fails: raises DlperfError naming the kernel whose arguments
    are not those that its operator takes, if there is one.
    """
    try:
        yield
    except _UNFIT:
        from dlperf.predictors.kernels.catalog import describe

        for machine in machines:
            for number, kernel in enumerate(machine.kernels):
                _check_op(
                    f"{machine.path}: kernels[{number}].op",
                    kernel.op,
                    describe,
                    "Recalibrate, or edit the file.",
                )
        raise


def _check_op(entry: str, op: Op, formula: Callable[[Op], object], way_out: str) -> None:
    try:
        formula(op)
    except _UNFIT as error:
        raise DlperfError(
            f"{entry} is {op.signature:.80}; expected the arguments of {op.name:.60}. {way_out}"
        ) from error


def check_predictors(names: Sequence[str]) -> None:
    """Raises DlperfError for a name that no predictor has."""
    from dlperf.predictors import registry

    for name in names:
        registry.get(name)


def load_point(args: Namespace) -> Measurement | None:
    """The measurement that a predictor is to rest on, or None. Raises DlperfError where the file is
    none.
    """
    if args.point is None:
        return None
    from dlperf.core.measurement import Measurement

    return Measurement.load(args.point)


def split_batch(spec: str) -> list[tuple[str, int | None]]:
    """``TARGET@32,128`` -> (TARGET, 32), (TARGET, 128); without ``@`` the batch size is None.
    Raises DlperfError for what follows ``@`` and is no size.
    """
    target, at, sizes = spec.rpartition("@")
    if not at or not target or set(sizes) & set("/\\:."):  # of a path's own
        return [(spec, None)]
    if not sizes.replace(",", "").isdigit():
        raise DlperfError(
            f"{spec}: {sizes or 'nothing'} after the @ is no batch size; give {target}@32 or"
            f" {target}@16,64"
        )
    found = [int(size) for size in sizes.split(",") if size]
    if not all(found):
        raise DlperfError(f"{spec}: batch size is 0; it must be at least 1")
    return [(target, size) for size in found]


def machine_path(args: Namespace) -> Path:
    """The machine file that was named, or this machine's."""
    from dlperf.core.machine import default_path

    return Path(args.machine) if args.machine else default_path()


def default_cache(name: str) -> Path:
    """A folder beside this machine's file, for what may be deleted at any time."""
    from dlperf.core.machine import default_path

    return default_path().parent / name


def load_machine(args: Namespace, path: str | Path | None = None) -> Machine:
    """The machine file asked for, or this machine's. Raises DlperfError naming the command that
    makes it.
    """
    from dlperf.core.machine import Machine

    return Machine.load(path or args.machine or None)


def run_calibration(
    path: Path,
    mode: str,
    threads: Sequence[int],
    traces: Sequence[Trace] = (),
    force: bool = False,
    workers: Sequence[int] = (),
) -> Machine:
    """Measure this machine (:func:`dlperf.microbench.suite.calibrate`), learn from the measurements
    how exact they make a prediction, and test the file on steps.

    Raises DlperfError where another process calibrates into `path` at the moment, and as that
    function does.
    """
    from dlperf.core.files import one_writer
    from dlperf.core.verification import has_failed
    from dlperf.microbench.suite import calibrate, what_is_kept
    from dlperf.predictors.adaptive_sampling import least_certain
    from dlperf.predictors.kernel_cost_model import fit_kernel_models
    from dlperf.studies import self_test

    with one_writer(path, "a calibration"), contextlib.ExitStack() as stack:
        try:
            started = [
                stack.enter_context(self_test.Process(count)) for count in dict.fromkeys(threads)
            ]  # they import torch while the measuring process does
            machine = calibrate(
                path,
                mode=mode,
                threads=tuple(threads),
                traces=tuple(traces),
                workers=tuple(workers),
                force=force,
                choose=least_certain,
                refused=lambda file: any(
                    has_failed(file.self_tests_of(count)) for count in file.threads
                ),
            )
        except Interrupted:
            raise
        except KeyboardInterrupt:
            raise Interrupted(what_is_kept(path, 0)) from None
        tested = {test.threads for test in machine.self_tests}
        try:
            machine = fit_kernel_models(machine)
            machine.save(path)
            machine = self_test.run(
                machine, [process for process in started if process.threads not in tested]
            )
        except KeyboardInterrupt:
            raise Interrupted(
                f"{path} keeps everything that was measured; the same command ends with its"
                " self-test, which was not finished"
            ) from None
        except WorkFailed as error:
            warn(f"the self-test was not finished ({error}); dlperf machine check repeats it")
        machine.save(path)
    return machine


def repeat_self_test(machine: Machine) -> Machine:
    """The machine with a self-test of this moment, which its file keeps where it can be written."""
    from dlperf.studies import self_test

    with contextlib.ExitStack() as stack:
        machine = self_test.run(
            machine,
            [stack.enter_context(self_test.Process(threads)) for threads in machine.threads],
        )
    with contextlib.suppress(WorkFailed):
        machine.save(machine.path)
    return machine


def default_threads(threads: int) -> tuple[int, ...]:
    """What is calibrated without a wish: one thread, and the number that torch uses."""
    return (1,) if threads == 1 else (1, threads)


def load_or_make_machine(args: Namespace, threads: int) -> Machine:
    """This machine's file; where there is none yet, a quick calibration makes it. A file that was
    named must exist.
    """
    path = machine_path(args)
    if args.machine or os.path.exists(path):
        return load_machine(args)
    log(
        f"this machine was never measured; a quick calibration goes to {path} (dlperf calibrate"
        " makes a better one)"
    )
    make_folder(path.parent)
    check_writable(path)
    return replace(run_calibration(path, "quick", default_threads(threads)), path=str(path))


def make_folder(folder: Path) -> None:
    """Make a folder and those above it. Raises DlperfError where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DlperfError(
            f"{folder}: cannot be made ({error.strerror or error}); choose another place"
        ) from error


def doubts_of_machine(machine: Machine, trace: Trace, threads: int) -> list[str]:
    """Where the machine file does not speak of this machine or this trace, or failed its self-test,
    a line each.
    """
    from dlperf.core import host
    from dlperf.report import machine_check

    doubts = [
        *machine_check.find_mismatches(machine, host.this_cpu(), host.versions()),
        *machine_check.find_missing_dtypes(machine, trace),
    ]
    if machine_check.is_unfinished(machine):
        doubts.append(
            f"{machine.path}: the calibration did not finish; dlperf calibrate resumes it"
        )
    if problem := machine_check.find_self_test_problem(machine, threads):
        doubts.append(problem)
    if machine_check.was_busy(machine, nearest := machine.nearest_threads(threads)):
        doubts.append(f"{machine.path}: {machine_check.busy_line(machine, nearest)}")
    return doubts


def is_cross_machine(machine: Machine) -> bool:
    """Whether the machine file is of another machine or torch than this."""
    from dlperf.core import host
    from dlperf.report.machine_check import find_mismatches

    return bool(find_mismatches(machine, host.this_cpu(), host.versions()))


def predict_here(
    recorded: Trace,
    machine: Machine,
    threads: int,
    predictor: str,
    malloc: str = "default",
    point: Measurement | None = None,
) -> Prediction:
    """A prediction, extrapolated where the machine file is of another machine or torch than this."""
    from dlperf.forecast.prediction import predict as predict_trace

    with naming_unfit_kernels(machine):
        prediction = predict_trace(recorded, machine, threads, predictor, malloc, point)
    return prediction.cross_machine() if is_cross_machine(machine) else prediction


def predict_and_warn(
    recorded: Trace,
    machine: Machine,
    threads: int,
    predictor: str,
    malloc: str = "default",
    point: Measurement | None = None,
) -> Prediction:
    """A prediction, with everything that makes it doubtful said on stderr and kept in it."""
    prediction = predict_here(recorded, machine, threads, predictor, malloc, point)
    prediction = replace(
        prediction, warnings=(*doubts_of_machine(machine, recorded, threads), *prediction.warnings)
    )
    for line in prediction.warnings:
        warn(line)
    if prediction.unpriced:
        ops = ", ".join(f"{name} x{count}" for name, count in prediction.unpriced.items())
        warn(
            f"no measured kernel speaks for {ops}: {100 * (1 - prediction.priced_time_frac):.1f} %"
            " of the time is unpriced"
        )
    return prediction
