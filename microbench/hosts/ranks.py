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
from collections.abc import Iterator, Sequence
from pathlib import Path

from dlperf.core.errors import WorkFailed
from dlperf.microbench.hosts.namespaces import Hosts, Place, bound_to_parent

_LOOK_S, _GRACE_S, _PATIENCE_S = 0.1, 2.0, 5.0
_LAST_BYTES = 4096
_MARKS = ("error:", "Error:", "Traceback")


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


@contextlib.contextmanager
def places_of(n: int, rate: str | None, on_loopback: bool) -> Iterator[list[Place]]:
    """The places of `n` ranks: a host each behind a link of `rate`, for as long as the block lasts,
    or this host.
    """
    if on_loopback:
        yield loopback_places(n)
    else:
        with Hosts(n, rate) as hosts:
            yield hosts.places


def run_ranks(
    places: Sequence[Place],
    command: Sequence[str],
    *,
    limit_s: float,
    environment: dict[str, str] | None = None,
    cwd: str | Path | None = None,
    quiet: bool = True,
) -> None:
    """Start the command at every place and wait until all have ended; when one fails, or the limit
    is over, the others are ended.

    The ranks find RANK, WORLD_SIZE and what torch.distributed else asks for in their environment;
    threads are 1 where nothing says otherwise. `quiet` keeps what they print from this process's
    output. Raises RankFailed with one line that names the rank and the last line it said. Nothing
    is left running.
    """
    inherited = {
        name: value
        for name, value in (environment or dict(os.environ)).items()
        if not name.startswith("TORCHELASTIC")
    }
    started: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="dlperf-") as folder:
        said = [Path(folder) / f"rank{rank}" for rank in range(len(places))]
        try:
            for rank, place in enumerate(places):
                own = {
                    "OMP_NUM_THREADS": "1",
                    **inherited,
                    **place.environment,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(places)),
                }
                with open(said[rank], "wb") as file:
                    started.append(
                        subprocess.Popen(
                            [*place.prefix, *command],
                            env=own,
                            cwd=cwd,
                            stdin=subprocess.DEVNULL,
                            stdout=subprocess.DEVNULL if quiet else None,
                            stderr=file if quiet else None,
                            start_new_session=True,
                        )
                    )
            _wait(started, said, limit_s)
        finally:
            end_all(started)


def _wait(started: Sequence[subprocess.Popen[bytes]], said: Sequence[Path], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while True:
        statuses = [process.poll() for process in started]
        if any(statuses):
            break
        if all(status == 0 for status in statuses):
            return
        if time.monotonic() > end:
            waiting = ", ".join(str(rank) for rank, status in enumerate(statuses) if status is None)
            raise RankFailed(f"rank {waiting} of {len(started)} did not end within {limit_s:g} s")
        time.sleep(_LOOK_S)
    grace = time.monotonic() + _GRACE_S
    while (
        any(process.poll() is None for process in started) and time.monotonic() < grace
    ):  # the first to end need not be the first that failed
        time.sleep(_LOOK_S)
    failed = [(rank, status) for rank, process in enumerate(started) if (status := process.poll())]
    rank, status = min(failed, key=lambda one: (one[1] > 0, not _words(said[one[0]]), one[0]))
    how = f"was ended by {_signal(-status)}" if status < 0 else f"ended with status {status}"
    words = _words(said[rank])
    raise RankFailed(
        f"rank {rank} of {len(started)} {how}{f': {words}' if words else ''}",
        128 - status if status < 0 else status,
    )


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _words(path: Path) -> str:
    """The last line that a rank said, of those that look like an error if there are any."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _LAST_BYTES))
        lines = [
            " ".join(line.split())
            for line in file.read().decode(errors="replace").splitlines()
            if line.strip()
        ]
        return next(
            (line for line in reversed(lines) if any(mark in line for mark in _MARKS)),
            lines[-1] if lines else "",
        )
    return ""


def end_all(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what still runs, with the processes it started: SIGTERM, and SIGKILL for what does not go
    within some seconds.
    """
    running = [process for process in started if process.poll() is None]
    for process in running:
        _send(process, signal.SIGTERM)
    end = time.monotonic() + _PATIENCE_S
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
        _send(process, signal.SIGKILL)  # the rank itself, or what it left in its group
        process.wait()
    end = time.monotonic() + _GRACE_S
    while (
        any(_send(process, 0) for process in running) and time.monotonic() < end
    ):  # what a rank started is not ours to wait for, and takes a moment to go
        time.sleep(_LOOK_S / 10)


def _send(process: subprocess.Popen[bytes], number: int) -> bool:
    """Whether somebody was there to be told."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, number)
        return True
    return False
