"""Results of studies: provenance, forecasts and the runs that they are of, pages and CSV."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from types import MappingProxyType
from typing import Annotated

import pandas as pd
from msgspec import Meta

from dlperf.core.text import fit, frame_to_csv, text_width
from dlperf.core.units import format_bytes, format_percent, format_seconds
from dlperf.report.document import Column, escape, format_table, table

Amount = Annotated[float, Meta(ge=0, le=1e18)]
"""Seconds, bytes, samples per second, or a fraction."""
PositiveAmount = Annotated[float, Meta(ge=1e-9, le=1e18)]


@dataclass(frozen=True)
class Provenance:
    """Where a study comes from: the machine, its file, versions, the command, the date; `remarks`
    say what a reader must know.
    """

    machine: str
    machine_file: str
    machine_mode: str
    machine_created: str
    versions: dict[str, str]
    command: str
    created: str
    n_runs: tuple[tuple[int, int], ...] = ()
    """(threads, runs) pairs."""
    seconds: float = 0.0
    seed: int | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pair:
    """A forecast and one run of what it is of, in the same unit."""

    predicted: Amount
    measured: PositiveAmount


class MeasuredForecast:
    """Statistics of `pairs`, one for each run. Errors are relative; differences where
    `is_relative` is false.
    """

    kind: str
    case: str
    unit: str
    pairs: tuple[Pair, ...]
    is_relative = True

    @property
    def predicted(self) -> float:
        """The median forecast."""
        return median(pair.predicted for pair in self.pairs)

    @property
    def measured(self) -> float:
        """The median run."""
        return median(pair.measured for pair in self.pairs)

    @property
    def measured_span(self) -> tuple[float, float]:
        """The smallest and the largest run."""
        values = [pair.measured for pair in self.pairs]
        return min(values), max(values)

    @property
    def error_frac(self) -> float:
        """predicted / measured - 1, or predicted - measured; the median over the runs."""
        errors = (
            p.predicted / p.measured - 1 if self.is_relative else p.predicted - p.measured
            for p in self.pairs
        )
        return round(median(errors), 12)

    @property
    def repeatability_frac(self) -> float | None:
        """(largest - smallest) / median of the runs, without the division where errors are
        differences; None of a single run.
        """
        if len(self.pairs) < 2:
            return None
        low, high = self.measured_span
        return (high - low) / (self.measured if self.is_relative else 1.0)


def percent(value: float | None) -> str:
    """A fraction in percent with one decimal, without the sign.

    >>> percent(0.0312), percent(None)
    ('3.1', '-')
    """
    return "-" if value is None or math.isnan(value) else f"{100 * value:.1f}"


def format_amount(value: float, unit: str) -> str:
    """A number of ``s``, ``bytes``, ``frac`` or ``samples/s`` in human units."""
    formats = {"s": format_seconds, "bytes": format_bytes, "frac": format_percent}
    return formats[unit](value) if unit in formats else f"{value:.4g}/s"


# -- pages -----------------------------------------------------------------------------------------

Tables = Sequence[tuple[str, list[Column]]]
"""Tables with their titles."""


def tables_to_text(
    tables: Tables, before: str = "", after: Iterable[str] = (), width: int | None = None
) -> str:
    """The tables for a terminal, between a paragraph and lines."""
    width = text_width() if width is None else width
    blocks = [f"{title}\n\n{format_table(columns, width)}" for title, columns in tables]
    return fit("\n\n".join([*([before] if before else []), *blocks, *after]), width)


def tables_to_markdown(
    study: str,
    title: str,
    provenance: Provenance,
    tables: Tables,
    *,
    before: str = "",
    after_first: Sequence[str] = (),
    failures: Iterable[str] = (),
) -> str:
    """The tables as a page of ``dlperf validate``; `after_first`, which is Markdown, follows the
    first one.
    """
    p = provenance
    versions = ", ".join(f"{name} {version}" for name, version in p.versions.items())
    source = (
        f"{p.machine}; {versions}; machine file: {p.machine_mode} calibration of"
        f" {p.machine_created}; {p.created}; {p.command}"
    )
    blocks = [f"<!-- dlperf validate {study} -->", f"# {title}", escape(source), escape(before)]
    for number, (heading, columns) in enumerate(tables):
        blocks += [f"## {escape(heading)}", table(columns), *(() if number else after_first)]
    remarks = (*(f"failed: {line}" for line in failures), *p.remarks)
    blocks.append("\n".join(f"- {escape(line)}" for line in remarks))
    return "\n\n".join(block for block in blocks if block) + "\n"


def runs_to_csv(
    rows: Iterable[MeasuredForecast],
    of_rows: Sequence[str] = (),
    of_results: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """CSV of every row and run. `of_rows` are further attributes of a row, `of_results` columns
    after the numbers with their attributes.
    """
    frame = pd.DataFrame(
        [
            {
                "kind": row.kind,
                "case": row.case,
                "run": run,
                "unit": row.unit,
                **{name: getattr(row, name) for name in of_rows},
                **asdict(pair),
                **{column: getattr(row, name) for column, name in of_results.items()},
            }
            for row in rows
            for run, pair in enumerate(row.pairs, 1)
        ]
    )
    return frame_to_csv(frame)
