"""The plan of a cluster measurement: groups one after another, what is finished written by rank 0,
one line for whatever ends it early.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dlperf.core import host
from dlperf.core.clock import Clock
from dlperf.core.cluster import Cluster, Link
from dlperf.core.errors import DlperfError
from dlperf.core.files import check_writable
from dlperf.core.rank_program import Watch
from dlperf.core.streams import log
from dlperf.microbench.hosts.ranks import loopback_places, run_ranks
from dlperf.microbench.network import collectives, links
from dlperf.microbench.network.co_run import measure_co_runs
from dlperf.microbench.network.collectives import (
    measure_collectives,
    measure_interference,
    measure_reductions,
)
from dlperf.microbench.network.links import measure_links
from dlperf.microbench.network.passes import Passes
from dlperf.microbench.network.team import Team, choose_backend

PROGRAM = "dlperf.microbench.network"
SECONDS = {
    "quick": {"local": 2.5, "links": 2.0, "collectives": 4.0, "interference": 2.0, "co_run": 3.0},
    "full": {
        "local": 8.0,
        "links": 14.0,
        "collectives": 28.0,
        "interference": 6.0,
        "co_run": 12.0,
    },
}
"""What each group may spend. The least number of repeats may take longer on a slow link; sizes that
cannot fit are left out and noted. ``sharing`` makes its operands, some seconds' worth where caches
are large, before its least rounds.
"""
_PAIR_START_S = 25.0


class _Unusable(DlperfError):
    """Input that all ranks find unusable alike; rank 0 reports it."""


def measure_cluster(
    path: str, *, quick: bool, backend: str | None, limit_s: float, force: bool, pair: bool = False
) -> int:
    """Measure the links between all ranks into `path` (by rank 0); the exit status. Does not return
    where a rank fails or a signal comes.
    """
    rank = int(os.environ["RANK"])
    file = path if rank == 0 else "the file"
    watch = Watch(PROGRAM, rank, limit_s, f"{file} holds the groups that were finished")
    watch.start()
    try:
        return _measure(Path(path), "quick" if quick else "full", backend, force, pair, watch)
    except _Unusable as error:  # every rank knows
        if rank == 0:
            log(f"error: {error}", PROGRAM)
        return 2
    except (
        DlperfError,
        RuntimeError,
        OSError,
        EOFError,
    ) as error:  # what torch.distributed raises when a peer is gone or silent
        watch.fail(shortened(str(error)) or type(error).__name__)


def shortened(message: str) -> str:
    """gloo's message without the place in its sources and its advice.

    >>> shortened("[/a/gloo/tcp/pair.cc:537] Read error [10.0.0.2]:5: reset. This is typically ...")
    'Read error [10.0.0.2]:5: reset'
    """
    line = message.splitlines()[0] if message else ""
    return re.sub(r"^\[[^\]]*\.(?:cc|cpp|h):\d+\] *", "", line).partition(". This is typically")[0]


def _measure(
    path: Path, mode: str, backend: str | None, force: bool, pair: bool, watch: Watch
) -> int:
    if int(os.environ["WORLD_SIZE"]) < 2:
        raise _Unusable(
            "one rank has no link; start at least two, for example with --nproc-per-node 2"
        )
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    watch.begin("finding the other ranks")
    try:
        chosen = choose_backend(backend)
    except DlperfError as error:  # before the ranks meet, so that each node says it once
        if os.environ.get("LOCAL_RANK", "0") == "0":
            log(f"error: {error}", PROGRAM)
        return 2
    team = Team(chosen, watch)
    problem = ""
    if team.rank == 0:
        try:
            check_writable(path, force)
        except DlperfError as error:
            problem = str(error)
    if problem := team.shared(problem):
        raise _Unusable(problem)
    cluster = Cluster(
        ranks=team.places,
        backend=team.backend,
        threads=torch.get_num_threads(),
        mode=mode,
        versions=host.versions(),
        notes=_notes(team),
        created=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    )
    of_links: Passes[links.Key] = Passes()
    of_collectives: Passes[collectives.Key] = Passes()
    groups: dict[str, Callable[[Cluster, Clock], Cluster]] = {
        "local": lambda found, budget: replace(
            _with_local(team, found, mode, budget),
            reductions=tuple(measure_reductions(mode)) if team.rank == 0 else (),
        ),
        "links": lambda found, budget: replace(
            found, links=_joined(found.links, measure_links(team, mode, budget, of_links))
        ),
        "collectives": lambda found, budget: replace(
            found,
            collectives=(
                *found.collectives,
                *measure_collectives(team, mode, budget, of_collectives),
            ),
        ),
        "interference": lambda found, budget: replace(
            found, interferences=tuple(measure_interference(team, mode, budget))
        ),
        "co_run": lambda found, budget: _with_co_runs(team, found, mode, budget),
    }
    if pair:
        del groups["local"], groups["interference"], groups["co_run"]
    for name, run in groups.items():
        watch.begin(name)
        begin = time.monotonic()
        cluster = replace(
            run(
                cluster,
                Clock(time.monotonic).within(
                    SECONDS[mode]["local"] / 3 if pair else SECONDS[mode][name]
                ),
            ),
            groups=(*cluster.groups, name),
        )
        if team.rank == 0:
            cluster.save(path)
            if not pair:
                log(f"{name}: {time.monotonic() - begin:.1f} s", PROGRAM)
    if team.rank == 0:
        replace(
            cluster,
            complete=True,
            notes=(*cluster.notes, *_left_out(cluster, mode), *_slowed(of_links, of_collectives)),
        ).save(path)
        if not pair:
            print(path)
    watch.begin("ending")
    team.wait()
    return 0


def _notes(team: Team) -> tuple[str, ...]:
    counts = {len(ranks) for ranks in team.nodes()}
    notes = []
    if len(counts) > 1:
        notes.append(
            f"nodes hold unequal numbers of ranks ({min(counts)} to {max(counts)}); ranks_per_node"
            " is the largest"
        )
    if (
        len(team.nodes()[0]) > 1
        and max(len(ranks) for ranks in team.nodes()) > host.available_cores()
    ):
        notes.append(f"{len(team.nodes()[0])} ranks share {host.available_cores()} cores")
    return tuple(notes)


def _left_out(cluster: Cluster, mode: str) -> list[str]:
    from dlperf.microbench.network.collectives import SIZES

    notes = []
    for kind, n_ranks, per_node in dict.fromkeys(
        (c.kind, c.n_ranks, c.ranks_per_node) for c in cluster.collectives
    ):
        largest = max(
            c.n_bytes
            for c in cluster.collectives
            if (c.kind, c.n_ranks, c.ranks_per_node) == (kind, n_ranks, per_node)
        )
        if largest < SIZES[mode][-1] and per_node < n_ranks:
            notes.append(
                f"{kind} over {n_ranks} ranks: sizes above {largest} bytes did not fit the time"
            )
    return notes


def _slowed(*measured: Passes[Any]) -> list[str]:
    slowed, several = (sum(counts) for counts in zip(*(passes.n_slowed() for passes in measured)))
    return (
        [(f"interference: one of two passes does not count in {slowed} of {several} measurements")]
        if slowed
        else []
    )


def _joined(links: tuple[Link, ...], measured: list[Link]) -> tuple[Link, ...]:
    """The team's own links before those of the pair."""
    own = {link.distance for link in measured}
    return (*measured, *(link for link in links if link.distance not in own))


def _with_local(team: Team, cluster: Cluster, mode: str, budget: Clock) -> Cluster:
    """What the same transfers cost inside one host, without a wire; measured by a pair that rank 0
    starts, unless ranks share its node anyway.
    """
    if len(team.nodes()[0]) > 1:
        return cluster
    found = None
    if team.rank == 0:
        with tempfile.TemporaryDirectory(prefix="dlperf-") as folder:
            output = Path(folder) / "pair.json"
            command = [sys.executable, "-m", PROGRAM, "--pair", "-o", str(output)]
            command += ["--backend", "gloo", *(["--quick"] if mode == "quick" else [])]
            with contextlib.suppress(DlperfError):
                run_ranks(
                    loopback_places(2),
                    command,
                    limit_s=_PAIR_START_S + 3 * budget.left_s,
                    meanwhile=lambda: team.go_on(True),
                )
                found = Cluster.load(output)
        team.go_on(False)
    else:
        while team.go_on(True):
            pass
    if found is None:
        missing = (
            "what one host's own processes cost each other could not be measured; all of a link"
            " counts as the wire's"
        )
        return cluster if team.rank else replace(cluster, notes=(*cluster.notes, missing))
    return replace(cluster, links=found.links, collectives=found.collectives)


def _with_co_runs(team: Team, cluster: Cluster, mode: str, budget: Clock) -> Cluster:
    """What ranks that share a computer cost one another while they compute; nothing where each has
    its own, and where they compute on GPUs.
    """
    if cluster.ranks_per_system == 1 or team.backend == "nccl":
        return cluster
    threads = team.collect(team.everyone, [float(torch.get_num_threads())])
    if (most := max(int(count) for (count,) in threads)) > 1:
        missing = (
            f"ranks compute with up to {most} threads: what those of one computer cost one another"
            " was not measured, as it is for one thread each"
        )
        return replace(cluster, notes=(*cluster.notes, missing))
    return replace(cluster, co_runs=tuple(measure_co_runs(team, mode, budget, host.this_cpu())))
