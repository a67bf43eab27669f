"""``dlperf compare`` for the frozen files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlperf.__main__ import main


@pytest.fixture
def folder(frozen_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for answers; the frozen files are in the current one."""
    monkeypatch.chdir(frozen_files)
    return tmp_path


ON = "--machine elsewhere.json --threads 1"


def test_files_and_targets_of_every_kind(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prediction's file and its trace are one step; a report's side is the measured one."""
    report = f"report lenet-16.json --measured measurement.json {ON} --json {folder}/report.json"
    assert main(f"predict lenet-16.json {ON} --json {folder}/prediction.json".split()) == 0
    assert main(report.split()) == 0
    capsys.readouterr()
    for a, b, on in (
        (f"{folder}/prediction.json", "lenet-16.json", ON),
        (f"{folder}/report.json", "measurement.json", ""),
    ):
        assert main(f"compare {a} {b} {on} --fail-above 0% --json -".split()) == 0
        (found,) = json.loads(capsys.readouterr().out)["steps"]
        assert found["growth_frac"] == pytest.approx(0.0)
        assert found["exceeds_intervals"] is False


def test_a_machine_of_small_caches(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps whose data leaves the private caches are compared like any other."""
    machine = json.loads(Path("elsewhere.json").read_text(encoding="utf-8"))
    machine["cpu"]["caches_bytes"] = [16384, 65536, 33554432]
    (folder / "small.json").write_text(json.dumps(machine), encoding="utf-8")
    command = f"compare lenet-16.json cnn-medium-64.json --machine {folder}/small.json --threads 1"
    assert main([*command.split(), "--json", "-"]) == 0
    capsys.readouterr()


def test_a_step_that_grew_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"compare mlp-4.json mlp-32.json {ON} --format md --fail-above"
    assert main([*command.split(), "500%"]) == 0
    capsys.readouterr()
    assert main([*command.split(), "5%"]) == 1
    page = capsys.readouterr()
    assert "mlp-32.json: the step grew by" in page.err
    assert "| layer" in page.out
    assert "batch size 4, batch size 32" in page.out


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("machine.json mlp-4.json", "machine.json: is a machine file, which holds no step"),
        ("mlp-4.json missing.json", "missing.json"),
        ("mlp-4.json lenet-inference-16.json", "give two of a kind"),
        ("mlp-4.json mlp-4.json --fail-above -3%", "--fail-above"),
    ],
)
def test_bad_input(
    command: str, line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(f"compare {command} {ON}".split())
    except SystemExit as stop:
        status = stop.code  # type: ignore[assignment]
    assert status == 2
    assert line in capsys.readouterr().err
