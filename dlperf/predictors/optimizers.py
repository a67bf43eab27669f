"""What an optimizer's loop costs beyond the sizes of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dlperf.core.costs import OPTIMIZER_CALL, OPTIMIZER_TENSOR
from dlperf.core.trace import Argument, Op, OptimizerInfo, TensorSpec, Trace
from dlperf.predictors.kernel_cost_model import KernelCostModel
from dlperf.predictors.kernels.catalog import describe

_TINY = 16


@dataclass(frozen=True)
class OptimizerCosts:
    """Seconds a step (`call_s`) and a parameter tensor (`tensor_s`), kernels on tiny tensors
    included; `source` says if this very loop was measured.
    """

    call_s: float
    tensor_s: float
    source: str
    cost_model: KernelCostModel
    known: dict[tuple[str, int, int, str], float] = field(default_factory=dict)

    def floor_s(self, op: Op) -> float:
        """Seconds of the op on a tiny tensor: what the loop's cost holds already."""
        signature = (
            op.packet,
            len(op.args),
            len(op.inputs) if op.packet.startswith("aten._f") else 0,
            op.inputs[0].dtype if op.inputs else "",
        )
        if signature not in self.known:
            tiny = Op(
                op.name,
                tuple(_shrink(value) for value in op.args),
                tuple((name, _shrink(value)) for name, value in op.kwargs),
            )
            (priced,) = self.cost_model.kernels_s([(describe(tiny),)])
            self.known[signature] = (
                priced.seconds
                if priced is not None
                else self.cost_model.cost_s("native_call") + self.cost_model.cost_s("boxed_call")
            )
        return self.known[signature]


def _shrink(argument: Argument) -> Argument:
    """The argument with every tensor cut to a few elements; of a list of tensors one is left."""
    if isinstance(argument, TensorSpec):
        return TensorSpec.contiguous(*([_TINY] if argument.shape else []), dtype=argument.dtype)
    if isinstance(argument, tuple):
        shrunk = tuple(_shrink(item) for item in argument)
        return shrunk[:1] if shrunk and isinstance(shrunk[0], TensorSpec) else shrunk
    return argument


def optimizer_costs(trace: Trace, cost_model: KernelCostModel) -> OptimizerCosts:
    """The costs of the trace's optimizer: measured for its class and loop, else from a line through
    the measured ones over ops a tensor.
    """
    info = trace.optimizer
    assert info is not None
    n_ops = sum(op.phase == "optimizer" for op in trace.ops)
    per_tensor = n_ops / max(info.n_tensors, 1) if info.implementation == "for-loop" else n_ops
    measured = _measured(cost_model)
    own = {
        ops: seconds
        for (kind, implementation, ops), seconds in measured.items()
        if (kind, implementation) == (info.type, info.implementation)
    }
    call_s = _call_s(info, cost_model)
    if own:
        nearest = min(own, key=lambda ops: abs(ops - per_tensor))
        # Another variant of the same class (weight decay, amsgrad) has a few ops more or less.
        return OptimizerCosts(
            call_s,
            max(0.0, own[nearest] + (per_tensor - nearest) * _slope(measured, info)),
            "measured",
            cost_model,
        )
    alike = [
        (ops, seconds)
        for (_, implementation, ops), seconds in measured.items()
        if implementation == info.implementation
    ]
    if not alike:
        return OptimizerCosts(
            call_s, per_tensor * cost_model.cost_s("native_call"), "extrapolated", cost_model
        )
    return OptimizerCosts(
        call_s,
        float(np.median([seconds / max(ops, 1) for ops, seconds in alike])) * per_tensor,
        "interpolated",
        cost_model,
    )


def _measured(cost_model: KernelCostModel) -> dict[tuple[str, str, int], float]:
    return {
        (cost.key.of, cost.key.variant, cost.key.at): cost.value
        for cost in cost_model.machine.costs_of(OPTIMIZER_TENSOR, threads=cost_model.threads)
    }


def _slope(measured: dict[tuple[str, str, int], float], info: OptimizerInfo) -> float:
    """Seconds that one more op a tensor takes in a for-loop; 0 for the others, whose ops serve all
    tensors at once.
    """
    if info.implementation != "for-loop":
        return 0.0
    points = [
        (ops, seconds)
        for (_, implementation, ops), seconds in measured.items()
        if implementation == "for-loop"
    ]
    return float(np.median([seconds / max(ops, 1) for ops, seconds in points]))


def _call_s(info: OptimizerInfo, cost_model: KernelCostModel) -> float:
    own = cost_model.machine.cost_value(
        OPTIMIZER_CALL, cost_model.threads, 0.0, of=info.type, variant=info.implementation
    )
    if own:
        return own
    calls = [
        cost.value
        for cost in cost_model.machine.costs_of(OPTIMIZER_CALL, threads=cost_model.threads)
    ]
    return float(np.median(calls)) if calls else 0.0
