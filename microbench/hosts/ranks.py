"""A command once for each rank: started together, ended together, with a limit of time and one line
for what went wrong.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from dlperf.core.child_process import last_line
from dlperf.core.errors import WorkFailed
from dlperf.microbench.hosts.namespaces import Place, bound_to_parent, hosts

_LOOK_S, _GRACE_S, _PATIENCE_S = 0.2, 2.0, 5.0
_MARKS = ("error:", "Error:", "Traceback")
Process = subprocess.Popen[bytes]


class RankFailed(WorkFailed):
    """A rank ended with another status than 0, or none did in time; `status` is that of the
    command.
    """

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def loopback_places(n: int) -> list[Place]:
    """All ranks on this host, talking over its loopback device."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    device = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "LOCAL_WORLD_SIZE": str(n),
        "GROUP_RANK": "0",
        "GLOO_SOCKET_IFNAME": device,
    }
    return [Place(bound_to_parent(), {**shared, "LOCAL_RANK": str(rank)}) for rank in range(n)]


def places_of(n: int, rate: str | None, on_loopback: bool) -> AbstractContextManager[list[Place]]:
    """The places of `n` ranks: a host each behind a link of `rate`, for as long as the block lasts,
    or this host.
    """
    return contextlib.nullcontext(loopback_places(n)) if on_loopback else hosts(n, rate)


def run_ranks(
    places: Sequence[Place],
    command: Sequence[str],
    *,
    limit_s: float,
    quiet: bool = True,
    meanwhile: Callable[[], object] = lambda: None,
) -> None:
    """Start the command at every place and wait until all have ended, calling `meanwhile` now and
    then; when one fails, or the limit is over, the others are ended.

    The ranks find RANK, WORLD_SIZE and what torch.distributed else asks for in their environment;
    threads are 1 where nothing says otherwise. `quiet` keeps what they print from this process's
    output. Raises RankFailed with one line that names the rank and its last line. Nothing is left
    running.
    """
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")
    }
    started: list[Process] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dlperf-")))
        stack.callback(end_all, started)
        logs = [folder / f"rank{rank}" for rank in range(len(places))]
        for rank, place in enumerate(places):
            own = {"RANK": str(rank), "WORLD_SIZE": str(len(places))}
            with open(logs[rank], "wb") as file:
                process = subprocess.Popen(
                    [*place.prefix, *command],
                    env={"OMP_NUM_THREADS": "1", **inherited, **place.environment, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL if quiet else None,
                    stderr=file if quiet else None,
                    start_new_session=True,
                )
            started.append(process)
        _wait(started, logs, limit_s, meanwhile)


def _wait(
    started: Sequence[Process],
    logs: Sequence[Path],
    limit_s: float,
    meanwhile: Callable[[], object],
) -> None:
    n_ranks, end = len(started), time.monotonic() + limit_s
    while not any(statuses := [process.poll() for process in started]):
        if None not in statuses:
            return
        if time.monotonic() > end:
            waiting = ", ".join(str(rank) for rank, status in enumerate(statuses) if status is None)
            raise RankFailed(f"rank {waiting} of {n_ranks} did not end within {limit_s:g} s")
        meanwhile()
        time.sleep(_LOOK_S)
    _wait_for(started, _GRACE_S)  # the first to end need not be the first that failed
    words = [_words(log) for log in logs]
    failed = [(process.poll() or 0, rank) for rank, process in enumerate(started)]
    status, rank = min(
        ((status, rank) for status, rank in failed if status),
        key=lambda one: (one[0] > 0, not words[one[1]], one[1]),
    )
    how = f"was ended by {_signal(-status)}" if status < 0 else f"ended with status {status}"
    raise RankFailed(
        f"rank {rank} of {n_ranks} {how}{f': {words[rank]}' if words[rank] else ''}",
        128 - status if status < 0 else status,
    )


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _words(log: Path) -> str:
    """The last line that a rank wrote, of those that look like an error if there are any."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in lines if any(mark in line for mark in _MARKS)]
    return " ".join(last_line("\n".join(errors or lines)).split())


def _wait_for(processes: Sequence[Process], seconds: float) -> None:
    end = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))


def end_all(started: Sequence[Process]) -> None:
    """End what still runs, with the processes it started: SIGTERM, and SIGKILL for what does not go
    within some seconds.
    """
    running = [process for process in started if process.poll() is None]
    for process in running:
        _send(process, signal.SIGTERM)
    _wait_for(running, _PATIENCE_S)
    for process in running:
        _send(process, signal.SIGKILL)  # the rank itself, or what it left in its group
        process.wait()
    end = time.monotonic() + _GRACE_S
    while (
        any(_send(process, 0) for process in running) and time.monotonic() < end
    ):  # what a rank started is not ours to wait for, and takes a moment to go
        time.sleep(_LOOK_S / 10)


def _send(process: Process, number: int) -> bool:
    """Whether somebody was there to get the signal."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, number)
        return True
    return False
