"""``dlperf tune``: the configuration that trains fastest and, with ``--try``, which of the best few
really did.
"""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING

from dlperf.cli.inputs import Answer, is_trace, load_machine, read_or_record
from dlperf.core.errors import DlperfError
from dlperf.core.streams import log, warn
from dlperf.core.version import VERSION

if TYPE_CHECKING:
    from dlperf.advice.grid import Axes, Configuration
    from dlperf.advice.rates import Forecaster
    from dlperf.advice.tuning import Tuning
    from dlperf.advice.tuning_trials import Contest
    from dlperf.core.loader_sample import SampledLoader
    from dlperf.core.machine import Machine
    from dlperf.core.trace import Trace

BEST, RUNS, SECONDS = 3, 3, 3.0
BATCH_SIZES = (8, 16, 32, 64, 128, 256)


def tune(args: Namespace) -> Answer:
    """Compare threads x batch size x loading workers x worker processes."""
    from dlperf.advice.grid import EPOCH, THROUGHPUT, Axes, Wish

    wish = Wish(
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
    from dlperf.advice import tuning, tuning_export, tuning_files, tuning_text
    from dlperf.advice.rates import Forecaster
    from dlperf.core import host
    from dlperf.report.machine_check import find_mismatches
    from dlperf.report.writing import check_folder

    if args.output is not None:
        check_folder(args.output, args.force)
    if args.trial and is_trace(args.target):
        raise DlperfError(
            f"{args.target}: a trace file has no code to measure; name the target it was recorded"
            " from"
        )
    machine = load_machine(args)
    mismatches = find_mismatches(machine, host.this_cpu(), host.versions())
    for line in mismatches:
        warn(line)

    def record(batch_size: int) -> Trace:
        log(f"recording a step at batch size {batch_size}")
        return read_or_record(args, args.target, batch_size)

    def sample(batch_size: int) -> SampledLoader:
        from dlperf.cli.loader_timing import sample_apart

        log(f"sampling the loader at batch size {batch_size}")
        return sample_apart(args.loader, batch_size, 0, 1, machine)

    forecaster = Forecaster(machine, record, bool(mismatches), sample if args.loader else None)
    if args.loader and not forecaster.knows_loading:
        raise DlperfError(
            f"{machine.path or 'machine'}: holds no costs of loading data, which --loader needs;"
            " dlperf calibrate adds them"
        )
    axes = _axes(args, machine, forecaster)
    n_best = args.best or BEST
    found = tuning.tune(
        args.target,
        machine.cpu.model,
        axes,
        wish,
        forecaster.pace_of,
        forecaster.knows,
        n_best if args.trial else 1,
        lambda: list(forecaster.notes),
    )
    found = replace(
        found, provenance=(f"dlperf {VERSION}: {shlex.join(['dlperf', *sys.argv[1:]])}",)
    )
    if args.trial:
        found = replace(found, contest=_try(args, found, n_best, forecaster))
    for note in found.notes:
        warn(note)
    if args.output is not None:
        written = tuning_files.write(found, args.output, args.force)
        log(f"wrote {', '.join(path.name for path in written)} to {args.output}")
    interrupted = found.contest is not None and found.contest.is_interrupted
    return Answer(
        tuning_text.tuning_to_text(found),
        tuning_export.tuning_to_json(found),
        status=130 if interrupted else 0,
    )


def _axes(args: Namespace, machine: Machine, forecaster: Forecaster) -> Axes:
    """The values to combine: those asked for, else what the machine file can tell and the machine
    has room for.
    """
    from dlperf.advice.grid import Axes
    from dlperf.core.host import available_cores

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
        args.workers or _powers_of_two(cores),
    )
    for threads in axes.threads:
        if threads not in machine.threads:
            forecaster.notes.append(
                f"the machine file holds {', '.join(map(str, machine.threads))} thread(s), not"
                f" {threads}: extrapolated; dlperf calibrate --threads {threads} measures it"
            )
        if threads > available_cores():
            forecaster.notes.append(
                f"{threads} threads asked for, this process may use {available_cores()} core(s)"
            )
    return axes


def _powers_of_two(most: int) -> tuple[int, ...]:
    return tuple(2**i for i in range(most.bit_length()))


def _try(args: Namespace, found: Tuning, n_best: int, forecaster: Forecaster) -> Contest:
    """Measure the best few."""
    from dlperf.advice import tuning_trials

    seconds, n_runs = args.seconds or SECONDS, args.runs or RUNS
    chosen = [row.configuration for row in found.best_rows[:n_best]]

    def measure(configuration: Configuration) -> float:
        return tuning_trials.measure_apart(
            configuration,
            args.target,
            inference=args.inference,
            input_shape=args.input,
            seconds=seconds,
            with_loader=forecaster.knows_loading,
            loader=args.loader,
        )

    log(
        f"measuring {len(chosen)} configuration(s), {n_runs} run(s) each, in processes of their own"
    )
    return tuning_trials.run_contest(chosen, measure, seconds=seconds, n_runs=n_runs, log=log)
