"""Small requests of a step: of autograd's engine, of convolutions and of lists of tensors."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from dlperf.core.trace import Op, Storage, TensorSpec, Trace
from dlperf.core.units import MIB
from dlperf.predictors.allocator.heap import PAGE_BYTES
from dlperf.predictors.allocator.policies import policy_of
from dlperf.predictors.allocator.process import Script
from dlperf.predictors.allocator.simulation import simulate
from dlperf.predictors.allocator.small_requests import CALL, Engine, small_requests
from dlperf.predictors.allocator.stages import Scratch, Stage

T = TensorSpec.contiguous
BLOCKS = (Stage(read=(MIB,), written=(MIB,)),)


class Requests:
    """Addresses in use, each with the bytes asked for."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.n_made = 0

    def malloc(self, sizes: Iterable[int]) -> list[int]:
        made = []
        for n_bytes in sizes:
            self.n_made += 1
            self.live[self.n_made] = n_bytes
            made.append(self.n_made)
        return made

    def free(self, addresses: list[int]) -> None:
        while addresses:
            del self.live[addresses.pop()]


def test_the_engine_gives_back_all_that_it_made() -> None:
    requests = Requests()
    engine = Engine(requests.malloc, requests.free)
    engine.end()
    assert not requests.n_made
    engine.start(3)
    at_first = len(requests.live)
    for _ in range(3):
        engine.next_node()
    assert list(requests.live.values()).count(24) == 2 + 1  # of one queue and the task: none waits
    engine.end()
    assert not requests.live
    assert at_first > 2 * 3


def test_a_node_gives_back_what_the_one_before_it_held() -> None:
    requests = Requests()
    engine = Engine(requests.malloc, requests.free)
    engine.start(9)
    engine.next_node()
    n_live = len(requests.live)
    for _ in range(5):
        engine.next_node()
        n_live -= 1  # what it waited for
        assert len(requests.live) == n_live


def test_an_engine_may_run_more_nodes_than_were_announced() -> None:
    requests = Requests()
    engine = Engine(requests.malloc, requests.free)
    engine.start(0)
    engine.next_node()
    engine.next_node()
    engine.end()
    assert not requests.live


def test_calls_are_those_of_onednn_with_blocks_and_of_lists() -> None:
    image, weight = T(8, 16, 9, 9), T(16, 16, 3, 3)
    ops = (
        Op("aten.convolution.default", (image, weight, None, (1, 1), (1, 1), (1, 1), False)),
        Op("aten.convolution.default", (image, weight, None, (1, 1), (1, 1), (1, 1), False)),
        Op("aten.relu.default", (image,), outputs=(image,)),
        Op("aten._foreach_sqrt.default", (image,), outputs=(image,) * 5, phase="optimizer"),
        Op("aten._foreach_mul_.Scalar", (image,), phase="optimizer"),
        Op("aten.mkldnn_rnn_layer.default", (image,)),
    )
    found = small_requests(Trace("t", 1, (), ops, ()), lambda index: index != 1)
    assert found.memories == {0: 4, 5: 13}
    assert found.calls == {0: CALL, 3: (40, 40, 8, 40), 5: (96, 176, 24)}
    assert (found.backward, found.optimizer) == (len(ops), 3)


def test_nodes_begin_with_their_first_op() -> None:
    ops = tuple(
        Op("aten.mul.Tensor", (T(4),), phase=phase, node=node)
        for phase, node in (
            ("forward", -1),
            ("backward", -1),
            ("backward", 0),
            ("backward", 0),
            ("backward", 1),
        )
    )
    found = small_requests(Trace("t", 1, (), ops, ()), lambda index: False)
    assert found.backward == 1
    assert found.first_of_node == {2, 4}


@pytest.mark.parametrize("policy", ["default", "jemalloc", "tuned"])
def test_small_requests_of_a_convolution_leave_nothing_behind(policy: str) -> None:
    """A heap that grew by every step would give back less than it faults in."""

    def blocks(op: Op) -> Scratch:
        return BLOCKS if op.packet == "aten.convolution" else ()

    image, weight = T(8, 16, 9, 9), T(16, 16, 3, 3)
    arguments = (image, weight, None, (1, 1), (1, 1), (1, 1), False)
    ops = (
        Op("aten.convolution.default", arguments, outputs=(image,), grad=True),
        Op("aten.relu.default", (image,), phase="backward", node=0),
    )
    trace = Trace("t", 1, (), ops, (Storage(MIB, 0, 2),))
    assert simulate(trace, blocks, policy).peak_bytes < 8 * MIB
    steps = Script(trace, blocks).run(policy_of(policy)).steps
    n_grown = sum(sum(step.faults) - sum(step.released) for step in steps)
    assert n_grown * PAGE_BYTES <= 3 * MIB  # each block, and the result, may lie anew
