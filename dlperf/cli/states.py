"""States of the machine: what ``--state`` names, and ``dlperf machine state``."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dlperf.cli.inputs import Answer, load_machine, threads_for, use_threads
from dlperf.cli.options import Command, Problems, common, machine_files, option, output
from dlperf.core.errors import DlperfError
from dlperf.core.streams import warn
from dlperf.core.text import counted, fit

if TYPE_CHECKING:
    from dlperf.core.machine import Machine
    from dlperf.core.state import Reading, State

NOW, REFERENCE = "now", "reference"
STATE = option(
    "--state",
    dest="states",
    action="append",
    default=[],
    metavar="FILE|now|reference",
    help=(
        "state of the machine: a file of dlperf machine state, a probe now, or the machine file's"
        " reference (default: the median of the machine file's readings). Given several times, the"
        " median counts, and the interval contains their spread"
    ),
)


def states_of(names: Sequence[str], machine: Machine, threads: int) -> list[State]:
    """The named states for steps of `threads`.

    Raises DlperfError for a file of another machine or another kind, and for ``now`` with a machine
    file of another machine.
    """
    return [_state(name, machine, threads) for name in names]


def warn_of_states(machine: Machine) -> None:
    """Warn of a machine file that lacks what states need. Predictions tell of contradictions."""
    from dlperf.core.machine_doubts import find_state_problem

    if problem := find_state_problem(machine):
        warn(f"{_name(machine)}: {problem}")


def take_reading(threads: int) -> Reading:
    """A reading of this machine now, with a team of `threads`."""
    from dlperf.core import state_probe

    if threads > 1:
        use_threads(threads)
    return state_probe.take_reading()


def _state(name: str, machine: Machine, threads: int) -> State:
    """The state of a name, as at the reference without any."""
    from dlperf.core import state
    from dlperf.core.machine_doubts import find_impossible_factor
    from dlperf.core.state_file import ProbedState

    if name == REFERENCE:
        return state.REFERENCE
    if name == NOW:
        _check_this_machine(machine, "for the state there, give the FILE of dlperf machine state")
        reading = take_reading(threads) if machine.reference is not None else None
    elif not os.path.exists(name):
        raise DlperfError(
            f"--state {name}: is neither now nor reference, and there is no such file; dlperf"
            " machine state -o FILE makes one"
        )
    else:
        probed = ProbedState.load(name)
        if probed.identity != machine.cpu.identity:
            raise DlperfError(
                f"{name}: is of another machine ({_named(probed.identity)}) than"
                f" {_name(machine)} ({_named(machine.cpu.identity)}); dlperf machine state -o FILE"
                " probes the machine that it runs on"
            )
        reading = probed.reading
    if machine.reference is None or reading is None:
        return state.REFERENCE
    if name != NOW and (impossible := find_impossible_factor(reading, machine.reference)):
        raise DlperfError(
            f"{name}: reading.{impossible}; dlperf machine state -o FILE probes the machine again"
        )
    found = reading.over(machine.reference)
    if reading.parallel_region_s or threads == 1:
        return found
    return replace(found, core_to_core=machine.usual_state.core_to_core)  # of one thread alone


def _check_this_machine(machine: Machine, way_out: str) -> None:
    """Raise DlperfError for a machine file of another processor than this."""
    from dlperf.core import host

    cpu = host.this_cpu()
    if machine.cpu.identity != cpu.identity:
        raise DlperfError(
            f"{_name(machine)}: is of another machine ({_named(machine.cpu.identity)}; this is"
            f" {_named(cpu.identity)}); {way_out}"
        )


def _name(machine: Machine) -> str:
    return machine.path or "the machine file"


def _named(identity: tuple[str, str, int]) -> str:
    """A machine in words: model, cores, and the family, in which two of a model may differ."""
    model, family, n_cores = identity
    return f"{model}, {family}, {counted(n_cores, 'core')}"


# -- dlperf machine state --------------------------------------------------------------------------


def probe(args: Namespace) -> Answer:
    """The state of this machine now, against the machine file's reference."""
    from dlperf.core.state_file import probed_state

    machine = load_machine(args, args.files)
    _check_this_machine(machine, "name this machine's file")
    found = probed_state(take_reading(threads_for(args, machine)))
    if args.output is not None:
        found.save(args.output)
    warn_of_states(machine)
    state = None if machine.reference is None else found.reading.over(machine.reference)
    lines = [found.reading.describe() if state is None else state.describe()]
    if machine.states:
        n, usual = len(machine.states), machine.usual_state.describe()
        lines.append(f"median of {counted(n, 'reading')}: {usual}")
    return Answer(fit("\n".join(lines)), {**found.to_json(), "state": state and vars(state)})


def check(args: Namespace) -> Problems:
    """Whether the file can be written. Raises DlperfError for one that it may not write."""
    from dlperf.core.files import check_writable

    if args.output == "-":
        args.output, args.json = None, "-"
    if args.output is not None:
        check_writable(args.output, args.force)
    return ()


STATE_COMMAND = Command(
    "state",
    "how fast this machine is now against its machine file, by a short probe",
    options=(
        machine_files(),
        output("state file to write, for predict --state"),
        *common(batch_size=False),
    ),
    work=probe,
    check=check,
)
