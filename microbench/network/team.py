"""The ranks as a team: groups of them, common starts, and rank 0's decision how often something is
repeated.
"""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlperf.core.cluster import Rank
from dlperf.core.errors import DlperfError
from dlperf.core.rank_program import Watch
from dlperf.core.text import counted

MOST_SAMPLES = 50


@dataclass(frozen=True)
class Group:
    """Some ranks, rank 0 among them: `data` moves what is measured, `control` (always gloo) starts
    and counts.
    """

    ranks: tuple[int, ...]
    ranks_per_node: int
    data: Any
    control: Any


class Team:
    """All ranks of the job, seen from one of them. `now` is the clock."""

    def __init__(
        self, backend: str, watch: Watch, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.watch, self.backend, self.now = watch, backend, now
        self.device = (
            torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            if backend == "nccl"
            else torch.device("cpu")
        )
        if backend == "nccl":
            torch.cuda.set_device(self.device)
        timeout = datetime.timedelta(seconds=watch.limit_s)
        _meet(timeout)
        self.rank, self.n_ranks = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        watch.claim = lambda: store.add("dlperf/ended", 1) == 1
        self._timeout = timeout
        self.places = tuple(
            Rank(*place)
            for place in self.gather((socket.gethostname(), this_socket(), this_system()))
        )
        self.everyone = Group(
            tuple(range(self.n_ranks)), self.per_node(range(self.n_ranks)), None, None
        )

    def per_node(self, ranks: Sequence[int]) -> int:
        """The most of these ranks that share a host."""
        hosts = [self.places[rank].host for rank in ranks]
        return max(hosts.count(host) for host in hosts)

    def nodes(self) -> list[list[int]]:
        """The ranks of each host, in order."""
        found: dict[str, list[int]] = {}
        for number, place in enumerate(self.places):
            found.setdefault(place.host, []).append(number)
        return list(found.values())

    def group(self, ranks: Sequence[int]) -> Group:
        """A group of these ranks. Every rank of the team has to call this, in the same order."""
        self.watch.begin(f"a group of {len(ranks)} ranks")
        chosen = list(ranks)
        control = dist.new_group(chosen, backend="gloo", timeout=self._timeout)
        data = (
            dist.new_group(chosen, backend="nccl", timeout=self._timeout)
            if self.backend == "nccl"
            else control
        )
        return Group(tuple(chosen), self.per_node(chosen), data, control)

    def wait(self) -> None:
        """Until every rank is here."""
        dist.barrier()

    def synchronize(self) -> None:
        """Until the device is done; nothing for gloo, whose calls return when they are."""
        if self.backend == "nccl":
            torch.cuda.synchronize()

    def finish_computation(self) -> None:
        """Until the device has computed what it was given; its communication may go on."""
        if self.backend == "nccl":
            torch.cuda.current_stream().synchronize()

    def messages(self, group: Group) -> Any:
        """The process group of messages between two of a group: None, gloo's own of everyone, but
        for nccl, whose messages lie on devices.
        """
        return group.data if self.backend == "nccl" else None

    def decide(self, group: Group, value: int) -> int:
        """Rank 0's number, for all of the group."""
        decided = torch.tensor([value])
        dist.broadcast(decided, 0, group=group.control)
        return int(decided)

    def go_on(self, more: bool) -> bool:
        """Whether all go on waiting: rank 0's answer, which also tells the others that it lives."""
        self.watch.begin(self.watch.step)
        return bool(self.decide(self.everyone, int(more)))

    def shared(self, text: str) -> str:
        """Rank 0's text, for all."""
        box = [text]
        dist.broadcast_object_list(box, 0)
        return box[0]

    def gather(self, own: Any) -> list[Any]:
        """What every rank has, by rank."""
        found: list[Any] = [None] * self.n_ranks
        dist.all_gather_object(found, own)
        return found

    def repeat(
        self,
        group: Group,
        call: Callable[[], float],
        budget_s: float,
        expected_s: float,
        least: int = 2,
        most: int = MOST_SAMPLES,
    ) -> list[list[float]]:
        """Samples of every rank, in rank 0's lists: one call to warm up, and then as many as fit
        the budget by rank 0's clock.

        Each begins after a barrier; `call` returns its own seconds. Empty where two calls of the
        expected duration would not fit the budget.
        """
        if not self.decide(group, int(2 * expected_s <= budget_s)):
            return []
        dist.barrier(group.control)
        begin = self.now()
        call()
        dist.barrier(group.control)
        took = max(self.now() - begin, 1e-6)
        n = self.decide(group, max(least, min(most, int(budget_s / took) - 1)))
        own = []
        for _ in range(n):
            self.watch.begin(self.watch.step)
            dist.barrier(group.control)
            own.append(call())
        return self.collect(group, own)

    def collect(self, group: Group, own: list[float]) -> list[list[float]]:
        """The lists of all ranks of the group, which have the same length."""
        mine = torch.tensor(own, dtype=torch.float64)
        all_of_them = [torch.empty_like(mine) for _ in group.ranks]
        dist.all_gather(all_of_them, mine, group=group.control)
        return [values.tolist() for values in all_of_them]


def _meet(timeout: datetime.timedelta) -> None:
    """Join the ranks' default group. Ranks that meet on loopback have a store that listens there
    alone; torch's own would listen on every interface.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not host.startswith("127.") or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        dist.init_process_group("gloo", timeout=timeout)
        return
    rank, n_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own: int | None = None
    if rank == 0:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(n_ranks)
            own = listener.detach()
    store = dist.TCPStore(host, port, n_ranks, rank == 0, timeout, master_listen_fd=own)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n_ranks, timeout=timeout)


def this_socket() -> int:
    """The processor socket that this process may run on; -1 where it may use several, or the system
    does not tell.
    """
    try:
        cores = os.sched_getaffinity(0)
        found = {
            int(Path(f"/sys/devices/system/cpu/cpu{core}/topology/physical_package_id").read_text())
            for core in cores
        }
    except (AttributeError, OSError, ValueError):
        return -1
    return found.pop() if len(found) == 1 else -1


def this_system() -> str:
    """The running kernel's boot id, which the namespaces of one computer share; empty where the
    system does not tell.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def choose_backend(asked: str | None) -> str:
    """nccl where every local rank has a CUDA device of its own, else gloo.

    Raises DlperfError where nccl was asked for and cannot be had.
    """
    n_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    n_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    lacking = ""
    if not n_devices:
        lacking = "there is no CUDA device (torch.cuda.is_available() is false)"
    elif not dist.is_nccl_available():
        lacking = f"torch {torch.__version__} was built without it"
    elif n_devices < n_local:
        lacking = (
            f"it takes a CUDA device a rank: {n_local} ranks of this node,"
            f" {counted(n_devices, 'device')}"
        )
    if asked == "nccl" and lacking:
        raise DlperfError(f"--backend nccl: {lacking}; use --backend gloo, or fewer ranks")
    return asked or ("gloo" if lacking else "nccl")
