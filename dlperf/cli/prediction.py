"""``dlperf predict``: predicts layers, step, memory and epochs without running the model."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dlperf.cli.device_memory import DEVICE_MEMORY, memory_on_device
from dlperf.cli.inputs import (
    Answer,
    check_predictors,
    is_trace,
    load_machine,
    predict_and_warn,
    read_or_record,
    resolve,
    threads_for,
    write_timeline,
)
from dlperf.cli.options import (
    DEVICE,
    LOADER,
    MODEL,
    TARGET,
    TIMELINE,
    Command,
    Problems,
    common,
    flag,
    given,
    option,
    what_if,
)
from dlperf.cli.states import STATE, states_of
from dlperf.core.argument_types import count, count_or_none
from dlperf.core.errors import DlperfError, refuse
from dlperf.core.streams import warn

if TYPE_CHECKING:
    from dlperf.core.machine import Machine
    from dlperf.core.measurement import Measurement
    from dlperf.core.state import State
    from dlperf.forecast.epoch import Epoch
    from dlperf.forecast.prediction import Prediction

MALLOCS = ("default", "tuned", "huge-pages", "jemalloc", "tcmalloc")
_TRAINING = ("accumulate", "clip", "scheduler", "checkpoint")
_EPOCH = (
    "epochs",
    "val_samples",
    "test_samples",
    "loader_workers",
    "persistent_workers",
    "loader",
    "drop_last",
    *_TRAINING,
    "accuracy",
)


def check(args: Namespace) -> Problems:
    """Options that exclude one another."""
    workers, samples = args.workers or 0, args.samples
    of_training, of_epoch = given(args, _TRAINING), given(args, _EPOCH)
    return (
        (
            workers and args.threads not in (None, 1),
            f"--workers have one thread each; leave --threads {args.threads} out",
        ),
        (
            samples is not None and workers > samples,
            f"--workers {workers} are more than the {samples} samples; give each at least one",
        ),
        (
            args.inference and of_training,
            f"{of_training} belongs to training; leave it or --inference out",
        ),
        (
            workers and args.device_memory,
            "--workers are processes on a CPU; leave them or --device-memory out",
        ),
        (samples is None and of_epoch, f"{of_epoch} forecasts an epoch and needs --samples N"),
        (
            args.profiled_on and args.point,
            "--point is for viebke-a and viebke-b; with --profiled-on, give the measurement there",
        ),
    )


def predict(args: Namespace) -> Answer:
    """Predict a step and an epoch."""
    from dlperf.core.measurement import Measurement
    from dlperf.core.what_if import MachineFactors
    from dlperf.report.step_pages import prediction_to_text

    check_predictors([args.predictor])
    factors = MachineFactors.of_pairs(args.what_if)
    machine = load_machine(args, devices=True)
    refuse(
        *(
            (
                machine.data_sheet is not None and holds,
                f"{name}; leave it out with a device",
            )
            for holds, name in (
                (args.workers, "--workers share the cores of a measured machine"),
                (args.malloc != MALLOCS[0], "--malloc is a policy of a measured machine's memory"),
                (args.states, "--state is that of a measured machine"),
                (args.loader_workers, "--loader-workers share the cores of a measured machine"),
                (args.loader, "--loader is timed on a measured machine"),
            )
        )
    )
    point = None if args.point is None else Measurement.load(args.point)
    source, there = _profile(args.profiled_on)
    threads = 1 if args.workers else threads_for(args, machine)
    states = states_of(args.states, machine, threads)
    recorded = read_or_record(args, args.target, machine=machine)
    prediction = predict_and_warn(
        recorded,
        machine,
        threads,
        args.predictor,
        args.malloc,
        point or there,
        state=states,
        what_if=factors.changed,
        profiled_on=source,
    )
    epoch = None if args.samples is None else _forecast_epoch(args, prediction, machine, states)
    if args.workers:
        from dlperf.forecast.worker_processes import predict_co_run

        prediction = predict_co_run(prediction, args.workers)
    prediction = replace(prediction, device_memory=memory_on_device(args, prediction))
    write_timeline(args, [([prediction], None)])
    data = prediction.to_json(epoch, prediction.page_faults)
    return Answer(prediction_to_text(prediction, epoch), data)


def _profile(paths: list[str]) -> tuple[Machine | None, Measurement | None]:
    """The machine file of ``--profiled-on``, and the measurement that was made there.

    Raises DlperfError for other files, two of a kind, and a measurement alone.
    """
    from dlperf.core.files import schema_of
    from dlperf.core.machine import Machine
    from dlperf.core.measurement import Measurement

    measured = [path for path in paths if schema_of(path) == "dlperf.measurement"]
    machines = [path for path in paths if path not in measured]
    way_out = "; give the other machine's file, and at most one measurement that was made there"
    if len(machines) > 1 or len(measured) > 1:
        raise DlperfError(f"--profiled-on: names {', '.join(paths)}{way_out}")
    if measured and not machines:
        raise DlperfError(
            f"--profiled-on {measured[0]}: a measurement does not contain the roofs of its machine"
            f"{way_out}"
        )
    source = Machine.load(machines[0]) if machines else None
    there = Measurement.load(measured[0]) if measured else None
    if source is not None and there is not None and there.machine != source.cpu.model:
        raise DlperfError(
            f"--profiled-on {measured[0]}: was measured on {there.machine}, not on"
            f" {source.cpu.model} of {source.path}; measure the step there"
        )
    return source, there


def _forecast_epoch(
    args: Namespace, prediction: Prediction, machine: Machine, states: Sequence[State] | None
) -> Epoch:
    """The forecast that the options ask for.

    The pass of an evaluation and a smaller last batch are steps of their own, recorded where there
    is code to record.
    """
    from dlperf.forecast.epoch import last_batch_size
    from dlperf.predictors.registry import evaluates_by_forward

    recorded = prediction.trace
    loader = None
    if args.loader:
        from dlperf.cli.loader_timing import sample_apart

        n_workers, threads = args.loader_workers or 0, prediction.threads
        loader = sample_apart(
            args.loader, recorded.batch_size, n_workers, threads, prediction.machine
        )
    drop_last = args.drop_last or (loader is not None and loader.drop_last)
    evaluation = last = None
    if not is_trace(args.target) and not evaluates_by_forward(args.predictor):
        if (args.val_samples or args.test_samples) and not recorded.inference:
            evaluation = _predict_other(args, prediction, machine, states, None, inference=True)
        share = math.ceil(args.samples / (args.workers or 1))  # the largest that a worker has
        size = last_batch_size(share, recorded.batch_size, drop_last)
        if size is not None:
            is_inference = recorded.inference
            last = _predict_other(args, prediction, machine, states, size, inference=is_inference)
    epoch = prediction.epoch(
        args.samples,
        args.epochs or 1,
        args.val_samples or 0,
        args.test_samples or 0,
        evaluation,
        last,
        loader,
        accumulate=args.accumulate or 1,
        drop_last=drop_last,
        loader_workers=args.loader_workers,
        persistent_workers=args.persistent_workers
        or (loader is not None and loader.persistent_workers),
        clip=args.clip,
        scheduler=args.scheduler,
        checkpoint=args.checkpoint,
        accuracy=args.accuracy,
        workers=args.workers,
    )
    if loader is not None and loader.n_samples not in (None, args.samples):
        warn(
            f"--loader {args.loader}: has {loader.n_samples:,} samples; the {args.samples:,} of"
            " --samples count"
        )
    for note in epoch.notes:
        warn(note)
    return epoch


def _predict_other(
    args: Namespace,
    prediction: Prediction,
    machine: Machine,
    states: Sequence[State] | None,
    batch_size: int | None,
    inference: bool,
) -> Prediction:
    """The prediction of another step of the same network."""
    from dlperf.forecast import prediction as predictions
    from dlperf.recorder import recording

    trace = recording.record_target(resolve(args, args.target, batch_size, inference=inference))
    return predictions.predict(
        trace,
        machine,
        prediction.threads,
        prediction.predictor,
        prediction.malloc,
        state=states,
        what_if=prediction.what_if.changed,
        profiled_on=prediction.profiled_on,
    )


COMMAND = Command(
    "predict",
    "predict layers, step, memory and epoch without running the model",
    options=(
        TARGET,
        option(
            "--predictor",
            default="calibrated",
            metavar="NAME",
            help=(
                "calibrated (default), roofline, gemm-table, viebke-a or viebke-b; data-sheet is"
                " that of devices"
            ),
        ),
        option(
            "--point",
            metavar="MEASUREMENT",
            help=(
                "measurement of the target (dlperf measure -o) that viebke-a and viebke-b rest on "
                "(default: the step that calibrated predicts)"
            ),
        ),
        option(
            "--profiled-on",
            action="append",
            default=[],
            metavar="FILE",
            help=(
                "take the kernels of another machine's file, carried over to this one by what"
                " bounds them; given once more: a measurement of the step there (dlperf measure -o)"
            ),
        ),
        option(
            "--malloc",
            choices=MALLOCS,
            default="default",
            help=f"the process's allocator policy: {', '.join(MALLOCS)}",
        ),
        STATE,
        DEVICE_MEMORY,
        what_if(
            "flops, memory_bandwidth, l3_bandwidth: so many times as much; overhead, page_faults:"
            " so many times the cost"
        ),
        option(
            "--samples",
            type=count,
            metavar="N",
            help="training samples of an epoch: forecast the epoch",
        ),
        option("--epochs", type=count, metavar="E", help="number of epochs (1)"),
        option(
            "--val-samples",
            type=count_or_none,
            metavar="V",
            help="validation samples after each epoch (0)",
        ),
        option(
            "--test-samples", type=count_or_none, metavar="S", help="test samples at the end (0)"
        ),
        option(
            "--loader-workers",
            type=count_or_none,
            metavar="W",
            help="worker processes of the data loader (0)",
        ),
        option(
            "--workers",
            type=count,
            metavar="P",
            help=(
                "processes that train an instance each on a share of the samples, with one thread: "
                "the step under their co-run slowdown, and with --samples the whole run"
            ),
        ),
        flag(
            "--persistent-workers",
            "loader workers stay from epoch to epoch",
        ),
        LOADER,
        *(
            option(f"--{flag}", action="store_true", help=text)
            for flag, text in (
                ("drop-last", "leave out an epoch's last, smaller batch"),
                ("clip", "the gradients' norm is clipped"),
                ("scheduler", "a learning rate scheduler steps with the optimizer"),
                ("accuracy", "right answers are counted at each batch"),
                ("checkpoint", "the parameters are saved after each epoch"),
            )
        ),
        option(
            "--accumulate", type=count, metavar="K", help="batches to one step of the optimizer (1)"
        ),
        TIMELINE,
        DEVICE,
        *common(),
        *MODEL,
    ),
    work=predict,
    check=check,
)
