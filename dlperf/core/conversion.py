"""The formats of dlperf's files as typed records, and the conversion of JSON data to them.

A record (a msgspec Struct) describes a format once: the names, types and limits of its entries.
Checks that join several entries, such as references, stand with the data classes that are made of
the records. They call :func:`refuse`, so that both kinds of error read alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
from msgspec import Meta, Struct, inspect

from dlperf.core.errors import DlperfError
from dlperf.core.text import visible

MOST = 2**53
"""Limit of sizes, counts and products of dimensions: a float holds every whole number below it."""
LEAST_S, LONGEST_S = 1e-15, 1e6
"""Limits of a measured time in seconds, and of a measured factor."""

Whole = Annotated[int, Meta(ge=0, le=MOST)]
Positive = Annotated[int, Meta(ge=1, le=MOST)]
IndexOrNone = Annotated[int, Meta(ge=-1, le=MOST)]
"""A position; -1 for none."""
Threads = Annotated[int, Meta(ge=1, le=2**16)]
Seconds = Annotated[float, Meta(ge=0, le=LONGEST_S)]
PositiveSeconds = Annotated[float, Meta(ge=LEAST_S, le=LONGEST_S)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(min_length=1, max_length=4096)]
Text = Annotated[str, Meta(max_length=2**16)]
T = TypeVar("T")


class SamplesRecord(Struct, gc=False):
    """Samples in seconds, zero included, and the number of disturbed ones."""

    samples_s: Annotated[list[Seconds], Meta(min_length=1)]  #: Raw samples.
    disturbed: Whole = 0  #: Samples that were dropped.


class PositiveSamplesRecord(Struct, gc=False):
    """Samples in seconds, and the number of disturbed ones."""

    samples_s: Annotated[list[PositiveSeconds], Meta(min_length=1)]  #: Raw samples.
    disturbed: Whole = 0  #: Samples that were dropped.


class CoRunRecord(PositiveSamplesRecord, gc=False, kw_only=True):
    """Co-run samples of one kind of work, and its samples alone."""

    work: Name  #: Kind of work: a bound, an operation, or the preparation.
    workers: Threads  #: Processes at once.
    alone: PositiveSamplesRecord  #: The same work by one process; pairs with `samples_s`.


def convert(data: object, record: type[T]) -> T:
    """The record that JSON data contain.

    Raises DlperfError naming the first unfit entry, its value and what is expected.
    """
    try:
        return msgspec.convert(data, record, str_keys=True)  # as all keys of JSON are text
    except UnicodeEncodeError:
        return convert(_with_visible_text(data), record)
    except msgspec.ValidationError as error:
        message = str(error)
    raise DlperfError(_explain(data, record, message))


def refuse(entry: str, value: object, expected: str) -> NoReturn:
    """Raise the DlperfError of an unfit entry.

    >>> refuse("ops[3].layer", "fc", "a layer of the trace")
    Traceback (most recent call last):
        ...
    dlperf.core.errors.DlperfError: ops[3].layer is 'fc'; expected a layer of the trace
    """
    raise DlperfError(f"{entry} is {shown(value)}; expected {expected}")


def check_unique(entry: str, names: Sequence[object]) -> None:
    """Refuse a repeated name; `entry` is that of a name, such as ``layers[{}].name``."""
    if len(set(names)) < len(names):
        index = next(index for index, name in enumerate(names) if name in names[:index])
        refuse(entry.format(index), names[index], "each of them once")


def shown(value: object) -> str:
    """A value of a JSON file in one short line, control characters escaped.

    >>> print(shown(None), shown("a\\x1b[31m"), shown([10] * 1000))
    null 'a\\x1b[31m' [10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10,...
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = ascii(value[:60]) if isinstance(value, str) else ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _with_visible_text(data: Any) -> Any:
    """The data with halves of surrogate pairs, which stop msgspec, as escape sequences."""
    if isinstance(data, dict):
        return {visible(key): _with_visible_text(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_with_visible_text(value) for value in data]
    return visible(data) if isinstance(data, str) else data


# -- from msgspec's messages to dlperf's ----------------------------------------------------------

_PLACE = re.compile(r" - at `\$(.*)`$")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_FIELD = re.compile(r"Object (missing required|contains unknown) field `(.*?)`")


def _explain(data: Any, record: Any, message: str) -> str:
    """The line for a message of msgspec.

    Its path leads to the entry's value and, through the record's types, to what is expected.
    """
    kind, entry, value, path = inspect.type_info(record), "", data, list[Any]()
    index = _PLACE.search(message)
    for name, number in _STEP.findall(index.group(1)) if index else ():
        kind = _not_null(kind)
        if name:
            kind, step = _field(kind, name).type, name
            entry += f".{name}"
        elif isinstance(kind, inspect.DictType):
            kind, step = kind.value_type, _first_unfit(data, record, path, value)
            entry += f"[{step!a}]"
        elif isinstance(kind, inspect.StructType):  # an array in the file
            field = kind.fields[step := int(number)]
            kind = field.type
            entry += f".{field.encode_name}"
        else:
            step = int(number)
            kind = kind.item_types[step] if isinstance(kind, inspect.TupleType) else kind.item_type
            entry += f"[{number}]"
        value = value[step]
        path.append(step)
    if found := _FIELD.match(message):
        kind = _not_null(kind)
        entry = f"{entry}.{found.group(2)}".lstrip(".")
        if "unknown" in found.group(1):
            known = ", ".join(field.encode_name for field in kind.fields)
            return f"{entry} is unknown; expected one of {known}"
        return f"{entry} is missing; expected {_expected(_field(kind, found.group(2)).type, None)}"
    return f"{entry.lstrip('.') or 'the file'} is {shown(value)}; expected {_expected(kind, value)}"


def _field(kind: Any, name: str) -> Any:
    return next(field for field in kind.fields if field.encode_name == name)


def _not_null(kind: Any) -> Any:
    """The type that a value other than null has."""
    return (
        next(one for one in kind.types if not isinstance(one, inspect.NoneType))
        if isinstance(kind, inspect.UnionType)
        else kind
    )


def _first_unfit(data: Any, record: Any, path: list[Any], values: dict[str, Any]) -> str:
    """The key of an object with free names at whose value the conversion fails."""
    for key, value in values.items():
        try:
            msgspec.convert(_replaced(data, path, {key: value}), record, str_keys=True)
        except msgspec.ValidationError:
            return key
    return next(iter(values))


def _replaced(data: Any, path: list[Any], value: Any) -> Any:
    """The data with another value at a path."""
    if not path:
        return value
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[path[0]] = _replaced(data[path[0]], path[1:], value)
    return copy


def _expected(kind: Any, value: Any) -> str:
    """What a type takes, in words; an upper limit only where the value exceeds it."""
    if isinstance(kind, inspect.UnionType):
        return " or ".join(_expected(one, value) for one in kind.types)
    if isinstance(kind, inspect.LiteralType):
        return f"one of {', '.join(map(str, kind.values))}"
    if isinstance(kind, (inspect.IntType, inspect.FloatType)):
        what = "a whole number" if isinstance(kind, inspect.IntType) else "a finite number"
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and kind.le is not None and value > kind.le:
            return (
                f"{what} of at most {kind.le:,}"
                if isinstance(kind, inspect.IntType)
                else f"{what} of at most {kind.le:g}"
            )
        if kind.ge is None or kind.ge < -1:
            return what
        if 0 < kind.ge < 1 and not (is_number and value > 0):
            return f"{what} greater than 0"
        return f"{what} of at least {kind.ge:g}"
    if isinstance(kind, inspect.StrType):
        too_long = (
            isinstance(value, str) and kind.max_length is not None and len(value) > kind.max_length
        )
        return (
            f"text of at most {kind.max_length:,} characters"
            if too_long
            else "text that is not empty"
            if kind.min_length
            else "text"
        )
    if isinstance(kind, (inspect.ListType, inspect.VarTupleType, inspect.TupleType)) or (
        isinstance(kind, inspect.StructType) and kind.array_like
    ):
        return f"a list{_length(kind)}"
    names = {
        inspect.BoolType: "true or false",
        inspect.NoneType: "null",
        inspect.AnyType: "a value",
    }
    return names.get(type(kind), "an object")


def _length(kind: Any) -> str:
    """The words for the number of entries of a list."""
    if isinstance(kind, (inspect.ListType, inspect.VarTupleType)):
        least, most = kind.min_length, kind.max_length
    else:
        least = most = len(kind.fields if isinstance(kind, inspect.StructType) else kind.item_types)
    if least and least == most:
        return f" of {least} entries"
    return f" of at least {least}" if least else f" of at most {most}" if most else ""
