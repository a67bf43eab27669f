"""``dlperf machine``: shows, makes, checks and compares machine files, and probes the state."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING

from dlperf.cli.devices import IMPORT, NEW
from dlperf.cli.inputs import Answer, load_machine, naming_unfit_kernels
from dlperf.cli.options import Command, common, machine_files
from dlperf.cli.states import STATE_COMMAND, take_reading
from dlperf.core.errors import DlperfError
from dlperf.core.files import MACHINE, check_writable, schema_of
from dlperf.core.streams import warn
from dlperf.core.text import fit

if TYPE_CHECKING:
    from dlperf.core.machine import Machine
    from dlperf.core.state import State


def show(args: Namespace) -> Answer:
    """Summary of a machine file or a cluster file."""
    from dlperf.report.machine_summary import summarize

    if args.files and schema_of(args.files) == "dlperf.cluster":
        from dlperf.core.cluster import Cluster
        from dlperf.distributed.cluster_summary import ClusterSummary

        page = ClusterSummary(Cluster.load(args.files))
        return Answer(page.to_text(), page.to_json())
    machine = load_machine(args, args.files, devices=True)
    with naming_unfit_kernels(machine):
        summary = summarize(machine)
    if machine.data_sheet is not None:
        from dlperf.report.data_sheet_page import data_sheet_page, data_sheet_to_json

        data = {**summary.to_json(), "data_sheet": data_sheet_to_json(machine.data_sheet)}
        return Answer(fit(data_sheet_page(machine)), data)
    return Answer(fit(summary.to_text()), summary.to_json())


def check(args: Namespace) -> Answer:
    """Whether a machine file can be trusted on this machine."""
    from dlperf.core import host
    from dlperf.core.machine_doubts import find_mismatches, find_state_problem
    from dlperf.core.readings import with_readings
    from dlperf.report import machine_check

    cpu, versions = host.this_cpu(), host.versions()
    machine = load_machine(args, args.files)
    state: State | None = None
    # What has no memory sweep yet was interrupted: nothing can be predicted from it.
    is_measured = bool(machine.kernels and machine.bandwidths)
    if is_measured and not find_mismatches(machine, cpu, versions):
        reading = take_reading(max(machine.threads))
        state = None if machine.reference is None else reading.over(machine.reference)
        machine = _repeat_self_test(with_readings(machine, [reading]))
        _keep(machine)
    problems = machine_check.find_problems(machine, cpu, versions)
    remarks = machine_check.find_remarks(machine)
    if state_problem := find_state_problem(machine):
        remarks.append(f"it {state_problem}")
    lines = [*problems, *machine_check.self_test_lines(machine)]
    lines += [] if state is None else [f"state now: {state.describe()}"]
    lines += [f"note: {remark}" for remark in remarks]
    verdict = "cannot be trusted here" if problems else "can be trusted here"
    text = "\n  ".join([f"{machine.path}: {verdict}", *dict.fromkeys(lines)])
    data = {
        "schema": "dlperf.machine-check",
        "schema_version": 1,
        "machine": machine.path,
        "trusted": not problems,
        "problems": problems,
        "remarks": remarks,
        "state": None if state is None else vars(state),
        "self_tests": [
            {**vars(test), "error_frac": test.error_frac} for test in machine.self_tests
        ],
    }
    return Answer(fit(text), data, status=1 if problems else 0)


def diff(args: Namespace) -> Answer:
    """Differences of two machine files."""
    from dlperf.report.machine_check import compare_machines

    machines = [load_machine(args, file) for file in args.files]
    with naming_unfit_kernels(*machines):
        difference = compare_machines(*machines)
    return Answer(fit(difference.to_text()), difference.to_json())


def _repeat_self_test(machine: Machine) -> Machine:
    """The machine with a self-test of this moment."""
    from dlperf.studies import self_test

    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(self_test.start(n)) for n in machine.threads]
        return self_test.run(machine, processes, self_test.seeds_of_check())


def _keep(machine: Machine) -> None:
    """Write the file of a machine; one that cannot be written is warned of."""
    try:
        check_writable(machine.path, schema=MACHINE)
        machine.save(machine.path)
    except DlperfError:
        warn(
            f"{machine.path}: cannot be written, so it keeps neither this check's reading nor its"
            " self-test; make the file and its folder writable, or copy it"
        )


def _action(
    name: str, text: str, work: Callable[[Namespace], Answer], n_files: int | str = "?"
) -> Command:
    files = machine_files(n_files)
    return Command(name, text, (files, *common(threads=False, batch_size=False)), work)


COMMAND = Command(
    "machine",
    "show, make, check or compare machine files; probe this machine's state",
    actions=(
        _action("show", "what a machine file, or a cluster file, contains", show),
        _action("check", "whether a machine file can be trusted here; exit status 1 if not", check),
        _action("diff", "how two machine files differ", diff, 2),
        STATE_COMMAND,
        NEW,
        IMPORT,
    ),
)
