"""Standard streams that are closed, full, or of an encoding that lacks characters."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from dlperf.core import streams

CLOSE = "import os, sys; sys.stdout.flush(); [os.close(n) for n in map(int, sys.argv[1])]; "
REOPEN = "os.execv(sys.executable, [sys.executable, '-c', sys.argv[2]])"


def run_closed(numbers: str, code: str) -> subprocess.CompletedProcess[str]:
    """`code` in a Python that starts with these descriptors closed."""
    command = [sys.executable, "-c", CLOSE + REOPEN, numbers, code]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)


@pytest.mark.process
@pytest.mark.parametrize("numbers", ["0", "1", "2", "01", "12", "012"])
def test_closed_descriptors_are_taken_before_a_file_gets_them(numbers: str) -> None:
    code = (
        "import subprocess, sys; from dlperf.core import streams; streams.open_closed()\nassert"
        " open('/dev/null').fileno() > 2\nprint('note', file=sys.stderr); assert sys.stdin.read()"
        " == ''\nsubprocess.run([sys.executable, '-c', 'import sys; assert None not in (sys.stdin,"
        " sys.stdout, sys.stderr)'], check=True)\nsys.exit(7)"
    )
    done = run_closed(numbers, code)
    assert done.returncode == 7
    assert done.stdout == ""
    assert done.stderr == ("" if "2" in numbers else "note\n")


def test_an_answer_is_not_lost_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    streams.flush_out()
    with pytest.raises(OSError, match="is closed; the answer cannot be written") as refused:
        streams.write_out("42")
    assert refused.value.filename == "stdout"


def test_characters_that_stdout_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    with streams.escaping():
        streams.write_out("größe \udcc3")
    assert raw.getvalue() == b"gr\\xf6\\xdfe \\udcc3\n"
    with pytest.raises(UnicodeEncodeError):  # a script's own stdout is as it was
        print("größe")
