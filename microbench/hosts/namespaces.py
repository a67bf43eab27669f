"""Hosts that are network namespaces of this computer, joined by links of a given rate. They need
root, iproute2 and util-linux.

Every host has one interface, ``eth0``, and a name of its own. What leaves it and what arrives at it
passes a token bucket (tc's tbf) of the link's rate; the switch between them is a bridge in a
further namespace. So nothing is made in the computer's own network, and nothing in a host can be
reached from it.

A process holds each namespace and waits for the end of its stdin, which comes with the end of this
process, whatever ends it. Then the namespace is gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dlperf.core.errors import DlperfError
from dlperf.core.units import KIB, parse_rate

PORT = 29500
"""Of the ranks' store: any will do where nobody else is."""
_LEAST_BURST_BYTES, _BURST_S = 128 * KIB, 1e-3
_QUEUE_S = 0.2
_MOST_HOSTS = 200
_PROGRAMS = ("ip", "tc", "unshare", "nsenter", "sh", "hostname")
_HOLD = 'hostname "$0" && echo ready && read -r _'


class Unavailable(DlperfError):
    """Hosts cannot be made here; the message gives the reason."""


@dataclass(frozen=True)
class Place:
    """Where one rank runs: what stands before its command, and what it finds in its environment."""

    prefix: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def hosts(n: int, rate: str | None) -> Iterator[list[Place]]:
    """A rank's place on each of `n` hosts behind links of `rate` (as
    :func:`dlperf.core.units.parse_rate` reads it; None: as fast as the system is), for as long as
    the block lasts. Processes that still run in a host lose its network when they end.

    Raises Unavailable where they cannot be made, and leaves nothing then.
    """
    if not 1 <= n <= _MOST_HOSTS:
        raise DlperfError(f"{n} hosts are asked for; 1 to {_MOST_HOSTS} can be made")
    if why := why_unavailable():
        raise Unavailable(why)
    with contextlib.ExitStack() as stack:
        names = ("switch", *(f"host{number}" for number in range(n)))
        switch, *holders = [stack.enter_context(_namespace(name)) for name in names]
        for line in script(switch, holders, rate):
            done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            if done.returncode:
                said = " ".join(done.stderr.split()) or f"ended with status {done.returncode}"
                raise Unavailable(f"{' '.join(line[5:8])}: {said}")
        yield [
            Place(
                (*_inside(holder), *bound_to_parent()),
                {
                    "MASTER_ADDR": _address(0),
                    "MASTER_PORT": str(PORT),
                    "LOCAL_RANK": "0",
                    "LOCAL_WORLD_SIZE": "1",
                    "GROUP_RANK": str(number),
                    "GLOO_SOCKET_IFNAME": "eth0",
                },
            )
            for number, holder in enumerate(holders)
        ]


@contextlib.contextmanager
def _namespace(name: str) -> Iterator[int]:
    """The process that holds a namespace whose host has this name."""
    holder = subprocess.Popen(
        ["unshare", "--net", "--uts", "sh", "-c", _HOLD, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with holder:
        assert holder.stdout is not None
        said = holder.stdout.readline().strip()
        if said != "ready":
            raise Unavailable(said)
        yield holder.pid
        holder.communicate()


def _inside(holder: int) -> tuple[str, ...]:
    """What in front of a command runs it in the namespaces of a process."""
    return ("nsenter", "--target", str(holder), "--net", "--uts")


def script(switch: int, hosts: Sequence[int], rate: str | None) -> Iterator[tuple[str, ...]]:
    """The commands that join namespaces, given by the processes that hold them, in their order."""
    bridge, link_add = _inside(switch), ("ip", "link", "add")
    yield *bridge, *link_add, "br0", "type", "bridge"
    yield *bridge, "ip", "link", "set", "br0", "up"
    for number, holder in enumerate(hosts):
        host, port = _inside(holder), f"port{number}"
        peer = ("peer", "name", "eth0", "netns", str(holder))
        yield *host, "ip", "link", "set", "lo", "up"
        yield *bridge, *link_add, port, "type", "veth", *peer
        yield *bridge, "ip", "link", "set", port, "master", "br0", "up"
        yield *host, "ip", "addr", "add", f"{_address(number)}/24", "dev", "eth0"
        yield *host, "ip", "link", "set", "eth0", "up"
        if rate is not None:
            for inside, device in ((host, "eth0"), (bridge, port)):
                yield *inside, "tc", "qdisc", "add", "dev", device, "root", *_bucket(rate)


def _bucket(rate: str) -> tuple[str, ...]:
    """A token bucket that holds a millisecond of the rate, and a long packet of a virtual interface
    at least.
    """
    bits_per_s = parse_rate(rate)
    burst = max(_LEAST_BURST_BYTES, int(bits_per_s / 8 * _BURST_S))
    limits = ("burst", f"{burst}b", "latency", f"{1e3 * _QUEUE_S:.0f}ms")
    return ("tbf", "rate", f"{bits_per_s:.0f}bit", *limits)


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
