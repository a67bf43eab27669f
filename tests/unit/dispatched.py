"""Live torch calls as `dlperf.core.trace.Op`s, independent of the recorder: what the formulas of
`dlperf.ops.counts` are tested on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from dlperf.core.trace import Argument, Op, Symbol, TensorSpec


def spec(value: torch.Tensor) -> TensorSpec:
    try:
        storage = value.untyped_storage()._cdata % 2**31
        strides = tuple(value.stride())
    except (NotImplementedError, RuntimeError):
        return TensorSpec.contiguous(*value.shape, dtype=str(value.dtype).removeprefix("torch."))
    return TensorSpec(tuple(value.shape), strides, str(value.dtype).removeprefix("torch."), storage)


def argument(value: Any) -> Argument:
    if isinstance(value, torch.Tensor):
        return spec(value)
    if isinstance(value, (list, tuple)):
        return tuple(argument(item) for item in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return Symbol(type(value).__name__, str(value))


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return (
        [found for item in value for found in tensors(item)]
        if isinstance(value, (list, tuple))
        else []
    )


class Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = argument(args), tuple((key, argument(value)) for key, value in kwargs.items())
        result = func(*args, **kwargs)
        name = f"{func._schema.name.replace('::', '.')}.{func._overloadname}"
        self.ops.append(Op(name, before[0], before[1], tuple(spec(t) for t in tensors(result))))  # type: ignore[arg-type]
        return result


def ops_of(call: Callable[[], object]) -> list[Op]:
    """The aten ops that a call runs, in order."""
    with Recording() as recording:
        call()
    return recording.ops


def torch_flops(call: Callable[[], object]) -> int:
    """What torch's own counter says: contractions only."""
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())
