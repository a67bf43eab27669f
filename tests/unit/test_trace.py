"""Traces as data: tensors, signatures, files."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlperf.core.errors import DlperfError
from dlperf.core.trace import (
    ITEM_BYTES,
    Layer,
    Op,
    OptimizerInfo,
    Parameter,
    Storage,
    Symbol,
    TensorSpec,
    Trace,
)

T = TensorSpec.contiguous


# -- tensors ---------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), max_size=4), st.permutations(range(4)), st.booleans())
def test_tensors_are_as_torch_sees_them(shape: list[int], order: list[int], permuted: bool) -> None:
    real = torch.empty(shape)
    if permuted:
        real = real.permute([axis for axis in order if axis < len(shape)])
    spec = TensorSpec(tuple(real.shape), tuple(real.stride()))
    assert spec.numel == real.numel()
    if real.numel():  # of an empty one torch says that it is anything
        assert spec.is_contiguous == real.is_contiguous()
        assert spec.is_dense  # no element is missing after a permutation
    assert T(*shape).strides == torch.empty(shape).stride()


def test_gaps_and_overlaps_are_not_dense() -> None:
    assert not TensorSpec((4, 4), (8, 1)).is_dense
    assert not TensorSpec((4, 4), (0, 1)).is_dense
    assert TensorSpec((4, 4), (1, 4)).is_dense
    assert not TensorSpec((4, 4), (1, 4)).is_contiguous


def test_a_broadcast_is_read_once() -> None:
    assert TensorSpec((64, 10), (0, 1)).nbytes == 4 * 10
    assert T(64, 10, dtype="float64").nbytes == 8 * 640
    assert TensorSpec((0, 10), (0, 1)).nbytes == 0
    assert T().nbytes == 4


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_item_sizes_are_torchs(dtype: str) -> None:
    real = getattr(torch, dtype, None)
    if real is not None:
        assert real.itemsize == ITEM_BYTES[dtype]


# -- ops -------------------------------------------------------------------------------------------


def test_inputs_are_found_in_lists_and_keywords() -> None:
    op = Op(
        "aten.cat.default",
        ((T(1), (T(2), None)), 3),
        (("out", T(4)), ("dtype", Symbol("dtype", "float32"))),
    )
    assert [spec.shape for spec in op.inputs] == [(1,), (2,), (4,)]


def test_a_signature_is_what_decides_the_time() -> None:
    base = Op("aten.add.Tensor", (T(8), T(8)), (("alpha", 1),), layer="a")
    assert (
        base.signature
        == Op(
            "aten.add.Tensor",
            (T(8, storage=3), T(8, storage=4)),
            (("alpha", 1),),
            (T(8),),
            "backward",
            "b",
            7,
            True,
        ).signature
    )
    others = [
        Op("aten.add_.Tensor", base.args, base.kwargs),
        Op(base.name, (T(8), T(9)), base.kwargs),
        Op(base.name, base.args, (("alpha", 2),)),
        Op(base.name, (T(8, dtype="float64"), T(8)), base.kwargs),
        Op(base.name, (T(8), TensorSpec((8,), (2,))), base.kwargs),
        Op(base.name, base.args),
    ]
    assert len({op.signature for op in (base, *others)}) == 1 + len(others)


def test_layers_count_their_calls() -> None:
    assert Layer("a", "Linear", True, (("", 1), ("b", 2))).n_calls == 3


def test_shared_parameters_count_once() -> None:
    tied = T(11, 6, storage=0)
    layers = (
        Layer("emb", "Embedding", True, parameters=(("weight", tied),)),
        Layer("out", "Linear", True, parameters=(("weight", tied), ("bias", T(11)))),
    )
    assert Trace("t", 1, layers, (), (Storage(264),)).n_parameters == 66 + 11


@pytest.mark.parametrize(
    ("batch_size", "ops", "message"),
    [(0, (), "batch size is 0"), (1, (Op("aten.relu.default", phase="warm"),), "phase 'warm'")],
)
def test_what_cannot_be_is_refused(batch_size: int, ops: tuple[Op, ...], message: str) -> None:
    with pytest.raises(DlperfError, match=message):
        Trace("t", batch_size, (), ops)


# -- files -----------------------------------------------------------------------------------------


def full_trace() -> Trace:
    """Every kind of argument and field."""
    x, weight, view = T(4, 3, storage=0), T(2, 3, storage=1), TensorSpec((3, 2), (1, 3), storage=1)
    arguments = (
        x,
        (view, None, (1, 2)),
        True,
        3,
        0.1,
        math.inf,
        -math.inf,
        "mean",
        Symbol("dtype", "bfloat16"),
        Symbol("device", "cpu"),
        (),
    )
    ops = (
        Op(
            "aten.mix.default",
            arguments,
            (("alpha", 2.5), ("memory_format", Symbol("memory_format", "channels_last"))),
            (T(4, 2),),
            "forward",
            "fc",
            -1,
            True,
        ),
        Op(
            "aten._fused_sgd_.default",
            ((weight,),),
            phase="optimizer",
            shares=(("fc", 0.25), ("gc", 0.75)),
        ),
        Op(
            "aten.mm.default", (T(2, 4), x), outputs=(weight,), phase="backward", layer="fc", node=5
        ),
    )
    layers = (
        Layer("Net", "Net", False, (("", 1),), (x,), (T(4, 2),)),
        Layer("fc", "Linear", True, (("Net", 2),), (x,), (T(4, 2),), (("weight", weight),)),
    )
    storages = (
        Storage(48, kind="input"),
        Storage(24, kind="parameter"),
        Storage(32, 0, 3),
        Storage(8, 1, None, "gradient"),
    )
    return Trace(
        "file.py:net",
        4,
        layers,
        ops,
        storages,
        OptimizerInfo("SGD", "fused", 1),
        recorded_on="real tensors",
        notes=("a note",),
        versions={"torch": "2"},
    )


def test_a_file_gives_back_the_trace(tmp_path: Path) -> None:
    trace = full_trace()
    trace.save(tmp_path / "t.json")
    again = Trace.load(tmp_path / "t.json")
    assert again == trace
    assert again.to_json() == trace.to_json()
    assert [op.signature for op in again.ops] == [op.signature for op in trace.ops]


def test_a_nan_survives() -> None:
    again = Trace.from_json(
        json.loads(
            json.dumps(
                Trace("t", 1, (), (Op("aten.fill_.Scalar", (T(2), math.nan)),)).to_json(),
                allow_nan=False,
            )
        )
    )
    value = again.ops[0].args[1]
    assert isinstance(value, float)
    assert math.isnan(value)


def damage(data: dict[str, Any], *path: Any, value: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema_version",), 99, "schema_version is 99"),
        (("schema_version",), "1", "schema_version is '1'"),
        (("schema",), "dlperf.machine", "is no dlperf.trace file"),
        (("batch_size",), 0, "batch_size is 0; expected a whole number of at least 1"),
        (("batch_size",), "4", "batch_size is '4'; expected a whole number"),
        (
            ("ops", 0, 4),
            "sideways",
            (
                r"ops\[0\]\.phase is 'sideways'; expected one of backward, forward, optimizer,"
                r" zero_grad"
            ),
        ),
        (("ops", 0), ["aten.relu.default"], r"ops\[0\] is .*; expected a list of 10 entries"),
        (("ops",), None, "ops is null; expected a list"),
        (
            ("ops", 2, 1, 0),
            {"tensor": 99},
            r"ops\[2\]\.args\[0\]\['tensor'\] is 99; expected the number of a tensor",
        ),
        (
            ("ops", 2, 1, 0),
            {"one": 1, "two": 2},
            r"ops\[2\]\.args\[0\] is .*; expected an operator's argument",
        ),
        (
            ("tensors", 0, 0),
            [-4, 3],
            r"tensors\[0\]\.shape\[0\] is -4; expected a whole number of at least 0",
        ),
        (("tensors", 0, 0), [4.5, 3], r"tensors\[0\]\.shape\[0\] is 4\.5; expected a whole number"),
        (
            ("tensors", 1, 1),
            [1],
            r"tensors\[1\]\.strides is \[1\]; expected as many as the shape has sizes, 2",
        ),
        (("tensors", 0, 3), 7, r"tensors\[0\]\.storage is 7; expected one of the 4 storages"),
        (("storages", 2, 0), -32, r"storages\[2\]\.n_bytes is -32; expected a whole number"),
        (("storages", 2), [1, 2, 3, "", 5], r"storages\[2\] is .*; expected a list of 4 entries"),
        (
            ("layers", 0, "inputs"),
            [99],
            r"layers\[0\]\.inputs\[0\] is 99; expected the number of a tensor",
        ),
        (("optimizer",), {"kind": "SGD"}, r"optimizer\.type is missing"),
        (
            ("tensors", 0, 2),
            "float33",
            r"tensors\[0\]\.dtype is 'float33'; expected the name of a torch dtype",
        ),
        (
            ("tensors", 0, 0),
            [2**30, 2**30],
            (
                r"tensors\[0\]\.shape is \[1073741824, 1073741824\]; expected a tensor of less than"
                r" 2\^53 bytes"
            ),
        ),
        (
            ("tensors", 0, 0),
            [2**70, 1],
            (
                r"tensors\[0\]\.shape\[0\] is 1180591620717411303424; expected a whole number of at"
                r" most"
            ),
        ),
        (("layers", 1, "name"), "Net", r"layers\[1\]\.name is 'Net'; expected each of them once"),
        (("layers", 1, "name"), "", r"layers\[1\]\.name is ''; expected text that is not empty"),
        (
            ("layers", 1, "callers", 0, 0),
            "x" * 99,
            r"callers\[0\]\.name is 'x{59}\.\.\.; expected a layer of the trace",
        ),
        (
            ("ops", 0, 5),
            "\x1b[31m",
            r"ops\[0\]\.layer is '\\x1b\[31m'; expected a layer of the trace",
        ),
        (
            ("storages", 2, 2),
            4,
            r"storages\[2\]\.dies is 4; expected an operator's number, of which there are 3",
        ),
        (("storages", 2, 1), 3, r"storages\[2\]\.born is 3; expected an operator's number"),
        (("versions",), {"torch": "2", "python": 3}, r"versions\['python'\] is 3; expected text"),
    ],
)
def test_a_damaged_file_is_named(
    tmp_path: Path, path: tuple[Any, ...], value: Any, message: str
) -> None:
    data = full_trace().to_json()
    damage(data, *path, value=value)
    file = tmp_path / "t.json"
    file.write_text(json.dumps(data))
    with pytest.raises(DlperfError, match=message) as error:
        Trace.load(file)
    assert str(error.value).startswith(f"{file}: ")


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    data = full_trace().to_json()
    since_later = ("parameters", "buffers", "arrivals")  # files of older versions lack them
    for key in [key for key in data if key not in ("schema", "schema_version", *since_later)]:
        (tmp_path / "t.json").write_text(
            json.dumps({name: value for name, value in data.items() if name != key})
        )
        with pytest.raises(DlperfError, match=f"{key} is missing; expected "):
            Trace.load(tmp_path / "t.json")


def test_arrivals_of_gradients_survive_a_file_and_are_checked(tmp_path: Path) -> None:
    weight = Parameter("fc.weight", "fc", TensorSpec.contiguous(3), sparse=True)
    other = Parameter("gc.weight", "gc", TensorSpec.contiguous(3))
    trace = replace(
        full_trace(),
        parameters=(weight, other),
        buffers=(("mean", TensorSpec.contiguous(2)),),
        arrivals=((0, 1),),
    )
    trace.save(tmp_path / "t.json")
    assert Trace.load(tmp_path / "t.json") == trace
    data = trace.to_json()
    data["arrivals"] = [[2, 1]]
    with pytest.raises(
        DlperfError, match=r"arrivals\[0\]\.parameter is 2; expected one of the 2 parameters"
    ):
        Trace.from_json(data)


def test_every_dtype_of_torch_has_a_size() -> None:
    import torch

    dtypes = {one for name in dir(torch) if isinstance(one := getattr(torch, name), torch.dtype)}
    assert {
        str(one).removeprefix("torch."): one.itemsize for one in dtypes
    }.items() <= ITEM_BYTES.items()


@pytest.mark.parametrize(
    ("argument", "entry"),
    [
        (math.nan, "args[1] is nan"),
        ({"float": "one"}, "args[1] is {'float': 'one'}"),
        ({"colour": "red"}, "args[1] is {'colour': 'red'}"),
        (2**70, "args[1] is 1180591620717411303424"),
        ([1, [2, {"tensor": True}]], "args[1][1][1]['tensor'] is true"),
        ([1, {"tensor": -1}], "args[1][1]['tensor'] is -1"),
        ({}, "args[1] is {}"),
        (functools.reduce(lambda inner, _: [inner], range(20), 1), "[[[[[[[[["),
    ],
)
def test_what_is_no_argument_is_named(argument: Any, entry: str) -> None:
    data = full_trace().to_json()
    data["ops"][1][1] = [1, argument]
    with pytest.raises(DlperfError, match=r"ops\[1\]\.args\[1\].* is .*; expected ") as error:
        Trace.from_json(data)
    assert entry in str(error.value)
    data["ops"][1][1], data["ops"][1][2] = [], {"alpha": argument}
    with pytest.raises(DlperfError, match=r"ops\[1\]\.kwargs\['alpha'\].* is .*; expected "):
        Trace.from_json(data)


def test_halves_of_surrogate_pairs_are_shown() -> None:
    with pytest.raises(
        DlperfError, match=r"batch_size is '.*ud800'; expected a whole number of at least 1"
    ):
        Trace.from_json({**full_trace().to_json(), "batch_size": "\ud800"})
