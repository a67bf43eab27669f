"""The accuracy study: networks, and single held-out ops."""

from __future__ import annotations

import contextlib
import datetime
import secrets
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dlperf.cli.inputs import (
    Answer,
    check_predictors,
    default_cache,
    load_machine,
    read_or_record,
    refuse_trace,
    split_batch,
    use_threads,
    warn_of_threads,
    write_folder,
)
from dlperf.cli.measurement import measure_apart
from dlperf.core.errors import telling_what_is_kept
from dlperf.core.streams import log, warn
from dlperf.core.text import counted

if TYPE_CHECKING:
    import pandas as pd

    from dlperf.core.machine import Kernel, Machine
    from dlperf.core.measurement import Measurement
    from dlperf.core.trace import Op, Trace
    from dlperf.studies.accuracy.archive import Archive
    from dlperf.studies.accuracy.baselines import BaselineEstimate
    from dlperf.studies.accuracy.cases import Case
    from dlperf.studies.accuracy.study import Study
    from dlperf.studies.results import Provenance

ALL = "all"
"""The word for every network of the checkout."""
BATCH_SIZES = (16, 64)
PREDICTORS = ("calibrated", "roofline", "gemm-table")
RUNS, RUNS_SEVERAL_THREADS = 2, 5
"""Fresh processes a case: with several threads they differ by far more."""
OPS_RUNS = 2
SECONDS = 4.0
"""How long each process times the step."""


def validate_accuracy(args: Namespace) -> Answer:
    """Predicted against measured over many networks, or single ops."""
    check_predictors(args.predictor or PREDICTORS)
    from dlperf.studies.accuracy import page
    from dlperf.studies.accuracy.study import Study

    use_threads(1)  # this process records and predicts; what is timed has processes of its own
    args.seconds = args.seconds or SECONDS
    machine = load_machine(args)
    counts = args.threads or machine.threads
    for count in counts:
        warn_of_threads(count)
    cases = _cases(args, counts)
    seed = args.seed
    if args.held_out_ops and seed is None:
        seed = secrets.randbelow(2**31)
    runs = tuple((count, _n_runs(args, count)) for count in counts) if cases else ()
    study = Study(provenance_of(machine, runs, args.seconds, seed))
    interrupted = False
    with keeping(args, "validation") as archive:
        if cases:
            study = _run(args, cases, machine, archive, study.provenance)
        if args.held_out_ops:
            study, interrupted = _with_ops(args, study, machine, counts)
            if interrupted and study.ops.empty and not study.scores:
                raise KeyboardInterrupt
    if archive.remark:
        study = study.with_remark(archive.remark)
    for remark in study.variation_remarks:
        warn(remark)
    return answer(args, study, page, interrupted)


@contextlib.contextmanager
def keeping(args: Namespace, cache: str) -> Iterator[Archive]:
    """The archive of a study. Ctrl-C inside raises Interrupted with what it keeps."""
    from dlperf.studies.accuracy.archive import Archive

    archive = Archive(args.cache or default_cache(cache), args.fresh)
    with telling_what_is_kept(lambda: archive.kept):
        yield archive


def answer(args: Namespace, study: Any, page: Any, interrupted: bool = False) -> Answer:
    """Write the folder of a study by its module of pages; the answer of the command."""
    write_folder(args, lambda to, force: page.write_study(study, to, force))
    status = 130 if interrupted else 1 if study.failures else 0
    return Answer(page.study_to_text(study), study.to_json(), status)


def _with_ops(
    args: Namespace, study: Study, machine: Machine, counts: Sequence[int]
) -> tuple[Study, bool]:
    """The study with single ops at each thread count, and whether their timing was interrupted;
    whole processes until then count.
    """
    n_each, n_done = args.runs or OPS_RUNS, 0
    for count in counts:
        ops, n_runs = _time_ops(args, machine, count, study.provenance.seed or 0)
        study, n_done = study.with_ops(ops), n_done + n_runs
        if n_runs < n_each:
            remark = (
                f"interrupted: {n_done} of {len(counts) * n_each} processes that time single ops"
                " were finished"
            )
            return study.with_remark(remark), True
    return study, False


def targets_of(asked: Sequence[str], sizes: Sequence[int]) -> list[tuple[str, int]]:
    """Every network asked for at each of its own batch sizes, else at each of `sizes`."""
    from dlperf.recorder import target_lookup

    found = []
    for spec in asked:
        for target, size in split_batch(spec):
            for name in target_lookup.checkout_targets() if target == ALL else (target,):
                refuse_trace(name, "measure")
                found += [(name, one) for one in ((size,) if size else sizes)]
    return list(dict.fromkeys(found))


def _cases(args: Namespace, counts: Sequence[int]) -> list[Case]:
    """Every target at every batch size and thread count; none for single ops alone."""
    from dlperf.studies.accuracy.cases import Case

    asked = args.targets or ([] if args.held_out_ops else [ALL])
    sizes = args.batch_sizes or ((args.batch_size,) if args.batch_size else BATCH_SIZES)
    networks: dict[str, list[int]] = {}
    for name, size in targets_of(asked, sizes):
        networks.setdefault(name, []).append(size)
    return [
        Case(name, size, count, args.inference)
        for name, own in networks.items()
        for count in counts
        for size in own
    ]


def provenance_of(
    machine: Machine,
    n_runs: tuple[tuple[int, int], ...],
    seconds: float,
    seed: int | None = None,
    remarks: Sequence[str] = (),
) -> Provenance:
    """Provenance of a study, with the doubts about its machine file, which go to stderr, too."""
    from dlperf.core import host
    from dlperf.core.machine_doubts import find_state_problem
    from dlperf.report import machine_check
    from dlperf.studies.results import Provenance

    doubts = [*machine_check.find_problems(machine, host.this_cpu(), host.versions())]
    doubts += filter(None, [find_state_problem(machine)])
    for doubt in doubts:
        warn(f"{machine.path}: {doubt}")
    return Provenance(
        machine=host.this_cpu().model,
        machine_file=machine.path,
        machine_mode=machine.mode,
        machine_created=machine.created,
        versions=host.versions(),
        command=shlex.join(["dlperf", *sys.argv[1:]]),
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        n_runs=n_runs,
        seconds=seconds,
        seed=seed,
        remarks=(*(f"machine file: {doubt}" for doubt in doubts), *filter(None, remarks)),
    )


def _n_runs(args: Namespace, threads: int) -> int:
    return int(args.runs or (RUNS if threads == 1 else RUNS_SEVERAL_THREADS))


def _run(
    args: Namespace,
    cases: Sequence[Case],
    machine: Machine,
    archive: Archive,
    provenance: Provenance,
) -> Study:
    from dlperf.predictors.gemm_table import peak_flops_per_s
    from dlperf.studies.accuracy.baselines import ask_baselines
    from dlperf.studies.accuracy.study import run_study, variants

    def measure(case: Case, trace: Trace, run: int) -> Measurement:
        line = (
            f"run {run} of {_n_runs(args, case.threads)},"
            f" case {cases.index(case) + 1} of {len(cases)}: {case.label}"
        )

        def take() -> Measurement:
            log(line)
            return measure_apart(args, case.target, case.batch_size, case.threads)

        n_taken = archive.n_taken
        found = archive.measurement(case, trace, run, args.seconds, take)
        if archive.n_taken == n_taken:
            log(f"{line}: kept from before")
        return found

    def ask(case: Case, trace: Trace) -> Sequence[BaselineEstimate]:
        peaks = peak_flops_per_s(machine, case.threads)
        peak = peaks.get("float32", max(peaks.values()))
        dram = machine.dram_bytes_per_s(case.threads)
        take = partial(ask_baselines, case, peak, dram, args.input)
        return archive.estimates(case, trace, f"{peak:.6g} {dram:.6g}", take)

    return run_study(
        cases,
        variants(machine, args.predictor or PREDICTORS),
        partial(_n_runs, args),
        lambda case: read_or_record(args, case.target, case.batch_size),
        measure,
        log,
        ask_baselines=ask if args.peers else None,
        with_ablation=args.ablation,
        provenance=provenance,
    )


def _time_ops(
    args: Namespace, machine: Machine, threads: int, seed: int
) -> tuple[pd.DataFrame, int]:
    """Random ops timed in fresh processes against their kernel models; and the number of finished
    processes, which an interruption makes lower.
    """
    from dlperf.cli.op_timing import time_ops_apart
    from dlperf.core.machine_doubts import is_cross_machine
    from dlperf.microbench.progress import progress_of
    from dlperf.predictors.kernel_cost_model import cost_model_of
    from dlperf.studies.accuracy.single_ops import kernel_s, make_random_ops, score_ops

    known = {kernel.op.signature for kernel in machine.kernels}
    random_ops = make_random_ops(seed, known, args.ops)
    n_runs = args.runs or OPS_RUNS
    log(
        f"{len(random_ops)} random ops that the machine file does not hold (--seed {seed}),"
        f" {n_runs} fresh process{'es' * (n_runs != 1)} with {counted(threads, 'thread')}"
    )
    runs: list[tuple[Kernel, ...]] = []
    refused: set[str] = set()
    with progress_of(n_runs * len(random_ops), "op", "timing ops") as bar:
        for number in range(1, n_runs + 1):
            bar.set_postfix_str(f"process {number} of {n_runs}, {counted(threads, 'thread')}")
            try:
                kernels, notes = time_ops_apart([one.op for one in random_ops], threads, bar.update)
            except KeyboardInterrupt:
                break
            runs.append(kernels)
            refused.update(notes)
    for note in sorted(refused):
        warn(f"not timed: {note}")
    cost_model = cost_model_of(machine, threads)
    far = is_cross_machine(machine)

    def price(op: Op) -> tuple[float, str]:
        seconds, source = kernel_s(cost_model, op)
        return seconds, "extrapolated" if far and source != "unpriced" else source

    return score_ops(random_ops, runs, price, threads), len(runs)
