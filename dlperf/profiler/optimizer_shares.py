"""The layers' shares of an optimizer's step.

An optimizer steps all parameters in one call, in its own order and groups. Its hooks run once a
step, and anything finer (a dispatch mode, a step per group) would time the instrument. So the real
optimizer steps with the gradients of one layer alone: torch's optimizers skip parameters without
gradient. A layer's weight is the time of that step less a step without any gradient. The shares
divide the uninstrumented step's time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dlperf.core.clock import Clock, undisturbed
from dlperf.core.device_clock import seconds_of, stamper
from dlperf.profiler.layer_times import OUTSIDE
from dlperf.recorder.tensors import parameters_in

_LEAST_ROUNDS, _MOST_ROUNDS = 5, 50
_NO_LAYER = -3
"""The index of a step without any gradient."""
ESTIMATE_NOTE = (
    "the optimizer's time is divided over the layers by the bytes of their parameters and state, an"
    " estimate"
)


@dataclass(frozen=True)
class OptimizerShares:
    """Fractions of the optimizer's step by layer index; their sum is 1, or 0 without parameters.

    `note`: how they were found, if not by timing.
    """

    fractions: Mapping[int, float]
    note: str | None = None


def parameter_owners(model: nn.Module) -> dict[int, int]:
    """The index (in ``modules()``) of the first module that owns each parameter, by its id."""
    owners: dict[int, int] = {}
    for index, module in enumerate(model.modules()):
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), index)
    return owners


def shares_by_bytes(
    optimizer: Any, owners: Mapping[int, int], only: set[int] | None = None
) -> OptimizerShares:
    """Shares in proportion to the bytes of parameters and state.

    `only`: the ids of the parameters that are stepped.
    """
    n_bytes: dict[int, float] = defaultdict(float)
    for parameter in parameters_in(optimizer):
        if not parameter.requires_grad or (only is not None and id(parameter) not in only):
            continue
        state = getattr(optimizer, "state", {}).get(parameter, {})
        tensors = filter(torch.is_tensor, (parameter, *state.values()))
        n_bytes[owners.get(id(parameter), OUTSIDE)] += sum(tensor.nbytes for tensor in tensors)
    return OptimizerShares(_normalised(n_bytes), ESTIMATE_NOTE)


def shares_by_timing(
    optimizer: Any,
    owners: Mapping[int, int],
    clock: Clock = Clock(),
    seconds: float = 0.5,
) -> OptimizerShares:
    """Shares found by stepping each layer alone, with the present gradients of the parameters.

    This changes parameters and state (:class:`dlperf.profiler.snapshot.Snapshot` saves them).
    Rounds go over all layers in turn, so that a layer's data is as cold as in a real step: at least
    5, up to 50 within `seconds`. :func:`shares_by_bytes` replaces an optimizer that cannot step
    without some gradients.
    """
    gradients = [
        (parameter, parameter.grad)
        for parameter in parameters_in(optimizer)
        if parameter.grad is not None
    ]
    by_layer: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    for parameter, gradient in gradients:
        by_layer[owners.get(id(parameter), OUTSIDE)].append((parameter, gradient))
    if len(by_layer) < 2:
        return OptimizerShares(dict.fromkeys(by_layer, 1.0))
    by_layer[_NO_LAYER] = []
    taken: dict[int, list[tuple[float, bool]]] = {layer: [] for layer in by_layer}
    for parameter, _ in gradients:
        parameter.grad = None
    begin = clock.now()
    try:
        n_done = 0
        while n_done < _LEAST_ROUNDS or (n_done < _MOST_ROUNDS and clock.now() - begin < seconds):
            for layer, present in by_layer.items():
                for parameter, gradient in present:
                    parameter.grad = gradient
                taken[layer].append(_time_step(optimizer, clock))
                for parameter, _ in present:
                    parameter.grad = None
            n_done += 1
    except Exception:  # an optimizer that needs all gradients
        taken.clear()
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
    alone_s = {layer: undisturbed(samples).median for layer, samples in taken.items()}
    empty_s = alone_s.pop(_NO_LAYER, 0.0)
    weights = {layer: max(0.0, seconds - empty_s) for layer, seconds in alone_s.items()}
    if not any(weights.values()):
        return shares_by_bytes(optimizer, owners, {id(parameter) for parameter, _ in gradients})
    return OptimizerShares(_normalised(weights))


def _time_step(optimizer: Any, clock: Clock) -> tuple[float, bool]:
    now = stamper(clock)
    before, begin = clock.switches(), now()
    optimizer.step()
    begin, end = seconds_of(clock, (begin, now()))
    return end - begin, clock.switches() != before


def _normalised(weights: Mapping[int, float]) -> dict[int, float]:
    total = sum(weights.values())
    return {layer: weight / total for layer, weight in weights.items()} if total else {}
