"""What may be changed about a step, as data: a variant can be recorded, predicted, and told to
another process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PAYS, DOES_NOT_PAY, UNSURE, DOES_NOT_APPLY = (
    "pays",
    "does not pay",
    "cannot be judged",
    "does not apply",
)
VERDICTS = (PAYS, DOES_NOT_PAY, UNSURE, DOES_NOT_APPLY)
LEAST_GAIN_FRAC = 0.02
"""The least predicted gain that is worth a line: below it a repeated measurement of the same step
differs as much (1-3 % on a quiet machine).
"""


@dataclass(frozen=True)
class Edit:
    """One change to what is built: the name of a transformation and the layers it is for (see
    :mod:`dlperf.advice.transformations`).
    """

    kind: str
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Variant:
    """A step with changes: `edits` of what is built, in that order, and the setting it runs in
    (None: as the baseline).

    `name` is unique within an explanation; the variant without changes is the baseline.
    """

    name: str
    edits: tuple[Edit, ...] = ()
    batch_size: int | None = None
    threads: int | None = None
    malloc: str | None = None

    @property
    def needs_code(self) -> bool:
        """Whether it changes model, inputs or optimizer, which needs the target's code."""
        return bool(self.edits) or self.batch_size is not None

    def to_json(self) -> dict[str, Any]:
        """The variant as JSON data."""
        return {
            "name": self.name,
            "edits": [{"kind": edit.kind, "layers": list(edit.layers)} for edit in self.edits],
            "batch_size": self.batch_size,
            "threads": self.threads,
            "malloc": self.malloc,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Variant:
        """The variant that :meth:`to_json` wrote."""
        edits = tuple(Edit(row["kind"], tuple(row["layers"])) for row in data["edits"])
        return cls(data["name"], edits, data["batch_size"], data["threads"], data["malloc"])


BASELINE = Variant("baseline")


@dataclass(frozen=True)
class Suggestion:
    """A variant and what the model says of it.

    `how` is what a user writes, `caveat` how results or training differ ("" if by rounding at
    most). `sample_s` is the predicted time of one sample, `gain_frac` the gain in samples per
    second over the baseline (0.25: a quarter more). `unsure_frac` is the share of its time that
    stands on extrapolated or unpriced ops. `verdict` is one of :data:`VERDICTS`, `reason` says why
    it does not pay. Values are None where it does not apply.
    """

    variant: Variant
    how: str
    verdict: str
    reason: str = ""
    caveat: str = ""
    batch_size: int | None = None
    threads: int | None = None
    step_s: float | None = None
    gain_frac: float | None = None
    unsure_frac: float | None = None
    peak_memory_bytes: int | None = None

    @property
    def sample_s(self) -> float | None:
        """Predicted seconds a sample."""
        return (
            None
            if self.step_s is None or self.batch_size is None
            else self.step_s / self.batch_size
        )
