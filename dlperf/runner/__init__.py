"""``dlperf run script.py``: an unmodified training script, watched for a few steps; and the same for a loop in one's own code.

torch is imported when the script imports it, not before: what the script sets up for it (threads, environment) keeps its effect.
"""
from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import os
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from dlperf.errors import DlperfError, check_type
from dlperf.runner.looks import Looks, Usual, usual_of
from dlperf.runner.main_script import check_script, run_as_main

if TYPE_CHECKING:
    from torch import nn

    from dlperf.machine import Machine
    from dlperf.measurement import Measurement
    from dlperf.report.comparison import Report
    from dlperf.runner.findings import Findings
    from dlperf.runner.live import Live
    from dlperf.runner.watcher import Watcher
    from dlperf.trace import Trace


def run_script(
    command: Sequence[str], *, module: bool = False, machine_path: str | Path | None = None, threads: int | None = None,
    output: str | Path | None = None, json_path: str | None = None, debug: bool = False, n_epochs: int | None = None,
) -> int:  # fmt: skip
    """Run a training script as ``__main__`` and report on its training when it ends; gives the script's exit status.

    ``command[0]`` is the script (`module`: the module's name), the rest its arguments. `machine_path` is the machine file,
    by default this machine's; where there is none a quick one is made first. The report goes to `output` (``.html``, ``.md``, else text), else to stdout
    after the script's own; `json_path` takes it as JSON (``-``: stdout, and nothing else of ours). Everything that
    dlperf has to say on the way goes to stderr, a forecast of the run among it; `n_epochs` is how many epochs that has, where it
    cannot be found in the script's loops. Under torchrun the first rank reports.

    Raises DlperfError where there is no such script, or an explicitly named machine file cannot be read.
    """
    check_script(command, module)
    # The script may change directory; what the user named is where the user stands now.
    output = None if output is None or str(output) == "-" else Path(output).absolute()
    json_path = json_path if json_path is None or json_path == "-" else str(Path(json_path).absolute())
    first_rank = os.environ.get("RANK", "0") == "0"
    if not first_rank:
        return run_as_main(command, module)
    machine = find_machine(machine_path)
    session = _Session(threads, machine, n_epochs)
    session.watch_when_torch_comes()
    pid = os.getpid()
    with _stdout_to_stderr() if json_path == "-" else contextlib.nullcontext():
        status = run_as_main(command, module)
    if os.getpid() != pid:
        return status  # a process that the script forked and that came this far
    sys.stdout.flush()
    try:
        session.end()
        _report(session, machine, _name_of(command, module), output, json_path, debug)
    except DlperfError as error:
        _say(str(error), error, debug)
    except KeyboardInterrupt:
        _say("interrupted while reporting")
    except Exception as error:  # a report that fails is no failure of the script
        _say(f"the report failed: {type(error).__name__}: {error}", error, debug)
    return status


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """The script's own output goes to stderr, its child processes' too, so that stdout is left to the JSON."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _report(session: _Session, machine: Machine | None, name: str, output: str | Path | None, json_path: str | None, debug: bool) -> None:
    from dlperf.files import write_json, write_text

    watcher = session.watcher
    if session.error is not None:
        _say(f"watching failed and was given up: {type(session.error).__name__}: {session.error}", session.error, debug)
        return
    if watcher is None:
        _say("no training was found: the script never imported torch")
        return
    if watcher.error is not None:
        _say(f"watching failed and was given up: {type(watcher.error).__name__}: {watcher.error}", watcher.error, debug)
        return
    from dlperf.runner.document import to_document
    from dlperf.runner.findings import Findings

    findings = Findings(watcher, machine, name, session.live)
    findings.prediction  # noqa: B018  first, so that its notes are among the others
    if json_path is not None:
        write_json(json_path, findings.to_json())
    if output is not None:
        write_text(output, to_document(findings, Path(output).suffix))
    elif json_path != "-":
        print(f"\n{findings.to_text()}", flush=True)


def _name_of(command: Sequence[str], module: bool) -> str:
    return command[0] if module else os.path.basename(command[0])


def _say(line: str, error: BaseException | None = None, debug: bool = False) -> None:
    print(f"dlperf: {line}", file=sys.stderr, flush=True)
    if debug and error is not None:
        traceback.print_exception(type(error), error, error.__traceback__, file=sys.stderr)


# -- the machine -------------------------------------------------------------------------------------------------------


def find_machine(path: str | Path | None) -> Machine | None:
    """The machine file, a quick one made first where there is none; None (and a line on stderr) where that fails.

    Raises DlperfError for a file that was named and cannot be read.
    """
    from dlperf.machine import Machine, default_path

    place = Path(path) if path is not None else default_path()
    if path is not None or place.exists():
        return Machine.load(place)
    _say(f"this machine has not been measured; doing so quickly, once, into {place} (dlperf calibrate does it better)")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(_calibration(place), stdout=sys.stderr, stdin=subprocess.DEVNULL, check=False)
        if done.returncode == 0:
            return Machine.load(place)
        reason = f"status {done.returncode}"
    except (OSError, DlperfError) as error:
        reason = str(error)
    _say(f"measuring the machine failed ({reason}); going on without predictions")
    return None


def _calibration(place: Path) -> list[str]:
    # a folder of the same name beside the script must not be taken for ours
    start = "import runpy, sys; sys.path[0] = sys.argv.pop(1); runpy.run_module('microbench', run_name='__main__', alter_sys=True)"
    home = str(Path(__file__).resolve().parent.parent)
    return [sys.executable, "-c", start, home, "--quick", "-o", str(place)]


# -- when torch comes --------------------------------------------------------------------------------------------------


class _Session:
    """One watched run: sets the watcher when torch has been imported."""

    def __init__(self, threads: int | None, machine: Machine | None, n_epochs: int | None) -> None:
        self.watcher: Watcher | None = None
        self.live: Live | None = None
        self.error: BaseException | None = None
        self._threads, self._machine, self._n_epochs = threads, machine, n_epochs
        self._looks = Looks()
        self._looks.take()
        self._finder: _AfterTorch | None = None

    def watch_when_torch_comes(self) -> None:
        """Now, if it is there already."""
        if "torch" in sys.modules:
            self._begin()
        else:
            self._finder = _AfterTorch(self._begin)
            sys.meta_path.insert(0, self._finder)

    def _begin(self) -> None:
        try:
            import torch

            from dlperf.runner.live import Live, StderrLine
            from dlperf.runner.watcher import Watcher

            if self._threads is not None:
                torch.set_num_threads(self._threads)
            self._looks.take()
            watcher = Watcher(looks=self._looks)
            usual = _usual_of(self._machine, torch.get_num_threads())
            live = Live(watcher.epochs, watcher.clock, StderrLine(), self._n_epochs)
            watcher.on_watched = lambda watcher: _forecast_from(live, watcher, usual)
            watcher.install()
            self.watcher, self.live = watcher, live
        except Exception as error:  # the script goes on without us
            self.error = error

    def end(self) -> None:
        """Take out whatever is still set."""
        if self.live is not None:
            self.live.finish()
        if self._finder is not None and self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        if self.watcher is not None:
            self.watcher.remove()


def _usual_of(machine: Machine | None, threads: int) -> Usual:
    """The pace as the machine file has it; unknown where that is of another machine or torch."""
    from dlperf import host
    from dlperf.inspection import find_mismatches

    return Usual() if machine is None or find_mismatches(machine, host.this_cpu(), host.versions()) else usual_of(machine, threads)


def _forecast_from(live: Live, watcher: Watcher, usual: Usual) -> None:
    """The watching is over: what it saw goes to the forecast."""
    from dlperf.runner.forecast import SeenStep

    watched = watcher.watched
    if watched is None or not watched.plain:
        return
    seen = [
        SeenStep(
            step.interval_s, step.loading_s, step.loaded.n_made, step.loaded.is_idle, step.loaded.n_workers,
            step.processor_s / step.interval_s if step.interval_s else 1.0, probed,
        )
        for steps, probed in ((watched.plain, False), (watched.probed, True)) for step in steps if step.interval_s is not None
    ]  # fmt: skip
    looks = [s.pace_s for s in watched.plain if s.pace_s is not None]
    passes = round(statistics.median(step.n_passes for step in watched.plain))
    live.begin(seen, passes, watched.root_type, lambda: watcher.looks.moment(looks, usual))


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Calls back once torch has been imported; the import itself is left as it is."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        """torch's own spec, its loader followed by the call back; None for everything else."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Followed(spec.loader, self._then)
        return spec


class _Followed(importlib.abc.Loader):
    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: Any) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then()


# -- in one's own code -------------------------------------------------------------------------------------------------


class profile:
    """Watch the training loop inside a ``with`` block.

        with dlperf.profile(model) as profile:
            for x, y in loader: ...
        print(profile.report().to_text())

    The loop must call the model, ``backward``, and an optimizer of torch.optim; after some twenty steps no hook is left but a
    step counter. `machine` is a Machine or a machine file, by default this machine's file. A loop that raises raises unchanged.
    """

    def __init__(self, model: nn.Module, machine: Machine | str | Path | None = None) -> None:
        from torch import nn

        from dlperf.machine import Machine

        check_type("profile", "model", model, nn.Module, "an instance, the one that the loop calls")
        if machine is not None:
            check_type("profile", "machine", machine, (Machine, str, Path), "a Machine, or a machine file by its path")
        self._model, self._machine_or_path = model, machine
        self._watcher: Watcher | None = None
        self._findings: Findings | None = None

    def __enter__(self) -> profile:
        from dlperf.runner.watcher import Watcher

        self._watcher = Watcher(self._model)
        self._watcher.install()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._watcher is not None
        self._watcher.remove()

    @property
    def findings(self) -> Findings:
        """Everything that was found. Raises DlperfError where no training was seen."""
        if self._findings is None:
            if self._watcher is None:
                raise DlperfError("profile: nothing was watched; use it in a with statement")
            if self._watcher.error is not None:
                raise DlperfError(f"profile: watching failed: {self._watcher.error}") from self._watcher.error
            from dlperf.runner.findings import Findings

            self._watcher.remove()
            self._findings = Findings(self._watcher, self._machine(), type(self._model).__name__)
        return self._findings

    def _machine(self) -> Machine | None:
        from dlperf.machine import Machine, default_path

        if isinstance(self._machine_or_path, Machine):
            return self._machine_or_path
        place = Path(self._machine_or_path) if self._machine_or_path is not None else default_path()
        if self._machine_or_path is None and not place.exists():
            return None
        return Machine.load(place)

    @property
    def measurement(self) -> Measurement:
        """The watched steps."""
        return self.findings.measurement

    @property
    def trace(self) -> Trace | None:
        """The step as recorded with the inputs and loss that were seen; None where it could not be."""
        return self.findings.trace

    def report(self) -> Report:
        """Predicted beside actual. Raises DlperfError where there is nothing to predict with, or nothing was seen."""
        report = self.findings.report
        if report is None:
            reason = self.findings.notes[-1] if self.findings.machine is not None and self.findings.notes else "no machine file; make one with dlperf calibrate"
            raise DlperfError(f"profile: {reason}")
        return report
