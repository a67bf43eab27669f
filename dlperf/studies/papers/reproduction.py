"""The papers' tables, recomputed from their printed inputs through the library's own models and
predictors.

A quantity measured in the paper's own run is never an input to its prediction. A further paper is
one module with a function that returns its tables, and one line in :data:`PAPERS`.
"""

from __future__ import annotations

from collections.abc import Callable

from dlperf.core.errors import DlperfError
from dlperf.studies.papers.cardwell import tables as _cardwell
from dlperf.studies.papers.choi import tables as _choi
from dlperf.studies.papers.ridgeline import tables as _ridgeline
from dlperf.studies.papers.tables import Entry, Row, Table
from dlperf.studies.papers.viebke import tables as _viebke
from dlperf.studies.papers.yang import tables as _yang

__all__ = ["PAPERS", "Entry", "Row", "Table", "reproduce"]

PAPERS: dict[str, Callable[[], list[Table]]] = {
    "cardwell": _cardwell,
    "choi": _choi,
    "ridgeline": _ridgeline,
    "viebke": _viebke,
    "yang": _yang,
}
"""The papers by short name; each gives its tables."""


def reproduce(paper: str | None = None) -> list[Table]:
    """The tables of one paper, or of all. Raises DlperfError for an unknown paper, naming the known
    ones.
    """
    if paper is None:
        return [table for tables in PAPERS.values() for table in tables()]
    if paper not in PAPERS:
        raise DlperfError(f"paper {paper!r} is unknown; known are {', '.join(sorted(PAPERS))}")
    return PAPERS[paper]()
