"""Python code like a module's forward: look-ups of attributes, options by keyword, checks of types
and configurations, small dictionaries, a loop, an object for the results.

What it costs beyond its instructions is next to nothing, and no function calls an operator. An
instruction is dear where its code and objects come back from far caches, as a step's do.
"""

from __future__ import annotations

from typing import Any

from dlperf.core.instructions import InstructionCounter

_N_LAYERS = 2
_SOURCE = """
class Config:
    def __init__(self):
        self.use_cache, self.kind, self.width, self.dropout = True, "b", 8, None

    @property
    def head(self):
        return self.width // 2


class Output:
    def __init__(self, state, cache=None, **others):
        self.state, self.cache = state, cache
        for name, value in others.items():
            if value is not None:
                setattr(self, name, value)


class Layer:
    def __init__(self, inner):
        self.config, self.inner, self.training = Config(), inner, True

    def options(self, kind, *, masks=(), **given):
        found = given.get("kind")
        if found is None or not isinstance(found, str):
            found = kind
        return {"kind": found, **{name: value for name, value in given.items() if value}}

    def forward(self, state, mask=None, use_cache=None, **given):
        config = self.config
        use_cache = config.use_cache if use_cache is None else use_cache
        if config.kind not in ("a", "b") and hasattr(self, "other"):
            raise ValueError(f"{config.kind} is unknown")
        if isinstance(mask, (list, tuple)) and len(mask) > 1:
            mask = mask[0]
        options = self.options(config.kind, masks=(mask,), width=config.width, head=config.head)
        dropout = 0.0 if not self.training else getattr(config, "dropout", None)
        given.setdefault("dropout", dropout)
        if self.inner is not None:
            state = self.inner.forward(state, mask=mask, use_cache=use_cache, **given).state
        return Output(state, cache=mask if use_cache else None, options=options)
"""
"""Compiled once for each layer, so that no two share their code."""


class PythonForward:
    """A call of some layers, one in another: how many instructions it executes, and at how many
    places of their code (0 where a debugger or tracer keeps them from being counted).
    """

    def __init__(self) -> None:
        self._layer: Any = None
        for number in range(_N_LAYERS):
            names: dict[str, Any] = {}
            exec(compile(_SOURCE, f"<layer {number}>", "exec"), names)
            self._layer = names["Layer"](self._layer)
        counter = InstructionCounter(lambda: "forward")
        self()
        counter.start()
        self._layer.forward(0, attentions=None, scale=1.0)
        counter.stop()
        self.n_instructions, self.n_distinct = counter.of("forward")

    def __call__(self) -> None:
        """Run it once."""
        self._layer.forward(0, attentions=None, scale=1.0)
