"""The use of ``torch.compile`` in a program, noticed before anything is compiled.

Dynamo traces global module hooks, guards on them, and breaks its graphs at wrapped functions. So
a program that compiles modules is watched without any: through its optimizers and loaders alone. In
a compiled function an optimizer may step, whose hooks are traced, too: it is not watched.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dlperf.core.patching import wrap_attribute

COMPILED = (
    "the step ran compiled (torch.compile): its layers were not timed, and the prediction is of the"
    " eager step"
)


NOT_COMPILED = (
    "torch.compile compiled nothing, since torch skips nn.Sequential and the like in"
    " model.compile(): the step ran eagerly"
)


FUNCTION = (
    "a function is compiled (torch.compile), and hooks on what it calls would change what is"
    " compiled; compile the model instead, or run without torch.compile"
)


class Compilations:
    """The modules that the program compiles.

    `on_module` is called before one is compiled, `on_function` before anything else is.
    """

    def __init__(self, on_module: Callable[[], None], on_function: Callable[[], None]) -> None:
        self._on_module, self._on_function = on_module, on_function
        self._compiled: list[tuple[nn.Module, Any]] = []

    def install(self) -> Callable[[], None]:
        """Wrap ``torch.compile``; ``Module.compile`` calls it, too. The result unwraps it."""
        return wrap_attribute(torch, "compile", self._compile)

    def _compile(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("disable"):
            return original(*args, **kwargs)
        target = args[0] if args else kwargs.get("model")
        if target is None:  # a decorator with options, which calls this again
            return original(*args, **kwargs)
        module = _module_of(target)
        (self._on_function if module is None else self._on_module)()
        result = original(*args, **kwargs)
        if module is not None:
            self._compiled.append((module, result))
        return result

    @property
    def module(self) -> nn.Module | None:
        """The module that is compiled, where it is the only one."""
        return self._compiled[0][0] if len(self._compiled) == 1 else None

    def watch_calls(
        self, before: Callable[[], None], after: Callable[[Any, Any, Any], None]
    ) -> Callable[[], None] | None:
        """Call ``before()`` and ``after(args, kwargs, output)`` around each call of the compiled
        :attr:`module`.

        The function around its compiled form is exchanged, outside of what Dynamo traces. The
        result undoes that; None where no single module is compiled.
        """
        module = self.module
        if module is None:
            return None
        compiled = self._compiled[0][1]
        holder, name = (
            (compiled, "forward")
            if isinstance(compiled, nn.Module)
            else (module, "_compiled_call_impl")
        )
        original = vars(holder).get(name)
        if original is None:
            return None

        def undo() -> None:
            if vars(holder).get(name) is called:
                vars(holder)[name] = original

        def called(*args: Any, **kwargs: Any) -> Any:
            before()
            output = original(*args, **kwargs)
            after(args, kwargs, output)
            return output

        vars(holder)[name] = called
        return undo


def _module_of(target: Any) -> nn.Module | None:
    """The module that is compiled with `target`: itself, or its call as a method."""
    target = getattr(target, "__self__", target)
    return target if isinstance(target, nn.Module) else None


def is_compiled(model: nn.Module) -> bool:
    """Whether the model or a part of it is compiled."""
    return any(
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
        or _is_compiled_function(module.forward)
        for module in model.modules()
    )


def has_compiled_function() -> bool:
    """Whether a function of the process is compiled, other than those of torch."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if not getattr(eval_frame, "cached_backends", None):  # nothing was compiled
        return False
    functions = [value for value in gc.get_objects() if type(value) is FunctionType]
    return any(map(_is_compiled_function, functions))


def _is_compiled_function(function: Any) -> bool:
    attributes = getattr(function, "__dict__", {})
    original = attributes.get("_torchdynamo_orig_callable")
    return (
        original is not None
        and not attributes.get("_torchdynamo_disable")
        and _module_of(original) is None
        and not str(getattr(original, "__module__", "")).startswith("torch.")
    )


def module_stepped_by(optimizer: Any) -> nn.Module | None:
    """The module that holds most of an optimizer's parameters, the outermost one; None for none."""
    ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    def rank(module: nn.Module) -> tuple[int, int]:
        n_stepped = sum(p.numel() for p in module.parameters() if id(p) in ids)
        return n_stepped, sum(1 for _ in module.modules())

    modules = [
        value
        for value in gc.get_objects()
        if issubclass(type(value), nn.Module) and type(value).__name__ != "OptimizedModule"
    ]
    best = max(modules, key=rank, default=None)
    return None if best is None or not rank(best)[0] else best


def scalar_of(output: Any) -> torch.Tensor | None:
    """The loss in a model's output: its only scalar with a gradient; None without one."""
    scalars = [
        leaf
        for leaf in pytree.tree_leaves(output)
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and leaf.requires_grad
    ]
    return scalars[0] if len(scalars) == 1 else None
