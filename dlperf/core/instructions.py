"""Counts the instructions that Python executes."""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

_TOOLS = (3, 4)
"""Numbers that :mod:`sys.monitoring` reserves for no kind of tool."""


class InstructionCounter:
    """Counts instructions of this thread between :meth:`start` and :meth:`stop`, by layer.

    `executed` is their number, `distinct` that of the places in the code where they stand.
    `layer_of` returns the layer whose code runs, empty for none; `counts` says whether the
    instructions of a code object count. Only calls that begin meanwhile are seen. Where a debugger,
    tracer or coverage has the interpreter's hook, it stays alone, and `is_kept_out` is set.
    """

    def __init__(
        self, layer_of: Callable[[], str], counts: Callable[[CodeType], bool] = lambda _: True
    ) -> None:
        self.is_kept_out = False
        self._layer_of, self._counts = layer_of, counts
        self._executed: Counter[str] = Counter()
        self._places: dict[str, set[tuple[int, int]]] = defaultdict(set)
        self._known: dict[int, bool] = {}
        self._tool: int | None = None
        self._watched: list[CodeType] = []

    def start(self) -> None:
        """Begin, or go on."""
        if sys.version_info >= (3, 12):
            self._start_monitoring()
        elif sys.gettrace() is None:
            sys.settrace(self._called)
        else:
            self.is_kept_out = True

    def stop(self) -> None:
        """Pause; a trace function that the program set meanwhile stays."""
        if sys.version_info >= (3, 12):
            self._stop_monitoring()
        elif getattr(sys.gettrace(), "__self__", None) is self:
            sys.settrace(None)

    def of(self, layer: str) -> tuple[int, int]:
        """Executed instructions of a layer, and distinct ones."""
        return self._executed[layer], len(self._places.get(layer, ()))

    def _wants(self, code: CodeType) -> bool:
        """Whether the instructions of a code object that is called now count."""
        if not self._layer_of():
            return False
        known = self._known.get(id(code))
        if known is None:
            is_own = code.co_filename == __file__
            known = self._known[id(code)] = not is_own and self._counts(code)
        return known

    def _count(self, code: CodeType, offset: int) -> None:
        layer = self._layer_of()
        if layer:
            self._executed[layer] += 1
            self._places[layer].add((id(code), offset))

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not self._wants(frame.f_code):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._ran

    def _ran(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self._count(frame.f_code, frame.f_lasti)
        return self._ran

    if sys.version_info >= (3, 12):

        def _start_monitoring(self) -> None:
            monitoring = sys.monitoring
            self._tool = next((n for n in _TOOLS if monitoring.get_tool(n) is None), None)
            if self._tool is None:
                self.is_kept_out = True
                return
            thread, events = threading.get_ident(), monitoring.events

            def begins(code: CodeType, offset: int) -> None:
                if threading.get_ident() == thread and self._wants(code):
                    monitoring.set_local_events(self._tool, code, events.INSTRUCTION)
                    self._watched.append(code)

            def runs(code: CodeType, offset: int) -> None:
                if threading.get_ident() == thread:
                    self._count(code, offset)

            monitoring.use_tool_id(self._tool, "dlperf")
            monitoring.register_callback(self._tool, events.PY_START, begins)
            monitoring.register_callback(self._tool, events.INSTRUCTION, runs)
            monitoring.set_events(self._tool, events.PY_START)

        def _stop_monitoring(self) -> None:
            tool, self._tool = self._tool, None
            if tool is None:
                return
            monitoring = sys.monitoring
            monitoring.set_events(tool, 0)
            while self._watched:
                monitoring.set_local_events(tool, self._watched.pop(), 0)
            for event in (monitoring.events.PY_START, monitoring.events.INSTRUCTION):
                monitoring.register_callback(tool, event, None)
            monitoring.free_tool_id(tool)
