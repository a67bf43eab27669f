"""Predictors by name; each file registers one."""

from __future__ import annotations

from dlperf.predictors import calibrated, gemm_table, roofline
from dlperf.predictors.base import BOUNDS, SOURCES, Item, Predictor, Prices, get, names, register

__all__ = ["BOUNDS", "SOURCES", "Item", "Predictor", "Prices", "calibrated", "gemm_table", "get", "names", "register", "roofline"]
