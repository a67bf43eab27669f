"""Calls that find their code or their operands far away, measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calibrated_cases import relu

from dlperf.core import code_footprint
from dlperf.core.clock import Clock, CoreSpeed, Repeats, Samples
from dlperf.core.costs import SHORT_ROWS, Cost, CostKey
from dlperf.core.machine import Bandwidth, Machine
from dlperf.core.trace import Op, TensorSpec
from dlperf.microbench import cold_start, framework, operator_benchmark, stream, worker
from dlperf.microbench.cold_work import Work
from dlperf.microbench.plan import Group, Point
from dlperf.predictors import cache_model
from dlperf.predictors.kernels import onednn

T = TensorSpec.contiguous


class Core:
    """Calls that take `warm_s`, and `longer_s` more the first time after :meth:`drive_out`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cold: set[str] = set()
        self.calls: list[str] = []

    def call(self, name: str, warm_s: float, longer_s: float) -> cold_start.Call:
        def run() -> None:
            self.now += warm_s + (longer_s if name in self.cold else 0.0)
            self.cold.discard(name)
            self.calls.append(name)

        return run

    def drive_out(self) -> None:
        self.now += 1.0
        self.cold |= {"code", "operands"}


def test_each_of_several_calls_is_compared_with_itself_without_other_work() -> None:
    core = Core()
    calls = core.call("code", 1e-6, 5e-6), core.call("operands", 3e-5, 7e-6)
    found = cold_start._after(
        calls, core.drive_out, 4, Clock(now=lambda: core.now, switches=lambda: 0)
    )
    assert [len(values) for values in found] == [8, 8]
    for values, longer_s in zip(found, (5e-6, 7e-6)):
        assert values == pytest.approx([longer_s] * 8)
    # Some rounds before, in which what is called sooner comes later: the nearer a call, the warmer.
    assert core.calls[:10] == [*4 * ["operands", "code"], "code", "operands"]


def test_moments_are_joined_by_name() -> None:
    costs = [
        Cost(CostKey("cold_start", "next", 1048576), 2, Samples((1e-6,), 1)),
        Cost(CostKey("native_call"), 2, Samples((2e-6,))),
    ]
    found = cold_start.joined(
        costs,
        {
            CostKey("cold_start", "next", 1048576): Samples((3e-6, 4e-6), 2),
            CostKey("cold_start", "first", 1048576): Samples((9e-6,)),
        },
    )
    assert found == [
        Cost(CostKey("cold_start", "next", 1048576), 2, Samples((1e-6, 3e-6, 4e-6), 3)),
        costs[1],
    ]


def test_operators_with_code_of_their_own_are_what_others_are_priced_by() -> None:
    tiny, further = (
        {op.packet for op in ops}
        for ops in (cold_start.tiny_operators(), cold_start.further_operators())
    )
    assert not tiny & further
    assert all(code_footprint.code_of(packet) == packet for packet in tiny | further)
    assert set(code_footprint._MEASURED.values()) <= tiny | further
    assert set(code_footprint._SIZES) == tiny | further | set(code_footprint.CALLED)


@pytest.mark.parametrize(
    "op",
    [
        *cold_start.tiny_operators(),
        *cold_start.further_operators(),
        *cold_start.elementwise_operators(),
    ],
    ids=lambda op: op.packet,
)
def test_the_operators_before_a_measured_one_leave_its_own_code_cold(op: Op) -> None:
    """All of their code counts as run since its own last did."""
    packets = [other.packet for other in cold_start._others(op)]
    assert len(set(packets)) == 2
    footprint = sum(map(code_footprint.relative_footprint, packets))
    own = code_footprint.code_of(op.packet)
    assert code_footprint.code_since(own, (op.packet, *packets)) == footprint


def test_a_convolution_is_not_measured_after_the_backward_of_another() -> None:
    bench = cold_start._Bench(True, Clock())
    packets = ("aten.convolution", "aten.addmm")
    for more, is_measured in (((), True), (("aten.convolution_backward",), False)):
        work = Work("varied", 33, lambda: None, lambda: None, packets + more)
        names = [what for what, *_ in bench._operators(work)]
        assert ("aten.convolution" in names) == is_measured
        assert "convolution_kernel" in names


def test_what_passes_counts_since_the_work_itself_ran_the_code() -> None:
    packets = ("aten.convolution", "aten.addmm", "aten.relu", "aten.gelu")
    work = Work("varied", 33, lambda: None, lambda: None, packets)
    assert [
        work.since(what)
        for what in ("aten.gelu", "aten.mm", "aten.addmm", "aten.convolution", "next")
    ] == [0, 8, 8, 13, 33]
    whole = Work("varied", 33, lambda: None, lambda: None, (*packets, "backward"))
    assert [whole.since(what) for what in ("aten.gelu", "backward")] == [
        10,
        33,
    ]  # the engine's call counts; what comes once a step comes after all of it
    assert Work("cold", 2**20, lambda: None, lambda: None).since("aten.mm") == 2**20


@pytest.mark.parametrize(
    "op", [*cold_start.tiny_operators(), *cold_start.further_operators()], ids=lambda op: op.packet
)
def test_autograd_records_what_a_forward_calls(op: Op) -> None:
    made = cold_start._recorded(op)()
    first = made if isinstance(made, torch.Tensor) else made[0]  # type: ignore[index]
    assert first.requires_grad == ("backward" not in op.packet)


def test_what_neighbours_change_is_measured_in_several_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def measured(name: str) -> Samples:
        calls.append(name)
        return Samples((1e-6 * len(calls),))

    def sweeps(*_: object) -> list[Bandwidth]:
        return []

    monkeypatch.setattr(
        framework,
        "measure",
        lambda *_: [
            Cost(CostKey("native_call"), 1, Samples((1e-6,))),
            Cost(CostKey("cold_start", "next", 1048576), 1, measured("first cold")),
        ],
    )
    monkeypatch.setattr(stream, "measure", sweeps)
    monkeypatch.setattr(
        stream,
        "measure_residency",
        lambda *_: [Cost(CostKey("cache_residency", at=2), 1, measured("retention"))],
    )
    monkeypatch.setattr(
        cold_start, "measure", lambda *_: {CostKey("cold_start", "next", 1048576): measured("cold")}
    )
    few = Group(
        "few",
        tuple(Point("pointwise", relu(n)) for n in (64, 128)),
        Repeats(sample_s=1e-5, n_samples=3),
    )
    monkeypatch.setattr(worker, "planned_groups", lambda *_: [few])
    monkeypatch.setattr(worker, "settled_core_speed", lambda *_: CoreSpeed(best_s=1.0))
    monkeypatch.setattr(worker, "AGAIN", {"full": 1})
    said: list[dict[str, Any]] = []
    job = {
        "threads": 1,
        "mode": "full",
        "groups": ["framework", "stream", "few"],
        "traces": [],
        "core_speed_s": 1.0,
        "asks": False,
        "measured": {},
        "n_readings": 0,
    }
    worker.run(job, said.append)
    assert sorted(calls) == ["cold", "first cold", "retention", "retention"]
    told = {
        message["group"]: Machine.from_json(message["part"]).costs
        for message in said
        if "group" in message
    }  # the last word of each
    found = {cost.key: len(cost.samples.values) for cost in (*told["framework"], *told["stream"])}
    assert (
        found[CostKey("native_call")],
        found[CostKey("cold_start", "next", 1048576)],
        found[CostKey("cache_residency", at=2)],
    ) == (1, 2, 2)


def test_each_order_in_which_operands_are_touched_is_measured() -> None:
    found = cold_start.passing_operators()
    names = {name for name, *_ in found}
    assert {cache_model.IN_ORDER, SHORT_ROWS, *cache_model._ORDERS.values()} == names
    for name, few, far, n_bytes in found:
        assert few.packet == far.packet
        result = operator_benchmark.build(far)()
        made = result[0] if isinstance(result, tuple) else result
        written = made.numel() * 4
        read = written if name == "aten.embedding" else sum(spec.nbytes for spec in far.inputs)
        copied = sum(sum(map(sum, stage)) for stage in onednn.scratch(far))
        assert n_bytes == pytest.approx(read + written + copied, rel=0.1)
