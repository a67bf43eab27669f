"""Rendezvous of the ranks of a training: their findings go to rank 0 through a store.

The script's process groups are not used: it may have destroyed them when it ends. The store is a
TCPStore. Under torchrun it is the agent's, which lives until the last rank of rank 0's host has
ended. Under another launcher it is dlperf's own, in rank 0's process; rank 0 leaves its address in
the script's store while that lives. It listens at MASTER_ADDR alone, and a line says so unless that
is a loopback address. Other ranks write and end; rank 0 waits for them, up to a limit.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from dlperf.core.streams import log

LIMIT_S = 60.0
"""Time for which rank 0 waits for the others once its own script has ended."""
FAILED_LIMIT_S = 5.0
"""The same after its own script failed: then others may have died."""
_PREFIX = "dlperf/run"
_REACH_S = 10.0
_POLL_S = 0.02
_UNREACHABLE = (RuntimeError, OSError, ValueError)
_ADDRESS = f"{_PREFIX}/address"


@dataclass(frozen=True)
class World:
    """This process's rank among those of a launcher, from torchrun's environment variables."""

    rank: int
    n_ranks: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> World:
        """The rank in an environment; rank 0 of 1 where it has none, or an impossible one.

        >>> World.of({"RANK": "1", "WORLD_SIZE": "4"}), World.of({"RANK": "4", "WORLD_SIZE": "4"})
        (World(rank=1, n_ranks=4), World(rank=0, n_ranks=1))
        """
        try:
            rank, n_ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        except (KeyError, ValueError):
            return cls(0, 1)
        return cls(rank, n_ranks) if 0 <= rank < n_ranks else cls(0, 1)


class Rendezvous:
    """A rank's connection to rank 0.

    :meth:`meet` is called repeatedly while the script's process group lives, the others after the
    script.
    """

    def __init__(
        self,
        world: World,
        limit_s: float = LIMIT_S,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.world, self.limit_s = world, limit_s
        self._now, self._sleep = now, sleep
        self._address: tuple[str, int] | None = None
        self._store: Any = None

    def meet(self) -> None:
        """Without an agent's store: rank 0 opens its own, the others get its address."""
        from torch import distributed

        if (
            self._address is not None
            or _agents_address() is not None
            or not distributed.is_initialized()
        ):
            return
        with contextlib.suppress(*_UNREACHABLE):  # then rank 0 reports this rank as missing
            self._agree(distributed.distributed_c10d._get_default_store())

    def _agree(self, theirs: Any) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        if self.world.rank == 0:
            host = os.environ.get("MASTER_ADDR") or "127.0.0.1"
            listener = _listen(host)
            self._address = (host, listener.getsockname()[1])
            if not _is_loopback(listener.getsockname()[0]):
                where = "{}:{}".format(*listener.getsockname())
                log(f"listens on {where} until the run ends, for ranks on other hosts")
            self._store = TCPStore(
                *self._address,
                None,
                True,
                timedelta(seconds=_REACH_S),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
            theirs.set(_ADDRESS, json.dumps(self._address))
        elif theirs.check([_ADDRESS]):
            host, port = json.loads(theirs.get(_ADDRESS))
            self._address = (host, port)

    def give(self, findings: dict[str, Any]) -> None:
        """Leave findings for rank 0. Raises RuntimeError where the store cannot be reached."""
        store = self._reach()
        if store is not None:
            store.set(self._key(self.world.rank), json.dumps(findings))

    def collect(self, limit_s: float | None = None) -> dict[int, dict[str, Any]]:
        """The findings of the other ranks, by rank, that arrive within the limit."""
        found: dict[int, dict[str, Any]] = {}
        until = self._now() + (self.limit_s if limit_s is None else limit_s)
        with contextlib.suppress(*_UNREACHABLE):  # a store that is gone
            store = self._reach()
            missing = set() if store is None else set(range(self.world.n_ranks)) - {self.world.rank}
            while missing:
                for rank in sorted(rank for rank in missing if store.check([self._key(rank)])):
                    found[rank] = json.loads(store.get(self._key(rank)))
                missing -= set(found)
                if not missing or self._now() >= until:
                    break
                self._sleep(_POLL_S)
        return found

    def _reach(self) -> Any:
        if self._store is None:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            address = _agents_address() or self._address
            if address is not None:
                self._store = TCPStore(
                    *address, None, False, timedelta(seconds=_REACH_S), wait_for_workers=False
                )
        return self._store

    def _key(self, rank: int) -> str:
        """A key of this run; a restarted training has its own."""
        names = ("TORCHELASTIC_RUN_ID", ""), ("TORCHELASTIC_RESTART_COUNT", "0")
        return "/".join([_PREFIX, *(os.environ.get(*name) for name in names), str(rank)])


def _listen(host: str) -> socket.socket:
    """A listener at `host`'s address; on all interfaces where it is not this computer's.

    A store of torch without it listens on all interfaces.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.bind((host, 0))
    except OSError:
        listener.bind(("", 0))
    listener.listen()
    return listener


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _agents_address() -> tuple[str, int] | None:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    try:
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        return None
