"""Profiles of torch.profiler as measurements: real ones of small networks, and ones by hand whose
sums can be read off.
"""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import report_cases as cases
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from dlperf.core.errors import DlperfError
from dlperf.core.measurement import LayerTimes, Measurement
from dlperf.core.trace import LOSS, Layer, Op, OptimizerInfo, TensorSpec, Trace
from dlperf.profiler.chrome_trace import UNMATCHED, ChromeTrace
from dlperf.recorder.recording import record
from dlperf.report.comparison import compare

US = 1e-6
PHASES = ("forward", "backward", "optimizer")
CLOCK_S = 2e-9
"""Microseconds since the machine started have a thousandth as their last digit."""
HIDDEN = "aten.detach"
T = TensorSpec.contiguous


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def mlp() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    model = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))
    return model, torch.randn(8, 12), torch.randint(4, (8,))


def cnn() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)
            self.norm, self.relu = nn.BatchNorm2d(3), nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.relu(self.norm(self.first(x)) + self.second(x))

    tail = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(48, 5))
    return nn.Sequential(Residual(), Residual(), tail), torch.randn(4, 3, 8, 8), torch.arange(4)


NETWORKS = {"mlp": mlp, "cnn": cnn}


def profiled(
    name: str, folder: Path, is_scheduled: bool, use_adam: bool = False, **options: Any
) -> tuple[list[Path], Trace]:
    """The files of a profile of four steps (scheduled: of the last three), and the trace."""
    model, inputs, labels = NETWORKS[name]()
    optimizer = (torch.optim.Adam if use_adam else torch.optim.SGD)(model.parameters(), 0.01)
    activities = [ProfilerActivity.CPU]
    if is_scheduled:
        options["schedule"] = schedule(wait=0, warmup=1, active=3, repeat=1)
        options["on_trace_ready"] = tensorboard_trace_handler(str(folder), use_gzip=True)
    with profile(activities=activities, **options) as profiler:
        for _ in range(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            if is_scheduled:
                profiler.step()
    if not is_scheduled:
        profiler.export_chrome_trace(str(folder / "trace.json"))
    trace = record(
        model,
        inputs,
        loss=lambda out: nn.functional.cross_entropy(out, labels),
        optimizer=optimizer,
        target=name,
    )
    return list(folder.iterdir()), trace


def events_of(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    data = gzip.decompress(data) if path.suffix == ".gz" else data
    return list(json.loads(data)["traceEvents"])


def row(measurement: Measurement, layer: str) -> LayerTimes:
    return next(times for times in measurement.layers if times.layer == layer)


def seconds(layer: LayerTimes) -> list[tuple[float, ...] | None]:
    """The samples of each phase in microseconds."""
    found = (layer.phase(phase) for phase in PHASES)
    return [None if s is None else tuple(round(v / US, 6) for v in s.values) for s in found]


@pytest.mark.parametrize(
    ("name", "is_scheduled", "options"),
    [
        ("mlp", False, {}),
        ("mlp", True, {"with_stack": True, "profile_memory": True}),
        ("cnn", False, {"record_shapes": True, "with_modules": True}),
        ("cnn", True, {}),
    ],
)
def test_each_operator_of_a_real_profile_finds_its_layer(
    name: str, is_scheduled: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    (path,), trace = profiled(name, tmp_path, is_scheduled, name == "mlp", **options)
    found = ChromeTrace.load(path).measurement(trace, 1)

    recorded = Counter((op.packet, op.phase) for op in trace.ops if op.packet != HIDDEN)
    assert {(op.op, op.phase): op.n_calls for op in found.ops} == recorded
    assert UNMATCHED not in {times.layer for times in found.layers}
    assert not [note for note in found.notes if "predicted" in note]
    assert any("no shapes" in note for note in found.notes) != options.get("record_shapes", False)
    at_work = {
        (layer, op.phase) for op in trace.ops if op.packet != HIDDEN for layer, _ in op.layer_shares
    }
    idle = {(layer.name, "forward") for layer in trace.layers} - at_work  # containers
    assert at_work | idle == {
        (times.layer, phase) for times in found.layers for phase in PHASES if times.phase(phase)
    }
    assert all(not any(row(found, layer).forward.values) for layer, _ in idle)

    # the first of four is cold; a scheduled profile has warmed up
    assert {len(samples.values) for samples in found.step.values()} == {3}
    for n, total_s in enumerate(found.step["total"].values):
        layers_s = math.fsum(
            samples.values[n]
            for times in found.layers
            for phase in PHASES
            if (samples := times.phase(phase)) is not None
        )
        assert layers_s + found.step["zero_grad"].values[n] == pytest.approx(total_s)
        for phase in PHASES:
            own = (op.times.values[n] for op in found.ops if op.phase == phase)
            assert math.fsum(own) <= found.step[phase].values[n] + CLOCK_S

    events = [
        event for event in events_of(path) if event.get("cat") in ("cpu_op", "user_annotation")
    ]
    steps = [event for event in events if event["name"].startswith("ProfilerStep#")]
    assert len(steps) == (3 if is_scheduled else 0)
    for step, total_s in zip(steps, found.step["total"].values):
        assert 0 < total_s <= step["dur"] * US + CLOCK_S
    for kind in ("aten.addmm", "aten.convolution", "aten.convolution_backward", "aten.mm"):
        calls = [e["dur"] for e in events if e["name"] == kind.replace(".", "::")]
        times = [op.times for op in found.ops if op.op == kind]
        n_calls = len(calls) // (3 if is_scheduled else 4)
        ours = math.fsum(value for samples in times for value in samples.values)
        assert ours == pytest.approx(US * math.fsum(calls[-3 * n_calls :]) if n_calls else 0.0)
    zero_grads = [e["dur"] for e in events if e["name"].startswith("Optimizer.zero_grad")][-3:]
    assert len(zero_grads) == 3
    assert found.step["zero_grad"].values == pytest.approx(
        [dur * US for dur in zero_grads], abs=CLOCK_S
    )


def test_another_network_or_batch_size_is_refused(tmp_path: Path) -> None:
    (path,), _ = profiled("cnn", tmp_path, False, record_shapes=True)
    chrome_trace = ChromeTrace.load(path)
    model, inputs, labels = mlp()
    other = record(model, inputs, target="mlp")
    with pytest.raises(DlperfError, match=r"of the 10 forward operators of mlp at batch size 8;"):
        chrome_trace.measurement(other, 1)
    model, inputs, _ = cnn()
    labels = torch.arange(2)
    smaller = record(
        model,
        inputs[:2],
        loss=lambda out: nn.functional.cross_entropy(out, labels),
        target="cnn",
    )
    shapes = r"has inputs \[\[4, 3, 8, 8\], .* in cnn at batch size 2 \[\[2, 3, 8, 8\], "
    with pytest.raises(DlperfError, match=shapes):
        chrome_trace.measurement(smaller, 1)


def test_a_forward_pass(tmp_path: Path) -> None:
    model, inputs, _ = mlp()
    model.eval()
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as of:
        model(inputs)
    of.export_chrome_trace(str(tmp_path / "trace.json"))
    chrome_trace = ChromeTrace.load(tmp_path / "trace.json")
    assert chrome_trace.inference
    found = chrome_trace.measurement(record(model, inputs, inference=True), 1)
    assert list(found.step) == ["forward", "total"]
    assert [times.layer for times in found.layers] == ["Sequential", "0", "1", "2", "3", UNMATCHED]
    assert any(note.endswith("a step, aten.dropout x1") for note in found.notes)  # does nothing


# -- by hand ---------------------------------------------------------------------------------------


def event(name: str, start: float, end: float, cat: str = "cpu_op", **more: Any) -> dict[str, Any]:
    times = {"ts": 1000.0 + start, "dur": end - start}
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": 7, **times, **more}


def annotation(name: str, start: float, end: float) -> dict[str, Any]:
    return event(name, start, end, "user_annotation")


NODE = "autograd::engine::evaluate_function: "


def step_events(at: float = 0.0) -> list[dict[str, Any]]:
    """A step of 100 us: layer a 20 us forward, 25 us backward, 10 us optimizer; b 20 us forward;
    loss 5 us forward, 5 us backward; zero_grad 5 us. 10 us lie before it.
    """
    return [
        annotation("Optimizer.zero_grad#SGD.zero_grad", at + 10, at + 15),
        event("aten::linear", at + 20, at + 35),  # a: from 15 to 35
        event("aten::t", at + 21, at + 24),
        event("aten::as_strided", at + 22, at + 23),
        event("aten::addmm", at + 25, at + 33),
        event("aten::relu", at + 40, at + 55),  # b: from 35 to 55
        event("aten::clamp_min", at + 41, at + 54),
        event("aten::sum", at + 56, at + 60),  # the loss: from 55 to 60
        event("aten::ones_like", at + 62, at + 65),  # its backward: from 60 to 65
        event(NODE + "AddmmBackward0", at + 66, at + 80),  # a: from 65 to 80
        event("AddmmBackward0", at + 67, at + 79),
        event("aten::mm", at + 68, at + 78),
        event(NODE + "torch::autograd::AccumulateGrad", at + 85, at + 90),  # a, too
        annotation("Optimizer.step#SGD.step", at + 92, at + 100),  # a: from 90 to 100
        event("aten::add_", at + 94, at + 97),
    ]


def recorded() -> Trace:
    def op(name: str, layer: str, phase: str = "forward") -> Op:
        return Op(f"aten.{name}", (T(3, 3),) * 3, phase=phase, layer=layer)

    return Trace(
        "net",
        2,
        (
            Layer("Net", "Net", False, (("", 1),)),
            Layer("a", "Linear", True, (("Net", 1),)),
            Layer("b", "ReLU", True, (("Net", 1),)),
        ),
        (
            op("t.default", "a"),
            op("addmm.default", "a"),
            op("relu.default", "b"),
            op("detach.default", "b"),
            op("sum.default", LOSS),
            op("ones_like.default", LOSS, "backward"),
            op("mm.default", "a", "backward"),
            op("add_.Tensor", "a", "optimizer"),
        ),
        optimizer=OptimizerInfo("SGD", "for-loop", 1),
    )


def measured(folder: Path, events: list[dict[str, Any]]) -> Measurement:
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    return ChromeTrace.load(path).measurement(recorded(), 1)


def outside_us(found: Measurement) -> str:
    return next(note for note in found.notes if note.startswith("outside"))


EXPECTED = {
    "Net": [(0.0,), None, None],
    "a": [(20.0,), (25.0,), (10.0,)],
    "b": [(20.0,), None, None],
    LOSS: [(5.0,), (5.0,), None],
}


def in_microseconds(found: Measurement) -> dict[str, Any]:
    return {times.layer: seconds(times) for times in found.layers}


def test_time_between_operators_belongs_to_the_next_and_the_rest_of_a_call_to_its_last(
    tmp_path: Path,
) -> None:
    found = measured(tmp_path, step_events())
    assert in_microseconds(found) == EXPECTED
    step = {name: round(samples.median / US, 6) for name, samples in found.step.items()}
    assert step == {
        "zero_grad": 5.0,
        "forward": 45.0,
        "backward": 30.0,
        "optimizer": 10.0,
        "total": 90.0,
    }
    ops = {(op.op, op.phase): (op.n_calls, round(op.times.median / US, 6)) for op in found.ops}
    assert ops == {
        ("aten.t", "forward"): (1, 3.0),
        ("aten.addmm", "forward"): (1, 8.0),
        ("aten.relu", "forward"): (1, 15.0),
        ("aten.sum", "forward"): (1, 4.0),
        ("aten.ones_like", "backward"): (1, 3.0),
        ("aten.mm", "backward"): (1, 10.0),
        ("aten.add_", "optimizer"): (1, 3.0),
    }
    assert outside_us(found) == "outside the step: 0 s"
    assert (
        Measurement.from_json(json.loads(json.dumps(found.to_json()))).to_json() == found.to_json()
    )


def test_steps_end_with_the_optimizer_and_the_first_is_cold(tmp_path: Path) -> None:
    second = [event("aten::stack", 105, 108), *step_events(110)]
    found = measured(tmp_path, step_events() + second + [event("aten::item", 220, 230)])
    assert in_microseconds(found) == EXPECTED
    # 110 us from one end of the optimizer to the next, of which 90 us are the step
    assert outside_us(found) == "outside the step: 20.0 us, aten.stack x1"
    assert any("1 of the 2 profiled steps are left out" in note for note in found.notes)


def test_annotated_steps_and_steps_with_other_operators(tmp_path: Path) -> None:
    events = [annotation(f"ProfilerStep#{n + 3}", 200 * n, 200 * n + 150) for n in range(3)]
    events += step_events() + step_events(200) + step_events(400)
    assert {len(s.values) for s in measured(tmp_path, events).step.values()} == {3}
    other = [event for event in events if event["ts"] != 1000.0 + 240]  # the second's relu
    found = measured(tmp_path, other)
    assert len(found.step["total"].values) == 2
    assert in_microseconds(found)["b"] == [(20.0, 20.0), None, None]


def test_what_does_not_match_is_named_with_its_time(tmp_path: Path) -> None:
    events = [e for e in step_events() if e["name"] not in ("aten::relu", "aten::clamp_min")]
    found = measured(tmp_path, [*events, event("aten::tanh", 40, 55)])
    assert in_microseconds(found)[UNMATCHED] == [(20.0,), None, None]
    assert "b" not in in_microseconds(found)
    assert "in the profile, not predicted: 20.0 us a step, aten.tanh x1" in found.notes
    assert "predicted, not in the profile: aten.relu x1" in found.notes
    assert ("aten.tanh", 15.0) in [(op.op, round(op.times.median / US, 6)) for op in found.ops]


def test_a_closure_runs_inside_the_optimizer(tmp_path: Path) -> None:
    *before, _, add = step_events()
    found = measured(tmp_path, [annotation("Optimizer.step#SGD.step", 5, 100), *before, add])
    assert in_microseconds(found) == EXPECTED


def test_the_backward_may_run_on_another_thread(tmp_path: Path) -> None:
    events = [
        {**e, "tid": 8 if "Backward" in e["name"] or e["name"] == "aten::mm" else 7}
        for e in step_events()
    ]
    assert in_microseconds(measured(tmp_path, events)) == EXPECTED


def test_the_rows_of_operators_add_up_to_the_step(tmp_path: Path) -> None:
    items = [
        *(cases.Item("a", "forward", 7 * US, "compute", "measured", op=n) for n in (0, 1)),
        cases.Item("a", "backward", 9 * US, "compute", "measured", op=6),
        cases.Item("a", "backward", 4 * US, "page-faults", "measured", "page faults"),
        cases.Item("Net", "forward", 2 * US, "overhead", "measured", "module call"),
        cases.Item("a", "optimizer", 6 * US, "overhead", "measured", "optimizer loop"),
        cases.Item(LOSS, "zero_grad", 1 * US, "overhead", "measured", "zero_grad"),
    ]
    found = measured(tmp_path, step_events())
    report = compare(cases.prediction(recorded(), items), found)
    (rows,) = report.ops
    sides = {(r.op, r.phase): (r.times.predicted_s, r.times.actual_s) for r in rows}
    for side, total_s in enumerate((36 * US, 90 * US)):
        assert math.fsum(times[side] or 0.0 for times in sides.values()) == pytest.approx(total_s)
    assert sides["aten.mm", "backward"] == pytest.approx((9 * US, 10 * US))
    assert sides["(between operators)", "forward"] == pytest.approx((2 * US, 15 * US))
    assert sides["(page faults)", "backward"] == (pytest.approx(4 * US), None)
    text = report.to_text(width=100)
    assert "aten.relu           forward       1       - 15.0 us      -" in text
    assert [entry["op"] for entry in report.to_json()["ops"]] == [r.op for r in rows]
    assert "Operators, calibrated" in report.to_markdown()


# -- what is no profile ----------------------------------------------------------------------------

WHOLE = json.dumps({"traceEvents": step_events()}).encode()
GPU = [event("aten::mm", 0, 5), event("gemm", 1, 4, "kernel")]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is neither a measurement nor a whole profile of torch.profiler"),
        (b"words", "is neither a measurement"),
        (WHOLE[:-20], "is neither a measurement"),
        (gzip.compress(WHOLE)[:-20], "is neither a measurement"),
        (gzip.compress(WHOLE)[:4], "is neither a measurement"),
        (b"\xff\xfe\x00", "is neither a measurement"),
        (b"[" * 100_000, "is neither a measurement"),
        (b"[]", r"Expected `object`, got `array`"),
        (b"{}", "missing required field `traceEvents`"),
        (WHOLE.replace(b'"dur": 5.0', b'"dur": -5.0'), r"Expected `float` >= 0"),
        (WHOLE.replace(b"1010.0", b'"soon"'), r"Expected `float`, got `str`"),
        (b'{"traceEvents": []}', "contains no operators"),
        (WHOLE.replace(b"cpu_op", b"python_function"), "contains no operators"),
        (json.dumps({"traceEvents": GPU}).encode(), "is a profile of a GPU"),
        (json.dumps({"traceEvents": GPU[1:]}).encode(), "is a profile of a GPU"),
    ],
)
def test_files_that_are_no_profile(data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(data)
    with pytest.raises(DlperfError, match=words) as refused:
        ChromeTrace.load(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert "\n" not in str(refused.value)


def test_a_profile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DlperfError, match=r"trace.json: No such file or directory$"):
        ChromeTrace.load(tmp_path / "trace.json")


def test_a_profile_without_operators_in_its_steps(tmp_path: Path) -> None:
    with pytest.raises(DlperfError, match="no operator ran in its steps"):
        measured(tmp_path, [*step_events(), annotation("ProfilerStep#3", 500, 600)])
