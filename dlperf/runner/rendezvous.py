"""How the ranks of a training hand their findings to rank 0: through a store, never through the
script's process groups.

A script may have destroyed its process group when it ends, and ranks may run on several hosts. So
findings go through a TCPStore: that of torchrun's agent, which lives until the last rank of rank
0's host has ended; or, under another launcher, one of dlperf's own in rank 0's process, whose
address rank 0 leaves in the script's store while that lives. It listens at MASTER_ADDR alone, and
says so where that is no loopback address. A rank writes and is gone; rank 0 waits for all of them,
up to a limit.
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
"""How long rank 0 waits for the others once its own script has ended."""
FAILED_LIMIT_S = 5.0
"""And where its own script failed: then others may have died without a word."""
_PREFIX = "dlperf/run"
_REACH_S = 10.0
_LOOK_S = 0.02
_ADDRESS = f"{_PREFIX}/address"


@dataclass(frozen=True)
class World:
    """This process's place among those of a launcher, as the environment says (torchrun's
    variables).
    """

    rank: int
    n_ranks: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> World:
        """Rank 0 of 1 where the environment does not tell, or tells nonsense.

        >>> World.of({"RANK": "1", "WORLD_SIZE": "4"}), World.of({"RANK": "1"}), World.of({"RANK": "4", "WORLD_SIZE": "4"})
        (World(rank=1, n_ranks=4), World(rank=0, n_ranks=1), World(rank=0, n_ranks=1))
        """
        try:
            rank, n_ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        except (KeyError, ValueError):
            return cls(0, 1)
        return cls(rank, n_ranks) if 0 <= rank < n_ranks else cls(0, 1)


class Rendezvous:
    """A rank's way to rank 0. :meth:`meet` is called now and then while the script's process group
    lives, the others when the script has ended.
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
        """Where there is no agent's store: rank 0 opens its own and leaves the address in the
        script's, the others read it there.
        """
        from torch import distributed

        if (
            self._address is not None
            or _agents_address() is not None
            or not distributed.is_initialized()
        ):
            return
        with contextlib.suppress(
            RuntimeError, OSError, ValueError
        ):  # then rank 0 will miss this rank, and say so
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
        """Leave this rank's findings for rank 0. Raises RuntimeError where the store cannot be
        reached.
        """
        store = self._reach()
        if store is not None:
            store.set(self._key(self.world.rank), json.dumps(findings))

    def collect(self, limit_s: float | None = None) -> dict[int, dict[str, Any]]:
        """What the other ranks have left, by rank; those that leave nothing within the limit are
        missing.
        """
        found: dict[int, dict[str, Any]] = {}
        until = self._now() + (self.limit_s if limit_s is None else limit_s)
        with contextlib.suppress(
            RuntimeError, OSError, ValueError
        ):  # a store that is gone: what came so far
            store = self._reach()
            waited_for = (
                []
                if store is None
                else [rank for rank in range(self.world.n_ranks) if rank != self.world.rank]
            )
            while waited_for:
                for rank in [rank for rank in waited_for if store.check([self._key(rank)])]:
                    found[rank] = json.loads(store.get(self._key(rank)))
                    waited_for.remove(rank)
                if not waited_for or self._now() >= until:
                    break
                self._sleep(_LOOK_S)
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
        """A restarted training writes under keys of its own."""
        again, run = (
            os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
            os.environ.get("TORCHELASTIC_RUN_ID", ""),
        )
        return f"{_PREFIX}/{run}/{again}/{rank}"


def _listen(host: str) -> socket.socket:
    """A listener at `host`'s own address; on all interfaces where that is none of this computer's.

    torch's own store would listen on all interfaces, whatever the host.
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
