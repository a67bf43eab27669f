"""The hierarchical roofline of Yang, Kurth, Williams 2019 for a trace on a machine: bytes by level of the memory, and the measured roofs.

`traffic` says what each op moves at each level (a model, its assumptions stated there), `blocking` what contractions need, :mod:`dlperf.roofs` what
the machine file measured, `layers` puts them together.
"""
from __future__ import annotations

from dlperf.hierarchy.layers import LayerTraffic, layer_traffic
from dlperf.hierarchy.traffic import Traffic, traffic_of
from dlperf.roofs import LEVELS, Ceiling, Roof, Roofs, roofs_of

__all__ = ["LEVELS", "Ceiling", "LayerTraffic", "Roof", "Roofs", "Traffic", "layer_traffic", "roofs_of", "traffic_of"]
