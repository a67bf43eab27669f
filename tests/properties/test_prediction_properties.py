"""Properties of calibrated predictions: bounds, scaling, additivity, sources, intervals, files."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from calibrated_cases import LEVELS, PEAK_FLOPS_PER_S, T, machine, mm, relu, trace

from dlperf import Prediction, predict
from dlperf.core.clock import Samples
from dlperf.core.costs import KINDS, Cost, CostKey
from dlperf.core.machine import Bandwidth, Cpu, Kernel, Machine
from dlperf.core.measurement import LayerTimes, Measurement
from dlperf.core.prediction import SOURCES
from dlperf.core.trace import PHASES, Layer, Op, OptimizerInfo, Storage, Symbol, TensorSpec, Trace

SIDE = st.integers(16, 256)
COSTS = {
    "native_call": 2e-6,
    "module_call": 3e-6,
    "autograd_record": 1e-6,
    "page_fault": 5e-7,
    "backward_call": 1e-5,
}


def mystery(n: int) -> Op:
    return Op("mine.mystery.default", (T(n),), outputs=(T(n),), layer="odd")


OPS = st.one_of(
    st.builds(mm, SIDE, SIDE, SIDE),
    st.builds(relu, st.integers(64, 2**20)),
    st.builds(mystery, st.integers(64, 2**16)),
)
SOME_OPS = st.lists(OPS, min_size=1, max_size=6)


def total_s(prediction: Prediction) -> float:
    assert prediction.step.total_s is not None
    return prediction.step.total_s


@settings(deadline=None, max_examples=60)
@given(SIDE, SIDE, SIDE)
def test_no_product_beats_the_peak(m: int, n: int, k: int) -> None:
    assert (
        total_s(predict(trace(mm(m, n, k)), machine(), threads=1))
        >= 2 * m * n * k / PEAK_FLOPS_PER_S
    )


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 2**22))
def test_what_is_unknown_takes_at_least_its_bytes(n: int) -> None:
    assert total_s(predict(trace(mystery(n)), machine(), threads=1)) >= 8 * n / max(LEVELS.values())


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 2**23), st.integers(0, 2**22), st.sampled_from([relu, mystery]))
def test_more_bytes_never_take_less_time(n: int, more: int, make: object) -> None:
    one, other = (
        total_s(predict(trace(make(size)), machine(), threads=1)) for size in (n, n + more)
    )  # type: ignore[operator]
    assert other >= one * (1 - 1e-9)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.floats(1e-7, 1e-5), st.floats(1e-11, 1e-8)), min_size=1, max_size=1),
    st.integers(64, 2**20),
    st.integers(1, 2**18),
)
def test_more_elements_never_take_less_time_whatever_the_law(
    model: list[tuple[float, float]], n: int, more: int
) -> None:
    ((call_s, each_s),) = model
    on = replace(
        machine(),
        kernels=tuple(
            Kernel(relu(size), "pointwise", 1, Samples((call_s + each_s * size,)))
            for size in (64, 1024, 2**15, 2**20)
        ),
    )
    one, other = (total_s(predict(trace(relu(size)), on, threads=1)) for size in (n, n + more))
    assert other >= one * (1 - 1e-9)


@settings(deadline=None, max_examples=40)
@given(SOME_OPS, st.sampled_from([0.5, 2.0, 4.0]))
def test_a_machine_twice_as_fast_takes_half(ops: list[Op], factor: float) -> None:
    slow, other = (predict(trace(*ops), machine(COSTS, factor=f), threads=1) for f in (1.0, factor))
    assert total_s(other) == pytest.approx(factor * total_s(slow), rel=1e-9)
    assert other.step.low_s == pytest.approx(factor * slow.step.low_s, rel=1e-6)  # type: ignore[operator]


@settings(deadline=None, max_examples=40)
@given(SOME_OPS, SOME_OPS)
def test_kernels_of_traces_add(first: list[Op], second: list[Op]) -> None:
    one, other, both = (
        total_s(predict(trace(*ops), machine(), threads=1))
        for ops in (first, second, first + second)
    )
    assert both == pytest.approx(one + other)


@settings(deadline=None, max_examples=40)
@given(SOME_OPS, SOME_OPS, st.integers(1, 4))
def test_rows_add_up_sources_are_known_and_the_interval_holds_the_step(
    forward: list[Op], backward: list[Op], threads: int
) -> None:
    ops = [
        *forward,
        *(replace(op, phase="backward", node=index) for index, op in enumerate(backward)),
    ]
    found = predict(trace(*ops, inference=False), machine(COSTS), threads=threads)
    step, total = found.step, total_s(found)
    assert step.low_s is not None
    assert step.high_s is not None
    assert 0 < step.low_s < total < step.high_s
    rows = found.layers[["forward_s", "backward_s", "optimizer_s"]].to_numpy().sum()
    assert rows == pytest.approx(total - (step.zero_grad_s or 0.0))
    assert set(found.ops["source"]) <= set(
        SOURCES if threads == 1 else ("extrapolated", "unpriced")
    )
    assert bool([line for line in found.warnings if "holds no costs" not in line]) == (threads != 1)
    assert 0.0 <= found.priced_time_frac <= 1.0
    assert sum(found.unpriced.values()) == sum(op.packet == "mine.mystery" for op in ops)
    json.dumps(found.to_json(), allow_nan=False)


@settings(deadline=None, max_examples=40)
@given(SOME_OPS, st.data())
def test_measured_ops_are_measured(ops: list[Op], data: st.DataObject) -> None:
    chosen = data.draw(st.sampled_from(ops))
    on = machine(extra=(Kernel(chosen, "exact", 1, Samples((1e-3, 3e-3, 2e-3))),))
    found = predict(trace(*ops), on, threads=1)
    rows = found.ops[
        [
            ops[index].signature == chosen.signature if index >= 0 else False
            for index in found.ops["index"]
        ]
    ]
    assert set(rows["source"]) == {"measured"}
    assert list(rows["seconds"]) == pytest.approx([1e-3] * len(rows))  # the least of the samples


@settings(deadline=None, max_examples=40)
@given(st.integers(9, 20), st.sampled_from([0, 1, 2]))
def test_far_outside_is_extrapolated(octaves: int, axis: int) -> None:
    sides = [64, 64, 64]
    sides[axis] = 2 ** (octaves + 1)  # 256 was the largest
    found = predict(trace(mm(*sides)), machine(), threads=1)
    (source,) = found.ops[found.ops["what"] == "kernel"]["source"]
    assert source == "extrapolated"


def _referring(trace: Trace) -> Trace:
    """The trace with layers of different names, which its callers and operators refer to."""
    layers = tuple(
        replace(layer, name=f"{index}{layer.name}") for index, layer in enumerate(trace.layers)
    )
    names = ("", *(layer.name for layer in layers))
    return replace(
        trace,
        layers=tuple(
            replace(
                layer,
                callers=tuple((names[count % len(names)], count) for _, count in layer.callers),
            )
            for layer in layers
        ),
        ops=tuple(
            replace(op, layer=names[-1], shares=tuple((names[-1], share) for _, share in op.shares))
            for op in trace.ops
        ),
    )


# -- files -----------------------------------------------------------------------------------------

NAMES = st.text(min_size=1, max_size=6)
SPECS = st.builds(
    lambda shape, dtype, storage, gap: TensorSpec(
        tuple(shape), tuple(gap * s for s in T(*shape).strides), dtype, storage
    ),
    st.lists(st.integers(0, 9), max_size=3),
    st.sampled_from(["float32", "int64", "bool"]),
    st.integers(-1, 2),
    st.integers(1, 2),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63),
    st.floats(allow_nan=False),
    NAMES,
    SPECS,
    st.builds(Symbol, st.sampled_from(["dtype", "device", "layout", "memory_format"]), NAMES),
)
ARGUMENTS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6
)
ANY_OPS = st.builds(
    Op,
    NAMES,
    st.lists(ARGUMENTS, max_size=4).map(tuple),
    st.dictionaries(NAMES, ARGUMENTS, max_size=2).map(lambda d: tuple(d.items())),
    st.lists(SPECS, max_size=2).map(tuple),
    st.sampled_from(PHASES),
    NAMES,
    st.integers(-1, 5),
    st.booleans(),
    st.lists(st.tuples(NAMES, st.floats(0, 1)), max_size=2).map(tuple),
)
LAYERS = st.builds(
    Layer,
    NAMES,
    NAMES,
    st.booleans(),
    st.lists(st.tuples(NAMES, st.integers(1, 9)), max_size=2).map(tuple),
    st.lists(SPECS, max_size=2).map(tuple),
    st.lists(SPECS, max_size=2).map(tuple),
    st.lists(st.tuples(NAMES, SPECS), max_size=2).map(tuple),
)
STORAGES = st.tuples(
    *[st.builds(Storage, st.integers(0, 2**40), st.just(-1), st.none() | st.just(0), NAMES)] * 3
)  # there before the step
TRACES = st.builds(
    Trace,
    NAMES,
    st.integers(1, 512),
    st.lists(LAYERS, max_size=2).map(tuple),
    st.lists(ANY_OPS, max_size=3).map(tuple),
    STORAGES,
    st.none() | st.builds(OptimizerInfo, NAMES, NAMES, st.integers(0, 9)),
    st.booleans(),
    NAMES,
    st.lists(NAMES, max_size=2).map(tuple),
    st.dictionaries(NAMES, NAMES, max_size=2),
).map(lambda trace: _referring(trace))
SIX_DIGITS = st.floats(1e-9, 1e3).map(lambda value: float(f"{value:.6g}"))
SAMPLES = st.builds(
    Samples, st.lists(SIX_DIGITS, min_size=1, max_size=4).map(tuple), st.integers(0, 9)
)
THREADS = st.integers(1, 64)
COST_KEYS = st.sampled_from(sorted(KINDS)).flatmap(
    lambda kind: st.builds(
        CostKey,
        st.just(kind),
        NAMES,
        st.integers(1, 2**40) if KINDS[kind].at else st.just(0),
        NAMES,
    )
)
MACHINES = st.builds(
    Machine,
    st.builds(
        Cpu,
        NAMES,
        THREADS,
        st.tuples(*[st.integers(0, 2**40)] * 3),
        st.integers(0, 2**50),
        st.lists(NAMES).map(tuple),
        NAMES,
    ),
    st.lists(
        st.builds(
            Kernel,
            st.builds(Op, NAMES, st.lists(ARGUMENTS, max_size=3).map(tuple)),
            NAMES,
            THREADS,
            SAMPLES,
        ),
        max_size=3,
    ).map(tuple),
    st.lists(
        st.builds(Bandwidth, NAMES, THREADS, st.integers(1, 2**40), st.integers(1, 2**40), SAMPLES),
        max_size=2,
    ).map(tuple),
    st.lists(st.builds(Cost, COST_KEYS, THREADS, SAMPLES), max_size=2).map(tuple),
    NAMES,
    st.lists(NAMES, max_size=2).map(tuple),
    st.booleans(),
    st.lists(NAMES, max_size=2).map(tuple),
    st.dictionaries(NAMES, NAMES, max_size=2),
    NAMES,
)
MEASUREMENTS = st.builds(
    lambda step, *rest: Measurement("t", 1, 1, {"forward": step[0], "total": step[1]}, *rest),
    st.tuples(SAMPLES, SAMPLES),
    st.lists(
        st.builds(LayerTimes, NAMES, NAMES, SAMPLES, st.none() | SAMPLES, st.none() | SAMPLES),
        max_size=3,
        unique_by=lambda row: row.layer,
    ).map(tuple),
    st.booleans(),
    st.none() | SAMPLES,
    st.dictionaries(NAMES, st.floats(0, 1e6)),
    st.lists(NAMES).map(tuple),
    st.dictionaries(NAMES, NAMES),
    NAMES,
)


@settings(deadline=None, max_examples=100)
@given(TRACES | MACHINES | MEASUREMENTS)
def test_files_give_back_what_they_were_given(found: Trace | Machine | Measurement) -> None:
    written = json.dumps(found.to_json(), allow_nan=False)
    again = type(found).from_json(json.loads(written))
    assert again == found
    assert json.dumps(again.to_json(), allow_nan=False) == written
