"""A distributed step beside its forecast, on a made-up machine and link: the figures are those of
`dlperf scale`.
"""

from __future__ import annotations

import pytest

from dlperf.core.clock import Samples
from dlperf.core.cluster import Cluster, Link
from dlperf.core.communication import Event, RankStep
from dlperf.core.machine import Bandwidth, Cpu, Machine
from dlperf.core.prediction import Item, Prices
from dlperf.core.trace import Layer, Op, OptimizerInfo, Parameter, TensorSpec, Trace
from dlperf.core.units import MIB
from dlperf.forecast.prediction import Prediction
from dlperf.models.buckets import ReducerOptions
from dlperf.runner.communication_recording import RecordedStep
from dlperf.runner.parallel_step import compare_step
from dlperf.runner.ranks import MergedRanks, RankFindings
from dlperf.runner.training_search import is_sharded, reducer_options


def prediction() -> Prediction:
    """One layer with a gradient of 1 MiB: forward 1 s, backward 2 s, optimizer 1 s."""
    few = TensorSpec.contiguous(4)
    ops = tuple(
        Op("aten.relu.default", (few,), outputs=(few,), phase=phase, layer="a")
        for phase in ("forward", "backward", "optimizer")
    )
    parameters = (Parameter("a.weight", "a", TensorSpec.contiguous(2**18)),)
    trace = Trace(
        "made-up",
        4,
        (Layer("a", "Linear", True, (("", 1),)),),
        ops,
        optimizer=OptimizerInfo("SGD", "for-loop", 0),
        parameters=parameters,
        arrivals=((0, 2),),
    )
    items = tuple(
        Item("a", op.phase, seconds, "compute", "measured", op=index)
        for index, (op, seconds) in enumerate(zip(ops, (1.0, 2.0, 1.0)))
    )
    machine = Machine(
        Cpu("made-up", 4),
        kernels=(),
        bandwidths=(Bandwidth("triad", 1, 2**30, 10**18, Samples((1.0,))),),
    )
    return Prediction(trace, machine, 1, "calibrated", Prices(items))


def team(hosts: tuple[str, ...] = ("a", "b")) -> MergedRanks:
    """Ranks whose own step takes 6 s, of which rank 0 communicates 1 s and the others 2 s."""
    found = {}
    for rank, name in enumerate(hosts):
        at_s = 3.0 if rank == 0 else 2.0
        events = (
            Event("launch", 0, "all_reduce", MIB, 0, at_s, at_s, None, 4.0),
            Event("wait", 0, "all_reduce", MIB, 0, at_s, 4.0),
        )
        step = RecordedStep(3, RankStep(0.0, 7.0, events, first=False), 6.0, 4.0 - at_s)
        found[rank] = RankFindings(
            rank, name, 0, "", (step,), (("0", tuple(range(len(hosts)))),), "gloo"
        )
    return MergedRanks(found, len(hosts))


CLUSTER = Cluster(
    (
        Link("network", latency_s=0.0, bandwidth_bytes_per_s=MIB),
        Link("socket", latency_s=0.0, bandwidth_bytes_per_s=1e15),
    )
)


def test_predicted_stands_beside_actual() -> None:
    found = compare_step(team(), prediction(), ReducerOptions(), 4, CLUSTER)
    assert found is not None
    assert found.actual == (6.0, 5.0, 1.0)
    assert found.predicted is not None
    # 2 (n - 1) / n = 1 times 1 MiB at 1 MiB/s, and nothing left to compute meanwhile: 4 s of
    # computing and 1 s for the only bucket
    assert found.predicted == pytest.approx((5.0, 4.0, 1.0), rel=0.01)
    (table,) = found.lines()
    assert table.splitlines()[1].split()[-2:] == ["-17", "%"]  # 5 s for 6
    assert found.to_json()["predicted"]["step_s"] == pytest.approx(5.0, rel=0.01)


def test_ranks_of_one_host_use_no_wire() -> None:
    found = compare_step(team(("a", "a")), prediction(), ReducerOptions(), 4, CLUSTER)
    assert found is not None
    assert found.predicted is not None
    assert found.predicted[2] == pytest.approx(0.0, abs=0.01)


def test_what_the_cluster_file_lacks_is_a_note() -> None:
    inside = Cluster((Link("socket", latency_s=0.0, bandwidth_bytes_per_s=1e15),))
    found = compare_step(team(), prediction(), ReducerOptions(), 4, inside)
    assert found is not None
    assert (found.predicted, len(found.notes)) == (None, 1)
    assert "contains no link between nodes" in found.notes[0]
    uneven = compare_step(team(("a", "a", "b")), prediction(), ReducerOptions(), 4, CLUSTER)
    assert uneven is not None
    assert "3 ranks do not fill nodes of 2" in uneven.notes[0]


def test_what_wraps_a_model_is_read_from_it() -> None:
    from torch import nn

    class DistributedDataParallel(nn.Linear):
        (
            bucket_bytes_cap_default,
            bucket_bytes_cap,
            gradient_as_bucket_view,
            find_unused_parameters,
            broadcast_buffers,
        ) = (
            False,
            3 * MIB,
            True,
            False,
            False,
        )

    assert reducer_options(DistributedDataParallel(2, 2)) == ReducerOptions(
        3 * MIB, True, False, False, False
    )
    assert reducer_options(nn.Linear(2, 2)) is None
    assert not is_sharded(nn.Linear(2, 2))
