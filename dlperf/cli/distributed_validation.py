"""``dlperf validate --distributed``: predicted and measured data-parallel steps, on ranks behind
links of known rates.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dlperf.cli.accuracy_validation import answer, keeping, provenance_of, targets_of
from dlperf.cli.inputs import (
    BATCH_SIZE,
    Answer,
    load_machine,
    predict_here,
    read_or_record,
    use_threads,
)
from dlperf.core.errors import DlperfError
from dlperf.core.streams import log, warn
from dlperf.core.units import UNSHAPED

if TYPE_CHECKING:
    from dlperf.core.cluster import Cluster
    from dlperf.core.machine import Machine
    from dlperf.studies.distributed.runs import DistributedCase, Launch

CASES = (
    "lenet@64",
    "cnn-large@16",
    "dlrm-top@64",
    "networks.further:gpt@16",
    "networks.further:mobilenet@32",
)
"""Networks and batch sizes of each rank: one whose gradients outlast its computation behind 1
Gbit/s, one the other way round at any rate, some between.
"""
RATES = ("1gbit", "300mbit", UNSHAPED)
RANKS = (2, 4)
RUNS, SECONDS = 2, 1.5


def validate_distributed(args: Namespace) -> Answer:
    """All-reduces and steps on several ranks beside their forecasts, over links as calibrated and
    over links changed on paper.
    """
    from dlperf.microbench.network.suite import SECONDS as LINK_SECONDS  # imports torch
    from dlperf.studies.distributed import page
    from dlperf.studies.distributed.cases import DistributedStudy
    from dlperf.studies.distributed.runs import RankRunner
    from dlperf.studies.distributed.study import PARTS, run_study

    use_threads(1)
    machine = load_machine(args)
    parts = args.parts or PARTS
    cases = _cases(args, machine) if set(parts) - {"all-reduce"} else []
    rates, launch, hosts, remarks = _where(args.rates or RATES)
    links_s = sum(LINK_SECONDS["quick" if args.quick_links else "full"].values())
    runs, seconds = args.runs or RUNS, args.seconds or SECONDS
    with keeping(args, "distributed") as archive:
        runner = RankRunner(
            launch, runs, seconds, archive, log, hosts, args.quick_links, links_s, machine.path
        )
        found = run_study(runner, cases, args.ranks or RANKS, rates, parts, warn, _replay)
    remarks += [*found.notes, archive.remark]
    study = DistributedStudy(
        provenance_of(machine, ((1, runs),), seconds, remarks=remarks),
        hosts,
        tuple(found.rows),
        tuple(found.links),
        tuple(found.failures),
    )
    return answer(args, study, page)


def _cases(args: Namespace, machine: Machine) -> list[DistributedCase]:
    """Every target at every batch size, recorded and predicted for one rank of one thread: one that
    does not work is known before anything is measured.
    """
    from dlperf.studies.distributed.runs import DistributedCase

    if args.input:
        raise DlperfError("--input is for a bare nn.Module; --distributed takes builders")
    sizes = args.batch_sizes or (args.batch_size or BATCH_SIZE,)
    return [
        DistributedCase(
            name, size, predict_here(read_or_record(args, name, size), machine, 1, "calibrated")
        )
        for name, size in targets_of(args.targets or CASES, sizes)
    ]


def _replay(recording: Path, cluster: Cluster, recorded_on: Cluster) -> tuple[float, float]:
    from dlperf.core.communication import Communication
    from dlperf.distributed.communication_replay import replay_communication

    found = replay_communication(Communication.load(recording), cluster, recorded_on)
    return found.rows[0].step_s, found.recorded_step_s


def _where(rates: Sequence[str]) -> tuple[tuple[str, ...], Launch, str, list[str]]:
    """Rates that this machine can set, the launcher of ranks, a description of their hosts, and
    remarks.
    """
    from dlperf.microbench.hosts.namespaces import Unavailable, hosts
    from dlperf.microbench.hosts.ranks import places_of, run_ranks

    why, remarks = "", []
    try:
        with hosts(2, next((rate for rate in rates if rate != UNSHAPED), None)):
            pass
    except Unavailable as error:
        why = str(error)
        remarks.append(
            f"ranks cannot have hosts of their own here ({why}): they run on loopback, where no"
            " rate can be set and no threshold stands"
        )
        warn(remarks[0])
        rates = (UNSHAPED,)

    def launch(words: Sequence[str], n: int, rate: str) -> None:
        from dlperf.studies.distributed.runs import RUN_LIMIT_S

        with places_of(n, None if rate == UNSHAPED else rate, bool(why)) as indices:
            run_ranks(indices, [sys.executable, *words], limit_s=RUN_LIMIT_S)

    where = (
        "on one host, over its loopback"
        if why
        else "each on a host of its own (network namespaces of one computer, token buckets between"
        " them)"
    )
    return tuple(rates), launch, where, remarks
