"""Predicted beside measured: tables, files, plots and one page of HTML."""
from __future__ import annotations

from dlperf.report.text import measurement_to_text, prediction_to_text

__all__ = ["measurement_to_text", "prediction_to_text"]
