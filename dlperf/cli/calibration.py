"""``dlperf calibrate``: measures this machine."""

from __future__ import annotations

import contextlib
import os
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dlperf.cli.device_calibration import calibrate_device
from dlperf.cli.inputs import (
    Answer,
    load_machine,
    machine_path,
    read_or_record,
    split_batch,
    use_threads,
)
from dlperf.cli.options import (
    MODEL,
    Command,
    Problems,
    common,
    option,
    output,
)
from dlperf.cli.states import warn_of_states
from dlperf.core.argument_types import counts
from dlperf.core.errors import DlperfError, WorkFailed, telling_what_is_kept
from dlperf.core.files import MACHINE, check_writable
from dlperf.core.streams import log, warn
from dlperf.core.text import counted, fit
from dlperf.report.writing import make_folder

if TYPE_CHECKING:
    from dlperf.core.machine import Machine
    from dlperf.core.state import Reading
    from dlperf.core.trace import Trace


def calibrate(args: Namespace) -> Answer:
    """Measure this machine."""
    from dlperf.report.machine_summary import conclude, summarize

    if args.device is not None:
        return calibrate_device(args)
    path = Path(args.output) if args.output else machine_path(args)
    if args.refresh:
        return refresh(path, args.threads)
    if not args.output and not args.machine:
        make_folder(path.parent)
    check_writable(path, args.force, MACHINE)
    former = _extended_by(args, path)
    mode = args.mode or (former.mode if former else "full")
    threads = args.threads or (former.threads if former else _default_threads(use_threads(None)))
    traces = [
        read_or_record(args, target, size)
        for spec in args.targets
        for target, size in split_batch(spec)
    ]
    begin = time.monotonic()
    machine = run_calibration(path, mode, threads, traces, args.force, args.workers)
    seconds, summary = time.monotonic() - begin, summarize(machine)
    return Answer(fit(conclude(summary, seconds)), summary.to_json())


def _extended_by(args: Namespace, path: Path) -> Machine | None:
    """The file to which targets or co-runs alone are added, at its own depth and thread counts;
    None where there is none.
    """
    from dlperf.core.machine import Machine

    if not (args.targets or args.workers) or args.force or not path.exists():
        return None
    with contextlib.suppress(DlperfError):  # of which the calibration itself speaks
        machine = Machine.load(path)
        return machine if machine.threads else None
    return None


def run_calibration(
    path: Path,
    mode: str,
    threads: Sequence[int],
    traces: Sequence[Trace] = (),
    force: bool = False,
    workers: Sequence[int] = (),
) -> Machine:
    """Measure this machine (:func:`dlperf.microbench.suite.calibrate`), fit its kernel models'
    errors, and test the file on steps.

    Raises DlperfError where another process calibrates into `path` at the moment, and as that
    function does.
    """
    from dataclasses import replace

    from dlperf.core import host
    from dlperf.core.files import one_writer
    from dlperf.microbench.suite import calibrate, what_is_kept
    from dlperf.predictors.kernel_fits import fit_kernel_models, least_certain
    from dlperf.studies import self_test

    kept = ""  # until all is measured
    with (
        telling_what_is_kept(lambda: kept or what_is_kept(path, 0)),
        one_writer(path, "a calibration"),
        contextlib.ExitStack() as stack,
    ):
        running = host.running_processes()
        started = [
            stack.enter_context(self_test.start(count)) for count in dict.fromkeys(threads)
        ]  # they import torch while the measuring process does
        machine = calibrate(
            path,
            mode=mode,
            threads=tuple(threads),
            traces=tuple(traces),
            workers=tuple(workers),
            force=force,
            choose=least_certain,
            refused=_why_refused,
            running=running,
        )
        kept = (
            f"{path} keeps everything that was measured; the same command ends with its self-test,"
            " which was not finished"
        )
        tested = {test.threads for test in machine.self_tests if not test.is_check}
        waiting = [process for process in started if process.threads not in tested]
        try:
            trimming = [
                stack.enter_context(self_test.start_trimming(process.threads))
                for process in waiting
                if self_test.times_pages(mode)
            ]  # they import torch while kernel models are fitted
            machine = fit_kernel_models(machine)
            machine.save(path)
            machine = self_test.run(
                machine,
                waiting,
                self_test.seeds_of_calibration(mode),
                trimming,
            )
        except WorkFailed as error:
            warn(f"the self-test was not finished ({error}); dlperf machine check repeats it")
        machine.save(path)
        kept = f"{path} is finished"
    return replace(machine, path=str(path))


def _why_refused(machine: Machine) -> str:
    """Why a calibration measures all of a file anew; empty where it extends the file."""
    from dlperf.core.machine_doubts import has_unfit_reference

    if has_unfit_reference(machine):
        return "contains no reference state that fits its readings"
    return ""


def refresh(path: Path, threads: Sequence[int] | None) -> Answer:
    """How far this machine's speed has moved since its file was made. The file gets the readings
    that are taken meanwhile; nothing else in it changes.

    Raises DlperfError where there is no file, it is of another machine or torch, or it contains no
    kernels at a number of threads.
    """
    from dlperf.core import host
    from dlperf.core.files import one_writer
    from dlperf.core.machine import Machine, lacks
    from dlperf.core.machine_doubts import find_mismatches
    from dlperf.core.readings import with_readings
    from dlperf.microbench import refresh as process
    from dlperf.report.machine_refresh import compare

    machine = Machine.load(path)
    check_writable(path, schema=MACHINE)
    for mismatch in find_mismatches(machine, host.this_cpu(), host.versions()):
        what = mismatch.partition(": extrapolated")[0]
        raise DlperfError(f"{what}; --refresh is for this machine's own file")
    counts = tuple(threads or machine.threads[:1])
    for count in counts or (1,):
        if not machine.families(count):
            raise lacks(machine, f"kernels with {counted(count, 'thread')}")
    retimed: list[process.Retimed] = []
    readings: list[Reading] = []
    with one_writer(path, "a calibration"):
        for count in counts:
            log(f"timing kernels of {path} again with {counted(count, 'thread')}")
            found, taken = process.measure(machine, count, process.BUDGET_S / len(counts))
            retimed += found
            readings += taken
        machine = with_readings(machine, readings)
        machine.save(path)
    page = compare(
        machine, [(one.kernel, one.seconds, one.readings) for one in retimed], tuple(readings)
    )
    warn_of_states(machine)
    for movement in page.moved:
        warn(movement.sentence())
    return Answer(fit(page.to_text()), page.to_json())


def check(args: Namespace) -> Problems:
    """Options that exclude one another."""
    from dlperf.core import shelf

    name = args.output or args.machine or ""
    return (
        (
            name.lower() in shelf.names() and not os.path.exists(name),
            f"{name}: is a device of the shelf; name a file for this machine, such as {name}.json",
        ),
        (
            args.refresh and (args.targets or args.workers),
            "--refresh measures what the file contains; leave --for and --workers out",
        ),
        (
            args.device is not None
            and (args.refresh or args.targets or args.workers or args.threads),
            "--device measures an accelerator; leave --refresh, --for, --workers and --threads out",
        ),
    )


def load_or_make_machine(args: Namespace, threads: int) -> Machine:
    """This machine's file; a quick calibration makes it where there is none. A file that was named
    must exist.
    """
    path = machine_path(args)
    if args.machine or os.path.exists(path):
        return load_machine(args)
    log(
        f"this machine was never measured; a quick calibration goes to {path} (dlperf calibrate"
        " makes a better one)"
    )
    make_folder(path.parent)
    check_writable(path, schema=MACHINE)
    return run_calibration(path, "quick", _default_threads(threads))


def _default_threads(threads: int) -> tuple[int, ...]:
    """One thread, and the number that torch uses."""
    return (1,) if threads == 1 else (1, threads)


COMMAND = Command(
    "calibrate",
    "measure this machine: create, resume or extend its machine file",
    options=(
        option(
            "--quick",
            dest="mode",
            action="store_const",
            const="quick",
            default=None,
            help="a rough one: about 40 s for each number of threads, self-test included",
            exclusive=True,
        ),
        option(
            "--thorough",
            dest="mode",
            action="store_const",
            const="thorough",
            help="more shapes and samples than usual",
            exclusive=True,
        ),
        option(
            "--refresh",
            action="store_true",
            help=(
                "some seconds: how far this machine's speed has moved since the file was made; adds"
                " readings of its state to the file and changes nothing else"
            ),
            exclusive=True,
        ),
        option(
            "--for",
            dest="targets",
            metavar="TARGET@BATCH",
            nargs="+",
            action="extend",
            default=[],
            help="also measure the exact operations of a target's step at that batch size; a"
            " file that is there is extended at its own depth and thread counts",
        ),
        option(
            "--threads",
            type=counts,
            metavar="T,T",
            help="thread counts to measure (default: 1 and torch's own number)",
        ),
        option(
            "--workers",
            type=counts,
            metavar="P,P",
            default=(),
            help=(
                "also measure the co-run slowdown of P processes of one thread each, for predict"
                " --workers"
            ),
        ),
        option(
            "--device",
            metavar="NAME",
            help=(
                "measure this accelerator of the machine instead, such as cuda: roofs and kernels"
            ),
        ),
        output("machine file to write (default: --machine)"),
        *common(threads=False),
        *MODEL,
    ),
    work=calibrate,
    check=check,
)
