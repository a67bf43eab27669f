"""Stack reuse_distances of operands and of code, worked out by hand."""

from __future__ import annotations

from calibrated_cases import T, trace
from hypothesis import given
from hypothesis import strategies as st

from dlperf.core.trace import Op, Storage
from dlperf.predictors.allocator.memory_map import owner_of_scratch
from dlperf.predictors.analysis import analyse
from dlperf.predictors.kernels.sub_kernels import scratch
from dlperf.predictors.reuse_distance import LruStack

KB = 1000


def touch(name: str, place: int, n_bytes: int) -> Op:
    """In place on one tensor."""
    return Op(f"aten.{name}_.default", (T(n_bytes // 4, storage=place),), layer=name)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 100)), max_size=700))
def test_recency_is_a_stack(touches: list[tuple[int, int]]) -> None:
    recency, stack = LruStack(), list[tuple[int, int]]()
    moments: dict[int, int] = {}
    for name, n_bytes in touches:
        if name in moments:
            above = next(index for index, (other, _) in enumerate(stack) if other == name)
            assert recency.since(moments[name]) == sum(size for _, size in stack[:above])
        recency.touch(name, n_bytes)
        moments[name] = recency.now
        stack = [(name, n_bytes), *(entry for entry in stack if entry[0] != name)]
    assert recency.since(0) == sum(size for _, size in stack)


def test_what_is_touched_twice_counts_once() -> None:
    step = trace(
        touch("relu", 0, 4 * KB),
        touch("abs", 1, 8 * KB),
        touch("neg", 1, 8 * KB),
        touch("exp", 1, 8 * KB),
        storages=(Storage(4 * KB, kind="input"), Storage(8 * KB, kind="input")),
    )
    found = analyse(step, "default")
    assert found.operand_distance.tolist() == [8 * KB, 4 * KB, 0, 0]
    assert found.operand_touched.tolist() == [
        0,
        3,
        5,
        6,
    ]  # of two steps of four: itself a step ago, the step before's last, and the ops right before
    assert found.code_distance == (
        8 * KB,
        12 * KB,
        12 * KB,
        12 * KB,
    )  # all that the others touched since each ran
    assert found.code_since == (3, 3, 3, 3)  # elementwise operators
    assert found.step_bytes == 12 * KB


def test_a_view_touches_nothing() -> None:
    first, second = T(KB, storage=0), T(KB, storage=1)
    view = Op("aten.view.default", (first, (KB,)), outputs=(first,), layer="view")
    step = trace(
        touch("relu", 0, 4 * KB),
        touch("abs", 1, 4 * KB),
        view,
        touch("neg", 0, 4 * KB),
        storages=(Storage(4 * KB, kind="input"),) * 2,
    )
    assert second.nbytes == 4 * KB
    assert analyse(step, "default").operand_distance.tolist() == [0, 4 * KB, 4 * KB]


def test_blocks_that_an_op_allocates_within_itself_lie_between_as_well() -> None:
    """oneDNN's copies of a convolution's operands, where two convolutions run: the second's lie where
    the first's lay, but for one between small requests, which finds its own of the step before.
    """
    image, weight = T(2, 16, 8, 8, storage=1), T(16, 16, 3, 3, storage=2)
    settings = (None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    ops = [
        Op(
            "aten.convolution.default",
            (image, weight, *settings),
            outputs=(T(2, 16, 8, 8, storage=n),),
        )
        for n in (3, 4)
    ]
    (stage,) = scratch(ops[0])
    blocks = sum(map(sum, stage))
    assert blocks >= 2 * image.nbytes + weight.nbytes
    kinds = (4 * KB, "input"), (image.nbytes, "input"), (weight.nbytes, "parameter")
    storages = (
        *(Storage(size, kind=kind) for size, kind in kinds),
        *(Storage(image.nbytes, kind="state") for _ in ops),
    )
    step = trace(touch("relu", 0, 4 * KB), *ops, touch("abs", 0, 4 * KB), storages=storages)
    found = analyse(step, "tuned")
    of_second = dict(found.allocator.predecessors_of_blocks[2])
    assert of_second.keys() == {owner_of_scratch(1), owner_of_scratch(2)}
    own = of_second[owner_of_scratch(2)]
    passed = 3 * image.nbytes + weight.nbytes + blocks + own
    assert found.operand_distance[-1] == passed
    assert found.working_bytes[1] == 2 * image.nbytes + weight.nbytes + blocks
    far = found.operand_is_blocks & (found.operand_op == 2) & (found.operand_distance > 0)
    assert found.operand_bytes[far] == [own]
    assert found.step_bytes == 4 * KB + passed


def test_memory_that_is_handed_out_again_is_the_same_memory() -> None:
    """Two results of one size, the first freed before the second: it takes the first one's place,
    and is as near as that was.
    """
    one, two = T(KB, storage=1), T(KB, storage=2)
    step = trace(
        Op("aten.relu.default", (T(KB, storage=0),), outputs=(one,), layer="a"),
        touch("abs", 3, 12 * KB),
        Op("aten.relu.default", (T(KB, storage=0),), outputs=(two,), layer="b"),
        storages=(
            Storage(4 * KB, kind="input"),
            Storage(4 * KB, born=0, dies=1),
            Storage(4 * KB, born=2, dies=3),
            Storage(12 * KB, kind="input"),
        ),
    )
    found = analyse(step, "tuned")  # no memory goes back to the system
    assert found.allocator.predecessors[2] == ((1, 4 * KB),)
    assert found.step_bytes == 20 * KB  # the input, one result, the other tensor
    of_second = found.operand_distance[found.operand_op == 2].tolist()
    assert (
        of_second
        == [
            12 * KB,
            12 * KB,
        ]
        # of the input and of its own memory, both of which the first op touched: the tensor in between
    )
