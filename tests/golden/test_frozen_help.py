"""``--help`` of every command."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest
from frozen_results import check_text

from dlperf.__main__ import main

_COMMAND = re.compile(r"^    ([a-z][a-z-]*)(?:  |$)", re.MULTILINE)


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse lays its help out anew")
def test_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, renew: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    def pages(words: list[str]) -> Iterator[str]:
        assert main([*words, "--help"]) == 0
        page = capsys.readouterr().out
        yield f"$ dlperf {' '.join([*words, '--help'])}\n{page}\n"
        found = _COMMAND.findall(page) if "positional arguments:\n  COMMAND" in page else []
        found += _COMMAND.findall(page) if "positional arguments:\n  ACTION" in page else []
        for command in found:
            yield from pages([*words, command])

    check_text("help", "".join(pages([])), renew)
