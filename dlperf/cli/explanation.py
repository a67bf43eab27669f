"""``dlperf explain``: parts of a step's time, and predicted and measured savings of changes."""

from __future__ import annotations

import os
import shlex
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from dlperf.cli.inputs import (
    Answer,
    is_trace,
    load_machine,
    predict_and_warn,
    read_or_record,
    refuse_trace,
    resolve,
    threads_for,
    warn_of_threads,
    write_folder,
)
from dlperf.cli.options import (
    MODEL,
    TARGET,
    Command,
    Problems,
    common,
    given,
    option,
    output,
)
from dlperf.core.argument_types import count, seconds
from dlperf.core.streams import log
from dlperf.core.text import counted
from dlperf.core.version import VERSION

if TYPE_CHECKING:
    from dlperf.advice.explanation import Explanation
    from dlperf.advice.trials import ChangeTrials
    from dlperf.advice.variants import Variant
    from dlperf.core.measurement import Measurement

RUNS, SECONDS = 3, 2.0


def check(args: Namespace) -> Problems:
    """Options of --try without it."""
    option = given(args, ("runs", "seconds"))
    return ((not args.trial and option, f"{option} is for the measuring of --try"),)


def explain(args: Namespace) -> Answer:
    """What the step's time is made of, and which changes would pay."""
    from dataclasses import replace

    from dlperf.advice import explanation as explaining
    from dlperf.advice import explanation_page
    from dlperf.report.document import to_text

    recorded = is_trace(args.target)
    if args.trial:
        refuse_trace(args.target, "try changes on")
    machine = load_machine(args)
    threads = threads_for(args, machine)
    if args.trial:
        warn_of_threads(threads)
    trace = read_or_record(args, args.target)
    prediction = predict_and_warn(trace, machine, threads, "calibrated")
    target = None if recorded else resolve(args, args.target)
    found = explaining.explain(prediction, target, log)
    found = replace(
        found,
        trials=_try(args, found, threads) if args.trial else None,
        provenance=(f"dlperf {VERSION}: {shlex.join(['dlperf', *sys.argv[1:]])}",),
    )
    write_folder(args, lambda to, force: explanation_page.write(found, to, force))
    interrupted = found.trials is not None and found.trials.is_interrupted
    return Answer(
        to_text(explanation_page.explanation_page(found)),
        explaining.explanation_to_json(found),
        status=130 if interrupted else 0,
    )


def _try(args: Namespace, found: Explanation, threads: int) -> ChangeTrials:
    """Measure everything that can be tried here, what is predicted to pay and what is not."""
    from dataclasses import replace

    from dlperf.advice import trials
    from dlperf.advice.variants import settings_in

    limit_s, n_runs = args.seconds or SECONDS, args.runs or RUNS
    batch_size = found.prediction.trace.batch_size
    variants, notes = [], []
    for suggestion in found.advice.suggestions:
        reason = trials.cannot_be_tried(suggestion, found.prediction.machine.cpu.memory_bytes)
        if not reason:
            variants.append(suggestion.variant)
        elif suggestion.step_s is not None:
            notes.append(f"{suggestion.variant.name} was not tried: {reason}")

    if ours := settings_in(os.environ):
        notes.append(
            f"the baseline was run without {', '.join(ours)}, as it is predicted for the system's"
            " default malloc"
        )

    def measure(variant: Variant) -> Measurement:
        return trials.measure_change(
            variant,
            args.target,
            batch_size,
            threads=threads,
            inference=args.inference,
            input_shape=args.input,
            seconds=limit_s,
        )

    log(
        f"trying {counted(len(variants), 'change')}, {counted(n_runs, 'run')} each, in processes of"
        " their own"
    )
    done = trials.run_change_trials(
        variants, measure, batch_size, seconds=limit_s, n_runs=n_runs, log=log
    )
    return replace(done, notes=tuple(notes))


COMMAND = Command(
    "explain",
    "what a step's time is made of, and which changes would pay",
    options=(
        TARGET,
        option(
            "--try",
            dest="trial",
            action="store_true",
            help="measure each change that can be made here beside its prediction",
        ),
        option(
            "--runs",
            type=count,
            metavar="N",
            help=(
                "with --try: processes for each change, and as many of the step as it is between"
                " them (3)"
            ),
        ),
        option(
            "--seconds",
            type=seconds,
            metavar="S",
            help="with --try: how long each process times the step (2)",
        ),
        output("folder to write the explanation and its plots to", "DIR"),
        *common(),
        *MODEL,
    ),
    work=explain,
    check=check,
    folder_answer="explanation",
)
