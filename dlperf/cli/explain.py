"""``dlperf explain``: what a step's time is made of, which changes would pay and, with ``--try``,
what they brought.
"""

from __future__ import annotations

import os
import shlex
import sys
from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING

from dlperf.cli.inputs import (
    Answer,
    is_trace,
    load_machine,
    predict_and_warn,
    read_or_record,
    resolve,
    threads_for,
    warn_of_threads,
)
from dlperf.core.errors import DlperfError
from dlperf.core.streams import log
from dlperf.core.version import VERSION

if TYPE_CHECKING:
    from dlperf.advice.change_trials import Trials
    from dlperf.advice.explanation import Explanation
    from dlperf.advice.variants import Variant
    from dlperf.core.measurement import Measurement

RUNS, SECONDS = 3, 2.0


def explain(args: Namespace) -> Answer:
    """What the step's time is made of, and which changes would pay."""
    from dlperf.advice import explanation as explaining
    from dlperf.advice import explanation_export, explanation_files, explanation_text
    from dlperf.report.writing import check_folder

    if args.output is not None:
        check_folder(args.output, args.force)
    recorded = is_trace(args.target)
    if recorded and args.trial:
        raise DlperfError(
            f"{args.target}: a trace file has no code to try changes on; name the target it was"
            " recorded from"
        )
    machine = load_machine(args)
    threads = threads_for(args, machine)
    if args.trial:
        warn_of_threads(threads)
    trace = read_or_record(args, args.target)
    prediction = predict_and_warn(trace, machine, threads, "calibrated")
    target = None if recorded else resolve(args, args.target)
    found = explaining.explain(prediction, target, log)
    found = replace(
        found, provenance=(f"dlperf {VERSION}: {shlex.join(['dlperf', *sys.argv[1:]])}",)
    )
    if args.trial:
        found = replace(found, trials=_try(args, found, threads))
    if args.output is not None:
        written = explanation_files.write(found, args.output, args.force)
        log(f"wrote {', '.join(path.name for path in written)} to {args.output}")
    interrupted = found.trials is not None and found.trials.is_interrupted
    return Answer(
        explanation_text.explanation_to_text(found),
        explanation_export.explanation_to_json(found),
        status=130 if interrupted else 0,
    )


def _try(args: Namespace, found: Explanation, threads: int) -> Trials:
    """Measure everything that can be tried here, what is predicted to pay and what is not."""
    from dlperf.advice import change_trials, mallocs

    seconds, n_runs = args.seconds or SECONDS, args.runs or RUNS
    batch_size = found.prediction.trace.batch_size
    variants, notes = [], []
    for suggestion in found.advice.suggestions:
        reason = change_trials.cannot_be_tried(
            suggestion, found.prediction.machine.cpu.memory_bytes
        )
        if not reason:
            variants.append(suggestion.variant)
        elif suggestion.step_s is not None:
            notes.append(f"{suggestion.variant.name} was not tried: {reason}")

    if ours := mallocs.settings_in(os.environ):
        notes.append(
            f"the baseline was run without {', '.join(ours)}, as it is predicted for the system's"
            " default malloc"
        )

    def measure(variant: Variant) -> Measurement:
        return change_trials.measure_apart(
            variant,
            args.target,
            batch_size,
            threads=threads,
            inference=args.inference,
            input_shape=args.input,
            seconds=seconds,
        )

    log(f"trying {len(variants)} change(s), {n_runs} run(s) each, in processes of their own")
    done = change_trials.run_trials(
        variants, measure, batch_size, seconds=seconds, n_runs=n_runs, log=log
    )
    return replace(done, notes=tuple(notes))
