"""``dlperf tune``: the fastest configuration, predicted and, with ``--try``, measured."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from dlperf.cli.inputs import (
    Answer,
    is_trace,
    load_machine,
    read_or_record,
    refuse_trace,
    write_folder,
)
from dlperf.cli.options import (
    LOADER,
    MODEL,
    TARGET,
    Command,
    Problems,
    common,
    given,
    option,
    output,
)
from dlperf.core.argument_types import count, counts, counts_or_none, seconds, size
from dlperf.core.errors import DlperfError
from dlperf.core.streams import log, warn
from dlperf.core.text import counted
from dlperf.core.version import VERSION

if TYPE_CHECKING:
    from dlperf.advice.grid import Axes, Configuration
    from dlperf.advice.rates import Forecaster
    from dlperf.advice.trials import ConfigurationTrials
    from dlperf.advice.tuning import Tuning
    from dlperf.core.loader_sample import SampledLoader
    from dlperf.core.machine import Machine
    from dlperf.core.trace import Trace

BEST, RUNS, SECONDS = 3, 3, 3.0
BATCH_SIZES = (8, 16, 32, 64, 128, 256)


def check(args: Namespace) -> Problems:
    """Options that exclude one another."""
    option = given(args, ("runs", "seconds", "best"))
    return (
        (args.batch_sizes and args.batch_size, "give one of --batch-size and --batch-sizes"),
        (not args.trial and option, f"{option} is for the measuring of --try"),
    )


def tune(args: Namespace) -> Answer:
    """Compare threads x batch size x loading workers x worker processes."""
    from dlperf.advice.grid import EPOCH, THROUGHPUT, Axes, Objective

    objective = Objective(
        args.objective or (THROUGHPUT if args.samples is None else EPOCH),
        args.samples,
        args.memory_limit,
    )
    Axes(
        args.threads or (1,),
        args.batch_sizes or (1,),
        args.loader_workers or (0,),
        args.workers or (1,),
    )  # values that cannot be, before anything is read
    if args.samples is not None and args.workers and max(args.workers) > args.samples:
        raise DlperfError(
            f"workers is {max(args.workers)}, more than the {args.samples} samples; each worker"
            " needs at least one"
        )
    from dataclasses import replace

    from dlperf.advice import tuning
    from dlperf.advice.rates import Forecaster
    from dlperf.core import host
    from dlperf.core.machine_doubts import find_mismatches, find_self_test_problem

    if args.trial:
        refuse_trace(args.target, "measure")
    machine = load_machine(args)
    mismatches = find_mismatches(machine, host.this_cpu(), host.versions())
    tested = (args.threads or machine.threads) if machine.self_tests else ()
    doubts = [find_self_test_problem(machine, threads) for threads in tested]
    for line in (*mismatches, *filter(None, doubts)):
        warn(line)

    def record(batch_size: int) -> Trace:
        log(f"recording a step at batch size {batch_size}")
        return read_or_record(args, args.target, batch_size)

    def sample(batch_size: int) -> SampledLoader:
        from dlperf.cli.loader_timing import sample_apart

        log(f"sampling the loader at batch size {batch_size}")
        return sample_apart(args.loader, batch_size, 0, 1, machine)

    forecaster = Forecaster(machine, record, sample if args.loader else None)
    if args.loader and not forecaster.knows_loading:
        raise DlperfError(
            f"{machine.path or 'machine'}: holds no costs of loading data, which --loader needs;"
            f" {machine.calibration()} adds them"
        )
    axes = _axes(args, machine, forecaster)
    n_best = args.best or BEST
    found = tuning.tune(
        args.target,
        machine.cpu.model,
        axes,
        objective,
        forecaster.rate_of,
        forecaster.knows,
        n_best if args.trial else 1,
        lambda: list(forecaster.notes),
    )
    found = replace(
        found,
        trials=_try(args, found, n_best, forecaster) if args.trial else None,
        provenance=(f"dlperf {VERSION}: {shlex.join(['dlperf', *sys.argv[1:]])}",),
    )
    for note in found.notes:
        warn(note)
    write_folder(args, lambda to, force: tuning.write(found, to, force))
    interrupted = found.trials is not None and found.trials.is_interrupted
    return Answer(
        str(found),
        tuning.tuning_to_json(found),
        status=130 if interrupted else 0,
    )


def _axes(args: Namespace, machine: Machine, forecaster: Forecaster) -> Axes:
    """The values to combine: the given ones, else those that the machine file supports and the
    machine has room for.
    """
    from dlperf.advice.grid import Axes
    from dlperf.core.host import available_cores
    from dlperf.core.machine_doubts import find_unmeasured_threads

    cores = machine.cpu.n_cores
    measured = tuple(t for t in machine.threads if t <= cores)
    sizes = args.batch_sizes or ((args.batch_size,) if args.batch_size else BATCH_SIZES)
    if is_trace(args.target):
        own = read_or_record(args, args.target).batch_size
        if args.batch_sizes or args.batch_size not in (None, own):
            raise DlperfError(
                f"{args.target}: a trace file has one batch size, {own}; name the target it was"
                " recorded from to compare others"
            )
        sizes = (own,)
    axes = Axes(
        args.threads or measured or (1,),
        sizes,
        args.loader_workers or tuple(range(min(cores, 2) + 1)),
        args.workers or tuple(2**i for i in range(cores.bit_length())),
    )
    for threads in axes.threads:
        if unmeasured := find_unmeasured_threads(machine, threads):
            forecaster.notes.append(unmeasured)
        if threads > available_cores():
            forecaster.notes.append(
                f"{threads} threads asked for, this process may use"
                f" {counted(available_cores(), 'core')}"
            )
    return axes


def _try(
    args: Namespace, found: Tuning, n_best: int, forecaster: Forecaster
) -> ConfigurationTrials:
    """Measure the best few."""
    from dlperf.advice import trials

    limit_s, n_runs = args.seconds or SECONDS, args.runs or RUNS
    chosen = [row.configuration for row in found.best_rows[:n_best]]

    def measure(configuration: Configuration) -> float:
        return trials.measure_configuration(
            configuration,
            args.target,
            inference=args.inference,
            input_shape=args.input,
            seconds=limit_s,
            with_loader=forecaster.knows_loading,
            loader=args.loader,
        )

    log(
        f"measuring {counted(len(chosen), 'configuration')}, {counted(n_runs, 'run')} each, in"
        " processes of their own"
    )
    return trials.run_configuration_trials(chosen, measure, n_runs=n_runs, log=log)


COMMAND = Command(
    "tune",
    "which threads, batch size, loading workers and worker processes train fastest",
    options=(
        TARGET,
        option(
            "--objective",
            choices=("epoch", "throughput"),
            help="the shortest epoch (default with --samples) or the most samples per second",
        ),
        option("--samples", type=count, metavar="N", help="training samples of an epoch"),
        option(
            "--memory-limit",
            type=size,
            metavar="BYTES",
            help="2GiB, 500MB: what all processes together may take beyond importing torch",
        ),
        option(
            "--threads",
            type=counts,
            metavar="T,T",
            help="threads to compare (default: those of the machine file)",
        ),
        option(
            "--batch-sizes",
            type=counts,
            metavar="B,B",
            help="batch sizes to compare (8,16,32,64,128,256)",
        ),
        option(
            "--loader-workers",
            type=counts_or_none,
            metavar="W,W",
            help="loading workers to compare (0,1,2)",
        ),
        LOADER,
        option(
            "--workers",
            type=counts,
            metavar="P,P",
            help=(
                "worker processes to compare, each with its share of the samples (powers "
                "of 2 up to the cores)"
            ),
        ),
        option(
            "--try",
            dest="trial",
            action="store_true",
            help="measure the best few, and name the fastest",
        ),
        option("--best", type=count, metavar="K", help="with --try: how many (3)"),
        option(
            "--runs", type=count, metavar="N", help="with --try: how often each is measured (3)"
        ),
        option(
            "--seconds", type=seconds, metavar="S", help="with --try: how long each is timed (3)"
        ),
        output("folder to write the comparison and its plot to", "DIR"),
        *common(threads=False),
        *MODEL,
    ),
    work=tune,
    check=check,
    epilog=(
        "It seeks speed, not convergence: a larger batch, or more workers, update the "
        "weights less often in an epoch."
    ),
    folder_answer="comparison",
)
