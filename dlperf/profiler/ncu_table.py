"""The CSV of Nsight Compute (``ncu --csv``) becomes launches of kernels with their counters.

Both pages are read: a row for each kernel and metric (``details``, the usual one), and a row for
each kernel with a column for each metric (``--page raw``), whose second line holds the units.
Quantities come out in SI base units.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlperf.core.errors import DlperfError
from dlperf.core.text import csv_rows, printable

WAY_OUT = "write one with ncu --csv --page raw"
_ID, _KERNEL, _METRIC, _UNIT, _VALUE = (
    "ID",
    "Kernel Name",
    "Metric Name",
    "Metric Unit",
    "Metric Value",
)
_PROCESS = "Process ID"
_CAPABILITY, _DEVICE = "CC", "device__attribute_display_name"
_MAJOR, _MINOR = (f"device__attribute_compute_capability_{part}" for part in ("major", "minor"))
_LABELS = {"Duration": "gpu__time_duration.sum"}
"""Metrics that the details page labels in words."""
_NUMBER = re.compile(r"(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_DECIMAL_COMMA = re.compile(
    r"\d{1,3}(?:\.\d{3})+,\d+|\d+,(?:\d{1,2}|\d{4,})|0\d*,\d+|\d{4,},\d+|\d{1,3}(?:\.\d{3}){2,}"
)
_ABSENT = {"", "n/a", "nan", "no data", "-"}
_LARGE = {"k": 3, "K": 3, "M": 6, "G": 9, "T": 12}
_SMALL = {"m": -3, "u": -6, "µ": -6, "μ": -6, "n": -9}
"""Powers of ten of prefixes."""
_TIMES = {"second", "s", "sec"}
_COUNTED = {"byte", "b", "cycle", "inst", "sector", "thread", "warp", "block", "hz", "op", "ops"}
_MANY_METRICS = 2
"""A last launch that lacks as many metrics, all behind those that it has, was cut."""
_TOOLS = (
    ("nvprof", re.compile(r"NVPROF|Profiling (?:application|result)|Time\(%\)|\"Invocations\"")),
    ("Nsight Systems", re.compile(r"Total Time \(ns\)|Start \(ns\)|Time \(%\)|CorrId")),
)


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of a kernel: its name as the file has it and its counters in SI base units.

    A counter that the file has no value for is not among the `metrics`. `capability` is that of the
    device, such as 8.0; None where the file does not tell.
    """

    kernel: str
    metrics: dict[str, float]
    capability: float | None = None


@dataclass(frozen=True, slots=True)
class NcuTable:
    """The launches of a file in their order, and the name of the device where the file tells."""

    launches: tuple[Launch, ...]
    device: str = ""


def read(path: str | Path, is_wanted: Callable[[str], bool] = lambda name: True) -> NcuTable:
    """The launches of a CSV file of ``ncu``, with the metrics whose names are wanted.

    Raises DlperfError in one line for a file that is missing, cut, binary, of another tool, without
    kernels, or that holds a number or a unit which cannot be read.
    """
    text = _text(Path(path))
    try:
        return _Reader(text, is_wanted).table()
    except _Unfit as error:
        raise DlperfError(f"{path}: {error}") from error


class _Unfit(Exception):
    """What is wrong with a file, and the way out."""


# -- text ------------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DlperfError(f"{path}: {error.strerror or error}") from error
    if not data.strip():
        raise DlperfError(f"{path}: is empty; {WAY_OUT}")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DlperfError(
            f"{path}: is UTF-16; convert it with iconv -f UTF-16 -t UTF-8, or {WAY_OUT}"
        )
    if path.suffix in (".ncu-rep", ".nsight-cuprof-report"):
        raise DlperfError(
            f"{path}: is a report of Nsight Compute, no CSV; make one with ncu -i {path} --csv"
            " --page raw"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DlperfError(f"{path}: is no text in UTF-8 (byte {error.start}); {WAY_OUT}") from error
    if "\0" in text:
        raise DlperfError(f"{path}: is binary, no CSV; {WAY_OUT}")
    return text


def _header(text: str) -> tuple[list[str], int, int]:
    """The titles of the columns, where the rows begin, and the number of the line above them.

    What the profiler and the program print before the table is left out.
    """
    begin = 0
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        begin += len(line)
        if _KERNEL not in line or _ID not in line:
            continue
        if {_ID, _KERNEL} <= {cell.strip(' "\r\n') for cell in line.split(";")}:
            raise _Unfit(f"its columns are separated by semicolons, ncu writes commas; {WAY_OUT}")
        try:
            ((_, cells),) = csv_rows(line)
        except ValueError:
            continue
        titles = [cell.strip() for cell in cells]
        if _ID in titles and _KERNEL in titles:
            return titles, begin, number
    raise _Unfit(_no_header(text))


def _no_header(text: str) -> str:
    if re.search(r'^"?ID"?,"?Process ID"?,', text, re.MULTILINE):
        return f"is cut in the titles of its columns, or lacks {_KERNEL!r}; {WAY_OUT}"
    if f'"{_KERNEL}"' in text and '"Invocations"' in text:
        return f"is a summary (--print-summary), which has no launches; {WAY_OUT}"
    head = text[:20_000]
    tool = next((name for name, pattern in _TOOLS if pattern.search(head)), None)
    if tool is not None:
        return f"is of {tool}, which counts no FLOPs and bytes by kernel; {WAY_OUT}"
    return f"has no table of ncu --csv (no line with the columns {_ID} and {_KERNEL!r}); {WAY_OUT}"


# -- table -----------------------------------------------------------------------------------------


class _Reader:
    """The table of one file."""

    def __init__(self, text: str, is_wanted: Callable[[str], bool]) -> None:
        self._titles, begin, self._above = _header(text)
        self._rest, self._is_wanted = text[begin:], is_wanted
        self._device = ""
        doubled = [t for t in (_ID, _KERNEL, _METRIC, _VALUE) if self._titles.count(t) > 1]
        if doubled:
            raise _Unfit(f"has the column {doubled[0]!r} twice; {WAY_OUT}")

    def table(self) -> NcuTable:
        is_long = _METRIC in self._titles or _VALUE in self._titles
        launches = tuple(self._long_launches() if is_long else self._raw_launches())
        if not launches:
            raise _Unfit(f"has the titles of its columns, but no kernel; {WAY_OUT}")
        return NcuTable(launches, self._device)

    def _column(self, title: str) -> int:
        if title not in self._titles:
            raise _Unfit(f"has no column {title!r}; {WAY_OUT}")
        return self._titles.index(title)

    def _rows(self, n_needed: int) -> Iterator[tuple[int, list[str]]]:
        """The rows that have at least as many cells as are needed. What the profiler and the
        program print between them is left out.
        """
        fewest = len(self._titles)
        is_whole = self._rest.endswith(("\n", "\r"))
        n_lines = self._rest.count("\n") + (not is_whole)
        rows = csv_rows(self._rest)
        while True:
            try:
                found = next(rows, None)
            except ValueError as error:
                raise _Unfit(
                    f"is cut or damaged: quotation marks do not match below line {self._above}"
                    f" ({error}); {WAY_OUT}"
                ) from error
            if found is None:
                return
            number, cells = found
            if not cells or cells[0].startswith("=="):
                continue
            is_last = number >= n_lines and not is_whole
            if len(cells) < n_needed or (is_last and len(cells) < fewest):
                if len(cells) == 1 and not is_last:
                    continue  # a line that the program printed
                raise _Unfit(
                    f"line {number + self._above} has {len(cells)} of {len(self._titles)} columns:"
                    f" the file is cut or damaged; {WAY_OUT}"
                )
            fewest = min(fewest, len(cells))
            yield number + self._above, cells

    def _capability(self, cells: Sequence[str], line: int) -> float | None:
        if _CAPABILITY not in self._titles or len(cells) <= self._column(_CAPABILITY):
            return None
        text = cells[self._column(_CAPABILITY)].strip()
        return float(text) if re.fullmatch(r"\d{1,2}\.\d", text) else None

    def _long_launches(self) -> list[Launch]:
        name, kernel = self._column(_ID), self._column(_KERNEL)
        metric, unit, value = map(self._column, (_METRIC, _UNIT, _VALUE))
        process = self._column(_PROCESS) if _PROCESS in self._titles else name
        launches: dict[tuple[object, ...], Launch] = {}
        runs: list[tuple[tuple[object, ...], list[str]]] = []
        part = 0
        for line, cells in self._rows(max(process, name, kernel, metric, unit, value) + 1):
            if cells[metric].strip() == _METRIC:  # files that were joined
                part += 1
                continue
            key = (part, cells[process], cells[name], cells[kernel])
            if key not in launches:
                launches[key] = Launch(cells[kernel], {}, self._capability(cells, line))
            title = cells[metric].strip()
            if not title:  # a rule's advice
                continue
            if not runs or runs[-1][0] != key:
                runs.append((key, []))
            runs[-1][1].append(title)
            self._take(launches[key].metrics, title, cells[unit], cells[value], line)
        _check_end(runs)
        return [_with_capability(launch) for launch in launches.values()]

    def _raw_launches(self) -> Iterator[Launch]:
        name, kernel = self._column(_ID), self._column(_KERNEL)
        units: list[str] | None = None
        for line, cells in self._rows(len(self._titles)):
            if cells[name].strip() == _ID:
                units = None
            elif units is None:
                if cells[name].strip() or cells[kernel].strip():
                    raise _Unfit(f"line {line} holds no units, which --page raw has; {WAY_OUT}")
                units = cells
            else:
                metrics: dict[str, float] = {}
                for title, unit, value in zip(self._titles, units, cells):
                    if "__" in title:
                        self._take(metrics, title, unit, value, line)
                yield _with_capability(
                    Launch(cells[kernel], metrics, self._capability(cells, line))
                )

    def _take(self, to: dict[str, float], title: str, unit: str, value: str, line: int) -> None:
        """Put a wanted metric into SI base units; the first of a name counts."""
        value = value.strip().removeprefix("(!)").strip()
        if title == _DEVICE:
            self._device = printable(value)
        name = _LABELS.get(title, title)
        if _DECIMAL_COMMA.fullmatch(value):
            raise _Unfit(
                f"line {line}: {printable(title)} is {value!r}, with a decimal comma; write the"
                " file anew where the system's language has decimal points"
            )
        if name in to or not (self._is_wanted(name) or name in (_MAJOR, _MINOR)):
            return
        if value.lower() in _ABSENT:
            return
        if not _NUMBER.fullmatch(value) or math.isinf(float(value.replace(",", ""))):
            raise _Unfit(f"line {line}: {name} is {printable(value)!r:.60}, no number; {WAY_OUT}")
        factor = unit_factor(unit.strip())
        if factor is None:
            raise _Unfit(
                f"line {line}: {title} has the unit {printable(unit)!r:.40}, which is unknown;"
                " write the file with --print-units base"
            )
        to[name] = float(value.replace(",", "")) * factor


def unit_factor(unit: str) -> float | None:
    """How many SI base units a unit of ncu is; None for one that is unknown.

    >>> unit_factor("Kbyte"), unit_factor("usecond"), unit_factor("cycle/nsecond")
    (1000.0, 1e-06, 1000000000.0)
    """
    above, _, below = unit.partition("/")
    top, bottom = _power(above), _power(below)
    return None if top is None or bottom is None else float(f"1e{top - bottom}")


def _power(unit: str) -> int | None:
    """The power of ten of a unit without a slash."""
    if unit == "%":
        return -2
    if not unit or unit in _TIMES or unit.lower() in _COUNTED:
        return 0
    if unit[0] in _SMALL and unit[1:] in _TIMES:
        return _SMALL[unit[0]]
    if unit[0] in _LARGE and unit[1:].lower() in _COUNTED:
        return _LARGE[unit[0]]
    return None


def _with_capability(launch: Launch) -> Launch:
    """The launch with the compute capability that its metrics tell, where no column does."""
    major, minor = launch.metrics.pop(_MAJOR, None), launch.metrics.pop(_MINOR, None)
    if launch.capability is None and major is not None and minor is not None:
        return Launch(launch.kernel, launch.metrics, major + minor / 10)
    return launch


def _check_end(runs: Sequence[tuple[tuple[object, ...], list[str]]]) -> None:
    """Raise _Unfit where the last launch lacks the end of the metrics that all others have."""
    if len(runs) <= 2 or len({key for key, _ in runs}) < len(runs):
        return
    whole, last = runs[0][1], runs[-1][1]
    if any(names != whole for _, names in runs[:-1]):
        return
    if len(last) + _MANY_METRICS <= len(whole) and whole[: len(last)] == last:
        raise _Unfit(
            f"is cut: its last kernel has {len(last)} of the {len(whole)} metrics of the others;"
            f" {WAY_OUT}"
        )
