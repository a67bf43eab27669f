"""``dlperf trace``: records a step."""

from __future__ import annotations

from argparse import Namespace

from dlperf.cli.inputs import Answer, check_file, read_or_record
from dlperf.cli.options import (
    MODEL,
    TARGET,
    Command,
    common,
    output,
)
from dlperf.core.files import TRACE
from dlperf.core.text import counted, fit


def trace(args: Namespace) -> Answer:
    """Record a step."""
    recorded = read_or_record(args, args.target)
    if args.output is not None:
        recorded.save(args.output)
    kind = "forward pass" if recorded.inference else "training step"
    text = (
        f"{recorded.target}: a {kind} at batch size {recorded.batch_size},"
        f" {counted(len(recorded.layers), 'layer')},"
        f" {counted(recorded.n_parameters, 'parameter')}, {counted(len(recorded.ops), 'op')},"
        f" recorded on {recorded.recorded_on}"
    )
    if args.output:
        text += f"; written to {args.output}"
    return Answer(fit(text), recorded.to_json(), indent=None)


COMMAND = Command(
    "trace",
    "record a step and save it",
    options=(
        TARGET,
        output("trace file to write"),
        *common(),
        *MODEL,
    ),
    work=trace,
    check=check_file,
    schema=TRACE,
)
