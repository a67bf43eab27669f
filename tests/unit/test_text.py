"""Names and notes of files: control characters are seen, and cells of CSV are no formulas."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import report_cases as cases

from dlperf.cli.main import main
from dlperf.core.files import write_text
from dlperf.core.streams import write_err
from dlperf.core.text import csv_text, frame_to_csv, printable, visible
from dlperf.report.comparison import compare, render
from dlperf.report.step_comparison import reports_to_csv

EVIL = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e\ud800\r"
CONTROLS = "\x1b\x07\x9b\u202e\ud800\r"
SEEN = r"\x1b[2J\x1b]0;title\x07\x9b31m\u202e\ud800\r"


def test_control_characters_are_seen() -> None:
    assert visible(f"a{EVIL}\n\tb é 層") == f"a{SEEN}\n\tb é 層"
    assert printable("a\n\tb") == r"a\n\tb"


def test_files_and_stderr_show_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path / "page.html", f"<p>{EVIL}</p>")
    assert (tmp_path / "page.html").read_bytes() == f"<p>{SEEN}</p>".encode()
    write_text("-", EVIL)
    write_err(EVIL)
    assert capsys.readouterr() == (f"{SEEN}\n", f"{SEEN}\n")


def test_the_command_line_obeys_no_name_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = cases.machine()
    path = tmp_path / "machine.json"
    replace(machine, cpu=replace(machine.cpu, model=EVIL), notes=(EVIL,)).save(path)
    main(["machine", "show", str(path)])
    out = capsys.readouterr().out
    assert out.count(SEEN) >= 2
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "schema": EVIL}))
    assert main(["machine", "show", str(path)]) == 2
    assert r"\x1b[2J" in (line := capsys.readouterr().err)
    path.write_text(json.dumps({**data, EVIL: 1, "groups": [EVIL, 1]}))
    main(["machine", "show", str(path)])
    assert not set(out + line + capsys.readouterr().err) & set(CONTROLS)


@pytest.mark.parametrize("form", ["text", "md", "html", "csv"])
def test_a_report_of_evil_names_is_shown_whole(form: str, tmp_path: Path) -> None:
    report = compare(*cases.hostile(f"{EVIL}a\nb"))
    vars(report)["pngs"] = {}  # its text is looked at
    write_text(tmp_path / "out", render([report], form))
    found = (tmp_path / "out").read_text()
    assert r"\x1b" in found.replace("\\\\x1b", r"\x1b")
    assert not set(found) & set(CONTROLS)


@pytest.mark.parametrize("cell", ["=1+1", "+a", "-x", "@sum", '=cmd|" /C calc"!A0', "\t=1"])
def test_text_cells_are_no_formulas(cell: str) -> None:
    rows = [
        {
            "name": cell,
            "seconds": -1.5,
            "count": -2,
            "gains": "-0.1 +0.2",
            "note": None,
            "more": "a=b",
        }
    ]
    for text in (csv_text(list(rows[0]), rows), frame_to_csv(pd.DataFrame(rows))):
        _, found = csv.reader(io.StringIO(text))
        assert found == [f"'{cell}", "-1.5", "-2", "-0.1 +0.2", "", "a=b"]
    layers = [
        row["layer"]
        for row in csv.DictReader(io.StringIO(reports_to_csv([compare(*cases.hostile(cell))])))
    ]
    assert f"'{cell}" in layers
    assert cell not in layers
