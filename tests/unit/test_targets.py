"""Targets: every form, and a line that helps for every bad one."""

from __future__ import annotations

import sys
import textwrap

import pytest
import torch
from torch import nn

from dlperf.core.errors import DlperfError, WorkFailed
from dlperf.recorder import recording, target_lookup, targets
from dlperf.recorder.targets import is_trace_file, resolve

GOOD = """
    import torch
    from torch import nn
    import beside
    def build(batch_size):
        print("building")
        model = nn.Linear(4, beside.WIDTH)
        return model, (torch.randn(batch_size, 4),), lambda y: y.mean()
    def with_optimizer(batch_size):
        model, inputs, loss = build(batch_size)
        return model, {"input": inputs[0]}, loss, torch.optim.Adam(model.parameters())
    class Net(nn.Module):
        def __init__(self, width=2):
            super().__init__()
            self.fc = nn.Linear(4, width)
        def forward(self, x):
            return {"y": self.fc(x)}
    class Needs(nn.Module):
        def __init__(self, width):
            super().__init__()
    net = Net(3)
    number = 5
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    path, modules = list(sys.path), dict(sys.modules)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - set(modules):
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture
def good(folder):
    write(folder, "sub/beside.py", "WIDTH = 7")
    write(folder, "sub/__init__.py", "")
    return write(folder, "sub/nets.py", GOOD)


def test_a_builder_in_a_file(good, capsys):
    target = resolve("sub/nets.py:build", 5)
    assert (target.spec, target.batch_size, target.inference) == ("sub/nets.py:build", 5, False)
    built = target.build()
    assert built.model.weight.shape == (7, 4)
    assert built.inputs[0].shape == (5, 4)
    assert type(built.optimizer) is torch.optim.SGD
    assert built.optimizer.defaults["lr"] == 0.01
    assert target.build().model is not built.model
    assert capsys.readouterr().out == ""  # stdout is for data


def test_other_forms(good):
    built = resolve("sub/nets.py:with_optimizer").build()
    assert type(built.optimizer) is torch.optim.Adam
    assert list(built.inputs) == ["input"]
    assert resolve(f"{good}:build", 2, inference=True).build().loss is None
    sys.path.insert(0, str(good.parent))
    assert resolve("sub.nets:build", 3).build().inputs[0].shape == (3, 4)
    for name, width in (("Net", 2), ("net", 3)):
        built = resolve(f"sub/nets.py:{name}", 6, input_shape=(5, 4)).build()
        assert built.inputs[0].shape == (6, 5, 4)
        assert built.model(*built.inputs)["y"].shape == (6, 5, width)
        trace = recording.record_target(resolve(f"sub/nets.py:{name}", 6, input_shape=(4,)))
        assert (trace.batch_size, trace.recorded_on, trace.n_parameters) == (
            6,
            "fake tensors",
            4 * width + width,
        )
    net = sys.modules["nets"].net
    assert type(net.fc.weight) is nn.Parameter
    assert net.fc.weight.grad is None


def test_two_files_of_the_same_name_and_their_neighbours(folder):
    for name, width in (("a", 3), ("b", 5)):
        write(
            folder,
            f"{name}/nets.py",
            "import torch, beside\nfrom torch import nn\n"
            "def build(n):\n    return nn.Linear(2, beside.WIDTH), (torch.ones(n, 2),), torch.sum",
        )
        write(folder, f"{name}/beside.py", f"WIDTH = {width}")
    write(folder, "json.py", "raise ValueError('this is not the json you want')")
    before = list(sys.path)
    first, second = resolve("a/nets.py:build"), resolve("b/nets.py:build")
    assert first.build().model.out_features == 3
    assert second.build().model.out_features == 5
    assert resolve("a/nets.py:build").build().model.out_features == 3
    assert sys.path[: len(before)] == before
    import json

    assert json.loads("1") == 1


def test_short_names(monkeypatch, folder):
    write(
        folder,
        "networks/targets.py",
        "import torch\ndef cnn_small(n):\n    return torch.nn.Linear(2, 2), (torch.ones(n, 2),),"
        " torch.sum",
    )
    write(folder, "networks/__init__.py", "")
    kept = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name.partition(".")[0] == "networks"
    }
    try:
        assert resolve("cnn-small", 4).build().inputs[0].shape == (4, 2)
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "networks"]:
            del sys.modules[name]
        sys.modules.update(kept)
    (folder / "networks/targets.py").unlink()
    monkeypatch.setattr(target_lookup, "__file__", str(folder / "site-packages/dlperf/targets.py"))
    with pytest.raises(DlperfError, match="target mlp: is a network of a dlperf checkout"):
        resolve("mlp")


def test_trace_files(tmp_path):
    trace = recording.record(nn.Linear(2, 2), torch.ones(3, 2))
    trace.save(tmp_path / "t.json")
    assert is_trace_file(str(tmp_path / "t.json"))
    assert is_trace_file("missing.json")
    assert not is_trace_file("nets.py:build")
    assert not is_trace_file("mlp")


BAD = {
    "missing.py:build": "there is no file missing.py",
    "sub:build": "does not import|has no 'build'",
    "sub/nets.py": "names no builder; say which, as in sub/nets.py:build",
    "lenett": "did you mean lenet\\?",
    "sub/nets.py:biuld": "has no 'biuld'; did you mean build",
    "sub/nets.py:number": "is of type int, which cannot be called",
    "sub/nets.py:Net": "say what goes in with --input",
    "nothere.at_all:build": "does not import: ModuleNotFoundError: No module named 'nothere'",
    "not a module:build": "neither a file nor a module's name",
    "bad.py:syntax": "does not import: SyntaxError: .*bad\\.py:1",
    "raises.py:build": "does not import: ValueError: while importing",
    "exits.py:build": "calls sys.exit\\(4\\) while it is imported; put its main program under",
    "two.py:no_arguments": r"is called as CALLABLE\(batch_size\), but takes \(\)",
    "two.py:too_many": "missing a required argument: 'b'",
}


@pytest.mark.parametrize("spec", BAD)
def test_bad_targets(good, folder, spec):
    write(folder, "bad.py", "def (:")
    write(folder, "raises.py", "raise ValueError('while importing')")
    write(folder, "exits.py", "import sys; sys.exit(4)")
    write(folder, "two.py", "def no_arguments(): pass\ndef too_many(a, b): pass")
    before, modules = list(sys.path), set(sys.modules)
    with pytest.raises(DlperfError, match=BAD[spec]) as caught:
        resolve(spec)
    assert not isinstance(caught.value, WorkFailed)
    assert str(caught.value).startswith(f"target {spec}: ")
    assert "\n" not in str(caught.value)
    assert sys.path[: len(before)] == before
    assert not {"bad", "raises", "exits"} & (set(sys.modules) - modules)


RETURNS = {
    "None": ("returned None; expected \\(model, inputs, loss\\)", False),
    "(model, inputs)": ("returned 2 values", False),
    "(model, inputs, loss, None, 1)": ("returned 5 values", False),
    "(nn.Linear, inputs, loss)": ("the model is the class Linear; expected an nn.Module", False),
    "(model, inputs[0], loss)": ("the inputs are a tensor", False),
    "(model, {1: inputs[0]}, loss)": ("names of the model's arguments", False),
    "(model, inputs, 3)": ("the loss is of type int", False),
    "(model, inputs, None)": ("the loss is None", False),
    "(model, inputs, loss, 0.1)": ("the optimizer is of type float", False),
    "(model, inputs, loss, torch.optim.SGD(nn.Linear(1, 1).parameters()))": (
        "holds none of the model's parameters",
        False,
    ),
    "(nn.ReLU(), inputs, loss)": ("no parameters to train; only inference", False),
    "(model.requires_grad_(False), inputs, loss)": (
        "none of the model's 2 parameters requires grad",
        False,
    ),
    "1 / 0": ("its builder raises ZeroDivisionError: division by zero", True),
    "sys.exit(2)": ("its builder called sys.exit\\(2\\)", True),
}


@pytest.mark.parametrize("expression", RETURNS)
def test_bad_builders(folder, expression):
    write(
        folder,
        "b.py",
        "import sys, torch\nfrom torch import nn\ndef build(n):\n    model, inputs, loss ="
        f" nn.Linear(2, 2), (torch.ones(n, 2),), torch.sum\n    return {expression}",
    )
    message, failed = RETURNS[expression]
    for attempt in (
        lambda: resolve("b.py:build").build(),
        lambda: recording.record_target(resolve("b.py:build")),
    ):
        with pytest.raises(DlperfError, match=message) as caught:
            attempt()
        assert isinstance(caught.value, WorkFailed) == failed
        assert str(caught.value).startswith("target b.py:build: ")


@pytest.mark.parametrize("batch_size", [0, -3])
def test_bad_batch_size(good, batch_size):
    with pytest.raises(DlperfError, match=f"batch size is {batch_size}"):
        resolve("sub/nets.py:build", batch_size)


def test_bad_input_shape(good):
    with pytest.raises(DlperfError, match="input shape is 3,0"):
        resolve("sub/nets.py:Net", input_shape=(3, 0))
    with pytest.raises(DlperfError, match="leave --input out"):
        resolve("sub/nets.py:build", input_shape=(3,))
    with pytest.raises(DlperfError, match=r"is called as Needs\(\), but takes \(width\)"):
        resolve("sub/nets.py:Needs", input_shape=(3,))


def test_a_builder_that_needs_data_is_called_on_real_tensors(folder):
    write(
        folder,
        "d.py",
        """
        import torch
        from torch import nn
        def build(n):
            x = torch.randn(n, 4)
            width = int((x > -100).sum() / n)
            return nn.Linear(width, 2), (x,), torch.sum
        """,
    )
    state = torch.get_rng_state()
    trace = recording.record_target(resolve("d.py:build", 3))
    assert trace.recorded_on == "real tensors"
    assert "reads the value of a tensor" in trace.notes[0]
    assert trace.n_parameters == 4 * 2 + 2
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "inputs",
    [(torch.tensor([[1.0, 2.0]]),), {"input": torch.tensor([[1.0, 2.0]])}],
    ids=["positional", "by name"],
)
def test_a_step_trains_and_one_without_a_loss_runs_forward(inputs):
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    built = targets.Built(model, inputs, torch.sum, torch.optim.SGD(model.parameters(), lr=0.1))
    built.step()
    assert model.weight.tolist()[0] == pytest.approx(
        [1 - 0.1 * 1, 1 - 0.1 * 2]
    )  # the gradient of the sum is the input
    other = torch.tensor([[10.0, 0.0]])
    built.step(
        {"input": other} if isinstance(inputs, dict) else (other,)
    )  # gradients do not add up
    assert model.weight.tolist()[0] == pytest.approx([0.9 - 0.1 * 10, 0.8])
    seen = []
    model.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    with torch.no_grad():
        targets.Built(model, inputs, None).step()
    assert seen == [False]
    assert model.weight.tolist()[0] == pytest.approx([-0.1, 0.8])
