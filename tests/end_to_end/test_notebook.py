"""``%%dlperf_profile`` in IPython, and the tutorial's notebook in a kernel; where these are
installed.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dlperf
from dlperf.runner.findings import Findings

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from report_cases import machine
from test_watcher import hooks

ROOT = Path(__file__).resolve().parents[2]
STEP = """
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    losses.append(loss.item().hex())
    loss.backward()
    optimizer.step()
"""
LOOP = f"for _ in range(25):{STEP}"
PROGRESS = """
from dlperf.microbench.progress import progress_of
with progress_of(3, "op", "timing ops") as bar:
    bar.update(3)
"""
START = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y, losses = torch.randn(4, 6), torch.randint(3, (4,)), []
"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An IPython with the extension and a small training, in a folder with a machine file."""
    pytest.importorskip("IPython", reason="IPython is not installed")
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("DLPERF_MACHINE", str(tmp_path / "machine.json"))
    machine().save(tmp_path / "machine.json")
    before, threads = hooks(), torch.get_num_threads()
    shell = InteractiveShell.instance(history_load_length=0)
    shell.history_manager.enabled = False
    shell.run_cell(f"%load_ext dlperf\n{START}").raise_error()
    yield shell
    InteractiveShell.clear_instance()
    assert hooks() == before
    assert torch.get_num_threads() == threads


def run(shell: Any, cell: str) -> tuple[Any, Any]:
    """A cell's result, and all that it shows."""
    from IPython.utils.capture import capture_output

    with capture_output() as shown:
        result = shell.run_cell(cell)
    return result, shown


@pytest.mark.slow
def test_a_profiled_cell_shows_its_report_and_trains_the_same(shell: Any) -> None:
    result, shown = run(shell, f"%%dlperf_profile model --as found --threads 1\n{LOOP}\nlosses[0]")
    result.raise_error()
    data = shown.outputs[-1].data
    assert "Layers, calibrated" in data["text/plain"]
    assert "<table>" in data["text/html"]
    assert "watched Sequential with SGD" in data["text/html"]
    assert isinstance(shell.user_ns["found"].report(), dlperf.Report)
    losses = shell.user_ns["losses"]
    assert any(
        losses[0] in text for text in (shown.stdout, str(shown.outputs[0]))
    )  # the last value
    run(shell, f"{START}{LOOP}")
    assert shell.user_ns["losses"] == losses


@pytest.mark.parametrize(
    ("cell", "kind"), [("x = 1\nx / 0", ZeroDivisionError), ("x = = 1", SyntaxError)]
)
def test_an_error_is_shown_as_without_the_magic(shell: Any, cell: str, kind: Any) -> None:
    plain, alone = run(shell, cell)
    result, shown = run(shell, f"%%dlperf_profile model --as found\n{cell}")
    assert (
        type(result.error_in_exec) is type(plain.error_in_exec or plain.error_before_exec) is kind
    )
    assert shown.stdout == alone.stdout
    assert not shown.outputs
    assert "found" in shell.user_ns
    assert run(shell, "1")[0].success


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nobody", "nobody: NameError: name 'nobody' is not defined; name the nn.Module"),
        ("model +", "model +: SyntaxError: "),
        ("x[0]", "the model is tensor"),
        ("model --machine none.json", "none.json: there is no such machine file"),
        ("model --machine 'none of.json'", "none of.json: there is no such machine file"),
        ("model --threads 0", "--threads is 0; it must be at least 1"),
        ("model --as 1x", "--as 1x: is no name of a variable"),
        ("model --threads many", "invalid int value: 'many'"),
        ("", "arguments are required: model"),
    ],
)
def test_wrong_usage_is_one_line_before_the_cell_runs(shell: Any, line: str, says: str) -> None:
    result, shown = run(shell, f"%%dlperf_profile {line}\nlosses.append(1)")
    told = (shown.stdout + shown.stderr).strip()
    assert says in told
    assert told.startswith("UsageError: ")
    assert len(told.splitlines()) == 1
    assert not result.success
    assert not shell.user_ns["losses"]


def test_a_report_that_fails_is_one_line(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("own failure")

    monkeypatch.setattr(Findings, "__init__", fail)
    result, shown = run(shell, f"%%dlperf_profile model\n{LOOP}")
    result.raise_error()
    assert shown.stderr == "dlperf: the report failed: RuntimeError: own failure\n"
    assert len(shell.user_ns["losses"]) == 25


def test_too_few_steps_are_said(shell: Any) -> None:
    _, shown = run(shell, "%%dlperf_profile model\npass")
    data = shown.outputs[-1].data
    for text in data.values():
        assert "at least 7 are needed" in text


@pytest.mark.slow
def test_a_training_over_several_cells(shell: Any) -> None:
    cells = [
        "import contextlib, dlperf\nwatching = contextlib.ExitStack()",
        "found = watching.enter_context(dlperf.profile(model))",
        *[f"for _ in range(5):{STEP}"] * 6,
        "watching.close()",
    ]
    for cell in cells:
        run(shell, cell)[0].raise_error()
    assert "watched Sequential with SGD: 8 steps" in str(shell.user_ns["found"])


@pytest.mark.process
@pytest.mark.network
def test_the_tutorial_runs_in_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nbclient", "ipykernel"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    import nbclient
    import nbformat

    packed = (ROOT / "tests/golden/frozen/machine.json.gz").read_bytes()
    (tmp_path / "machine.json").write_bytes(gzip.decompress(packed))
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("DLPERF_MACHINE", str(tmp_path / "machine.json"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "docs/tutorial/notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    notebook.cells += [
        nbformat.v4.new_code_cell(source)
        for source in (
            PROGRESS,
            "%%dlperf_profile model\n1 / 0",
            "print('not reached')",
        )
    ]
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="ZeroDivisionError"):
        nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    shown = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    *pages, bar, failed, last = shown
    data = [output.get("data", {}) for outputs in pages for output in outputs]
    assert sum("<table" in one.get("text/html", "") for one in data) == 4
    assert sum("image/png" in one for one in data) == 1
    assert [output.output_type for output in failed] == ["error"]
    assert not last
    text = str(bar)
    assert "3/3" in text
    assert "IProgress" not in text
