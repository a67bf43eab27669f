"""Moments on an accelerator, by events on its current stream. The accelerator's module (torch.cuda,
or what torch has for another one) is a parameter: nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dlperf.core.conversion import Whole
from dlperf.core.errors import DlperfError, WorkFailed, one_line

if TYPE_CHECKING:
    from dlperf.core.clock import Clock


@dataclass(frozen=True)
class DevicePeaks:
    """The most that torch's allocator had for a step on an accelerator:
    ``torch.cuda.max_memory_allocated`` and ``max_memory_reserved``.
    """

    allocated_bytes: Whole  #: Tensors.
    reserved_bytes: Whole  #: Segments of the device.


@dataclass(frozen=True)
class DeviceClock:
    """Events of a device: `module` has Event, current_stream and synchronize, `device` is torch's.

    An event is the moment at which the device reaches it, after all that was given to its stream
    before. Between two events it may also wait for the host, unless a `head_start` gives it enough
    work while the host issues a number of calls.
    """

    module: Any
    device: Any
    head_start: Callable[[int], object] | None = None
    _free: list[Any] = field(default_factory=list, repr=False)

    @property
    def name(self) -> str:
        """The device's name, such as ``NVIDIA A100-SXM4-80GB``."""
        return str(self.module.get_device_properties(self.device).name)

    def peaks(self) -> DevicePeaks:
        """What torch's allocator had at most, since the process began or a reset."""
        return DevicePeaks(
            self.module.max_memory_allocated(self.device),
            self.module.max_memory_reserved(self.device),
        )

    @property
    def _captures(self) -> bool:
        """Whether a graph of the device is captured now, which no waiting may disturb."""
        is_capturing = getattr(self.module, "is_current_stream_capturing", None)
        return bool(is_capturing is not None and is_capturing())

    def stamp(self) -> Any:
        """A moment of the device; the host does not wait for it. It never raises, as it is called
        in the middle of programs: :meth:`seconds` does.
        """
        try:
            if self._captures:
                raise DlperfError("a graph is captured, whose steps cannot be watched")
            event = self._free.pop() if self._free else self.module.Event(enable_timing=True)
            event.record(self.module.current_stream(self.device))
        except Exception as error:
            return error
        return event

    def seconds(self, stamps: Sequence[Any]) -> list[float]:
        """Seconds of moments since the first of them. This waits for the device, and takes the
        moments back.

        Raises WorkFailed where a moment could not be noted.
        """
        failed = next((one for one in stamps if isinstance(one, Exception)), None)
        if failed is not None:
            raise WorkFailed(f"{self.device}: no event was recorded: {one_line(failed)}")
        self.module.synchronize(self.device)
        first = stamps[0]
        found = [0.0, *(1e-3 * first.elapsed_time(one) for one in stamps[1:])]
        self._free.extend(stamps)
        return found

    def time(self, call: Callable[[], object], n_calls: int) -> float:
        """Seconds of calls in a stream of them."""
        if self.head_start is not None:
            self.head_start(n_calls)
        begin = self.stamp()
        for _ in range(n_calls):
            call()
        return self.seconds((begin, self.stamp()))[1]


def stamper(clock: Clock) -> Callable[[], Any]:
    """What notes a moment: of the clock's device, or of the host without one."""
    return clock.now if clock.device is None else clock.device.stamp


def seconds_of(clock: Clock, stamps: Sequence[Any]) -> Sequence[float]:
    """The moments of a clock's :func:`stamper` in seconds; those of a device since the first."""
    return stamps if clock.device is None or not stamps else clock.device.seconds(stamps)
