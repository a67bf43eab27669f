"""``dlperf measure``: times a step and its layers."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import TYPE_CHECKING

from dlperf.cli.inputs import (
    Answer,
    check_file,
    machine_path,
    refuse_trace,
    resolve,
    use_threads,
    warn_of_threads,
)
from dlperf.cli.options import (
    ACCELERATOR,
    MODEL,
    TARGET,
    Command,
    common,
    flag,
    option,
    output,
)
from dlperf.core import child_process
from dlperf.core.argument_types import seconds
from dlperf.core.files import MEASUREMENT
from dlperf.core.streams import warn, write_err

if TYPE_CHECKING:
    from dlperf.core.measurement import Measurement


def measure(args: Namespace) -> Answer:
    """Time a step and its layers, in this fresh process."""
    from dataclasses import replace

    from dlperf.core.host import usual_threads_of_file

    refuse_trace(args.target, "measure")
    use_threads(args.threads)
    threads = use_threads(args.threads or usual_threads_of_file(machine_path(args)))
    warn_of_threads(threads)
    target = resolve(args, args.target)
    from dlperf.profiler import step_profiler
    from dlperf.recorder.accelerator import find_accelerator
    from dlperf.report.step_pages import measurement_to_text

    measurement = step_profiler.measure_target(
        target,
        seconds=args.seconds,
        with_trace=not args.no_trace,
        device=None if args.device is None else find_accelerator(args.device),
    )
    if args.memory:
        from dlperf.profiler.peak_memory import measure_peak_memory

        size = measure_peak_memory(
            args.target,
            measurement.batch_size,
            threads,
            inference=args.inference,
            input_shape=args.input,
        )
        measurement = replace(measurement, peak_memory_bytes=size)
    if args.output is not None:
        measurement.save(args.output)
    for note in measurement.notes:
        warn(note)
    return Answer(measurement_to_text(measurement), measurement.to_json())


def measure_apart(args: Namespace, spec: str, batch_size: int, threads: int) -> Measurement:
    """A measurement from a fresh process, whose memory no recording has touched.

    Raises DlperfError for an unusable target, WorkFailed where measuring it failed.
    """
    from dlperf.core.measurement import Measurement

    command = [
        *("measure", spec, "--no-trace", "--json", "-"),
        *("--batch-size", str(batch_size), "--threads", str(threads)),
        *("--seconds", str(args.seconds)),
        *(("--inference",) if args.inference else ()),
        *(("--input", ",".join(map(str, args.input))) if args.input else ()),
        *(("--device", args.device) if args.device else ()),
    ]
    with child_process.Child("dlperf", *command) as process:
        out, err = process.communicate()
    if process.returncode:
        line = child_process.last_line(err)
        raise child_process.failure(process.returncode, line.partition("error: ")[2] or err)
    for line in err.splitlines():
        write_err(line)
    return Measurement.from_json(json.loads(out))


COMMAND = Command(
    "measure",
    "time per step and its layers",
    options=(
        TARGET,
        option(
            "--seconds",
            type=seconds,
            default=4.0,
            metavar="S",
            help="how long to time the step (4)",
        ),
        flag(
            "--memory",
            "also count the most memory that three steps add to a fresh process",
        ),
        flag(
            "--no-trace",
            "leave the trace of the step out of the file; report then asks for the target",
        ),
        ACCELERATOR,
        output("measurement file to write; needed unless --json writes it"),
        *common(),
        *MODEL,
    ),
    work=measure,
    check=check_file,
    schema=MEASUREMENT,
)
