"""The recorder on a process group of one rank in this process: which calls it sees, their bytes and
waits, and that nothing of it stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

from dlperf.runner.collectives import CollectiveRecorder
from dlperf.runner.communication_recording import CollectiveCall, StepMark
from dlperf.runner.ranks import RankFindings


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.fixture
def recorder(group: None) -> Iterator[CollectiveRecorder]:
    made = CollectiveRecorder()
    made.install()
    yield made
    made.remove()
    assert made.error is None


def calls(recorder: CollectiveRecorder) -> list[CollectiveCall]:
    return recorder._calls


def tensors(n: int = 6) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32)


@pytest.mark.parametrize(
    ("make", "kind", "n_bytes", "peer"),
    [
        (lambda: dist.all_reduce(tensors()), "all_reduce", 24, None),
        (lambda: dist.all_gather([tensors()], tensors()), "all_gather", 24, None),
        (lambda: dist.all_gather_into_tensor(tensors(), tensors()), "all_gather", 24, None),
        (lambda: dist.reduce_scatter(tensors(), [tensors()]), "reduce_scatter", 24, None),
        (lambda: dist.reduce_scatter_tensor(tensors(), tensors()), "reduce_scatter", 24, None),
        (lambda: dist.broadcast(tensors(), 0), "broadcast", 24, 0),
        (lambda: dist.reduce(tensors(), 0), "reduce", 24, 0),
        (lambda: dist.gather(tensors(), [tensors()]), "gather", 24, 0),
        (lambda: dist.scatter(tensors(), [tensors()]), "scatter", 24, 0),
        (lambda: dist.all_to_all_single(tensors(), tensors()), "all_to_all", 24, None),
        (lambda: dist.barrier(), "barrier", 0, None),
        (lambda: dist.all_reduce(torch.zeros(0)), "all_reduce", 0, None),
        (
            lambda: functional.all_reduce(tensors(), "sum", dist.group.WORLD) + 1,
            "all_reduce",
            24,
            None,
        ),
    ],
)
def test_a_blocking_call_is_a_launch_and_its_wait(
    recorder: CollectiveRecorder, make: Any, kind: str, n_bytes: int, peer: int | None
) -> None:
    try:
        make()
    except RuntimeError as error:
        if kind == "reduce_scatter" and "does not support" in str(error):
            pytest.skip(str(error))  # gloo in earlier releases of torch
        raise
    (call,) = calls(recorder)
    assert (call.kind, call.n_bytes, call.peer) == (kind, n_bytes, peer)
    ((at, until),) = call.waits
    assert call.at <= call.until <= at <= until
    assert recorder.groups == {call.group: (0,)}
    assert recorder.backend == "gloo"


def test_what_a_call_computes_is_what_it_computes_without(group: None) -> None:
    def results() -> list[torch.Tensor]:
        torch.manual_seed(3)
        summed, got = torch.randn(5), torch.zeros(5)
        work = dist.all_reduce(summed, dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        work.wait()
        dist.all_gather_into_tensor(got, summed)
        return [summed, got, functional.all_reduce(got, "sum", dist.group.WORLD) * 2, torch.rand(2)]

    plain = results()
    recorder = CollectiveRecorder()
    recorder.install()
    watched = results()
    recorder.remove()
    assert all(torch.equal(a, b) for a, b in zip(plain, watched))
    assert [call.kind for call in calls(recorder)] == ["all_reduce", "all_gather", "all_reduce"]


def test_an_asynchronous_call_is_waited_for_where_the_script_waits_and_its_completion_is_seen(
    recorder: CollectiveRecorder,
) -> None:
    work = dist.all_reduce(tensors(), async_op=True)
    assert work is not None
    work.wait()
    work.wait()
    (call,) = calls(recorder)
    assert len(call.waits) == 1  # the second one finds nothing to wait for
    work.get_future().wait()
    assert call.done is not None
    assert call.done >= call.at


def test_errors_of_a_call_are_the_scripts_own(recorder: CollectiveRecorder) -> None:
    with pytest.raises((RuntimeError, ValueError)) as watched:
        dist.all_reduce(torch.zeros(2, dtype=torch.complex64), dist.ReduceOp.MAX)
    recorder.remove()
    with pytest.raises(type(watched.value)) as plain:
        dist.all_reduce(torch.zeros(2, dtype=torch.complex64), dist.ReduceOp.MAX)
    assert str(plain.value) == str(watched.value)


def test_ddp_launches_in_its_backward_and_waits_at_its_end(recorder: CollectiveRecorder) -> None:
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    now = recorder.clock.now
    for number in range(3):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        recorder.after_step(
            StepMark(1, now(), now(), plain=number == 2, own_s=1.0), is_watched=number > 0
        )
    recorder.remove()
    first, plain = recorder.steps
    assert (first.number, first.step.first, plain.number, plain.step.first) == (0, True, 2, False)
    n_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    for step in (first.step, plain.step):
        reduced = [event for event in step.launches if event.kind == "all_reduce"]
        assert sum(event.n_bytes for event in reduced) == n_bytes
        assert {event.call for event in step.waits} == {event.call for event in step.launches}
    kinds = [event.kind for event in plain.step.launches]
    assert kinds[: kinds.index("all_reduce")] == [
        "broadcast",
        "broadcast",
    ]  # the buffers: float32 and int64


def test_a_communication_hook_is_seen_too(recorder: CollectiveRecorder) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 8))
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    before = len(calls(recorder))
    model(torch.ones(3, 4)).sum().backward()
    (call,) = calls(recorder)[before:]
    assert (call.kind, call.n_bytes) == ("all_reduce", 2 * 40)
    assert call.region is not None


def test_groups_are_told_apart(recorder: CollectiveRecorder) -> None:
    other = dist.new_group([0])
    before = len(calls(recorder))
    dist.all_reduce(tensors())
    dist.all_reduce(tensors(), group=other)
    one, two = calls(recorder)[before:]
    assert one.group != two.group
    assert set(recorder.groups.values()) == {(0,)}


def test_nothing_stays(group: None) -> None:
    def state() -> tuple[Any, ...]:
        tables = [
            torch._C._dispatch_dump_table(name)
            for name in ("c10d::allreduce_", "c10d::send", "_c10d_functional::wait_tensor")
        ]
        return (
            tables,
            dist.Work.wait,
            dist._broadcast_coalesced,
            len(nn.modules.module._global_forward_pre_hooks),
        )

    before = state()
    recorder = CollectiveRecorder()
    recorder.install()
    assert state() != before
    recorder.remove()
    recorder.remove()
    assert state() == before
    dist.all_reduce(tensors())
    assert calls(recorder) == []


def test_a_failure_of_the_recorder_ends_the_recording_alone(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = CollectiveRecorder()
    recorder.install()
    monkeypatch.setattr(recorder, "_issued", lambda *_: 1 / 0)
    summed = tensors()
    dist.all_reduce(summed)
    dist.all_reduce(summed)
    recorder.remove()
    assert isinstance(recorder.error, ZeroDivisionError)
    assert torch.equal(summed, tensors())


def test_a_model_in_evaluation_does_not_begin_the_first_step(recorder: CollectiveRecorder) -> None:
    nn.Linear(2, 2).eval()(torch.ones(1, 2))
    assert recorder._first_began is None
    nn.Linear(2, 2)(torch.ones(1, 2))
    began = recorder._first_began
    assert began is not None
    nn.Linear(2, 2)(torch.ones(1, 2))
    assert recorder._first_began == began


def test_a_program_that_never_trains_is_one_step_unless_it_has_too_many_calls(group: None) -> None:
    recorder = CollectiveRecorder(most_calls=3)
    recorder.install()
    for _ in range(3):
        dist.all_reduce(tensors())
    (run,) = recorder.steps
    assert len(list(run.step.launches)) == len(list(run.step.waits)) == 3
    dist.all_reduce(tensors())
    assert (recorder.has_forgotten, len(calls(recorder)), recorder.steps) == (True, 1, ())
    recorder.remove()
    assert "at most 3 calls are kept" in RankFindings.of(0, 0, "no optimizer", recorder, 1).reason
