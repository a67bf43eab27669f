"""``dlperf compare``: two steps side by side, without running either."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from dlperf.cli.inputs import (
    Answer,
    load_machine,
    predict_and_warn,
    read_or_record,
    split_batch,
    threads_for,
)
from dlperf.cli.options import MODEL, TARGET_HELP, Command, common, given, option
from dlperf.core.argument_types import percent
from dlperf.core.errors import DlperfError
from dlperf.core.files import schema_of
from dlperf.core.streams import warn
from dlperf.core.units import format_percent

if TYPE_CHECKING:
    from dlperf.report.step_times import StepTimes

PREDICTOR = "calibrated"


def compare(args: Namespace) -> Answer:
    """The differences of A and B; exit status 1 where a step grew by more than allowed."""
    from dlperf.report.document import to_markdown, to_text
    from dlperf.report.step_difference import SCHEMA, SCHEMA_VERSION, compare_steps

    useless = given(args, ("batch_size", "threads", "predictor", "inference", "input"))
    if useless and not any(map(_is_predicted, (args.a, args.b))):
        raise DlperfError(
            f"{useless} changes nothing: {args.a} and {args.b} contain their times; leave it out,"
            " or name targets or trace files, which are predicted"
        )
    warn_once = cache(warn)
    found = compare_steps(*(_steps_of(args, side, warn_once) for side in (args.a, args.b)))
    grown = [one for one in found if one.growth_frac > (args.fail_above or float("inf"))]
    for one in grown:
        warn(
            f"{one.second.name}: the step grew by {format_percent(one.growth_frac)}, more than"
            f" {format_percent(args.fail_above)}"
        )
    page = [block for one in found for block in one.page()]
    text = to_markdown("comparison", page) if args.format == "md" else to_text(page)
    data = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "failed": bool(grown),
        "steps": [one.to_json() for one in found],
    }
    return Answer(text, data, status=1 if grown else 0)


def _is_predicted(spec: str) -> bool:
    """Whether a side is predicted here: a target or a trace file."""
    return schema_of(spec) in (None, "dlperf.trace")


def _steps_of(args: Namespace, spec: str, warn: Callable[[str], None]) -> list[StepTimes]:
    """The steps of a file; a trace or a target is predicted."""
    from dlperf.report.step_times import step_of_prediction, steps_of_file

    if not _is_predicted(spec):
        return steps_of_file(spec)
    machine = load_machine(args, devices=True)
    threads = threads_for(args, machine)
    steps = []
    for target, size in split_batch(spec):
        trace = read_or_record(args, target, size, machine)
        prediction = predict_and_warn(
            trace, machine, threads, args.predictor or PREDICTOR, warn=warn
        )
        steps.append(step_of_prediction(prediction, spec))
    return steps


COMMAND = Command(
    "compare",
    "compare two steps, layer by layer, without running them",
    options=(
        option(
            "a",
            metavar="A",
            help=f"prediction, measurement, report, run or trace file; or {TARGET_HELP}",
        ),
        option("b", metavar="B", help="the same of what came after"),
        option(
            "--fail-above",
            type=percent,
            metavar="5%",
            help="exit status 1 where a step grows by more",
        ),
        option("--predictor", metavar="NAME", help=f"predictor ({PREDICTOR})"),
        option("--format", choices=("text", "md"), default="text", help="text (default) or md"),
        *common(),
        *MODEL,
    ),
    work=compare,
)
