"""Every family of ops; importing this registers them all."""

from __future__ import annotations

from dlperf.predictors import (
    families_contractions,
    families_elements,
    families_images,
    families_layers,
    families_others,
    families_sequences,
)
from dlperf.predictors.features import Description, describe, known

__all__ = [
    "Description",
    "describe",
    "families_contractions",
    "families_elements",
    "families_images",
    "families_layers",
    "families_others",
    "families_sequences",
    "known",
]
