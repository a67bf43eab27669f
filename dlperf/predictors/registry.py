"""Predictors by name; each file registers one."""

from __future__ import annotations

from dlperf.predictors import calibrated, gemm_table, roofline, viebke
from dlperf.predictors.base import Predictor, evaluates_by_forward, get, names, register

__all__ = [
    "Predictor",
    "calibrated",
    "evaluates_by_forward",
    "gemm_table",
    "get",
    "names",
    "register",
    "roofline",
    "viebke",
]
