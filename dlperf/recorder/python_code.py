"""Whose Python code a step runs: the instructions that count in the forward of each layer."""

from __future__ import annotations

import os
from types import CodeType

from torch import nn
from torch.nn.modules import module as torch_module

from dlperf.core.instructions import InstructionCounter
from dlperf.recorder.attribution import ModuleStack, layer_names
from dlperf.recorder.op_recorder import OpRecorder

_TORCH_NN = os.path.join(os.path.dirname(nn.__file__), "")
_OTHERS = tuple(
    os.path.join(os.path.dirname(os.path.dirname(file)), "") for file in (__file__, nn.__file__)
)
"""Folders of dlperf and of torch."""
_LOOK_UPS = ("__getattr__", "__setattr__", "__init__")
KEPT_OUT = (
    "a debugger, tracer or coverage watches the program: instructions of Python were not counted,"
    " and predictions lack their time"
)


def instruction_counter(
    model: nn.Module, stack: ModuleStack, recorder: OpRecorder
) -> InstructionCounter:
    """Counts what Python executes in the forwards of the model's layers.

    Not counted: dlperf, torch except for ``torch.nn``, operators, calls of modules, and the
    forward of torch's own modules without children: these have prices of their own.
    """
    priced = {
        name
        for module, name in layer_names(model).items()
        if type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None
    }

    def layer_of() -> str:
        name = "" if recorder.is_busy else stack.caller
        return "" if name in priced else name

    return InstructionCounter(layer_of, _counts)


def _counts(code: CodeType) -> bool:
    if code.co_filename == torch_module.__file__:
        return code.co_name in _LOOK_UPS
    return code.co_filename.startswith(_TORCH_NN) or not code.co_filename.startswith(_OTHERS)
