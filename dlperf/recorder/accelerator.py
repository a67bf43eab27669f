"""The accelerator of a step: torch's CUDA device, or another one that torch.accelerator knows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from dlperf.core.device_clock import DeviceClock
from dlperf.core.errors import DlperfError
from dlperf.core.text import counted

CPU_DEVICES = ("cpu", "meta")
CPU_ONLY = (
    "dlperf records, measures and predicts steps on the CPU, and on an accelerator of this machine;"
    " leave the model and its inputs on the CPU (recording allocates no memory there)"
)
_WAY_OUT = "dlperf predict --device a100 predicts by a data sheet without one"


def accelerator_type() -> str | None:
    """The type of the accelerator that torch was built for, such as ``cuda``; None without one.

    It is not initialised, so that the process may still fork.
    """
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def find_accelerator(name: str) -> torch.device:
    """The accelerator of this machine that `--device` names: ``cuda``, ``cuda:1``.

    Raises DlperfError for another name, and where there is none.
    """
    from dlperf.core import shelf

    if name.lower() in shelf.names():
        raise DlperfError(
            f"--device {name}: is a device of the shelf, which dlperf predict and machine new take;"
            " name an accelerator of this machine, such as cuda"
        )
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DlperfError(
            f"--device {name:.60}: is no device of torch; name an accelerator of this machine, such"
            " as cuda or cuda:1"
        ) from None
    if device.type in CPU_DEVICES:
        raise DlperfError(f"--device {name}: is no accelerator; leave it out for the processor")
    if device.type == "cuda" and not torch.cuda.is_available():
        why = "finds no driver or no GPU" if torch.version.cuda else "was built without CUDA"
        raise DlperfError(
            f"--device {name}: no CUDA device: torch.cuda.is_available() is false (torch"
            f" {torch.__version__} {why}); {_WAY_OUT}"
        )
    if device.type != accelerator_type() or not torch.accelerator.is_available():
        raise DlperfError(f"--device {name}: torch finds no such accelerator here; {_WAY_OUT}")
    n_devices = torch.accelerator.device_count()
    if (device.index or 0) >= n_devices:
        raise DlperfError(
            f"--device {name}: this machine has {counted(n_devices, f'{device.type} device')}, from"
            f" {device.type}:0 on"
        )
    device = torch.device(device.type, device.index or 0)
    torch.get_device_module(device).set_device(device)
    torch.empty(0, device=device)  # initialises it
    return device


def accelerator_of(name: str, tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """The accelerator that tensors lie on; None for the CPU.

    Raises DlperfError where `name` lies on one that torch does not find here, or on several.
    """
    found: set[torch.device] = set()
    for tensor in tensors:
        if tensor.device.type not in CPU_DEVICES:
            if tensor.device.type != accelerator_type():
                raise DlperfError(f"{name}: lies on {tensor.device}; {CPU_ONLY}")
            found.add(tensor.device)
    if len(found) > 1:
        listed = " and ".join(sorted(map(str, found)))
        raise DlperfError(f"{name}: lies on {listed}; dlperf measures one accelerator at a time")
    return found.pop() if found else None


def device_clock(device: torch.device) -> DeviceClock:
    """The clock of an accelerator."""
    return DeviceClock(torch.get_device_module(device), device)


def save_device_random_states() -> Callable[[], None]:
    """Save the random states of accelerators that are in use; the result restores them. None is
    initialised by it.
    """
    undo = contextlib.ExitStack()
    for name in ("cuda", "xpu", torch._C._get_privateuse1_backend_name()):
        module: Any = getattr(torch, name, None)
        if module is not None and module.is_initialized():
            for index in range(module.device_count()):
                undo.callback(module.set_rng_state, module.get_rng_state(index), index)
    return undo.close
