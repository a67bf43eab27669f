"""A program that compiles is watched without a change of what is compiled."""

from __future__ import annotations

import itertools
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import calibrated_cases as made_up
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from dlperf.core.clock import Samples
from dlperf.core.costs import ARITHMETIC, CACHE_MISS, Cost, CostKey
from dlperf.core.errors import DlperfError
from dlperf.core.trace import Op, TensorSpec
from dlperf.ops.fused import FUSED
from dlperf.predictors.kernel_cost_model import cost_model_of
from dlperf.recorder import compiled_recording
from dlperf.recorder.compiled_recording import CompiledRecording, _plain
from dlperf.runner.compilation import COMPILED, NOT_COMPILED, module_stepped_by
from dlperf.runner.findings import Findings
from dlperf.runner.run_report import compiled_lines, to_json
from dlperf.runner.watched_training import WatchedTraining
from dlperf.runner.watcher import Watcher

# torch 2.6 starts a process when it first compiles
pytestmark = [pytest.mark.usefixtures("_fresh_dynamo"), pytest.mark.process]


@pytest.fixture
def _fresh_dynamo() -> Any:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.body(x)
        return output, nn.functional.cross_entropy(output, y)


def train(
    how: str,
    n: int = 20,
    backend: Any = "aot_eager",
    sizes: tuple[int, ...] = (5,),
    n_passes: int = 1,
) -> tuple[list[str], dict[str, dict[str, int]]]:
    """Train a model that is compiled, with batches of `sizes` in turn, each `n_passes` times;
    returns the losses, and what Dynamo counted.
    """
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model: Any = Net()
    optimizer = torch.optim.Adam(model.parameters())
    if how == "wrapped":
        model = torch.compile(model, backend=backend)
    elif how == "in place":
        model.compile(backend=backend)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(n_passes):
            _, loss = model(x, y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    called = torch.compile(step, backend=backend) if how == "step" else step
    losses = [
        float(called(torch.randn(size, 6), torch.randint(3, (size,))).item()).hex()
        for size in itertools.islice(itertools.cycle(sizes), n)
    ]
    return losses, {name: dict(values) for name, values in counters.items() if values}


@pytest.mark.parametrize("how", ["wrapped", "in place", "step"])
def test_graphs_breaks_recompilations_and_losses_are_the_same(how: str) -> None:
    train(how)  # the first compilation of a process has further frames
    alone = train(how)
    watcher = Watcher()
    watcher.install()
    try:
        watched = train(how)
    finally:
        watcher.remove()
    assert watcher.error is None
    assert watched == alone
    assert alone[1]["stats"]["unique_graphs"] >= 1
    if how == "step":
        with pytest.raises(DlperfError, match="a function is compiled"):
            Findings(watcher)
        return
    findings = Findings(watcher)
    assert findings.measurement.layers == ()
    assert set(findings.measurement.step) == {"optimizer", "total"}
    assert COMPILED in findings.notes
    trace = findings.trace  # eager, with the loss that the model returned
    assert trace is not None
    assert (trace.batch_size, trace.layers[0].name) == (5, "Net")
    assert "aten.nll_loss_backward.default" in [op.name for op in trace.ops]


def test_a_model_that_was_compiled_before_is_noticed() -> None:
    for compile_it in (False, True):
        torch.manual_seed(0)
        model: Any = Net()
        compiled = torch.compile(model, backend="aot_eager")
        compiled(torch.randn(5, 6), torch.randint(3, (5,)))
        watcher = Watcher(compiled if compile_it else Net())
        watcher.install()
        try:
            n_hooks = len(nn.modules.module._global_forward_pre_hooks)
            assert n_hooks == (0 if compile_it else 1)
        finally:
            watcher.remove()
            nn.modules.module._global_forward_pre_hooks.clear()


def test_the_stepped_module_is_the_outermost_one() -> None:
    holder = nn.ModuleDict({"net": Net()})
    assert module_stepped_by(torch.optim.SGD(holder.parameters(), lr=0.1)) is holder
    assert module_stepped_by(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)) is None


# -- the compiled step -----------------------------------------------------------------------------


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.ModuleType:
    """A module as Inductor generates it, with one kernel that writes its second argument."""
    codecache = pytest.importorskip("torch._inductor.codecache")
    module = types.ModuleType("generated")
    module.__file__ = str(tmp_path / "generated.py")
    Path(module.__file__).write_text(
        "cpp_fused_mul_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''\n"
        'extern "C" void kernel(const float* in_ptr0, float* out_ptr0)\n{\n'
        "for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(4000L); x0+=1L)\n"
        "{\nauto tmp0 = in_ptr0[x0];\nout_ptr0[x0] = tmp0;\n}\n}\n''')\n"
    )
    module.call = None  # type: ignore[attr-defined]
    module.cpp_fused_mul_0 = lambda _read, written: written.numpy().fill(2)  # type: ignore[attr-defined]
    monkeypatch.setattr(codecache.PyCodeCache, "modules", [module])
    return module


def stand_in(module: types.ModuleType) -> Callable[..., Any]:
    """A backend whose graphs are Inductor's in kind: FX code, and a call of the generated kernel
    that changes no result.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.output_code import CompiledFxGraph

    empty = torch._C._dynamo.guards._empty_strided_cpu  # passes no dispatcher

    class Graph(CompiledFxGraph):
        def __init__(self, graph: torch.fx.GraphModule) -> None:
            def run(inputs: list[Any]) -> Any:
                arguments, made = list(inputs), empty((1000,), (1,), torch.float32)
                inputs.clear()
                module.cpp_fused_mul_0(torch.ones(1000), made)
                return graph(*arguments)

            self.current_callable, self._boxed_call = run, True
            self.compiled_fn_runner = None

    def compiler(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        return Graph(graph)

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)  # type: ignore[no-any-return]


def recording_of(watcher: Watcher) -> CompiledRecording:
    assert watcher.watched is not None
    assert watcher.watched.compiled is not None
    return watcher.watched.compiled


def watched_training(how: str, backend: Any, **kwargs: Any) -> tuple[Any, Watcher]:
    watcher = Watcher()
    watcher.install()
    try:
        return train(how, backend=backend, **kwargs), watcher
    finally:
        watcher.remove()


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_a_compiled_step_is_recorded_while_it_runs(how: str, generated: types.ModuleType) -> None:
    backend, kernel = stand_in(generated), generated.cpp_fused_mul_0
    train(how, backend=backend)
    alone = train(how, backend=backend)
    watched, watcher = watched_training(how, backend)
    assert (watched, watcher.error) == (alone, None)
    assert generated.cpp_fused_mul_0 is kernel
    assert not torch._C._len_torch_dispatch_stack()
    trace = recording_of(watcher).trace("net", 5)
    names = [(op.phase, op.packet) for op in trace.ops]
    assert [names.count((phase, FUSED)) for phase in ("forward", "backward")] == [1, 1]
    assert names.count(("forward", "aten.addmm")) == 2
    assert names.count(("backward", "aten.mm")) == 3
    assert ("optimizer", "aten.addcdiv_") in names
    fused = next(op for op in trace.ops if op.packet == FUSED)
    assert dict(fused.kwargs)["instructions"] == 8000  # a load and a store
    assert [spec.nbytes for spec in (*fused.inputs, *fused.outputs)] == [4000, 4000]
    (read,), (written,) = fused.inputs, fused.outputs
    assert trace.storages[read.storage].born < trace.ops.index(fused)
    assert trace.storages[written.storage].born == trace.ops.index(fused)
    assert {op.layer for op in trace.ops} == {"Net"}
    assert len(trace.layers[0].parameters) == 4


def test_a_product_into_a_buffer_is_the_product_of_an_eager_step() -> None:
    a, b, bias = TensorSpec.contiguous(2, 3), TensorSpec.contiguous(3, 4), TensorSpec.contiguous(4)
    out = TensorSpec.contiguous(2, 4)
    usual = (("alpha", 1), ("beta", 1), ("out", out))
    called = Op("aten.addmm.out", (bias, a, b), usual, (out,))
    assert _plain(called) == Op("aten.addmm.default", (bias, a, b), (), (out,))
    assert _plain(Op("aten.addmm.out", (bias, a, b), (("beta", 2),))).kwargs == (("beta", 2),)


def test_graphs_without_a_visible_kernel_are_not_predicted(
    generated: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_recording._Recorder, "note", lambda *_: None)
    monkeypatch.setattr(compiled_recording._Recorder, "_record", lambda *_: None)
    _, watcher = watched_training("wrapped", stand_in(generated))
    with pytest.raises(DlperfError, match="no kernel that can be seen"):
        recording_of(watcher).trace("net", 5)


def machine() -> Any:
    """10^9 sums a second in float32, products and elementwise kernels of exact models."""
    keys = [key for key in made_up.step_keys() if key.kind != CACHE_MISS]  # no time, but by byte
    found = made_up.machine(dict.fromkeys(keys, 1e-7))
    sums = Cost(CostKey(ARITHMETIC, "add", variant="float32"), 1, Samples((1e-9,)))
    return found.__class__(**{**vars(found), "costs": (*found.costs, sums)})


def test_a_generated_kernel_takes_its_roofline_and_a_launch() -> None:
    model = cost_model_of(machine(), 1)
    assert model.fused_s(1e6, 1e3, 1) == pytest.approx(1e6 * 1e-9 + 1e-7)
    moved = 4 * made_up.MIB
    assert model.fused_s(1.0, moved, 1) == pytest.approx(moved / made_up.LEVELS["L3"] + 1e-7)


def test_the_compiled_step_is_predicted_beside_the_eager_one(generated: types.ModuleType) -> None:
    _, watcher = watched_training("wrapped", stand_in(generated))
    findings = Findings(watcher, machine())
    compiled, eager = findings.compiled_prediction, findings.prediction
    assert compiled is not None, findings.notes
    assert eager is not None
    index = next(i for i, op in enumerate(compiled.trace.ops) if op.packet == FUSED)
    (item,) = [item for item in compiled.prices.items if item.op == index]
    lanes = dict(compiled.trace.ops[index].kwargs)["lanes"]
    assert item.seconds == pytest.approx(8000 * lanes * 1e-9, rel=0.05)
    calls = [item for item in compiled.prices.items if item.what == "compiled call"]
    # 18 and 5 calls and bodies of modules; 2 and 2.5 look-ups of each of 4 parameters
    assert [item.seconds / 1e-7 for item in calls] == pytest.approx([18 * 2 + 8, 5 * 2 + 10])
    first, second = compiled_lines(findings)
    assert first.startswith("compiled step predicted ")
    assert "eager step predicted" in second
    data = to_json(findings)["compiled"]
    assert data["step"]["total_s"] == compiled.step.total_s
    assert data["eager_s"] == eager.step.total_s


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_a_compiled_step_of_several_passes_is_compared_with_as_many_eager_ones(
    how: str, is_recorded: bool, generated: types.ModuleType
) -> None:
    backend = stand_in(generated) if is_recorded else "aot_eager"
    train(how, backend=backend, n_passes=4)
    alone = train(how, backend=backend, n_passes=4)
    watched, watcher = watched_training(how, backend, n_passes=4)
    assert (watched, watcher.error) == (alone, None)
    once = Findings(watched_training(how, backend)[1], machine())
    findings = Findings(watcher, machine())
    assert (once.n_passes, findings.n_passes) == (1, 4)
    assert "a step has 4 forward and backward passes" in findings.measurement.notes

    def counts(found: Findings) -> list[int]:
        assert found.trace is not None
        named = [(op.phase, op.packet) for op in found.trace.ops]
        return [
            named.count(one)
            for one in [
                ("forward", "aten.addmm"),
                ("backward", "aten.mm"),
                ("optimizer", "aten.addcdiv_"),
            ]
        ]

    assert counts(once) == [2, 3, 4]
    assert counts(findings) == [8, 12, 4]
    assert findings.trace is not None
    assert findings.trace.layers[0].n_calls == 4
    assert (findings.compiled_prediction is not None) == is_recorded
    if is_recorded:
        calls = recording_of(watcher).trace("net", 5).layers[0].callers
        assert calls == (("", 4),)


def test_a_call_in_an_evaluation_is_no_pass() -> None:
    watched = WatchedTraining((Net(),), ())
    watched.note_call((1,), {}, None)
    with torch.no_grad():
        watched.note_call((2,), {}, None)
    watched.model.eval()
    watched.note_call((3,), {}, None)
    assert (watched.n_calls, watched.inputs) == (1, ((1,), {}))


def test_without_inductor_the_gain_alone_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_recording, "_generated_modules", list)
    _, watcher = watched_training("wrapped", "aot_eager")
    findings = Findings(watcher, machine())
    assert findings.compiled_prediction is None
    what = "no prediction of the compiled step: it was not recorded"
    assert f"{what} (another backend than Inductor compiles the model)" in findings.notes
    (line,) = compiled_lines(findings)
    assert line.startswith("compiled step ")
    assert "as predicted for eager" in line


def test_a_model_that_torch_does_not_compile_ran_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo skips nn.Sequential in ``model.compile()``; a network stands for it here."""
    monkeypatch.setattr(compiled_recording, "_generated_modules", list)
    monkeypatch.setattr(Net, "__call__", lambda self, *args: self._call_impl(*args))
    _, watcher = watched_training("in place", "aot_eager")
    findings = Findings(watcher, machine())
    assert NOT_COMPILED in findings.notes
    assert COMPILED not in findings.notes
    assert compiled_lines(findings) == []


@pytest.mark.parametrize("broken", ["spec", "_push", "generated_kernels", "StepTensors"])
def test_a_failure_inside_leaves_the_program_unharmed(
    broken: str, generated: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = stand_in(generated)
    train("wrapped", backend=backend)
    alone = train("wrapped", backend=backend)

    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError("broken")

    owner: Any = compiled_recording
    if broken.startswith("_"):
        owner = compiled_recording.CompiledRecording
    elif broken == "spec":
        owner = compiled_recording._Recorder
    monkeypatch.setattr(owner, broken, fail)
    watched, watcher = watched_training("wrapped", backend)
    assert watched == alone
    assert not torch._C._len_torch_dispatch_stack()
    assert not hasattr(generated.cpp_fused_mul_0, "__wrapped__")
    if watcher.error is None:
        findings = Findings(watcher, machine())
        assert findings.compiled_prediction is None
        assert any("broken" in note for note in findings.notes)


def test_a_model_compiled_anew_in_the_recorded_step_is_not_predicted(
    generated: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.codecache import PyCodeCache

    _, watcher = watched_training("wrapped", stand_in(generated), sizes=(5, 5, 5, 5, 7, 5))
    assert recording_of(watcher).trace("net", 5).ops  # no module was added
    monkeypatch.setattr(
        compiled_recording.CompiledRecording,
        "_run_graph",
        lambda _self, original, *args: PyCodeCache.modules.append(generated) or original(*args),
    )
    _, watcher = watched_training("wrapped", stand_in(generated))
    with pytest.raises(DlperfError, match="compiled anew"):
        recording_of(watcher).trace("net", 5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_kernels_of_inductor_are_recorded() -> None:
    pytest.importorskip("torch._inductor")
    for sizes in (5,), (5, 5, 5, 5, 7, 5):
        train("wrapped", backend="inductor", sizes=sizes)
        losses, counted = train("wrapped", backend="inductor", sizes=sizes)
        watched, watcher = watched_training("wrapped", "inductor", sizes=sizes)
        assert watcher.error is None
        assert watched[0] == losses
        for name in ("frames", "stats", "graph_break"):  # others count what the caches held
            assert watched[1].get(name) == counted.get(name)
    watched, watcher = watched_training("wrapped", "inductor")
    trace = recording_of(watcher).trace("net", 5)
    packets = [op.packet for op in trace.ops]
    assert packets.count("aten.addmm") == 2
    assert FUSED in packets
