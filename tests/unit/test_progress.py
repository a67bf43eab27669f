"""Progress where there is no terminal, with a clock in the hand."""

from __future__ import annotations

import io
import sys

import pytest

from dlperf.microbench.progress import Lines, progress_of


def test_lines_are_told_at_once_and_then_every_ten_seconds() -> None:
    said: list[str] = []
    time = 100.0
    lines = Lines(8, "kernel", said.append, lambda: time)
    lines.set_postfix_str("1 thread: gemm")
    assert said == ["0 of 8 kernels, 0 s; now 1 thread: gemm"]
    time = 109.0
    lines.update(2)
    lines.set_postfix_str("1 thread: pool")
    assert len(said) == 1  # nine seconds after the last
    time = 110.0
    lines.update(1)
    assert said[1:] == ["3 of 8 kernels, 10 s; now 1 thread: pool"]
    time = 119.5
    lines.update(1)
    time = 125.0
    lines.set_postfix_str("2 threads: gemm")
    assert said[2:] == ["4 of 8 kernels, 25 s; now 2 threads: gemm"]


def test_a_pipe_gets_lines_and_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_of(3, "op", "timing ops") as progress:
        progress.update(2)
    err = capsys.readouterr().err
    assert err == "dlperf: timing ops: 2 of 3 ops, 0 s\n"
    with progress_of(3, "op", "timing ops", bar=True) as progress:
        progress.set_postfix_str("first")
        progress.update(3)
    assert "3/3" in capsys.readouterr().err


def test_a_notebook_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})
    monkeypatch.setattr(sys, "stderr", shown := kind())
    with progress_of(3, "op", "timing ops") as progress:
        progress.update(3)
    assert "3/3" in shown.getvalue()
