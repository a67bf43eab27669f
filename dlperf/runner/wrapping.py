"""``dlperf run script.py``: an unmodified training script, watched for a few steps; and the same
for a loop in one's own code.

torch is imported when the script imports it, not before: what the script sets up for it (threads,
environment) keeps its effect.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from dlperf.core import streams
from dlperf.core.errors import DlperfError, check_type
from dlperf.core.files import default_path
from dlperf.core.streams import write_err
from dlperf.core.text import visible
from dlperf.runner.main_script import check_script, run_as_main
from dlperf.runner.rendezvous import FAILED_LIMIT_S, Rendezvous, World
from dlperf.runner.session import Session

if TYPE_CHECKING:
    from torch import nn

    from dlperf.core.cluster import Cluster
    from dlperf.core.machine import Machine
    from dlperf.core.measurement import Measurement
    from dlperf.core.trace import Trace
    from dlperf.report.comparison import Report
    from dlperf.runner.findings import Findings
    from dlperf.runner.ranks import MergedRanks
    from dlperf.runner.watcher import Watcher


@dataclass(frozen=True)
class Outputs:
    """Where findings go: the report (``.html``, ``.md``, else text; None: stdout), the JSON (``-``:
    stdout, and nothing else of ours), the trace of the ranks' communication.
    """

    report: Path | None = None
    json: str | None = None
    communication: Path | None = None

    @classmethod
    def of(
        cls, report: str | Path | None, json: str | None, communication: str | Path | None
    ) -> Outputs:
        """As the user named them; a script may change directory, so they are where the user stands
        now.
        """
        return cls(
            None if report is None or str(report) == "-" else Path(report).absolute(),
            json if json is None or json == "-" else str(Path(json).absolute()),
            None if communication is None else Path(communication).absolute(),
        )


def run_script(
    command: Sequence[str],
    *,
    module: bool = False,
    machine_path: str | Path | None = None,
    threads: int | None = None,
    output: str | Path | None = None,
    json_path: str | None = None,
    debug: bool = False,
    n_epochs: int | None = None,
    cluster_path: str | Path | None = None,
    communication: str | Path | None = None,
) -> int:
    """Run a training script as ``__main__`` and report on its training when it ends; gives the
    script's exit status.

    ``command[0]`` is the script (`module`: the module's name), the rest its arguments.
    `machine_path` is the machine file, by default this machine's; where there is none a quick one
    is made first. The report goes to `output` (``.html``, ``.md``, else text), else to stdout after
    the script's own; `json_path` takes it as JSON (``-``: stdout, and nothing else of ours).
    Everything that dlperf has to say on the way goes to stderr, a forecast of the run among it;
    `n_epochs` is how many epochs that has, where it cannot be found in the script's loops.

    Under torchrun every rank is watched, the calls on its process groups too, and rank 0 alone
    reports, for all of them. `communication` takes the trace of these calls; with the cluster file
    at `cluster_path` the distributed step is predicted beside what it took.

    Raises DlperfError where there is no such script, or an explicitly named machine or cluster file
    cannot be read.
    """
    check_script(command, module)
    world = World.of(os.environ)
    if world.n_ranks == 1 and os.environ.get("RANK", "0") != "0":
        return run_as_main(command, module)  # one of several, nobody says how many
    exchange = Rendezvous(world)
    if world.rank:
        return _run_beside(command, module, threads, exchange, debug)
    outputs = Outputs.of(output, json_path, communication)
    machine = find_machine(machine_path)
    cluster = _find_cluster(cluster_path)
    if world.n_ranks == 1 and (cluster_path is not None or communication is not None):
        _say(
            "one rank sends nothing: --cluster and --communication are for several, started with"
            " torchrun"
        )
    session = Session(threads, machine, n_epochs, exchange)
    session.watch_when_torch_comes()
    pid = os.getpid()
    with streams.stdout_to_stderr() if outputs.json == "-" else contextlib.nullcontext():
        status = run_as_main(command, module)
    if os.getpid() != pid:
        return status  # a process that the script forked and that came this far
    streams.flush_out()
    try:
        session.end()
        team = _collect(session, exchange, status, _name_of(command, module))
        with streams.escaping():
            _report(session, machine, _name_of(command, module), outputs, debug, team, cluster)
    except DlperfError as error:
        _say(str(error), error, debug)
    except OSError as error:
        _say(
            "the report was not written:"
            f" {f'{error.filename}: ' if error.filename else ''}{error.strerror or error}",
            error,
            debug,
        )
    except KeyboardInterrupt:
        _say("interrupted while reporting")
    except Exception as error:  # a report that fails is no failure of the script
        _say(f"the report failed: {type(error).__name__}: {error}", error, debug)
    return status


def _run_beside(
    command: Sequence[str], module: bool, threads: int | None, exchange: Rendezvous, debug: bool
) -> int:
    """Another rank than 0: watched as rank 0 is, but for its layers; what was found goes to rank 0,
    and nothing is printed.
    """
    session = Session(threads, None, None, exchange)
    session.watch_when_torch_comes()
    pid = os.getpid()
    status = run_as_main(command, module)
    if os.getpid() != pid:
        return status
    streams.flush_out()
    try:
        session.end()
        if "torch" in sys.modules:
            exchange.give(session.findings(status).to_json())
    except Exception as error:  # rank 0 misses it and says so
        if debug:
            _say(
                f"rank {exchange.world.rank} could not hand over its findings:"
                f" {type(error).__name__}: {error}",
                error,
                debug,
            )
    return status


def _collect(session: Session, exchange: Rendezvous, status: int, name: str) -> MergedRanks | None:
    """The findings of all ranks, once they have ended; None for one rank, and for a script without
    torch.
    """
    world = exchange.world
    if world.n_ranks == 1 or "torch" not in sys.modules:
        return None
    from dlperf.runner.ranks import MergedRanks, RankFindings

    others = exchange.collect(FAILED_LIMIT_S if status else None)
    found = {
        0: session.findings(status),
        **{rank: RankFindings.from_json(data) for rank, data in others.items()},
    }
    return MergedRanks(found, world.n_ranks, name)


def _report(
    session: Session,
    machine: Machine | None,
    name: str,
    outputs: Outputs,
    debug: bool,
    team: MergedRanks | None,
    cluster: Cluster | None,
) -> None:
    from dlperf.core.files import write_json, write_text

    if team is not None and outputs.communication is not None:
        if team.trace is not None:
            team.trace.save(outputs.communication)
        else:
            _say(f"{outputs.communication} was not written: {team.problem}")
    watcher = session.watcher
    if session.error is not None:
        _say(
            f"watching failed and was given up: {type(session.error).__name__}: {session.error}",
            session.error,
            debug,
        )
        return
    if watcher is None:
        _say("no training was found: the script never imported torch")
        return
    if watcher.error is not None:
        _say(
            f"watching failed and was given up: {type(watcher.error).__name__}: {watcher.error}",
            watcher.error,
            debug,
        )
        return
    from dlperf.runner.document import to_document
    from dlperf.runner.findings import Findings

    try:
        findings = Findings(watcher, machine, name, session.live, team, cluster)
    except DlperfError:
        if team is not None:
            for remark in team.remarks:
                _say(remark)
            if outputs.json != "-" and (lines := team.lines()):
                streams.write_out("\n".join(("", *lines)))
            if team.is_whole_run:
                _say(
                    "no optimizer stepped: these are the run's own calls, and there is no training"
                    " to report on"
                )
                return
        raise
    findings.prediction  # noqa: B018  first, so that its notes are among the others
    findings.parallel_step  # noqa: B018
    if outputs.json is not None:
        write_json(outputs.json, findings.to_json())
    if outputs.report is not None:
        write_text(outputs.report, to_document(findings, outputs.report.suffix))
    elif outputs.json != "-":
        streams.write_out(f"\n{visible(findings.to_text())}")


def _name_of(command: Sequence[str], module: bool) -> str:
    return command[0] if module else os.path.basename(command[0])


def _say(line: str, error: BaseException | None = None, debug: bool = False) -> None:
    write_err(f"dlperf: {line}")
    if debug and error is not None:
        traceback.print_exception(type(error), error, error.__traceback__, file=sys.stderr)


# -- the machine -----------------------------------------------------------------------------------


def find_machine(path: str | Path | None) -> Machine | None:
    """The machine file, a quick one made first where there is none; None (and a line on stderr)
    where that fails.

    Raises DlperfError for a file that was named and cannot be read.
    """
    from dlperf.core.machine import Machine

    place = Path(path) if path is not None else default_path()
    if path is not None or os.path.exists(place):
        return Machine.load(place)
    _say(
        f"this machine has not been measured; doing so quickly, once, into {place} (dlperf"
        " calibrate does it better)"
    )
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            _calibration(place), stdout=sys.stderr, stdin=subprocess.DEVNULL, check=False
        )
        if done.returncode == 0:
            return Machine.load(place)
        reason = f"status {done.returncode}"
    except (OSError, DlperfError) as error:
        reason = str(error)
    _say(f"measuring the machine failed ({reason}); going on without predictions")
    return None


def _find_cluster(path: str | Path | None) -> Cluster | None:
    from dlperf.core.cluster import Cluster

    return None if path is None else Cluster.load(path)


def _calibration(place: Path) -> list[str]:
    # a folder of the same name beside the script must not be taken for ours
    start = (
        "import runpy, sys; sys.path[0] = sys.argv.pop(1); runpy.run_module('dlperf',"
        " run_name='__main__', alter_sys=True)"
    )
    home = str(Path(__file__).resolve().parent.parent)
    return [
        sys.executable,
        "-c",
        start,
        home,
        "calibrate",
        "--quick",
        "--threads",
        "1",
        "-o",
        str(place),
    ]


# -- in one's own code -----------------------------------------------------------------------------


def _machine_of(given: Machine | str | Path | None) -> Machine | None:
    """The machine given or in the file given; by default this machine's, None where it was never
    measured.
    """
    from dlperf.core.machine import Machine, default_path

    if isinstance(given, Machine):
        return given
    place = default_path() if given is None else Path(given)
    return None if given is None and not os.path.exists(place) else Machine.load(place)


class profile:
    """Watch the training loop inside a ``with`` block::

        with dlperf.profile(model) as profile:
            for x, y in loader: ...
        print(profile.report().to_text())

    The loop must call the model, ``backward``, and an optimizer of torch.optim, for 7 steps at
    least and 19 to time layers; then no hook is left but a step counter. `machine` is a Machine or
    a machine file, by default this machine's file. A loop that raises raises unchanged.

    Raises DlperfError, before the loop runs, for a machine file that is missing or cannot be used.
    """

    def __init__(self, model: nn.Module, machine: Machine | str | Path | None = None) -> None:
        from torch import nn

        from dlperf.core.machine import Machine

        check_type("profile", "model", model, nn.Module, "an instance, the one that the loop calls")
        if machine is not None:
            check_type(
                "profile",
                "machine",
                machine,
                (Machine, str, Path),
                "a Machine, or a machine file by its path",
            )
        self._model, self._machine = model, _machine_of(machine)
        self._watcher: Watcher | None = None
        self._is_over = False
        self._findings: Findings | None = None

    def __enter__(self) -> profile:
        from dlperf.runner.watcher import Watcher

        if self._machine is None:
            text = (
                f"dlperf: no machine file {default_path()}: the loop is measured, and predicted"
                " once dlperf calibrate has made it"
            )
            warnings.warn(text, stacklevel=2)
        self._watcher = Watcher(self._model)
        self._watcher.install()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._watcher is not None
        self._watcher.remove()
        self._is_over = True

    @property
    def findings(self) -> Findings:
        """Everything that was found. Raises DlperfError where no training was seen."""
        if self._findings is None:
            if self._watcher is None:
                raise DlperfError("profile: nothing was watched; use it in a with statement")
            if self._watcher.error is not None:
                raise DlperfError(
                    f"profile: watching failed: {self._watcher.error}"
                ) from self._watcher.error
            from dlperf.runner.findings import Findings

            self._watcher.remove()
            self._findings = Findings(self._watcher, self._machine, type(self._model).__name__)
        return self._findings

    def __repr__(self) -> str:
        name = type(self._model).__name__
        if self._watcher is None:
            return f"<profile of {name}: nothing was watched; use it in a with statement>"
        return f"<profile of {name}: {self._watcher.epochs.n_steps} optimizer steps seen>"

    def __str__(self) -> str:
        try:
            return self.findings.to_text() if self._is_over else repr(self)
        except DlperfError as error:
            return f"{self!r}\n{error}"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    @property
    def measurement(self) -> Measurement:
        """The watched steps."""
        return self.findings.measurement

    @property
    def trace(self) -> Trace | None:
        """The step as recorded with the inputs and loss that were seen; None where it could not be."""
        return self.findings.trace

    def report(self) -> Report:
        """Predicted beside actual. Raises DlperfError where there is nothing to predict with, or
        nothing was seen.
        """
        report = self.findings.report
        if report is None:
            reason = (
                self.findings.notes[-1]
                if self.findings.machine is not None and self.findings.notes
                else "no machine file; make one with dlperf calibrate"
            )
            raise DlperfError(f"profile: {reason}")
        return report
