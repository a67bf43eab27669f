"""The watching of a training inside a trainer, and its report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from dlperf.core.errors import DlperfError, one_line
from dlperf.core.machine import Machine
from dlperf.report.comparison import Report
from dlperf.runner.findings import Findings
from dlperf.runner.rendezvous import Rendezvous, World
from dlperf.runner.run_report import to_text
from dlperf.runner.session import Session
from dlperf.runner.wrapping import chosen_machine, report_of


class TrainerWatch:
    """Watches the trainings of one trainer, one after another, in this process.

    `machine` is a Machine or a machine file, by default this machine's file. A failure of dlperf's
    own is kept for the report; it never reaches the training.

    Raises DlperfError for a machine file that is missing or cannot be used.
    """

    def __init__(self, machine: Machine | str | Path | None = None) -> None:
        super().__init__()
        self._machine = chosen_machine(type(self).__name__, machine)
        self._session: Session | None = None
        self._undo = contextlib.ExitStack()
        self._error: Exception | None = None
        self._findings: Findings | None = None

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Keep the first failure of dlperf's own; it stays inside the block."""
        try:
            yield
        except Exception as error:
            self._error = self._error or error

    @contextlib.contextmanager
    def _until_failure(self) -> Iterator[None]:
        """The watching ends with a failure of the training inside the block."""
        try:
            yield
        except BaseException:
            self._end()
            raise

    def _begin(self, on_watched: Callable[[], None] | None = None) -> None:
        """Watch a training that is about to start; `on_watched`: after the watched steps."""
        self._end()
        self._error = self._findings = None
        rendezvous, length = Rendezvous(World(0, 1)), (None, None)
        session = Session(None, self._machine, length, rendezvous, False, on_watched)
        session.watch_after_torch()
        self._session = session
        self._undo.callback(session.end)

    def _end(self) -> None:
        """Remove every hook; a second call has no effect."""
        with self._guarded():
            self._undo.close()

    def _found(self) -> Findings:
        """The findings so far. Raises DlperfError where no training was watched."""
        session = self._session
        failure = self._error or (None if session is None else session.failure)
        if failure is not None:
            raise DlperfError(f"watching failed and was given up: {one_line(failure)}") from failure
        if session is None or session.watcher is None:
            raise DlperfError("no training was watched in this process")
        return Findings(session.watcher, self._machine, live=session.live)

    def _all(self) -> Findings:
        """All findings; the watching ends."""
        self._end()
        if self._findings is None:
            self._findings = self._found()
        return self._findings

    def report(self) -> Report:
        """Predicted beside actual. Raises DlperfError without a machine, a prediction or steps."""
        return report_of(type(self).__name__, self._all())

    def summary(self) -> str:
        """Layers, step and run as text; one line where there is nothing to report."""
        try:
            return to_text(self._all())
        except Exception as error:
            reason = str(error) if isinstance(error, DlperfError) else one_line(error)
            return f"{type(self).__name__}: {reason}"
