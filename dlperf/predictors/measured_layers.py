"""Times of a measured step by layer, for predictors that rest on a measurement of the network."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dlperf.core.errors import DlperfError
from dlperf.core.measurement import Measurement
from dlperf.core.prediction import PHASES
from dlperf.core.trace import LOSS, Trace


def whole_s(point: Measurement, trace: Trace) -> tuple[float, set[str]]:
    """The seconds that the point and the trace have in common, and their phases: the whole step, or
    the forward where one is no training.

    Raises DlperfError where the point's layers are not the trace's.
    """
    types = {layer.name: layer.type for layer in trace.layers}
    for row in point.layers:
        if row.layer != LOSS and types.get(row.layer) != row.type:
            here = f"is {types[row.layer]} in" if row.layer in types else "is not in"
            raise DlperfError(
                f"the point is of another network: its layer {row.layer!r} ({row.type}) {here}"
                f" {trace.target}; dlperf measure {trace.target} -o FILE makes one"
            )
    if point.inference == trace.inference:
        return point.step["total"].median, {"zero_grad", *PHASES}
    return point.step["forward"].median, {"forward"}


def layer_times_s(
    point: Measurement, trace: Trace, phases: set[str]
) -> Iterator[tuple[str, str, float]]:
    """(layer, phase, seconds) of the point that add up to its whole; a phase without times by layer
    stands under the root.
    """
    medians = {phase: samples.median for phase, samples in point.step.items() if phase in phases}
    # Medians of phases do not quite add up to the median of the step.
    scale = whole_s(point, trace)[0] / math.fsum(medians.values())
    root = trace.layers[0].name if trace.layers else LOSS
    for phase, median in medians.items():
        rows = [
            (row.layer, samples.median)
            for row in point.layers
            if phase != "zero_grad" and (samples := row.phase(phase)) is not None
        ]
        total = math.fsum(seconds for _, seconds in rows)
        for layer, seconds in rows if total > 0 else [(root, 1.0)]:
            yield layer, phase, scale * median * seconds / (total or 1.0)
