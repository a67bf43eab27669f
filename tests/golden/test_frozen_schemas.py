"""The keys of every JSON document that dlperf reads or writes, with their types."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from frozen_results import check_text
from msgspec import inspect

import dlperf
from dlperf.__main__ import main
from dlperf.studies.accuracy.baselines import BaselineEstimate
from dlperf.studies.distributed.runs import AllReduces, StepRun
from dlperf.studies.trainings.cases import TrainingForecast

PACKAGE = Path(dlperf.__file__).parent
READ = (
    "MachineRecord",
    "TraceRecord",
    "MeasurementRecord",
    "ClusterRecord",
    "CommunicationRecord",
    "StateRecord",
)
"""The records of dlperf's own files."""
KEPT = {
    "TrainingForecastRecord": TrainingForecast,
    "BaselineEstimateRecord": BaselineEstimate,
    "AllReducesRecord": AllReduces,
    "StepRunRecord": StepRun,
}
"""What a validation keeps in files."""

_ON = "--machine elsewhere.json --threads 1"
ANSWERED = (
    "machine diff machine.json elsewhere.json",
    "machine show machine.json",
    "machine show cluster.json",
    "machine show a100",
    f"predict lenet-16.json {_ON} --samples 1000 --epochs 2 --val-samples 100",
    f"predict lenet-inference-16.json {_ON}",
    f"predict cnn-medium-64.json {_ON} --device-memory 1GiB",
    f"predict unpriced-16.json {_ON} --profiled-on machine.json",
    "predict mlp-32.json --machine elsewhere.json --workers 2 --samples 1000",
    f"scale lenet-16.json {_ON} --cluster cluster.json --ranks 1,2",
    "scale --trace communication.json --cluster cluster.json",
    f"tune mlp-32.json {_ON} --loader-workers 0 --workers 1 --samples 1000",
    "tune mlp-32.json --machine elsewhere.json --threads 1,2 --loader-workers 0,1 --workers 1,2",
    f"explain cnn-medium-64.json {_ON}",
    f"compare mlp-4.json mlp-32.json {_ON}",
    f"report lenet-16.json --measured measurement.json {_ON}",
    "roofline attention.csv",
    "roofline attention.csv --machine a100",
)
"""Commands whose answers give the formats."""


def records() -> dict[str, type[msgspec.Struct]]:
    """Every record of the package by name, wherever its module lies."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "Struct" in path.read_text(encoding="utf-8"):
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            importlib.import_module(".".join(part for part in parts if part != "__init__"))

    def below(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
        for own in kind.__subclasses__():
            yield own
            yield from below(own)

    return {
        kind.__name__: kind
        for kind in below(msgspec.Struct)
        if kind.__module__.startswith("dlperf.")
    }


def limits(kind: Any) -> str:
    """The limits of a type, such as ``[0..1]``; empty without any."""
    low = getattr(kind, "ge", getattr(kind, "min_length", None))
    high = getattr(kind, "le", getattr(kind, "max_length", None))
    if low is None and high is None:
        return ""
    return f" [{'' if low is None else low}..{'' if high is None else high}]"


def lines_of(kind: Any, indent: str = "  ") -> tuple[str, list[str]]:
    """A type in a word, and the lines of what it contains."""
    if isinstance(kind, inspect.Metadata):
        return lines_of(kind.type, indent)
    if isinstance(kind, inspect.UnionType):
        parts = [lines_of(one, indent) for one in kind.types]
        return " or ".join(word for word, _ in parts), [line for _, own in parts for line in own]
    if isinstance(kind, inspect.LiteralType):
        return f"one of {', '.join(map(str, sorted(kind.values)))}", []
    if isinstance(kind, (inspect.StructType, inspect.DataclassType)):
        is_array = getattr(kind, "array_like", False)
        is_strict = getattr(kind, "forbid_unknown_fields", False) and not is_array
        inside = []
        for field in kind.fields:
            word, own = lines_of(field.type, indent + "  ")
            optional = "" if field.required else ", optional"
            inside += [f"{indent}{field.encode_name}: {word}{optional}", *own]
        strict = ", no other keys" if is_strict else ""
        return f"{'array' if is_array else 'object'}{strict}", inside
    if isinstance(kind, (inspect.ListType, inspect.VarTupleType)):
        word, own = lines_of(kind.item_type, indent)
        return f"list{limits(kind)} of {word}", own
    if isinstance(kind, inspect.TupleType):
        return f"({', '.join(lines_of(one, indent)[0] for one in kind.item_types)})", []
    if isinstance(kind, inspect.DictType):
        word, own = lines_of(kind.value_type, indent)
        return f"{lines_of(kind.key_type)[0]} -> {word}", own
    return type(kind).__name__.removesuffix("Type").lower() + limits(kind), []


def test_records(frozen_files: Path, renew: bool) -> None:
    """Formats of files as their typed records give them."""
    known, lines = records(), []
    for name in ("machine", "lenet-16", "measurement", "cluster", "communication"):
        data = json.loads((frozen_files / f"{name}.json").read_text(encoding="utf-8"))
        lines.append(f"{data['schema']} {data['schema_version']}")
    lines.append("")
    for name, kind in {**{name: known[name] for name in READ}, **KEPT}.items():
        word, own = lines_of(inspect.type_info(kind))
        lines += [f"{name}: {word}", *own, ""]
    check_text("schemas-read", "\n".join(lines), renew)


def shape(values: list[Any], indent: str = "  ") -> tuple[str, list[str]]:
    """The types of several values of one key, and the lines of what they contain."""
    words, lines = set(), []
    entries = [entry for value in values if isinstance(value, list) for entry in value]
    objects = [value for value in values if isinstance(value, dict)]
    if any(isinstance(value, list) for value in values):
        word, own = shape(entries, indent)
        words.add(f"list of ({word})" if entries else "list")
        lines += own
    if objects:
        words.add("object")
        for key in dict.fromkeys(key for value in objects for key in value):
            word, own = shape([value[key] for value in objects if key in value], indent + "  ")
            optional = "" if all(key in value for value in objects) else ", optional"
            if key in ("schema", "schema_version"):
                optional = f" {objects[0][key]}"
            lines += [f"{indent}{key}: {word}{optional}", *own]
    names = {int: "number", float: "number", str: "text", bool: "true or false", type(None): "null"}
    words |= {names[type(value)] for value in values if not isinstance(value, (dict, list))}
    return " or ".join(sorted(words)), lines


def answered(words: str, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main([*words.split(), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_documents(
    frozen_files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    renew: bool,
) -> None:
    """Formats of answers; the tables of ``reproduce`` have keys of their own."""
    monkeypatch.chdir(frozen_files)
    documents = [answered(words, capsys) for words in ANSWERED]
    by_schema: dict[str, list[Any]] = {}
    for data in documents:
        by_schema.setdefault(data["schema"], []).append(data)
    lines = []
    for schema in sorted(by_schema):
        _, own = shape(by_schema[schema])
        lines += [schema, *own, ""]
    check_text("schemas-written", "\n".join(lines), renew)
