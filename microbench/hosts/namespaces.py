"""Hosts that are network namespaces of this computer, joined by links of a given rate. They need
root, iproute2 and util-linux.

Every host has one interface, ``eth0``, and a name of its own. What leaves it and what arrives at it
passes a token bucket (tc's tbf) of the link's rate; the switch between them is a bridge in a
further namespace. So nothing is made in the computer's own network, and nothing in a host can be
reached from it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dlperf.core.errors import DlperfError
from dlperf.core.units import KIB, parse_rate

FOLDER = Path("/var/run/netns")
"""Where ``ip netns`` keeps the names."""
PORT = 29500
"""Of the ranks' store: any will do where nobody else is."""
_LEAST_BURST_BYTES, _BURST_S = 128 * KIB, 1e-3
_QUEUE_S = 0.2
_MOST_HOSTS = 200
_PROGRAMS = ("ip", "tc", "unshare", "sh", "hostname")
_NAME = re.compile(r"dlperf-(\d+)-(\d+)-(\d+)-\d+-(?:switch|\d+)")
_REMOVE = 'read -r _; for name; do ip netns del "$name" 2>/dev/null; done; exit 0'
_numbers = itertools.count()


class Unavailable(DlperfError):
    """Hosts cannot be made here; the message says why."""


@dataclass(frozen=True)
class Place:
    """Where one rank runs: what stands before its command, and what it finds in its environment."""

    prefix: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


class Hosts:
    """So many hosts behind links of `rate` (as :func:`dlperf.core.units.parse_rate` reads it; None:
    as fast as the system is). A context manager.

    Whatever ends this process, the hosts are removed: a process of its own waits for its end, and
    for :meth:`remove`. Raises Unavailable on entry where they cannot be made, and leaves nothing
    then.
    """

    def __init__(self, n: int, rate: str | None) -> None:
        if not 1 <= n <= _MOST_HOSTS:
            raise DlperfError(f"{n} hosts are asked for; 1 to {_MOST_HOSTS} can be made")
        self.n, self.rate = n, rate
        self._mark = f"{_own_mark()}-{next(_numbers)}"
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The namespaces of the hosts, in the order of their ranks."""
        return tuple(f"{self._mark}-{number}" for number in range(self.n))

    @property
    def switch(self) -> str:
        """The namespace of the bridge."""
        return f"{self._mark}-switch"

    @property
    def places(self) -> list[Place]:
        """One rank on each host: how a command gets there, and where its group meets."""
        return [
            Place(
                (
                    "ip",
                    "netns",
                    "exec",
                    name,
                    "unshare",
                    "--uts",
                    *bound_to_parent(),
                    "sh",
                    "-c",
                    'hostname "$0" && exec "$@"',
                    f"host{number}",
                ),
                {
                    "MASTER_ADDR": _address(0),
                    "MASTER_PORT": str(PORT),
                    "LOCAL_RANK": "0",
                    "LOCAL_WORLD_SIZE": "1",
                    "GROUP_RANK": str(number),
                    "GLOO_SOCKET_IFNAME": "eth0",
                },
            )
            for number, name in enumerate(self.names)
        ]

    def __enter__(self) -> Hosts:
        why = why_unavailable()
        if why:
            raise Unavailable(why)
        self._guard = subprocess.Popen(
            ["sh", "-c", _REMOVE, "dlperf-hosts", *self.names, self.switch],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            for line in self.script():
                _call(*line)
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Take the hosts away, once; processes that still run in them lose their network when they
        end.
        """
        guard, self._guard = self._guard, None
        if guard is not None and guard.stdin is not None:
            guard.stdin.close()
            guard.wait()

    def script(self) -> Iterator[tuple[str, ...]]:
        """The commands that make the hosts, in their order."""
        switch = self.switch
        yield "ip", "netns", "add", switch
        yield "ip", "-n", switch, "link", "add", "br0", "type", "bridge"
        yield "ip", "-n", switch, "link", "set", "br0", "up"
        for number, host in enumerate(self.names):
            port = f"port{number}"
            yield "ip", "netns", "add", host
            yield "ip", "-n", host, "link", "set", "lo", "up"
            yield (
                "ip",
                "-n",
                switch,
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                host,
            )
            yield "ip", "-n", switch, "link", "set", port, "master", "br0", "up"
            yield "ip", "-n", host, "addr", "add", f"{_address(number)}/24", "dev", "eth0"
            yield "ip", "-n", host, "link", "set", "eth0", "up"
            if self.rate is not None:
                for namespace, device in ((host, "eth0"), (switch, port)):
                    yield (
                        "tc",
                        "-n",
                        namespace,
                        "qdisc",
                        "add",
                        "dev",
                        device,
                        "root",
                        *_bucket(self.rate),
                    )


def _bucket(rate: str) -> tuple[str, ...]:
    """A token bucket that holds a millisecond of the rate, and a long packet of a virtual interface
    at least.
    """
    bits_per_s = parse_rate(rate)
    burst = max(_LEAST_BURST_BYTES, int(bits_per_s / 8 * _BURST_S))
    return (
        "tbf",
        "rate",
        f"{bits_per_s:.0f}bit",
        "burst",
        f"{burst}b",
        "latency",
        f"{1e3 * _QUEUE_S:.0f}ms",
    )


def _address(number: int) -> str:
    return f"10.77.0.{number + 1}"


def bound_to_parent() -> tuple[str, ...]:
    """What in front of a command makes it die with the process that starts it; nothing where the
    system has no such program.
    """
    return ("setpriv", "--pdeathsig", "KILL", "--") if shutil.which("setpriv") else ()


def why_unavailable() -> str:
    """Why no hosts can be made here; empty where they may (only making some tells)."""
    if os.name != "posix" or not hasattr(os, "geteuid") or not Path("/proc/self/ns/net").exists():
        return "network namespaces are Linux's"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{missing[0]} is not there (iproute2 and util-linux have what is needed)"
    return "" if os.geteuid() == 0 else "network namespaces need root"


def _call(*command: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"ended with status {done.returncode}"
        raise Unavailable(f"{' '.join(command[:3])}: {said}")


# -- what was left behind --------------------------------------------------------------------------


def _own_mark() -> str:
    """dlperf, the namespace of process numbers, this process, and when it began: nobody else's
    name, ever.
    """
    return (
        f"dlperf-{os.stat('/proc/self/ns/pid').st_ino}-{os.getpid()}-{_begin_of(os.getpid())}"
        if Path("/proc/self/ns/pid").exists()
        else "dlperf-0-0-0"
    )


def _begin_of(process: int) -> str:
    """When a process began, in ticks of the system's clock; empty where there is none of this
    number.
    """
    try:
        return (
            Path(f"/proc/{process}/stat")
            .read_text(encoding="ascii", errors="replace")
            .rpartition(")")[2]
            .split()[19]
        )
    except (OSError, IndexError):
        return ""


def stale_sets(folder: Path = FOLDER) -> dict[int, list[str]]:
    """Namespaces that dlperf made in a process which is gone, by that process; not those of other
    containers, whose processes are not seen here.
    """
    found: dict[int, list[str]] = {}
    with contextlib.suppress(OSError):
        here = str(os.stat("/proc/self/ns/pid").st_ino)
        for path in sorted(folder.iterdir()):
            match = _NAME.fullmatch(path.name)
            if (
                match
                and match.group(1) == here
                and _begin_of(int(match.group(2))) != match.group(3)
            ):
                found.setdefault(int(match.group(2)), []).append(path.name)
    return found


def remove_stale(say: Callable[[str], None], folder: Path = FOLDER) -> None:
    """Remove what an earlier process of dlperf could not take away itself, and name it."""
    for process, names in stale_sets(folder).items():
        for name in names:
            _call("ip", "netns", "del", name)
        say(
            f"removed the network namespaces that process {process} of dlperf left behind when it"
            f" was killed: {', '.join(names)}"
        )
