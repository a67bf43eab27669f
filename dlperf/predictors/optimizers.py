"""What an optimizer's loop costs beyond the sizes of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dlperf.core.costs import OPTIMIZER_CALL, OPTIMIZER_TENSOR
from dlperf.core.trace import Argument, Op, TensorSpec, Trace
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
    info, machine, threads = trace.optimizer, cost_model.machine, cost_model.threads
    assert info is not None
    is_loop = info.implementation == "for-loop"
    n_ops = sum(op.phase == "optimizer" for op in trace.ops)
    per_tensor = n_ops / max(info.n_tensors, 1) if is_loop else n_ops
    calls = [cost.value for cost in machine.costs_of(OPTIMIZER_CALL, threads=threads)]
    call_s = machine.cost_value(
        OPTIMIZER_CALL, threads, 0.0, of=info.type, variant=info.implementation
    ) or float(np.median(calls or [0.0]))
    alike = [
        (cost.key.of, cost.key.at, cost.value)
        for cost in machine.costs_of(OPTIMIZER_TENSOR, threads=threads)
        if cost.key.variant == info.implementation
    ]
    op_s = cost_model.cost_s("native_call")
    if alike:
        op_s = float(np.median([seconds / max(ops, 1) for _, ops, seconds in alike]))
    own = [(ops, seconds) for kind, ops, seconds in alike if kind == info.type]
    if not own:
        source = "interpolated" if alike else "extrapolated"
        return OptimizerCosts(call_s, op_s * per_tensor, source, cost_model)
    ops, seconds = min(own, key=lambda measured: abs(measured[0] - per_tensor))
    # Another variant of the same class (weight decay, amsgrad) has a few ops more or less; those of
    # other loops serve all tensors at once.
    further_s = (per_tensor - ops) * op_s if is_loop else 0.0
    return OptimizerCosts(call_s, max(0.0, seconds + further_s), "measured", cost_model)
