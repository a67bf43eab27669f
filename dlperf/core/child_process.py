"""Processes that work for another: the child ends with its answer or one line on stderr, the parent
with the exception for that line.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any, TextIO

from dlperf.core.errors import DlperfError, WorkFailed, is_shortage, says_shortage
from dlperf.core.streams import write_err

FAILED, UNUSABLE, INTERRUPTED = 1, 2, 130
_PR_SET_PDEATHSIG = 1
_ENDS_S = 5.0
"""How long a process that is to end may take."""


class Child(subprocess.Popen[str]):
    """A process of this Python that runs a module with arguments. It is killed where its ``with``
    block ends before it does.

    Its environment is this process's where none is given, with OMP_NUM_THREADS for `threads`.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        threads: int | None = None,
        environment: Mapping[str, str] | None = None,
        stdout: int | IO[bytes] = subprocess.PIPE,
        stderr: int | None = subprocess.PIPE,
    ) -> None:
        variables = dict(os.environ if environment is None else environment)
        if threads is not None:
            variables["OMP_NUM_THREADS"] = str(threads)
        super().__init__(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            text=True,
            errors="replace",
            env=variables,
        )

    def __exit__(self, *raised: Any) -> None:
        if self.poll() is None:
            self.kill()
        with contextlib.suppress(BrokenPipeError):  # of what it did not read
            super().__exit__(*raised)

    def stop(self) -> None:
        """End it: asked first, then killed. What it writes has no reader any more, so it waits for
        none; an interrupt that reached it as well may have been lost in a library's callback.
        """
        if self.stdout is not None:
            self.stdout.close()
        self.terminate()
        try:
            self.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self.wait()

    def write(self, line: str) -> None:
        """Write a line to its stdin. Nothing happens where it has ended: its status tells."""
        assert self.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.stdin.write(line + "\n")
            self.stdin.flush()

    def answer(
        self,
        job: object = None,
        limit_s: float | None = None,
        process: str = "the measuring process",
        unusable: type[DlperfError] = DlperfError,
    ) -> Any:
        """The JSON that it ends with, given a job as a line of JSON.

        Raises subprocess.TimeoutExpired after `limit_s`, and what :func:`failure` returns where the
        process fails or writes nothing.
        """
        line = None if job is None else json.dumps(job) + "\n"
        out, err = self.communicate(line, timeout=limit_s)
        if self.returncode or not out:
            raise failure(self.returncode, err or "", process, unusable)
        return json.loads(out)


def run(work: Callable[[], str], out: TextIO | None = None) -> int:
    """Do the work of a child and write the line that it returns to `out` (default: stdout); the
    exit status.

    Prints of the work go to stderr. Status 0; UNUSABLE for DlperfError, FAILED for WorkFailed or
    any other exception, with one line on stderr; INTERRUPTED on Ctrl-C.
    """
    out = sys.stdout if out is None else out
    try:
        with contextlib.redirect_stdout(sys.stderr):
            answer = work()
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        is_ours = isinstance(error, DlperfError)
        if is_shortage(error):
            write_err("out of memory")
            return FAILED
        write_err(("" if is_ours else f"{type(error).__name__}: ") + " ".join(str(error).split()))
        return UNUSABLE if is_ours and not isinstance(error, WorkFailed) else FAILED
    print(answer, file=out, flush=True)
    return 0


def read_job() -> dict[str, Any]:
    """The job that the parent wrote as one line of JSON to stdin. Ends this process quietly where
    there is none: the parent is gone.
    """
    line = sys.stdin.readline()
    try:
        job: dict[str, Any] = json.loads(line)
    except ValueError:  # nothing, or a part of it
        sys.exit(FAILED)
    return job


def end_with_parent() -> None:
    """Linux: SIGTERM for this process when its parent ends, however it ends.

    Ends this process at once where the parent is gone already, which the pipe of stdout shows.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(1, 0)
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            sys.exit(FAILED)


def last_line(said: str) -> str:
    """The last line that is not empty: usually why a process ended.

    >>> last_line("loading\\nValueError: no such weather\\n\\n")
    'ValueError: no such weather'
    """
    return next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")


def failure(
    status: int,
    said: str,
    process: str = "the measuring process",
    unusable: type[DlperfError] = DlperfError,
) -> KeyboardInterrupt | DlperfError:
    """The exception for a child's exit status other than 0 and its stderr; `process` names a child
    that wrote nothing.

    KeyboardInterrupt for INTERRUPTED, since Ctrl-C reaches the whole group; `unusable` for
    UNUSABLE, else WorkFailed, with the last line of stderr.

    >>> failure(1, "ValueError: no such weather\\n")
    WorkFailed('ValueError: no such weather')
    >>> failure(-9, "")
    WorkFailed('the measuring process ended with status -9')
    """
    if status == INTERRUPTED:
        return KeyboardInterrupt()
    reason = last_line(said) or f"{process} ended with status {status}"
    if says_shortage(reason):
        return WorkFailed(reason if "out of memory" in reason else f"{process} is out of memory")
    return (unusable if status == UNUSABLE else WorkFailed)(reason)
