"""Temporary wrappers around functions of other modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap_attribute(owner: Any, name: str, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """Wrap the function `owner.name`; calls become ``wrapper(original, *args, **kwargs)``.

    The result unwraps it, unless somebody else has replaced the attribute since.
    """
    original, is_own = getattr(owner, name), name in vars(owner)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    def undo() -> None:
        if getattr(owner, name, None) is wrapped:
            if is_own:
                setattr(owner, name, original)
            else:  # inherited, or of an instance's class
                delattr(owner, name)

    setattr(owner, name, wrapped)
    return undo
