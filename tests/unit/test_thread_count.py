"""One thread count for predictions and measurements: torch's own where the file holds it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from report_cases import machine
from torch import nn

import dlperf
from dlperf.cli.inputs import threads_for
from dlperf.core.errors import DlperfError
from dlperf.core.host import torch_threads, usual_threads, usual_threads_of_file
from dlperf.core.machine import Machine

NET = nn.Linear(4, 4)
INPUTS = (torch.ones(2, 4),)


@pytest.fixture
def own() -> Iterator[int]:
    """torch's own number is 2."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


def held(*counts: int) -> Machine:
    one = machine()
    kernels = tuple(replace(kernel, threads=count) for kernel in one.kernels for count in counts)
    bandwidths = tuple(replace(b, threads=count) for b in one.bandwidths for count in counts)
    return replace(one, kernels=kernels, bandwidths=bandwidths)


@pytest.mark.parametrize(
    ("counts", "expected"), [((1, 2, 4), 2), ((1,), 1), ((1, 8), 1), ((3, 8), 3), ((), 2)]
)
def test_torchs_own_number_where_the_file_holds_it_else_the_nearest(
    own: int, counts: tuple[int, ...], expected: int, tmp_path: Path
) -> None:
    found = held(*counts)
    assert usual_threads(found) == expected
    for indent in (None, 1):
        path = tmp_path / "machine.json"
        path.write_text(json.dumps(found.to_json(), indent=indent))
        assert usual_threads_of_file(path) == expected


def test_without_a_readable_file_torchs_own_number_counts(own: int, tmp_path: Path) -> None:
    assert usual_threads_of_file(tmp_path / "none.json") == own
    (tmp_path / "empty.json").write_text("")
    assert usual_threads_of_file(tmp_path / "empty.json") == own
    (tmp_path / "broken.json").write_text('{"kernels": [{"threads": 0')
    assert usual_threads_of_file(tmp_path / "broken.json") == own


@pytest.mark.process
def test_torchs_own_number_is_known_without_torch() -> None:
    code = (
        "import sys; from dlperf.core.host import torch_threads; n = torch_threads();"
        " assert 'torch' not in sys.modules; print(n)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"OMP_NUM_THREADS": "3"}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "3", done.stderr
    assert torch_threads() == torch.get_num_threads()


@pytest.mark.parametrize(("counts", "expected"), [((1,), 1), ((1, 2, 4), 2)])
def test_predict_measure_and_the_command_line_take_the_same(
    own: int,
    counts: tuple[int, ...],
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = held(*counts)
    found.save(tmp_path / "machine.json")
    monkeypatch.setenv("DLPERF_MACHINE", str(tmp_path / "machine.json"))
    trace = dlperf.record(NET, INPUTS, loss=torch.sum)
    prediction = dlperf.predict(trace, found, predictor="roofline")
    measurement = dlperf.measure(NET, INPUTS, loss=torch.sum, seconds=0.01)
    asked = type("Asked", (), {"threads": None})()
    assert (prediction.threads, measurement.threads, threads_for(asked, found)) == (expected,) * 3
    assert dlperf.compare(prediction, measurement).warnings == ()
    assert torch.get_num_threads() == own  # as it was


def test_a_measurement_follows_its_argument(own: int) -> None:
    def loss(output: torch.Tensor) -> torch.Tensor:
        assert torch.get_num_threads() == 1
        return output.sum()

    assert dlperf.measure(NET, INPUTS, loss=loss, seconds=0.01, threads=1).threads == 1
    assert torch.get_num_threads() == own
    with pytest.raises(DlperfError, match="threads is 0; it must be at least 1"):
        dlperf.measure(NET, INPUTS, threads=0)
