"""Pages made from the program itself: the command line from its parsers, file formats from their
typed records, results from reports/.

:func:`write` writes one Markdown file a page part into a folder; the pages include them.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from generate_results import accuracy, first_table, is_shown
from markdown_text import escaped, table
from msgspec import inspect as types

ROOT = Path(__file__).resolve().parent.parent


def write(folder: Path) -> None:
    """Write every part; a file whose text stays the same is left alone."""
    folder.mkdir(exist_ok=True)
    for name, text in (
        ("command-line", command_line()),
        ("common-options", common_options()),
        ("file-formats", file_formats()),
        ("cost-kinds", cost_kinds()),
        ("answers", answers()),
        ("accuracy", accuracy()),
        ("distributed", first_table("distributed/distributed.md", is_shown)),
        ("trainings", first_table("threads/training.md")),
        ("notebook", notebook()),
        ("rooms", rooms()),
        ("rooms.svg", rooms_picture()),
    ):
        path = folder / (name if "." in name else f"{name}.md")
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def notebook() -> str:
    """The tutorial's notebook: its text, and its cells as code."""
    cells = json.loads((ROOT / "docs/tutorial/notebook.ipynb").read_text("utf-8"))["cells"]
    parts = []
    for text, kind in (("".join(cell["source"]), cell["cell_type"]) for cell in cells):
        language = "text" if re.search("^ *[%!]", text, re.MULTILINE) else "python"  # magics
        parts.append(f"```{language}\n{text}\n```" if kind == "code" else text)
    return "\n\n".join(parts)


# -- the command line ------------------------------------------------------------------------------


def command_line() -> str:
    """Every command with its arguments and options."""
    from dlperf.cli.main import _parser

    parser, parts = _parser(), []
    common = _common(parser)
    for name, own in _commands(parser):
        actions = [one for one in own._actions if not isinstance(one, argparse._HelpAction)]
        actions = [one for one in actions if one.help is not argparse.SUPPRESS]
        below = [one for one in actions if isinstance(one, argparse._SubParsersAction)]
        actions = [one for one in actions if one not in below]
        text = f"{'#' * (1 + len(name.split()))} dlperf {name}\n\n{own.description}\n"
        if own.epilog:
            text += f"\n{own.epilog}\n"
        if not below:
            shared = [one for one in actions if _same(common.get(one.dest), one)]
            text += f"\n```text\n{_usage(name, actions)}\n```\n\n"
            text += "\n".join(_entry(one) for one in actions if one not in shared)
            if shared:
                names = ", ".join(f"`{one.option_strings[-1]}`" for one in shared)
                text += f"\nAlso the [common options](#common-options) {names}.\n"
        parts.append(text)
    return "\n".join(parts)


def common_options() -> str:
    """The options that most commands have."""
    from dlperf.cli.main import _parser

    return "\n".join(_entry(action) for action in _common(_parser()).values())


def _common(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The options that half of the commands or more have, with the same meaning."""
    parsers = [own for _, own in _commands(parser)]
    actions = [one for own in parsers for one in own._actions if one.option_strings]
    actions = [one for one in actions if not isinstance(one, argparse._HelpAction)]
    return {
        one.dest: one
        for one in actions
        if 2 * sum(_same(one, other) for other in actions) >= len(parsers)
    }


def _same(one: argparse.Action | None, other: argparse.Action) -> bool:
    return one is not None and (one.dest, one.help) == (other.dest, other.help)


def _commands(
    parser: argparse.ArgumentParser, name: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    if name:
        yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, own in action.choices.items():
                yield from _commands(own, f"{name} {word}".strip())


def _usage(name: str, actions: Sequence[argparse.Action]) -> str:
    shown = []
    for action in actions:
        if not action.option_strings:
            word = str(action.metavar or action.dest)
            many = {"+": f"{word} [{word} ...]", "*": f"[{word} ...]", "?": f"[{word}]"}
            shown.append(
                many.get(
                    str(action.nargs),
                    " ".join([word] * int(action.nargs or 1))
                    if str(action.nargs or 1).isdigit()
                    else f"{word} ...",
                )
            )
    return " ".join(["dlperf", name, *shown, "[options]"])


def _entry(action: argparse.Action) -> str:
    """An argument as an entry of a definition list."""
    value = ""
    if action.nargs != 0 and action.option_strings:
        word = action.metavar or (
            "{" + ",".join(map(str, action.choices)) + "}"
            if action.choices
            else action.dest.upper()
        )
        value = f" {word} ..." if action.nargs in ("+", "*") else f" {word}"
    names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    text = " ".join((action.help or "").replace("%%", "%").split())
    text = text[:1].upper() + text[1:]
    return f"`{names}{value}`\n: {escaped(text)}\n"


# -- file formats ----------------------------------------------------------------------------------

_UNITS = (
    ("_bytes_per_s", "bytes/s"),
    ("_flops_per_s", "FLOP/s"),
    ("samples_per_s", "samples/s"),
    ("s_per_byte", "s/byte"),
    ("_flop_per_byte", "FLOP/byte"),
    ("_per_s", "1/s"),
    ("_bytes", "bytes"),
    ("_flops", "FLOP"),
    ("_frac", "fraction"),
    ("_s", "s"),
)


def unit(field: str) -> str:
    """The unit that a field's name says, in SI base units; empty where it has none.

    >>> unit("total_s"), unit("peak_memory_bytes"), unit("layers")
    ('s', 'bytes', '')
    """
    if field in ("bytes", "flops"):
        return {"bytes": "bytes", "flops": "FLOP"}[field]
    return next((word for suffix, word in _UNITS if field.endswith(suffix)), "")


def _with_unit(word: str, field: str) -> str:
    return f"{word} ({unit(field)})" if unit(field) else word


def file_formats() -> str:
    """Every field of the formats that dlperf reads, from their typed records."""
    from dlperf.core import cluster
    from dlperf.core.records import communication, machine, measurement, state, trace

    parts = []
    for name, module in (
        ("machine", machine),
        ("trace", trace),
        ("measurement", measurement),
        ("cluster", cluster),
        ("state", state),
        ("communication", communication),
    ):
        top = getattr(module, f"{name.capitalize()}Record")
        parts.append(f"## dlperf.{name}\n\n{_described(top)}\n")
        done: list[type] = []
        waiting = [top]
        while waiting:
            record = waiting.pop(0)
            if record in done:
                continue
            done.append(record)
            fields = types.type_info(record).fields  # type: ignore[union-attr]
            rows = []
            meanings = _meanings(record)
            for field in fields:
                word, inner = _type(field.type)
                waiting += inner
                rows.append(
                    [
                        f"`{field.encode_name}`",
                        _with_unit(
                            word if field.required else f"{word}, optional", field.encode_name
                        ),
                        meanings.get(field.name, ""),
                    ]
                )
            if record is not top:
                parts.append(f"### {name}: {_name(record)}\n\n{_described(record)}\n")
            parts.append(table(("field", "type", "meaning"), rows) + "\n")
    return "\n".join(parts)


def _name(record: type) -> str:
    words = re.findall(r"[A-Z][a-z0-9]*", record.__name__.removesuffix("Record"))
    return " ".join(words).lower()


def _described(record: type) -> str:
    return _markdown(inspect.getdoc(record) or "")


def _markdown(text: str) -> str:
    """A docstring of reStructuredText as Markdown, as far as docstrings here need it."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")


def _meanings(record: type) -> dict[str, str]:
    """The ``#:`` comments of a record's fields, and those of its bases."""
    found: dict[str, str] = {}
    for kind in reversed(record.__mro__):
        if not kind.__module__.startswith("dlperf."):
            continue
        lines = inspect.getsource(kind).splitlines()
        for before, line in itertools.pairwise(["", *lines]):
            field = re.match(r"    (\w+): ", line)
            own = line if "#: " in line else before if before.lstrip().startswith("#: ") else ""
            if field and own:
                found[field.group(1)] = own.partition("#: ")[2]
    return found


def cost_kinds() -> str:
    """Every kind of cost of a machine file, with its meaning."""
    from dlperf.core.costs import KINDS

    meanings = dict(
        line.split("\t") for line in (ROOT / "docs/cost-kinds.tsv").read_text("utf-8").splitlines()
    )
    if unknown := meanings.keys() ^ KINDS.keys():
        raise ValueError(f"docs/cost-kinds.tsv and the kinds of costs differ: {sorted(unknown)}")
    rows = [
        [f"`{name}`", kind.unit, kind.statistic, kind.at, meanings[name]]
        for name, kind in KINDS.items()
    ]
    return table(("kind", "unit", "statistic", "`at` in", "meaning"), rows) + "\n"


def _type(kind: Any) -> tuple[str, list[type]]:
    """A type in words, and the records that it contains."""
    if isinstance(kind, types.Metadata):
        return _type(kind.type)
    if isinstance(kind, types.UnionType):
        parts = [_type(one) for one in kind.types]
        return " or ".join(word for word, _ in parts), [own for _, inner in parts for own in inner]
    if isinstance(kind, types.LiteralType):
        return " or ".join(f"`{value}`" for value in kind.values), []
    if isinstance(kind, (types.StructType, types.DataclassType)):
        return f"*{_name(kind.cls)}*", [kind.cls]
    if isinstance(kind, (types.ListType, types.VarTupleType)):
        word, inner = _type(kind.item_type)
        return f"list of {word}", inner
    if isinstance(kind, types.TupleType):
        found = [_type(one) for one in kind.item_types]
        return "list: " + ", ".join(word for word, _ in found), [o for _, i in found for o in i]
    if isinstance(kind, types.DictType):
        key, (word, inner) = _type(kind.key_type)[0], _type(kind.value_type)
        return f"{key} → {word}", inner
    plain = {"IntType": "whole number", "FloatType": "number", "StrType": "text"}
    plain |= {"BoolType": "true or false", "NoneType": "null", "AnyType": "any"}
    return plain.get(type(kind).__name__, type(kind).__name__), []


# -- answers of commands ---------------------------------------------------------------------------


def answers() -> str:
    """Every field of what commands write, from the frozen formats."""
    lines = (ROOT / "tests/golden/frozen/schemas-written.txt").read_text(encoding="utf-8")
    parts = []
    for block in lines.split("\n\n"):
        name, *fields = block.strip().splitlines()
        rows = []
        for line in fields:
            depth = (len(line) - len(line.lstrip())) // 2 - 1
            key, _, kind = line.strip().partition(": ")
            rows.append([f"{'&emsp;' * depth}`{key}`", _with_unit(kind, key)])
        parts.append(f"### {name}\n\n{table(('field', 'type'), rows)}\n")
    return "\n".join(parts)


# -- architecture ----------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _GAP = 760, 58, 14


def rooms() -> str:
    """The role of every room, and the first sentence of every module."""
    parts = []
    for name in [*itertools.chain(*layers()), "microbench"]:
        folder = ROOT / ("microbench" if name == "microbench" else f"dlperf/{name}")
        lines = [f"## {name}", "", _first_paragraph(folder / "__init__.py"), ""]
        for path in sorted(folder.rglob("*.py")):
            if path.name != "__init__.py" or path.parent != folder:
                module = path.relative_to(folder).with_suffix("").as_posix()
                module = module.removesuffix("/__init__")
                lines.append(f"`{module}`\n: {_first_paragraph(path)}\n")
        parts.append("\n".join(lines))
    return "\n".join(parts)


def layers() -> list[list[str]]:
    """The rooms from top to bottom, by the contract of imports; one list for each height."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'type = "layers"\nlayers = (\[.*?\n\])', text, re.DOTALL)
    assert found is not None, "pyproject.toml has no contract of layers"
    rows = ast.literal_eval(found[1])
    return [[one.strip().removeprefix("dlperf.") for one in row.split(":")] for row in rows]


def _first_paragraph(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return escaped(_markdown(" ".join(text.partition("\n\n")[0].split())))


def rooms_picture() -> str:
    """The rooms as an SVG: who stands higher may import who stands lower."""
    rows = [*layers()]
    height = len(rows) * (_HEIGHT + _GAP) + _GAP
    style = 'font-family="sans-serif" font-size="22" text-anchor="middle"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" {style}>',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for index, row in enumerate(rows):
        width = (_WIDTH - _GAP * (len(row) + 1)) / len(row)
        y = _GAP + index * (_HEIGHT + _GAP)
        for column, name in enumerate(row):
            x = _GAP + column * (width + _GAP)
            parts.append(
                f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{_HEIGHT}" rx="6" '
                f'fill="#e8eef5" stroke="#3b5b7e"/>'
                f'<text x="{x + width / 2:.0f}" y="{y + 37}" fill="#14212e">{name}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])
