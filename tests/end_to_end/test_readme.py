"""The README's commands are ones that the command line understands, and its Python names exist."""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import dlperf
from dlperf.cli.main import parse

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> Iterator[str]:
    for block in blocks("console"):
        for line in block.splitlines():
            if line.startswith("$ "):
                yield line[2:].split("  #")[0].rstrip()


@pytest.mark.parametrize("command", list(commands()))
def test_commands_parse(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mydata.py").write_text(
        "def loader(batch_size, num_workers): ...\n"
    )  # a loader is looked for at once
    program, *arguments = shlex.split(command)
    if (
        program == "torchrun"
    ):  # its own options are torch's affair; the module that it starts is ours
        assert find_spec(arguments[arguments.index("-m") + 1]) is not None
        return
    assert program == "dlperf"
    assert parse(arguments).command == arguments[0]


def test_there_are_commands() -> None:
    assert len(list(commands())) >= 8


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.splitlines()[0])
def test_python_names_exist(block: str) -> None:
    for node in ast.walk(ast.parse(block)):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "dlperf"
        ):
            assert hasattr(dlperf, node.attr), node.attr


@pytest.mark.parametrize("name", re.findall(r"^scripts/\w+", README, re.MULTILINE))
def test_scripts_are_there(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)


@pytest.mark.parametrize(
    "link", [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
)
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link.partition("#")[0]).exists()
