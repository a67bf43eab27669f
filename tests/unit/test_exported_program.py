"""Exported programs as targets."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from dlperf.__main__ import main
from dlperf.core.errors import DlperfError
from dlperf.recorder.recording import record, record_target
from dlperf.recorder.targets import resolve


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x * 2.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("exported") / "net.pt2")
    program = torch.export.export(Net().eval(), (torch.randn(6, 8),))
    torch.export.save(program, path)
    return path


def test_a_program_has_the_layers_and_the_work_of_its_model(path: str) -> None:
    target = resolve(path, 32)
    assert (target.batch_size, target.inference) == (6, True)
    trace = record_target(target)
    own = record(Net().eval(), torch.randn(6, 8), inference=True)
    layers = {layer.name: layer.type for layer in own.layers}
    assert {layer.name: layer.type for layer in trace.layers} == layers
    products = [op.name for op in own.ops if "addmm" in op.name]
    assert [op.name for op in trace.ops if "addmm" in op.name] == products
    assert trace.n_parameters == own.n_parameters


def test_what_is_no_program_gets_one_line(tmp_path: Path) -> None:
    with pytest.raises(DlperfError, match="no such file"):
        resolve(str(tmp_path / "none.pt2"))
    text, archive = tmp_path / "text.pt2", tmp_path / "archive.pt2"
    text.write_text("x")
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a", "b")
    for bad in (text, archive):
        with pytest.raises(DlperfError, match=r"no exported program.*torch\.export\.save"):
            resolve(str(bad))


def test_its_batch_size_stands(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", path, "--batch-size", "99", "--json", "-"]) == 2
    assert "was exported at batch size " in capsys.readouterr().err
