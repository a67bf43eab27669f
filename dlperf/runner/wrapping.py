"""Wraps a training script (``dlperf run``) or a training loop (:class:`profile`).

torch is imported when the script imports it: what the script sets up for it (threads, environment)
keeps its effect.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from dlperf.core import streams
from dlperf.core.errors import DlperfError, check_type, one_line
from dlperf.core.files import default_path
from dlperf.core.garbage import uncollected
from dlperf.core.text import visible
from dlperf.runner.main_script import INTERRUPTED, check_script, run_as_main
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
    n_steps: int | None = None,
    cluster_path: str | Path | None = None,
    communication: str | Path | None = None,
    timeline_path: str | Path | None = None,
) -> int:
    """Run a training script as ``__main__``, report on its training; returns its exit status.

    ``command[0]`` is the script (`module`: the module's name), the rest its arguments.
    `machine_path` is the machine file, by default this machine's; where there is none a quick one
    is made. The report is written to `output` (``.html``, ``.md``, else text), by default to stdout
    after the script's own output; `json_path` is for JSON (``-``: stdout, and nothing else of
    dlperf), `timeline_path` for the timeline of the step. All else goes to stderr, the ETA of the
    run included; `n_epochs` or `n_steps` is its length, where the script's loops do not tell it.

    Under torchrun every rank is watched, with its calls on process groups, and rank 0 reports for
    all. The trace of these calls is written to `communication`. With the cluster file at
    `cluster_path` the distributed step has a prediction.

    Raises DlperfError where there is no such script, or an explicitly named machine or cluster file
    cannot be read.
    """
    check_script(command, module)
    world = World.of(os.environ)
    if world.n_ranks == 1 and os.environ.get("RANK", "0") != "0":
        return run_as_main(command, module)  # one of an unknown number of ranks
    run = _ScriptRun(command, module, debug, Rendezvous(world))
    if world.rank:
        return run.as_other_rank(threads)
    # a script may change its directory
    report = None if output is None or str(output) == "-" else Path(output).absolute()
    json = json_path if json_path in (None, "-") else str(Path(json_path).absolute())
    calls = None if communication is None else Path(communication).absolute()
    timeline = None if timeline_path is None else Path(timeline_path).absolute()
    with uncollected():
        machine = find_machine(machine_path)
        cluster = _find_cluster(cluster_path)
        if world.n_ranks == 1 and (cluster is not None or calls is not None):
            streams.log(
                "one rank sends nothing: --cluster and --communication are for several, started"
                " with torchrun"
            )
        run.session = Session(threads, machine, (n_epochs, n_steps), run.rendezvous)
        gc.freeze()  # the script's collections need not look through the machine file

    def end() -> None:
        try:
            run.session.end()
            with streams.escaping(), uncollected():
                run.report(machine, cluster, report, json, calls, timeline)
        except DlperfError as error:
            run.log(str(error), error)
        except OSError as error:
            name = f"{error.filename}: " if error.filename else ""
            run.log(f"the report was not written: {name}{error.strerror or error}", error)
        except KeyboardInterrupt:
            run.log("interrupted while reporting")
        except Exception as error:  # a report that fails is no failure of the script
            run.log(f"the report failed: {one_line(error)}", error)

    with contextlib.ExitStack() as stack:
        if json == "-":
            stack.enter_context(streams.stdout_to_stderr())
        with _reporting_at_sigterm(run, stack, end):
            if not run.execute():
                return run.status
    if run.status == INTERRUPTED:
        run.log("interrupted: reporting on the steps that were seen; Ctrl-C once more ends that")
    end()
    return run.status


@contextlib.contextmanager
def _reporting_at_sigterm(
    run: _ScriptRun, stack: contextlib.ExitStack, end: Callable[[], None]
) -> Iterator[None]:
    """Where the script leaves SIGTERM alone, it ends the process as ever, after `stack` is closed
    and the report made. With several ranks nothing changes: others end at the same time.
    """
    pid = os.getpid()

    def handle(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        try:
            if os.getpid() == pid:  # no child that the script forked
                run.status = 128 + number
                run.log("ended by SIGTERM: reporting on the steps that were seen")
                stack.close()
                # It may come within no_grad, or while torch is imported.
                torch = sys.modules.get("torch")
                with getattr(torch, "enable_grad", contextlib.nullcontext)():
                    end()
                streams.flush_out()
        finally:
            os.kill(os.getpid(), number)

    is_ours = (
        run.rendezvous.world.n_ranks == 1
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if is_ours:
        signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        if is_ours and signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _ScriptRun:
    """One run of a script on this rank."""

    session: Session

    def __init__(
        self, command: Sequence[str], module: bool, debug: bool, rendezvous: Rendezvous
    ) -> None:
        self.rendezvous, self.status = rendezvous, 0
        self._command, self._module, self._debug = command, module, debug
        self._name = command[0] if module else os.path.basename(command[0])

    def execute(self) -> bool:
        """Run the script under the session; False in a process that the script forked."""
        self.session.watch_after_torch()
        pid = os.getpid()
        self.status = run_as_main(self._command, self._module)
        if os.getpid() != pid:
            return False
        streams.flush_out()
        return True

    def as_other_rank(self, threads: int | None) -> int:
        """Watch a rank other than 0; its findings go to rank 0, and nothing is printed."""
        self.session = Session(threads, None, (None, None), self.rendezvous)
        if not self.execute():
            return self.status
        try:
            self.session.end()
            if "torch" in sys.modules:
                self.rendezvous.give(self.session.rank_findings(self.status).to_json())
        except Exception as error:  # rank 0 misses it and reports it
            if self._debug:
                rank = self.rendezvous.world.rank
                self.log(f"rank {rank} could not hand over its findings: {one_line(error)}", error)
        return self.status

    def log(self, line: str, error: BaseException | None = None) -> None:
        """Write a line to stderr; for debugging the traceback, too."""
        streams.log(line)
        if self._debug and error is not None:
            traceback.print_exception(error)

    def _merged_ranks(self) -> MergedRanks | None:
        """The findings of all ranks, once they have ended; None for one rank or without torch."""
        n_ranks = self.rendezvous.world.n_ranks
        if n_ranks == 1 or "torch" not in sys.modules:
            return None
        from dlperf.runner.ranks import MergedRanks, RankFindings

        others = self.rendezvous.collect(FAILED_LIMIT_S if self.status else None)
        found = {rank: RankFindings.from_json(data) for rank, data in others.items()}
        found[0] = self.session.rank_findings(self.status)
        return MergedRanks(dict(sorted(found.items())), n_ranks, self._name)

    def report(
        self,
        machine: Machine | None,
        cluster: Cluster | None,
        report: Path | None,
        json: str | None,
        communication: Path | None,
        timeline: Path | None,
    ) -> None:
        """Write the report and the files that were asked for."""
        from dlperf.core.files import write_json, write_text

        ranks, watcher = self._merged_ranks(), self.session.watcher
        if ranks is not None and communication is not None:
            if ranks.trace is not None:
                ranks.trace.save(communication)
            else:
                self.log(f"{communication} was not written: {ranks.problem}")
        failure = self.session.failure
        if failure is not None:
            self.log(f"watching failed and was given up: {one_line(failure)}", failure)
            return
        if watcher is None or (self.status and not watcher.epochs.n_steps and ranks is None):
            if not self.status:
                self.log("no training was found: the script never imported torch")
            return  # a script that failed before it trained has said why
        from dlperf.runner import run_report
        from dlperf.runner.findings import Findings

        try:
            findings = Findings(watcher, machine, self._name, self.session.live, ranks, cluster)
        except DlperfError:
            for remark in [] if ranks is None else ranks.remarks:
                self.log(remark)
            if ranks is not None and json != "-" and (lines := ranks.lines()):
                streams.write_out("\n".join(("", *lines)))
            if ranks is None or not ranks.is_whole_run:
                raise
            self.log(
                "no optimizer stepped: these are the run's own calls, and there is no training to"
                " report on"
            )
            return
        findings.prediction  # noqa: B018  first, so that its notes are among the others
        findings.parallel_step  # noqa: B018
        if json is not None:
            write_json(json, run_report.to_json(findings))
        if timeline is not None:
            write_json(timeline, run_report.to_timeline(findings), indent=None)
        if report is not None:
            write_text(report, run_report.to_document(findings, report.suffix))
            self.log(f"wrote {report}")
        elif json != "-":
            streams.write_out(f"\n{visible(run_report.to_text(findings))}")
        if 0 < self.status < INTERRUPTED:
            self.log(f"the script ended with status {self.status}; the report is of what it did")


# -- the machine -----------------------------------------------------------------------------------


def find_machine(path: str | Path | None) -> Machine | None:
    """The machine file; where there is none, a quick one is made.

    None, and a line on stderr, where that fails. Raises DlperfError for a file that was named and
    cannot be read.
    """
    from dlperf.core.machine import Machine

    index = Path(path) if path is not None else default_path()
    if path is not None or os.path.exists(index):
        return Machine.load(index)
    streams.log(
        f"this machine has not been measured; doing so quickly, once, into {index} (dlperf"
        " calibrate does it better)"
    )
    # a folder named dlperf beside the script is not this package
    start = (
        "import runpy, sys; sys.path[0] = sys.argv.pop(1); runpy.run_module('dlperf',"
        " run_name='__main__', alter_sys=True)"
    )
    home = str(Path(__file__).resolve().parents[2])
    options = ["calibrate", "--quick", "--threads", "1", "-o", str(index)]
    try:
        index.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-c", start, home, *options],
            stdout=sys.stderr,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode == 0:
            return Machine.load(index)
        reason = f"status {done.returncode}"
    except (OSError, DlperfError) as error:
        reason = str(error)
    streams.log(f"measuring the machine failed ({reason}); going on without predictions")
    return None


def _find_cluster(path: str | Path | None) -> Cluster | None:
    if path is None:
        return None
    from dlperf.core.cluster import Cluster

    return Cluster.load(path)


# -- in one's own code -----------------------------------------------------------------------------


def chosen_machine(call: str, machine: Machine | str | Path | None) -> Machine | None:
    """The machine that `call` got, by default this machine's; None, and a warning, without a file.

    Raises DlperfError for a machine file that is missing or cannot be used.
    """
    from dlperf.core.machine import Machine

    if machine is not None:
        way_out = "a Machine, or a machine file by its path"
        check_type(call, "machine", machine, (Machine, str, Path), way_out)
    elif os.path.exists(default_path()):
        machine = default_path()
    else:
        warnings.warn(
            f"dlperf: no machine file {default_path()}: the loop is measured, and predicted"
            " once dlperf calibrate has made it",
            stacklevel=3,
        )
    return Machine.load(machine) if isinstance(machine, (str, Path)) else machine


def report_of(call: str, findings: Findings) -> Report:
    """Predicted beside actual. Raises DlperfError, with the reason, without a prediction."""
    if findings.report is not None:
        return findings.report
    reason = "no machine file; make one with dlperf calibrate"
    if findings.machine is not None and findings.notes:
        reason = findings.notes[-1]
    raise DlperfError(f"{call}: {reason}")


class profile:
    """Watch the training loop inside a ``with`` block::

        with dlperf.profile(model) as profile:
            for x, y in loader: ...
        print(profile.report().to_text())

    The loop must call the model and ``backward``, for 7 steps at least and 19 to time layers; then
    no hook is left but a step counter. A step is one period of the loop, with all models that train
    in it. `machine` is a Machine or a machine file, by default this machine's file. Where it has a
    reference, the machine's state is read after the timed steps, and the report is at it. A loop
    that raises raises unchanged.

    Raises DlperfError, before the loop runs, for a machine file that is missing or cannot be used.
    """

    def __init__(self, model: nn.Module, machine: Machine | str | Path | None = None) -> None:
        from torch import nn

        check_type("profile", "model", model, nn.Module, "an instance, the one that the loop calls")
        self._model, self._machine = model, chosen_machine("profile", machine)
        self._watcher: Watcher | None = None
        self._is_over = False
        self._findings: Findings | None = None

    def __enter__(self) -> profile:
        from dlperf.runner.state_readings import StateReadings
        from dlperf.runner.watcher import Watcher

        self._watcher = Watcher(self._model, state_readings=StateReadings(self._machine))
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
        """All findings. Raises DlperfError where no training was seen."""
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
            if not self._is_over:
                return repr(self)
            from dlperf.runner.run_report import to_text

            return to_text(self.findings)
        except DlperfError as error:
            return f"{self!r}\n{error}"

    def _repr_html_(self) -> str:
        from dlperf.report.document import Preformatted
        from dlperf.report.html import to_fragment
        from dlperf.runner.run_report import page

        try:
            if self._is_over:
                return to_fragment(page(self.findings, is_brief=True))
        except DlperfError:
            pass  # its text has the reason
        return to_fragment([Preformatted(str(self))])

    @property
    def measurement(self) -> Measurement:
        """The watched steps."""
        return self.findings.measurement

    @property
    def trace(self) -> Trace | None:
        """The step, recorded with the inputs and loss that were seen; None where that failed."""
        return self.findings.trace

    def report(self) -> Report:
        """Predicted beside actual. Raises DlperfError without a machine, a prediction or steps."""
        return report_of("profile", self.findings)
