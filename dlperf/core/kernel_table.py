"""Tables of measured kernels: CSV files with the shapes and the time of one kernel in each row.

Which columns a table has says which operator it is about; `FAMILIES` lists them. The time stands in
one column of `TIMES`. Other columns are passed over.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from dlperf.core.clock import Samples
from dlperf.core.conversion import LEAST_S, LONGEST_S, MOST, shown
from dlperf.core.errors import DlperfError
from dlperf.core.machine_entries import Kernel
from dlperf.core.operators import ITEM_BYTES, Op, TensorSpec
from dlperf.core.text import csv_rows

TIMES = {"time_s": 1.0, "time_ms": 1e-3, "time_us": 1e-6, "best_ms": 1e-3}
"""Columns of the time, and their unit in seconds."""
_UNARY = ("relu", "sigmoid", "tanh", "exp", "silu", "sqrt", "neg", "abs")
_DTYPES = tuple(name for name in ITEM_BYTES if name.startswith(("float", "bfloat")))
_CONV = ("n", "c_in", "h", "w", "c_out", "kh", "kw")
_CONV_OPTIONS = ("stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w", "groups")
_DEFAULT_0 = ("pad_h", "pad_w", "in_place")


@dataclass(frozen=True)
class TableRow:
    """A measured kernel: its family, its operator with outputs, and its seconds."""

    family: str
    op: Op
    seconds: float


@dataclass(frozen=True)
class KernelTable:
    """The rows of a table."""

    path: str
    rows: tuple[TableRow, ...]

    @classmethod
    def load(cls, path: str | Path) -> KernelTable:
        """Read a table. Raises DlperfError that names the file, the line and the way out."""
        header, lines = _read(path)
        family = _family_of(path, header)
        time = _time_column(path, header)
        _check_lines(path, header, lines)
        rows = []
        for number, cells in lines:
            row = _Row(path, number, dict(zip(header, cells)))
            name, op = FAMILIES[family][2](row)
            rows.append(TableRow(name, op, row.seconds(time)))
        return cls(str(path), tuple(rows))

    def kernels(self, threads: int = 1) -> tuple[Kernel, ...]:
        """The rows as kernels of a machine file; equal ones as samples of one. A device counts as
        one thread, a processor as its cores.
        """
        found: dict[str, Kernel] = {}
        for row in self.rows:
            op, samples = replace(row.op, outputs=()), Samples((row.seconds,))
            if (known := found.get(op.signature)) is not None:
                found[op.signature] = replace(known, samples=known.samples.joined(samples))
            else:
                found[op.signature] = Kernel(op, row.family, threads, samples)
        return tuple(found.values())


class _Row:
    """The cells of a line by column, with errors that name them."""

    def __init__(self, path: str | Path, number: int, cells: Mapping[str, str]) -> None:
        self.path, self.number, self.cells = path, number, cells

    def refuse(self, column: str, expected: str) -> NoReturn:
        """Raise the error of an unfit cell."""
        raise DlperfError(
            f"{self.path}: line {self.number}: {column} is {shown(self.cells[column])}; expected"
            f" {expected}"
        )

    def whole(self, column: str, least: int = 1) -> int:
        """A whole number of at least `least`; where the table lacks the column the usual one."""
        if column not in self.cells:
            return 0 if column in _DEFAULT_0 else 1
        text = self.cells[column].strip()
        if not text.isascii() or not text.isdigit() or not least <= int(text[:20]) <= MOST:
            self.refuse(column, f"a whole number of at least {least}")
        return int(text)

    def seconds(self, column: str) -> float:
        """The positive, finite time of the row."""
        try:
            found = float(self.cells[column]) * TIMES[column]
        except ValueError:
            comma = " with a decimal point" if "," in self.cells[column] else ""
            self.refuse(column, f"a number{comma}")
        if not LEAST_S <= found <= LONGEST_S:
            self.refuse(column, "a positive, finite time")
        return found

    def dtype(self) -> str:
        """The dtype of the row, float32 without one."""
        found = self.cells.get("dtype", "float32").strip()
        if found not in _DTYPES:
            self.refuse("dtype", f"one of {', '.join(_DTYPES[:4])}")
        return found


def _elementwise(row: _Row) -> tuple[str, Op]:
    name = row.cells.get("op", "relu").strip()
    if name not in _UNARY:
        row.refuse("op", f"one of {', '.join(_UNARY)}")
    text = row.cells["shape"].strip()
    sizes = text.split("x")
    if not all(size.isascii() and size.isdigit() and len(size) < 16 for size in sizes):
        row.refuse("shape", "sizes with an x between them, such as 4x64x56x56")
    shape = tuple(map(int, sizes))
    if not math.prod(shape):
        row.refuse("shape", "sizes of at least 1")
    if math.prod(shape) > MOST:
        row.refuse("shape", "a tensor that a memory can hold")
    spec = TensorSpec.contiguous(*shape, dtype=row.dtype())
    mark = "_" if row.whole("in_place", 0) else ""
    return name, Op(f"aten.{name}{mark}.default", (spec,), outputs=(spec,))


def _convolution(row: _Row) -> tuple[str, Op]:
    n, c_in, h, w, c_out, kh, kw = map(row.whole, _CONV)
    pads = row.whole("pad_h", 0), row.whole("pad_w", 0)
    strides = row.whole("stride_h"), row.whole("stride_w")
    dilations = row.whole("dilation_h"), row.whole("dilation_w")
    groups, dtype = row.whole("groups"), row.dtype()
    if c_in % groups or c_out % groups:
        row.refuse("groups", f"a divisor of c_in {c_in} and c_out {c_out}")
    out = [
        (size + 2 * pad - reach * (side - 1) - 1) // step + 1
        for size, pad, reach, side, step in zip((h, w), pads, dilations, (kh, kw), strides)
    ]
    for places, column in zip(out, ("kh", "kw")):
        if places < 1:
            row.refuse(column, "a kernel that the padded image contains")
    tensors = (
        TensorSpec.contiguous(n, c_in, h, w, dtype=dtype),
        TensorSpec.contiguous(c_out, c_in // groups, kh, kw, dtype=dtype),
        TensorSpec.contiguous(n, c_out, *out, dtype=dtype),
    )
    if max(spec.numel for spec in tensors) > MOST:
        row.refuse("n", "tensors that a memory can hold")
    settings = (strides, pads, dilations, False, (0, 0), groups)
    args = (*tensors[:2], None, *settings)
    return "conv2d", Op("aten.convolution.default", args, outputs=tensors[2:])


def _product(row: _Row) -> tuple[str, Op]:
    m, n, k, batch = (row.whole(column) for column in ("m", "n", "k", "batch"))
    lead, dtype = (batch,) if "batch" in row.cells else (), row.dtype()
    if batch * max(m * k, k * n, m * n) > MOST:
        row.refuse("m", "matrices that a memory can hold")
    a, b, out = (
        TensorSpec.contiguous(*lead, *sides, dtype=dtype) for sides in ((m, k), (k, n), (m, n))
    )
    return "gemm", Op(f"aten.{'bmm' if lead else 'mm'}.default", (a, b), outputs=(out,))


Reader = Callable[[_Row], tuple[str, Op]]
FAMILIES: dict[str, tuple[tuple[str, ...], tuple[str, ...], Reader]] = {
    "elementwise": (("shape",), ("op", "in_place", "dtype"), _elementwise),
    "conv2d": (_CONV, (*_CONV_OPTIONS, "dtype"), _convolution),
    "gemm": (("m", "n", "k"), ("batch", "dtype"), _product),
}
"""Columns that a table must have, those that it may have, and what reads a row, by operators."""
_OWN = {"elementwise": {"shape"}, "conv2d": {"c_in", "c_out", "kh", "kw"}, "gemm": {"m", "k"}}
"""Columns by which a table is known."""


def row_of(family: str, cells: Mapping[str, str], seconds: float) -> TableRow:
    """A row of a table of a family, by its cells.

    >>> row_of("gemm", {"m": "2", "n": "3", "k": "4"}, 1e-6).op.outputs[0].shape
    (2, 3)
    """
    name, op = FAMILIES[family][2](_Row("", 0, cells))
    return TableRow(name, op, seconds)


def _read(path: str | Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The header, known columns in lower case, and the cells of each further line with its
    number.
    """
    if os.path.isdir(path):
        raise DlperfError(f"{path}: is a folder; name a CSV file")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        lines = [(number, cells) for number, cells in csv_rows(text) if any(cells)]
    except FileNotFoundError:
        raise DlperfError(f"{path}: there is no such file; name a CSV file of kernels") from None
    except OSError as error:
        raise DlperfError(f"{path}: {error.strerror or error}; name a CSV file") from error
    except UnicodeDecodeError:
        raise DlperfError(f"{path}: is no text; name a CSV file, not a compressed one") from None
    except ValueError as error:
        raise DlperfError(f"{path}: {error}: is no CSV text; it may be cut") from None
    if not lines:
        raise DlperfError(f"{path}: is empty; expected a header and a row for each kernel")
    known = {*TIMES}.union(*(needed + more for needed, more, _ in FAMILIES.values()))
    header = [cell.strip() for cell in lines[0][1]]
    return [name.lower() if name.lower() in known else name for name in header], lines[1:]


def _check_lines(path: str | Path, header: list[str], lines: list[tuple[int, list[str]]]) -> None:
    """Raise DlperfError for a table without rows, and for a line that is none of its rows."""
    if not lines:
        raise DlperfError(f"{path}: holds a header and no kernel; it may be cut")
    for number, cells in lines:
        if {cell.strip() for cell in cells} & {*TIMES, "shape", "c_in"}:
            raise DlperfError(
                f"{path}: line {number}: a second table begins; give each operator its own file"
            )
        if len(cells) != len(header):
            raise DlperfError(
                f"{path}: line {number}: has {len(cells)} cells, the header {len(header)};"
                " the file may be cut, or have decimal commas"
            )


def _family_of(path: str | Path, header: list[str]) -> str:
    """The operators that a table is about, by its columns."""
    if len(header) == 1 and any(mark in header[0] for mark in ";\t"):
        raise DlperfError(
            f"{path}: its columns are not separated by commas; write it with commas between"
            " columns and points in numbers"
        )
    if {"Kernel Name", "Metric Name"} <= set(header):
        raise DlperfError(
            f"{path}: is a profile of Nsight Compute, whose kernels have no shapes (dlperf roofline"
            f" reads it); expected columns such as {','.join(_CONV)},time_s"
        )
    found = [name for name, own in _OWN.items() if own <= set(header)]
    if len(found) > 1:
        raise DlperfError(
            f"{path}: has the columns of {' and '.join(found)}; give each operator its own file"
        )
    twice = next((name for name in header if header.count(name) > 1), None)
    if found and twice is not None:
        raise DlperfError(f"{path}: has two columns {shown(twice)}; leave one out")
    missing = [name for name in FAMILIES[found[0]][0] if name not in header] if found else []
    if missing:
        raise DlperfError(f"{path}: lacks the column {missing[0]} of {found[0]}")
    if not found:
        known = "; ".join(",".join(needed) for needed, _, _ in FAMILIES.values())
        raise DlperfError(
            f"{path}: is no table of kernels: its first line has none of the columns {known}"
        )
    return found[0]


def _time_column(path: str | Path, header: list[str]) -> str:
    """The column of the time."""
    found = [name for name in TIMES if name in header]
    if len(found) != 1:
        has = f"has {' and '.join(found)}" if found else "has no time"
        raise DlperfError(f"{path}: {has}; expected one column of {', '.join(TIMES)}")
    return found[0]
