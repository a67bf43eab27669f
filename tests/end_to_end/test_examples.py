"""Every example of the README and of the pages in docs/ runs, and prints what stands there.

Conventions of a page. Its examples run in one folder, from top to bottom. The folder holds the
frozen ``machine.json`` (this machine's file), ``cluster.json``, ``communication.json``,
``measurement.json`` and the profile ``attention.csv`` of tests/golden.

- A ``python`` block whose first line is ``# NAME.py`` is written to that file. Any other one is
  executed, all of a page in one namespace.
- A ``console`` block holds commands after ``$``, each with what it prints on stdout. A command
  without lines below it may print anything. A last line ``...`` stands for any further lines.
- A comment before a block changes this: ``<!-- example: parsed -->`` checks commands and Python
  without running them. With ``<!-- example: measured -->`` numbers and notes differ from run to
  run: the words of most lines are found in the output; ``...`` may stand anywhere. So it is for
  all outputs where torch is not that of the machine file: no prediction is then as near as measured.

``python -m pytest tests/end_to_end/test_examples.py --renew`` writes the present output into the
pages; the git diff shows each change.
"""

from __future__ import annotations

import ast
import contextlib
import gzip
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import preloaded
import pytest

import dlperf
from dlperf.cli.main import main, parse
from dlperf.core import host

ROOT = Path(__file__).resolve().parents[2]
FROZEN = ROOT / "tests" / "golden" / "frozen"
FILES = ("machine", "cluster", "communication", "measurement")
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")],
    key=lambda page: page.relative_to(ROOT).as_posix(),
)
PAGES = [page for page in PAGES if "_generated" not in page.parts]
ANY = "..."
WIDTH = "100"
"""Columns of an output."""
FOUND_FRAC = 0.8
"""Lines of a measured output that are found again; notes and breaks of lines come and go."""

_BLOCK = re.compile(
    r"^(?:<!-- example: (?P<how>\w+) -->\n+)?```(?P<language>console|python)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_QUANTITY = re.compile(r"[-+]?\d[\d,.]*(?:e[-+]?\d+)? ?(?:[GMKkTm]i?B|[num]?s|%|[kMGT])?(?!\w)")


@dataclass(frozen=True)
class Example:
    """A block of a page: `how` is empty, ``parsed`` or ``measured``."""

    how: str
    language: str
    text: str
    start: int
    line: int

    @property
    def commands(self) -> list[tuple[str, list[str]]]:
        """Each command with the lines below it."""
        found: list[tuple[str, list[str]]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                assert found, f"line {self.line}: a console block begins with $"
                found[-1][1].append(line)
        return found


def examples(page: Path) -> list[Example]:
    text = page.read_text(encoding="utf-8")
    return [
        Example(
            found["how"] or "",
            found["language"],
            found["text"],
            found.start("text"),
            text.count("\n", 0, found.start()) + 1,
        )
        for found in _BLOCK.finditer(text)
    ]


def title(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the frozen files, on a computer that looks like that of the machine file."""
    import torch

    for name in FILES:
        packed = (FROZEN / f"{name}.json.gz").read_bytes()
        (tmp_path / f"{name}.json").write_bytes(gzip.decompress(packed))
    packed = (FROZEN / "profiles" / "attention.csv.gz").read_bytes()
    (tmp_path / "attention.csv").write_bytes(gzip.decompress(packed))
    machine = dlperf.Machine.load(tmp_path / "machine.json")
    monkeypatch.setattr(host, "this_cpu", lambda: machine.cpu)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    for name, value in (("DLPERF_MACHINE", "machine.json"), ("COLUMNS", WIDTH)):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads, modules = torch.get_num_threads(), set(sys.modules)
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.process
@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)], ids=title)
def test_page(page: Path, folder: Path, capfd: pytest.CaptureFixture[str], renew: bool) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    changes = []
    releases = [
        versions["torch"].split(".")[:2]
        for versions in (host.versions(), dlperf.Machine.load("machine.json").versions)
    ]
    is_other_torch = releases[0] != releases[1]
    for example in examples(page):
        where = f"{title(page)}:{example.line}"
        if example.language == "python":
            run_python(example, namespace, where)
            continue
        kept = []
        for command, expected in example.commands:
            program, arguments = words(command)
            kept += [f"$ {command}", *expected]
            if example.how == "parsed":
                check_words(program, arguments, where)
                continue
            capfd.readouterr()
            status, printed, told = run(program, arguments, capfd)
            assert status == 0, f"{where}: {command}: exit status {status}: {told}"
            if not expected:
                continue
            actual = [line.rstrip() for line in printed.rstrip().splitlines()]
            if not agree(expected, actual, example.how == "measured" or is_other_torch):
                assert renew, f"{where}: {command} prints\n{printed}\ninstead of\n" + "\n".join(
                    expected
                )
                del kept[-len(expected) :]
                kept += shortened(actual, expected)
        changes.append((example, "\n".join(kept) + "\n"))
    if renew:
        text = page.read_text(encoding="utf-8")
        for example, new in reversed(changes):
            text = text[: example.start] + new + text[example.start + len(example.text) :]
        page.write_text(text, encoding="utf-8")


def run_python(example: Example, namespace: dict[str, Any], where: str) -> None:
    tree = ast.parse(example.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "dlperf":
                assert hasattr(dlperf, node.attr), f"{where}: dlperf.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dlperf."):
            # an optional library of it may be missing
            assert find_spec(str(node.module)) is not None, f"{where}: {node.module}"
    if example.how == "parsed":
        return
    if name := re.match(r"# (\S+\.py)\n", example.text):
        Path(name.group(1)).write_text(example.text, encoding="utf-8")
        return
    with contextlib.redirect_stdout(sys.stderr):
        exec(compile(tree, where, "exec"), namespace)


def words(command: str) -> tuple[str, list[str]]:
    """The program and its arguments, without a comment."""
    program, *arguments = shlex.split(command.split("  #")[0])
    return program, arguments


def check_words(program: str, arguments: list[str], where: str) -> None:
    """A command that may take long, or needs several machines, is one that dlperf understands."""
    if program in ("torchrun", "python"):
        module = arguments[arguments.index("-m") + 1] if "-m" in arguments else None
        assert module is None or find_spec(module) is not None, f"{where}: {module}"
        if module == "dlperf":
            program, arguments = "dlperf", arguments[arguments.index("-m") + 2 :]
    if program == "dlperf":
        for argument in arguments:  # a loader is looked for at once
            if (found := re.match(r"(\w+\.py):(\w+)$", argument)) and not Path(found[1]).exists():
                Path(found[1]).write_text(f"def {found[2]}(*_): ...\n", encoding="utf-8")
        assert parse(arguments).command == arguments[0], where
    elif program.startswith("scripts/"):
        assert os.access(ROOT / program, os.X_OK), f"{where}: {program}"


def run(
    program: str, arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command; those that take over the process in another."""
    if program == "dlperf" and arguments[0] != "run":
        status = main(arguments)
        captured = capfd.readouterr()
        return status, captured.out, captured.err
    command = [sys.executable, *(["-m", "dlperf"] if program == "dlperf" else []), *arguments]
    assert program in ("dlperf", "python"), f"{program} is not run here; mark it as parsed"
    done = preloaded.run(command, cwd=Path.cwd(), env=os.environ)
    return done.returncode, done.stdout, done.stderr


def agree(expected: list[str], actual: list[str], measured: bool) -> bool:
    """Whether an output is the expected one, up to a last ``...``."""
    if measured:
        printed = {words_of(line) for line in actual}
        wanted = [words_of(line) for line in expected if line.strip() not in ("", ANY)]
        return sum(line in printed for line in wanted) >= FOUND_FRAC * len(wanted)
    if expected[-1] == ANY:
        expected, actual = expected[:-1], actual[: len(expected) - 1]
    return [line.rstrip() for line in expected] == actual


def words_of(line: str) -> str:
    """A line without what a measurement or another computer changes."""
    line = re.sub(r"\b(inside|outside)\b|[-+.,:()=<>]|-{2,}", " ", _QUANTITY.sub(" ", line))
    line = re.sub(r"\b(compute|L[123]|DRAM|overhead|page faults|page-faults)\b", " ", line)
    line = re.sub(r"\b(measured|interpolated|extrapolated)$|\bon (AMD|Intel)\b.*", " ", line)
    return " ".join(line.split())


def shortened(actual: list[str], expected: list[str]) -> list[str]:
    """The output, cut where the page had cut it."""
    return [*actual[: len(expected) - 1], ANY] if expected[-1] == ANY else actual


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_links(page: Path) -> None:
    """Links and pictures within the repository lead somewhere."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path = link.partition("#")[0]
        if path and "://" not in link and "_generated" not in path:
            assert (page.parent / path).exists(), f"{title(page)}: {link}"


def test_scripts() -> None:
    """The scripts that the README names are there."""
    found = re.findall(r"scripts/\w+", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert found
    for name in found:
        assert os.access(ROOT / name, os.X_OK), name


def test_agreement() -> None:
    """Numbers count unless they were measured; words always do."""
    assert agree(["step 2 ms", ANY], ["step 2 ms", "more"], measured=False)
    assert not agree(["step 2 ms"], ["step 3 ms"], measured=False)
    assert agree(["step 2 ms +3.1 %"], ["step 31.5 us -4 %"], measured=True)
    assert not agree(["step 2 ms"], ["epoch 2 ms"], measured=True)


def test_messages() -> None:
    """The messages of docs/reference/messages.md are ones that the program has."""
    page = (ROOT / "docs/reference/messages.md").read_text(encoding="utf-8")
    known = "\n".join(
        value.value
        for path in (ROOT / "dlperf").rglob("*.py")
        for value in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
    )
    wanted = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    wanted = [words for words in wanted if words != "message"]
    missing = [
        part for words in wanted for part in words.split(" ... ") if part.strip() not in known
    ]
    assert wanted
    assert not missing, f"messages that no module has: {missing}"


def test_modules() -> None:
    """The modules that the architecture page names are there."""
    page = (ROOT / "docs/development/architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+)`", page)
    assert named
    for name in named:
        root = ROOT if name.startswith("microbench/") else ROOT / "dlperf"
        assert (root / name).is_dir() or (root / f"{name}.py").exists(), name


def test_generated_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of the pages that are made from parsers, records and reports have content."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    spec = spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = module_from_spec(spec)
    spec.loader.exec_module(generate)
    generate.write(tmp_path)
    text = (tmp_path / "command-line.md").read_text(encoding="utf-8")
    commands = dlperf_commands()
    assert commands
    assert all(f"## dlperf {name}\n" in text for name in commands)
    for path in tmp_path.iterdir():
        assert len(path.read_text(encoding="utf-8").splitlines()) > 8, path.name


def dlperf_commands() -> list[str]:
    """The commands that the frozen ``--help`` lists."""
    text = (FROZEN / "help.txt").read_text(encoding="utf-8")
    return re.findall(r"^\$ dlperf ([a-z]+) --help", text, re.MULTILINE)
