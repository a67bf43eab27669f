"""``dlperf validate --training``: predicted and measured trainings."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from dlperf.cli.accuracy_validation import answer, keeping, provenance_of
from dlperf.cli.inputs import Answer, load_machine, use_threads
from dlperf.core.errors import DlperfError, WorkFailed
from dlperf.core.streams import log, warn

if TYPE_CHECKING:
    from dlperf.core.machine import Machine
    from dlperf.forecast.prediction import Prediction
    from dlperf.studies.trainings.cases import ForecastTable, TrainingForecast
    from dlperf.studies.trainings.runs import TrainingRunner

NETWORKS = ("cnn-small", "cnn-medium", "cnn-large")
WRAPPED = ("lenet", "cnn-medium")
WORKERS = (1, 2, 4, 8)
MORE_WORKERS = (16, 60, 240, 480, 960, 1920, 3840)
MEMORY_BATCH_SIZES = (16, 64)
RUNS, SECONDS = 2, 10.0
_SAMPLES, _TESTS = 60_000, 10_000
_EPOCHS = {"cnn-large": 15}
"""Epochs of the paper's runs; 70 for the others."""


def validate_trainings(args: Namespace) -> Answer:
    """Every kind of forecast of a training beside what it forecasts."""
    from dlperf.recorder import target_lookup
    from dlperf.studies.trainings.runs import LOADERS, TrainingRunner

    for name in args.targets:
        if name not in LOADERS:
            raise DlperfError(
                f"{name}: the training scripts know {', '.join(LOADERS)}; name some of these with"
                " --training"
            )
    from dlperf.studies.trainings import page
    from dlperf.studies.trainings.cases import KINDS, TrainingStudy

    use_threads(1)
    machine = load_machine(args)
    rows: list[TrainingForecast] = []
    failures: list[str] = []
    wanted = set(args.parts or KINDS)
    runs, seconds = args.runs or RUNS, args.seconds or SECONDS
    with keeping(args, "training") as archive:
        folder = target_lookup.checkout_folder()
        runner = TrainingRunner(folder, machine, runs, seconds, archive, log)
        for make in _plan(runner, args, wanted):
            try:
                row = make()
            except (DlperfError, WorkFailed) as error:
                failures.append(str(error))
                warn(str(error))
                continue
            rows.append(row)
            log(f"{row.kind}: {row.case}: {100 * row.error_frac:+.1f} %")
    tables = _tables(args.targets or NETWORKS, machine, failures) if "workers" in wanted else ()
    study = TrainingStudy(
        provenance_of(machine, ((1, runs),), seconds, remarks=[archive.remark]),
        tuple(rows),
        tables,
        tuple(failures),
    )
    return answer(args, study, page)


def _plan(
    runner: TrainingRunner, args: Namespace, wanted: set[str]
) -> Iterator[Callable[[], TrainingForecast]]:
    from dlperf.recorder import target_lookup

    networks = args.targets or NETWORKS
    for network in networks:
        for p in WORKERS:
            if ("workers" if p <= runner.machine.cpu.n_cores else "oversubscribed") in wanted:
                yield partial(runner.workers, network, p)
    for network in args.targets or WRAPPED:
        for loader_workers in (0, 1):
            for kind in ("wrapped", "epoch"):
                if kind in wanted:
                    yield partial(runner.epoch, kind, network, loader_workers)
    if "choice" in wanted:
        yield from (partial(runner.choice, network) for network in networks)
    if "memory" in wanted:
        for target in args.targets or target_lookup.checkout_targets():
            for size in args.batch_sizes or MEMORY_BATCH_SIZES:
                yield partial(runner.memory, target, size)


def _total_s(
    step: Prediction, evaluation: Prediction, epochs: int, workers: int, images: int = 1
) -> float | None:
    """A training on a multiple of the usual images."""
    n, n_tests = _SAMPLES * images, _TESTS * images
    return step.epoch(n, epochs, n, n_tests, evaluation, workers=workers).total_s


def _tables(
    networks: Sequence[str], machine: Machine, failures: list[str]
) -> tuple[ForecastTable, ...]:
    """The paper's run (Table X's form) on more workers, and on more images and epochs (Table XI's
    form), for this machine.
    """
    from dlperf.forecast.prediction import predict
    from dlperf.recorder import recording, targets
    from dlperf.studies.trainings.cases import ForecastTable

    n_cores, counts = machine.cpu.n_cores, (*WORKERS, *MORE_WORKERS)
    scaling: dict[str, tuple[float | None, ...]] = {}
    sizes: dict[str, tuple[float | None, ...]] = {}
    for network in networks:
        step = recording.record_target(targets.resolve(network))
        forward = recording.record_target(targets.resolve(network, inference=True))
        evaluation = predict(forward, machine, 1)
        epochs = _EPOCHS.get(network, 70)
        for predictor in ("calibrated", "viebke-a", "viebke-b"):
            try:
                one = predict(step, machine, 1, predictor)
                scaling[f"{network}, {predictor}"] = tuple(
                    _total_s(one, evaluation, epochs, p) for p in counts
                )
                for images in (1, 2, 4) if predictor == "calibrated" else ():
                    sizes[f"{network}, {_SAMPLES * images:,} images"] = tuple(
                        _total_s(one, evaluation, epochs * more, n_cores, images)
                        for more in (1, 2, 4)
                    )
            except DlperfError as error:
                failures.append(f"{network}, {predictor}: {error}")
    title = (
        f"Forecast on this machine's {n_cores} cores, minutes: {_SAMPLES:,} images, 70 epochs"
        " (large: 15), over p"
    )
    found = (
        (title, scaling, tuple(map(str, counts))),
        (
            f"Forecast for p = {n_cores}, minutes: images x epochs",
            sizes,
            ("70 (15) epochs", "140 (30)", "280 (60)"),
        ),
    )
    return tuple(
        ForecastTable(title, tuple(rows), columns, tuple(rows.values()))
        for title, rows, columns in found
        if rows
    )
