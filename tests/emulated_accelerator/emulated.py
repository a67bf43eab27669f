"""The accelerator of accelerator.cpp as torch's device `emulated`, on which every program that
imports torch finds it, by an entry point of the group torch.backends.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import torch

NAME = "emulated"
MEMORY_BYTES = 2**27


class Module(types.ModuleType):
    """What torch.cuda is for CUDA."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def synchronize(self, device: Any = None) -> None:
        torch.ops.emulated.synchronize()

    def Event(self, enable_timing: bool = False) -> torch.Event:
        return torch.Event(NAME, enable_timing=enable_timing)

    def max_memory_allocated(self, device: Any = None) -> int:
        return int(torch.ops.emulated.peak(False))

    def max_memory_reserved(self, device: Any = None) -> int:
        return int(torch.ops.emulated.peak(True))

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        torch.ops.emulated.reset_peak()

    def empty_cache(self) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_device_properties(self, device: Any = None) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            name="Emulated accelerator",
            multi_processor_count=2,
            total_memory=MEMORY_BYTES,
            L2_cache_size=2**20,
        )


def load() -> None:
    """Make the device known to torch, once."""
    if not hasattr(torch, NAME):
        torch.ops.load_library(Path(__file__).with_name("accelerator.so"))
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, Module(NAME))
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
