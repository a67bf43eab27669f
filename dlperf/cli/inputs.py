"""Inputs of commands: threads, targets, machine files and predictions from them."""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dlperf.cli.options import Problems
from dlperf.core.errors import DlperfError, refuse
from dlperf.core.files import check_writable, default_path, device_path, kind_of, schema_of
from dlperf.core.streams import log, warn
from dlperf.core.text import counted

if TYPE_CHECKING:
    from dlperf.core.machine import Machine
    from dlperf.core.measurement import Measurement
    from dlperf.core.state import State
    from dlperf.core.trace import Op, Trace
    from dlperf.forecast.prediction import Prediction
    from dlperf.recorder.targets import Target
    from dlperf.report.timeline import Case

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


class Answer(NamedTuple):
    """Result of a command: `text` for stdout, `data` for ``--json`` (written with `indent`), and
    the exit status.
    """

    text: str
    data: dict[str, Any]
    status: int = 0
    indent: int | None = 1


def use_threads(threads: int | None) -> int:
    """Make torch use a given number of threads; the number that it uses then.

    Raises DlperfError for far more than there are cores.
    """
    if threads is not None:
        from dlperf.core.host import check_threads

        check_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # read when torch is imported
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    return int(torch.get_num_threads())


def threads_for(args: Namespace, machine: Machine) -> int:
    """The given thread count, else torch's own or the nearest that the machine file holds."""
    if args.threads is not None:
        return int(args.threads)
    from dlperf.core.host import usual_threads

    use_threads(None)  # torch's own number is that of a process that has imported it
    return usual_threads(machine)


def warn_of_threads(threads: int) -> None:
    """Warn of more threads than cores."""
    from dlperf.core.host import available_cores

    if threads > available_cores():
        warn(
            f"{threads} threads asked for, this process may use"
            f" {counted(available_cores(), 'core')}"
        )


def resolve(
    args: Namespace, spec: str, batch_size: int | None = None, inference: bool | None = None
) -> Target:
    """The target of the options; `batch_size` and `inference` come before them."""
    from dlperf.recorder import targets

    asked = batch_size or args.batch_size
    target = targets.resolve(
        spec,
        asked or BATCH_SIZE,
        inference=args.inference if inference is None else inference,
        input_shape=args.input,
    )
    size = target.batch_size
    refuse((asked not in (None, size), f"{spec}: was exported at batch size {size}, not {asked}"))
    return target


def is_trace(spec: str) -> bool:
    """Whether a target is a trace file. Raises DlperfError for a JSON file of another kind."""
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
        trace.Trace.load(spec)  # raises, naming what is wrong
    return schema == trace.SCHEMA


def refuse_trace(spec: str, work: str) -> None:
    """Raise DlperfError for a trace file where there is code needed, to `work` on."""
    if is_trace(spec):
        raise DlperfError(
            f"{spec}: a trace file has no code to {work}; name the target it was recorded from"
        )


def check_file(args: Namespace) -> Problems:
    """Whether a command names a file to write. Raises DlperfError for one that it may not write."""
    if args.output == "-":
        args.output, args.json = None, "-"
    if args.output is not None:
        check_writable(args.output, args.force, args.command_data.schema)
    nowhere = args.output is None and args.json is None
    return ((nowhere, "names no file to write; give -o FILE (or --json -)"),)


def write_folder(args: Namespace, write: Callable[[str, bool], Sequence[Path]]) -> None:
    """Let `write` fill the folder of ``-o``, if one is given, and name its files on stderr."""
    if args.output is not None:
        written = write(args.output, args.force)
        log(f"wrote {', '.join(path.name for path in written)} to {args.output}")


def write_timeline(args: Namespace, cases: Iterable[Case]) -> None:
    """Write the timeline of ``--timeline``, if one is asked for."""
    if args.timeline is not None:
        from dlperf.core.files import write_json
        from dlperf.report.timeline import timeline

        write_json(args.timeline, timeline(cases), indent=None)


def read_or_record(
    args: Namespace, spec: str, batch_size: int | None = None, machine: Machine | None = None
) -> Trace:
    """The step of a target: read where the target is a trace file, recorded otherwise, with what
    PyTorch chooses on the `machine` if it is an accelerator.
    """
    if not is_trace(spec):
        from dlperf.recorder import recording

        target = resolve(args, spec, batch_size)
        sheet = None if machine is None else machine.data_sheet
        if sheet is not None and sheet.kind == "accelerator":
            from dlperf.recorder.device_defaults import with_device_defaults

            target = target.changed(with_device_defaults)
        trace = recording.record_target(target)
        for note in trace.notes:
            log(note)
        return trace
    from dlperf.core.trace import Trace

    trace = check_ops(spec, Trace.load(spec))
    asked = batch_size or args.batch_size
    shape = ",".join(map(str, args.input or ()))
    refuse(
        (
            asked not in (None, trace.batch_size),
            (
                f"{spec}: was recorded at batch size {trace.batch_size}, not {asked}; record it"
                f" anew with dlperf trace --batch-size {asked}"
            ),
        ),
        (
            args.inference and not trace.inference,
            f"{spec}: is a training step; record the forward pass with dlperf trace --inference",
        ),
        (
            args.input,
            f"{spec}: --input {shape} is for a bare nn.Module; a trace file has its shapes",
        ),
    )
    return trace


def check_ops(path: str | Path, trace: Trace, where: str = "") -> Trace:
    """The trace of a file. Raises DlperfError naming an operator with arguments that it does not
    take.
    """
    from dlperf.ops import counts
    from dlperf.predictors.kernels.catalog import describe
    from dlperf.predictors.kernels.sub_kernels import sub_kernels

    def check(op: Op) -> object:
        return counts.op_flops(op), counts.op_bytes(op), list(map(describe, sub_kernels(op)))

    for number, op in enumerate(trace.ops):
        _check_op(f"{path}: {where}ops[{number}]", op, check, "Record it again.")
    return trace


@contextlib.contextmanager
def naming_unfit_kernels(*machines: Machine) -> Iterator[None]:
    """On a failure inside, raise DlperfError naming a kernel with arguments that its operator does
    not take, if there is one.
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
    """Raise DlperfError for an unknown predictor."""
    from dlperf.predictors import registry

    for name in names:
        registry.get(name)


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
    return Path(args.machine) if args.machine else default_path()


def default_cache(name: str) -> Path:
    """A folder next to this machine's file, for measurements that may be deleted at any time."""
    return default_path().parent / name


def load_machine(args: Namespace, path: str | Path | None = None, devices: bool = False) -> Machine:
    """The named machine file or device (of the shelf, or one of this machine that was calibrated),
    or this machine's file.

    Raises DlperfError naming the command that makes it, and for a device of a data sheet unless
    `devices` are asked for.
    """
    from dlperf.core.machine import Machine

    name, device = path or args.machine or None, getattr(args, "device", None)
    refuse((device is not None and name, "give one of --machine and --device"))
    if device is not None or (name is not None and not os.path.exists(name)):
        from dlperf.core import shelf

        own = None if device is None else device_path(device)
        is_own = own is not None and own != default_path() and own.exists()
        if is_own and str(device).lower() not in shelf.names():
            machine = Machine.load(own)
        elif device is not None or str(name).lower() in shelf.names():
            machine = shelf.device(str(name) if device is None else device)
        else:
            near = shelf.nearest(str(name)) if devices and not Path(str(name)).suffix else None
            refuse(
                (
                    near,
                    (
                        f"{name}: there is no such machine file, and no such device; did you mean"
                        f" {near}?"
                    ),
                )
            )
            machine = Machine.load(name)
    else:
        machine = Machine.load(name)
    if machine.data_sheet is not None and not devices:
        raise DlperfError(
            f"{machine.path or machine.cpu.model}: is a device by its data sheet; this needs a"
            " machine that dlperf calibrate measured (dlperf predict, validate --table and machine"
            " show take devices)"
        )
    return machine


def load_accelerator(args: Namespace, device: str) -> Machine:
    """The named machine file of an accelerator, or that of this machine's `device`.

    Raises DlperfError for a processor's, and naming the command that makes it.
    """
    path = Path(args.machine) if args.machine else device_path(device)
    if not args.machine and not path.exists():
        raise DlperfError(
            f"{path}: there is no such machine file; dlperf calibrate --device {device} makes it,"
            " --machine FILE names another"
        )
    machine = load_machine(Namespace(machine=str(path)), devices=True)
    if machine.data_sheet is None or machine.data_sheet.kind != "accelerator":
        raise DlperfError(
            f"{path}: is of a processor, {machine.cpu.model}; --device {device} needs the machine"
            f" file of an accelerator, which dlperf calibrate --device {device} makes"
        )
    return machine


def predict_here(
    recorded: Trace,
    machine: Machine,
    threads: int,
    predictor: str,
    malloc: str = "default",
    point: Measurement | None = None,
    state: State | Sequence[State] | None = None,
    what_if: Mapping[str, float] | None = None,
    profiled_on: Machine | None = None,
) -> Prediction:
    """A prediction; what makes a kernel model impossible is named with its machine file."""
    from dlperf.forecast.prediction import predict as predict_trace

    with naming_unfit_kernels(machine, *([] if profiled_on is None else [profiled_on])):
        return predict_trace(
            recorded, machine, threads, predictor, malloc, point, state, what_if, profiled_on
        )


def predict_and_warn(
    recorded: Trace,
    machine: Machine,
    threads: int,
    predictor: str,
    malloc: str = "default",
    point: Measurement | None = None,
    warn: Callable[[str], None] = warn,
    state: State | Sequence[State] | None = None,
    what_if: Mapping[str, float] | None = None,
    profiled_on: Machine | None = None,
) -> Prediction:
    """A prediction; its warnings go to stderr, too."""
    prediction = predict_here(
        recorded, machine, threads, predictor, malloc, point, state, what_if, profiled_on
    )
    for line in prediction.warnings:
        warn(line)
    if prediction.unpriced:
        ops = ", ".join(f"{name} x{count}" for name, count in prediction.unpriced.items())
        warn(
            f"no measured kernel supports {ops}: {100 * (1 - prediction.priced_time_frac):.1f} %"
            " of the time is unpriced"
        )
    return prediction
