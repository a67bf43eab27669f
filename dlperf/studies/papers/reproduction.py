"""The papers' tables, recomputed from their printed inputs through the library's own models and
predictors.

A quantity measured in the paper's own run is never an input to its prediction. A further paper is
one module with a function that returns its tables, and one line in :data:`PAPERS`.
"""

from __future__ import annotations

from dlperf.core.errors import DlperfError
from dlperf.studies.papers import cardwell, choi, ridgeline, viebke, yang
from dlperf.studies.papers.tables import Table

PAPERS = {
    "cardwell": cardwell.tables,
    "choi": choi.tables,
    "ridgeline": ridgeline.tables,
    "viebke": viebke.tables,
    "yang": yang.tables,
}
"""The papers by short name; each gives its tables."""


def reproduce(paper: str) -> list[Table]:
    """The tables of a paper. Raises DlperfError for an unknown paper, naming the known ones."""
    if paper not in PAPERS:
        raise DlperfError(f"paper {paper!r} is unknown; known are {', '.join(sorted(PAPERS))}")
    return PAPERS[paper]()
