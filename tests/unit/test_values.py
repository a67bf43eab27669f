"""What may be typed behind options, told before anything is imported."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from dlperf.core.argument_types import loader


@pytest.mark.parametrize(
    "source",
    [
        "def data(b, w): ...",
        "class data: ...",
        "data = make()",
        "from other import data",
        "import data",
        "from other import *",
        "globals()['data'] = 1",
        "def __getattr__(name): ...",
        "if True:\n    data = 1",
        "def (",
        "(data := 1)",
        "data: object = 1",
    ],
)
def test_a_loader_that_may_be_there_is_let_through(tmp_path: Path, source: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    assert loader(f"{path}:data") == f"{path}:data"
    assert loader("package.module:data") == "package.module:data"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}:dat", "defines no dat"),
        ("{}:Data.dat", "defines no Data"),
        ("{}", "names no function"),
        ("{}:", "names no function"),
        ("absent.py:data", "there is no file absent.py"),
        (":data", "names no function"),
    ],
)
def test_a_loader_that_cannot_be(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def data(batch_size, num_workers):\n    return other.dat\n")
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        loader(text.format(path))
