"""Builders that convert their model (``.to``, ``.double()``) stay under fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from dlperf.recorder import recording, targets

BUILDER = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        return self.two(self.one(x)) * self.scale

def net(batch_size):
    model = Tied(){conversion}
    return model, (torch.randn(batch_size, 8, dtype=model.one.weight.dtype),), lambda out: out.float().mean()
"""


@pytest.mark.parametrize(
    ("conversion", "dtype"),
    [
        ('.to("cpu")', "float32"),
        (".to(torch.bfloat16)", "bfloat16"),
        (".double()", "float64"),
        (".double().float()", "float32"),
        (".eval()", "float32"),
    ],
)
def test_converted_models_are_recorded_on_fake_tensors(
    tmp_path: Path, conversion: str, dtype: str
) -> None:
    file = tmp_path / "net.py"
    file.write_text(BUILDER.replace("{conversion}", conversion))
    trace = recording.record_target(targets.resolve(f"{file}:net", 4))
    assert trace.recorded_on == "fake tensors"
    assert {spec.dtype for layer in trace.layers for _, spec in layer.parameters} == {dtype}
    assert trace.n_parameters == 8 * 8 + 8 + 8  # the weight once: it is tied


def test_conversion_is_torchs_own_again_afterwards(tmp_path: Path) -> None:
    before: Callable[..., nn.Module] = nn.Module._apply
    file = tmp_path / "net.py"
    file.write_text(BUILDER.replace("{conversion}", ".double()"))
    recording.record_target(targets.resolve(f"{file}:net", 4))
    assert nn.Module._apply is before
    assert nn.Linear(2, 2).to(torch.float64).weight.dtype == torch.float64


def test_a_copied_module_shares_the_mode_of_its_original(tmp_path: Path) -> None:
    target = tmp_path / "copied.py"
    target.write_text(
        "import copy, torch\n"
        "def net(batch_size):\n"
        "    model = copy.deepcopy(torch.nn.Linear(6, 5))\n"
        "    return model, (torch.rand(batch_size, 6),), lambda out: out.sum()\n"
    )
    trace = recording.record_target(targets.resolve(f"{target}:net", 4))
    views = [op for op in trace.ops if op.packet == "aten.t" and op.phase == "forward"]
    assert views
    assert all(op.outputs[0].storage == op.inputs[0].storage for op in views)
