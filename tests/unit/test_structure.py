"""The rules of docs/architecture.md, held by reading the sources."""
from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for package in ("dlperf", "microbench", "networks") for path in (ROOT / package).rglob("*.py"))
MAX_LINES = 450

TORCH = (
    "dlperf.recorder", "dlperf.stopwatch", "dlperf.targets", "dlperf.loader_sampling",
    "dlperf.runner", "dlperf.reproduce.cardwell_kernels", "dlperf.validation.peer_worker",
    "dlperf.validation.rank_process", "dlperf.validation.rank_training",
    "dlperf.explanation.parameters", "dlperf.explanation.transformations", "dlperf.explanation.widths", "dlperf.explanation.trial_process",
    "dlperf.residence.process", "dlperf.selftest.process", "dlperf.tuning.trial_process",
)  # fmt: skip
"""The modules of dlperf (with what lies below them) that import torch when they are imported."""
TORCH_INSIDE = ("dlperf.commands",)
"""Those that import it inside a function, where a command needs it."""
COMMAND_LINE = ("dlperf.cli", "dlperf.commands")
MICROBENCH_MAY = (
    "dlperf.machine", "dlperf.cluster", "dlperf.sharing", "dlperf.trace", "dlperf.clock", "dlperf.files", "dlperf.errors", "dlperf.host", "dlperf.units",
    "dlperf.values", "dlperf.version", "dlperf.child_process", "dlperf.code", "dlperf.verification", "dlperf.streams", "dlperf.locks", "dlperf.shortage",
)  # fmt: skip

# What each part may import of dlperf, besides parts of its own and those before it in the list: imports point down.
ORDER = (
    ("dlperf.version", "dlperf.errors", "dlperf.streams", "dlperf.text", "dlperf.units", "dlperf.terminal", "dlperf.display", "dlperf.values"),
    ("dlperf.run_options", "dlperf.scale_options", "dlperf.validate_options"),
    ("dlperf.records", "dlperf.files", "dlperf.machine_path", "dlperf.locks", "dlperf.shortage", "dlperf.clock", "dlperf.child_process", "dlperf.code"),
    ("dlperf.operators",),
    ("dlperf.trace", "dlperf.sharing", "dlperf.verification"),
    ("dlperf.machine", "dlperf.measurement", "dlperf.cluster", "dlperf.communication", "dlperf.exposure"),
    ("dlperf.host", "dlperf.work", "dlperf.laws", "dlperf.roofs", "dlperf.spread", "dlperf.thread_count"),
    ("dlperf.allocator", "dlperf.network"),
    ("dlperf.predictors",),
    ("dlperf.hierarchy",),
    ("dlperf.loading",),
    ("dlperf.prediction", "dlperf.epoch", "dlperf.loop", "dlperf.cures", "dlperf.contention", "dlperf.strategies"),
    ("dlperf.targets",),
    ("dlperf.residence",),
    ("dlperf.recorder",),
    ("dlperf.loader_sampling",),
    ("dlperf.stopwatch",),
    ("dlperf.report", "dlperf.selftest", "dlperf.inspection", "dlperf.reproduce"),
    ("dlperf.validation", "dlperf.explanation", "dlperf.tuning", "dlperf.scaling"),
    ("dlperf.runner",),
    ("dlperf.commands",),
    ("dlperf.cli",),
    ("dlperf.__main__",),
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(tree: ast.AST, inside_functions: bool = True) -> Iterator[str]:
    """Every module that the source imports at run time, ``from a import b`` as ``a.b``."""
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node) or (not inside_functions and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imports(node, inside_functions)


def below(name: str, parts: tuple[str, ...]) -> bool:
    return any(name == part or name.startswith(part + ".") for part in parts)


def rank(name: str) -> int | None:
    """The place in ORDER of the part that a module (or a name in it) belongs to."""
    for place, parts in enumerate(ORDER):
        if below(name, parts):
            return place
    return None


@pytest.fixture(params=SOURCES, ids=module_name)
def source(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_torch_enters_where_it_may(source: Path) -> None:
    name = module_name(source)
    if not name.startswith("dlperf") or below(name, TORCH):
        return
    found = [target for target in imports(parse(source), inside_functions=not below(name, TORCH_INSIDE)) if target.split(".")[0] == "torch"]
    assert not found, f"{name} imports {found}"


def test_networks_are_not_imported(source: Path) -> None:
    name = module_name(source)
    if name.startswith("networks"):
        return
    assert not [target for target in imports(parse(source)) if target.split(".")[0] == "networks"]


def test_networks_do_not_know_dlperf(source: Path) -> None:
    if module_name(source).startswith("networks"):
        assert not [target for target in imports(parse(source)) if target.split(".")[0] in ("dlperf", "microbench")]


def test_microbench_is_imported_by_the_command_line_alone(source: Path) -> None:
    name = module_name(source)
    if name.startswith("dlperf") and not below(name, COMMAND_LINE):
        assert not [target for target in imports(parse(source)) if target.split(".")[0] == "microbench"]


def test_microbench_rests_on_data_and_clock(source: Path) -> None:
    if not module_name(source).startswith("microbench"):
        return
    found = [target for target in imports(parse(source)) if target.split(".")[0] == "dlperf"]
    assert not [target for target in found if not below(target, MICROBENCH_MAY)]


def test_imports_point_down(source: Path) -> None:
    """Imports when a module is loaded; what is imported inside a function may be a way back up (a method that forwards)."""
    name = module_name(source)
    if not name.startswith("dlperf") or name == "dlperf":
        return
    own = rank(name)
    assert own is not None, f"{name} has no place in ORDER"
    for target in imports(parse(source), inside_functions=False):
        if target.split(".")[0] == "dlperf" and target != "dlperf":
            other = rank(target)
            assert other is not None, f"{target} has no place in ORDER"
            assert other <= own, f"{name} imports {target}, which stands above it"


def test_size(source: Path) -> None:
    n_lines = len(source.read_text(encoding="utf-8").splitlines())
    assert n_lines <= MAX_LINES, f"{module_name(source)} has {n_lines} lines: two ideas"


def test_public_names_have_docstrings(source: Path) -> None:
    tree = parse(source)
    assert ast.get_docstring(tree), f"{module_name(source)} has none"
    for node in ast.walk(tree):
        public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
        if not public or not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node not in public_nodes(tree):
            continue
        assert ast.get_docstring(node), f"{module_name(source)}:{node.lineno} {node.name} has none"


def public_nodes(tree: ast.Module) -> set[ast.AST]:
    """Top-level definitions and the methods of public classes; what stands inside a function is its own affair."""
    found: set[ast.AST] = set()
    for node in tree.body:
        found.add(node)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            overloaded = any("overload" in ast.unparse(d) for child in node.body if isinstance(child, ast.FunctionDef) for d in child.decorator_list)
            found.update(child for child in node.body if not overloaded)
    return found


def test_modules_have_honest_names() -> None:
    forbidden = {"utils", "util", "helpers", "helper", "manager", "common", "misc"}
    assert not [path for path in SOURCES if path.stem in forbidden]


def test_no_public_function_is_shadowed_by_a_module() -> None:
    import dlperf

    modules = {path.stem for path in (ROOT / "dlperf").iterdir()}
    assert not modules & set(dlperf.__all__)


def test_csv_is_written_in_one_place(source: Path) -> None:
    """Where cells that a spreadsheet would take for formulas are made safe."""
    if module_name(source).startswith("dlperf") and module_name(source) != "dlperf.text":
        text = source.read_text(encoding="utf-8")
        assert ".to_csv(index" not in text
        assert not [target for target in imports(ast.parse(text)) if target == "csv"]


def test_predictors_are_registered() -> None:
    from dlperf import predictors

    assert set(predictors.names()) >= {"calibrated", "gemm-table", "roofline"}
    for name in predictors.names():
        assert predictors.get(name).name == name


def test_the_command_line_knows_the_formats_of_reports() -> None:
    from dlperf import values
    from dlperf.report import writing

    assert values.FORMATS == writing.FORMATS


def test_the_command_line_knows_how_many_ops_can_be_drawn() -> None:
    from dlperf import validate_options
    from dlperf.validation import single_ops

    assert validate_options.MOST_OPS == single_ops.MOST_OPS


def test_the_command_line_knows_the_policies_of_malloc() -> None:
    from dlperf import allocator, cli

    assert tuple(allocator.POLICIES) == cli.MALLOCS


def run_python(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, check=True)
    return done.stdout


HELP = """
import sys
from dlperf.cli import main
status = main(sys.argv[1:])
heavy = {"torch", "pandas", "numpy", "matplotlib", "msgspec", "microbench"} & set(sys.modules)
print(f"status {status}, heavy {sorted(heavy)}")
"""


@pytest.mark.parametrize("arguments", [["--help"], ["predict", "--help"], ["--version"], ["run", "--help"]], ids=" ".join)
def test_help_is_light(arguments: list[str]) -> None:
    assert run_python(HELP, *arguments).splitlines()[-1] == "status 0, heavy []"


def test_import_is_light() -> None:
    heavy = run_python("import sys, dlperf; print(sorted({'torch', 'pandas', 'numpy', 'matplotlib'} & set(sys.modules)))")
    assert heavy.strip() == "[]"


def test_the_running_of_a_script_imports_neither_networks_nor_microbench() -> None:
    found = run_python("import sys, dlperf.runner; print(sorted({'networks', 'microbench'} & set(sys.modules)))")
    assert found.strip() == "[]"


def test_the_papers_tables_and_figures_need_no_torch() -> None:
    """It enters below reproduce at the kernels that run on torch.distributed, which nothing imports but their own command."""
    loaded = "import sys, dlperf.reproduce.figures; print(sorted(name for name in sys.modules if name.split('.')[0] == 'torch' or 'cardwell_kernels' in name))"
    assert run_python(loaded).strip() == "[]"


def test_the_kernels_on_ranks_are_imported_by_themselves_alone(source: Path) -> None:
    kernels = "dlperf.reproduce.cardwell_kernels"
    if not below(module_name(source), (kernels,)):
        assert not [target for target in imports(parse(source)) if below(target, (kernels,))]
