"""Printed tables beside recomputed ones, as data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, SupportsFloat

from dlperf.core.errors import DlperfError
from dlperf.core.text import fit, text_width
from dlperf.report.document import Column, format_table


@dataclass(frozen=True, slots=True)
class Entry:
    """One number of a paper.

    `printed` is the text as it stands there, with its decimals and, as in ``2.78e-2``, its power of
    ten; "" where the paper does not print the number. `recomputed` is ours, not rounded, in the
    printed unit.
    """

    printed: str
    recomputed: float

    @property
    def decimals(self) -> int:
        """Decimals of the printed number; 3 where none is printed."""
        if not self.printed:
            return 3
        return len(self.printed.partition("e")[0].partition(".")[2])

    @property
    def text(self) -> str:
        """The recomputed number at the printed precision.

        >>> Entry("2.8e-2", 0.02777).text
        '2.8e-2'
        """
        _, power, exponent = self.printed.partition("e")
        return f"{self.recomputed / 10 ** int(exponent or 0):.{self.decimals}f}{power}{exponent}"

    @property
    def matches(self) -> bool | None:
        """Whether both agree at the printed precision; None where nothing is printed."""
        return self.text == self.printed if self.printed else None


@dataclass(frozen=True, slots=True)
class Row:
    """A row: what it is about (the paper's own columns of inputs and names), and its numbers in the
    order of the table's quantities.
    """

    keys: tuple[str, ...]
    entries: tuple[Entry, ...]


def row(keys: Iterable[object], *numbers: Entry | SupportsFloat) -> Row:
    """A row of keys and numbers; a number that is no Entry is not printed in the paper."""
    entries = (n if isinstance(n, Entry) else Entry("", float(n)) for n in numbers)
    return Row(tuple(map(str, keys)), tuple(entries))


@dataclass(frozen=True, slots=True)
class Table:
    """One table of a paper: printed against recomputed.

    `keys` head the columns that identify a row, `quantities` those that are recomputed. `notes` say
    which reading of the paper was taken. Raises DlperfError for rows of another width.
    """

    paper: str
    title: str
    keys: tuple[str, ...]
    quantities: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.keys) != len(self.keys) or len(row.entries) != len(self.quantities):
                expected = f"{len(self.keys)} + {len(self.quantities)}"
                raise DlperfError(
                    f"{self.title}: row {row.keys} has {len(row.keys)} + {len(row.entries)}"
                    f" columns; expected {expected}"
                )

    @property
    def n_printed(self) -> int:
        """How many numbers the paper prints."""
        return sum(entry.matches is not None for row in self.rows for entry in row.entries)

    @property
    def n_matches(self) -> int:
        """How many of them come out the same at the printed precision."""
        return sum(entry.matches is True for row in self.rows for entry in row.entries)

    def to_text(self, width: int | None = None) -> str:
        """The table for a terminal: printed and recomputed numbers, ``*`` where they differ.

        >>> rows = Row(("1",), (Entry("2.0", 2.04),)), Row(("2",), (Entry("4.0", 3.9),))
        >>> print(Table("A paper", "Table 1", ("x",), ("y",), rows).to_text(80))
        A paper: Table 1
        x y printed y recomputed
        1       2.0          2.0
        2       4.0         3.9*
        1 of 2 printed values match
        """
        width = text_width() if width is None else width
        columns = [
            Column(key, tuple(row.keys[index] for row in self.rows), align_left=True)
            for index, key in enumerate(self.keys)
        ]
        for index, quantity in enumerate(self.quantities):
            entries = [row.entries[index] for row in self.rows]
            ours = tuple(entry.text + "*" * (entry.matches is False) for entry in entries)
            if any(entry.printed for entry in entries):
                printed = tuple(entry.printed or "-" for entry in entries)
                columns.append(Column(f"{quantity} printed", printed))
                columns.append(Column(f"{quantity} recomputed", ours))
            else:
                columns.append(Column(quantity, ours))
        lines = [f"{self.paper}: {self.title}", format_table(columns, width)]
        if self.n_printed:
            lines.append(f"{self.n_matches} of {self.n_printed} printed values match")
        return fit("\n".join([*lines, *self.notes]), width)

    def to_json(self) -> dict[str, Any]:
        """The table as JSON data; recomputed numbers are not rounded."""
        return {
            "paper": self.paper,
            "title": self.title,
            "notes": list(self.notes),
            "printed": self.n_printed,
            "matches": self.n_matches,
            "rows": [
                {
                    **dict(zip(self.keys, row.keys)),
                    **{
                        quantity: {
                            "printed": entry.printed or None,
                            "recomputed": entry.recomputed,
                            "matches": entry.matches,
                        }
                        for quantity, entry in zip(self.quantities, row.entries)
                    },
                }
                for row in self.rows
            ],
        }
