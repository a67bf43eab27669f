"""``dlperf validate --training``: predicted and measured trainings."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dlperf.cli.accuracy_validation import provenance_of
from dlperf.cli.inputs import Answer, default_cache, load_machine, use_threads, write_folder
from dlperf.core.errors import DlperfError, Interrupted, WorkFailed
from dlperf.core.streams import log, warn

if TYPE_CHECKING:
    from dlperf.core.machine import Machine
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
    from dlperf.studies.trainings.runs import LOADERS

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
    runner = _runner(args, machine)
    rows: list[TrainingForecast] = []
    failures: list[str] = []
    wanted = set(args.parts or KINDS)
    try:
        for make in _plan(runner, args, wanted):
            try:
                row = make()
            except (DlperfError, WorkFailed) as error:
                failures.append(str(error))
                warn(str(error))
                continue
            rows.append(row)
            log(f"{row.kind}: {row.case}: {100 * row.error_frac:+.1f} %")
    except KeyboardInterrupt:
        raise Interrupted(runner.archive.kept) from None
    tables = _tables(args.targets or NETWORKS, machine, failures) if "workers" in wanted else ()
    provenance = provenance_of(args, machine, ((1, runner.n_runs),), runner.seconds)
    provenance = replace(
        provenance,
        remarks=(*provenance.remarks, *([runner.archive.remark] if runner.archive.remark else [])),
    )
    study = TrainingStudy(provenance, tuple(rows), tables, tuple(failures))
    write_folder(args, lambda to, force: page.write_study(study, to, force))
    return Answer(page.study_to_text(study), study.to_json(), status=1 if failures else 0)


def _runner(args: Namespace, machine: Machine) -> TrainingRunner:
    from dlperf.recorder import target_lookup
    from dlperf.studies.accuracy.archive import Archive
    from dlperf.studies.trainings.runs import TrainingRunner

    archive = Archive(args.cache or default_cache("training"), args.fresh)
    return TrainingRunner(
        target_lookup.checkout_folder(),
        machine,
        args.runs or RUNS,
        args.seconds or SECONDS,
        archive,
        log,
    )


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
        for network in networks:
            yield partial(runner.choice, network)
    if "memory" in wanted:
        for target in args.targets or target_lookup.checkout_targets():
            for size in args.batch_sizes or MEMORY_BATCH_SIZES:
                yield partial(runner.memory, target, size)


def _tables(
    networks: Sequence[str], machine: Machine, failures: list[str]
) -> tuple[ForecastTable, ...]:
    """The paper's run (Table X's form) on more workers, and on more images and epochs (Table XI's
    form), for this machine.
    """
    from dlperf.forecast.prediction import predict
    from dlperf.recorder import recording, targets
    from dlperf.studies.trainings.cases import ForecastTable

    scaling: list[tuple[str, tuple[float | None, ...]]] = []
    sizes: list[tuple[str, tuple[float | None, ...]]] = []
    n_cores = machine.cpu.n_cores
    for network in networks:
        step = recording.record_target(targets.resolve(network))
        evaluation = predict(
            recording.record_target(targets.resolve(network, inference=True)), machine, 1
        )
        epochs = _EPOCHS.get(network, 70)
        for predictor in ("calibrated", "viebke-a", "viebke-b"):
            try:
                one = predict(step, machine, 1, predictor)
                times = [
                    one.epoch(_SAMPLES, epochs, _SAMPLES, _TESTS, evaluation, workers=p).total_s
                    for p in (*WORKERS, *MORE_WORKERS)
                ]
                scaling.append((f"{network}, {predictor}", tuple(times)))
                if predictor == "calibrated":
                    for factor in (1, 2, 4):
                        n, n_tests = _SAMPLES * factor, _TESTS * factor
                        row = [
                            one.epoch(
                                n, epochs * more, n, n_tests, evaluation, workers=n_cores
                            ).total_s
                            for more in (1, 2, 4)
                        ]
                        sizes.append((f"{network}, {n:,} images", tuple(row)))
            except DlperfError as error:
                failures.append(f"{network}, {predictor}: {error}")
    found = []
    for title, rows, columns in (
        (
            (
                f"Forecast on this machine's {n_cores} cores, minutes: {_SAMPLES:,} images, 70"
                " epochs (large: 15), over p"
            ),
            scaling,
            (*WORKERS, *MORE_WORKERS),
        ),
        (
            f"Forecast for p = {n_cores}, minutes: images x epochs",
            sizes,
            ("70 (15) epochs", "140 (30)", "280 (60)"),
        ),
    ):
        if rows:
            found.append(
                ForecastTable(
                    title,
                    tuple(name for name, _ in rows),
                    tuple(map(str, columns)),
                    tuple(times for _, times in rows),
                )
            )
    return tuple(found)
