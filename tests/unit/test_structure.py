"""What no linter checks of the rules in docs/development/architecture.md. Rules of imports: pyproject.toml."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path
    for package in ("dlperf", "microbench", "networks")
    for path in (ROOT / package).rglob("*.py")
    if not path.is_relative_to(ROOT / "dlperf" / "microbench")
)
MAX_LINES = 550
"""Some 500."""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_size() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert not {str(path): n for path, n in lines.items() if n > MAX_LINES}, "two ideas"


def test_public_names_have_docstrings() -> None:
    lacking = []
    for source in SOURCES:
        tree = ast.parse(source.read_text(encoding="utf-8"))
        named = [node for node in public_nodes(tree) if isinstance(node, NAMED)]
        nodes = [node for node in named if not node.name.startswith("_")]
        lacking += [module_name(source)] * (not ast.get_docstring(tree))
        lacking += [f"{module_name(source)}.{n.name}" for n in nodes if not ast.get_docstring(n)]
    assert not lacking


NAMED = (ast.FunctionDef, ast.ClassDef)


def public_nodes(tree: ast.Module) -> set[ast.AST]:
    """Top-level definitions and the methods of public classes; what stands inside a function is its
    own affair.
    """
    found: set[ast.AST] = set()
    for node in tree.body:
        found.add(node)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            overloaded = any(
                "overload" in ast.unparse(d)
                for child in node.body
                if isinstance(child, ast.FunctionDef)
                for d in child.decorator_list
            )
            found.update(child for child in node.body if not overloaded)
    return found


def test_modules_have_honest_names() -> None:
    forbidden = {"utils", "util", "helpers", "helper", "manager", "common", "misc"}
    assert not [path for path in SOURCES if path.stem in forbidden]


def test_no_public_function_is_shadowed_by_a_module() -> None:
    import dlperf

    modules = {path.stem for path in (ROOT / "dlperf").iterdir()}
    assert not modules & set(dlperf.__all__)


def test_csv_is_written_in_one_place() -> None:
    """Where cells that a spreadsheet would take for formulas are made safe."""
    others = [path for path in SOURCES if path.match("dlperf/**/*.py") and path.stem != "text"]
    writers = re.compile(r"\.to_csv\(index|^ *(import csv|from csv import)", re.MULTILINE)
    assert not [path for path in others if writers.search(path.read_text(encoding="utf-8"))]


def test_predictors_are_registered() -> None:
    from dlperf.predictors import registry

    assert set(registry.names()) >= {"calibrated", "gemm-table", "roofline"}
    for name in registry.names():
        assert registry.get(name).name == name


def test_the_command_line_knows_the_formats_of_reports() -> None:
    from dlperf.core import argument_types
    from dlperf.report import comparison

    assert argument_types.FORMATS == comparison.FORMATS


def test_the_command_line_knows_how_many_ops_can_be_drawn() -> None:
    from dlperf.cli import validation
    from dlperf.studies.accuracy import single_ops

    assert validation.MOST_OPS == single_ops.MOST_OPS


def test_the_command_line_knows_the_policies_of_malloc() -> None:
    from dlperf.cli import prediction
    from dlperf.predictors.allocator import policies

    assert tuple(policies.POLICIES) == prediction.MALLOCS


def run_python(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    return done.stdout


HELP = """
import sys
from dlperf.cli.main import main
status = main(sys.argv[1:])
heavy = {"torch", "pandas", "numpy", "matplotlib", "msgspec", "IPython", "dlperf.microbench"} & set(sys.modules)
print(f"status {status}, heavy {sorted(heavy)}")
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "arguments", [["--help"], ["predict", "--help"], ["--version"], ["run", "--help"]], ids=" ".join
)
def test_help_is_light(arguments: list[str]) -> None:
    assert run_python(HELP, *arguments).splitlines()[-1] == "status 0, heavy []"


@pytest.mark.process
def test_import_is_light() -> None:
    heavy = run_python(
        "import sys, dlperf; print(sorted({'torch', 'pandas', 'numpy', 'matplotlib'} &"
        " set(sys.modules)))"
    )
    assert heavy.strip() == "[]"


@pytest.mark.process
def test_the_running_of_a_script_imports_neither_networks_nor_microbench() -> None:
    found = run_python(
        "import sys, dlperf.runner.wrapping; print(sorted({'networks', 'dlperf.microbench'} &"
        " set(sys.modules)))"
    )
    assert found.strip() == "[]"


@pytest.mark.process
def test_the_papers_tables_and_figures_need_no_torch() -> None:
    """It enters below reproduce at the kernels that run on torch.distributed, which nothing imports
    but their own command.
    """
    loaded = (
        "import sys, dlperf.studies.papers.figures; print(sorted(name for name in sys.modules if"
        " name.split('.')[0] == 'torch' or 'cardwell_kernels' in name))"
    )
    assert run_python(loaded).strip() == "[]"
