"""A device whose time passes in its events alone: the module of an accelerator without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from dlperf.core.device_clock import DeviceClock

EVENT_S = 1e-3


class MadeUpDevice:
    """Each event is a millisecond after the one before; `log` has what was asked, in order. An
    event that is read without waiting for the device fails.
    """

    def __init__(self, memory_bytes: int = 2**21) -> None:
        self.log: list[str] = []
        self.time_s, self.n_waited = 0.0, 0.0
        self.memory_bytes = memory_bytes
        self.OutOfMemoryError = MemoryError

    def clock(self) -> DeviceClock:
        return DeviceClock(self, torch.device("cpu"))

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        self.log.append("new")
        return _Event(self)

    def current_stream(self, device: Any) -> str:
        return f"stream of {device}"

    def synchronize(self, device: Any = None) -> None:
        self.log.append("wait")
        self.n_waited = self.time_s

    def empty_cache(self) -> None:
        self.log.append("empty")

    def reset_peak_memory_stats(self, device: Any) -> None:
        self.log.append("reset")

    def max_memory_allocated(self, device: Any) -> int:
        return 3000

    def max_memory_reserved(self, device: Any) -> int:
        return 2**21

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(
            name="Testor GPU",
            multi_processor_count=10,
            L2_cache_size=2**16,
            total_memory=self.memory_bytes,
            major=8,
            minor=0,
        )


class _Event:
    def __init__(self, device: MadeUpDevice) -> None:
        self.device, self.at_s = device, 0.0

    def record(self, stream: str) -> None:
        assert stream.startswith("stream of ")
        self.device.log.append("record")
        self.device.time_s += EVENT_S
        self.at_s = self.device.time_s

    def elapsed_time(self, other: _Event) -> float:
        assert max(self.at_s, other.at_s) <= self.device.n_waited, "the device is not there yet"
        return 1e3 * (other.at_s - self.at_s)
