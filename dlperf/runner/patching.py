"""A wrapper put in an attribute's place, and taken away again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def replace(
    owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Put a wrapper in an attribute's place; the result undoes it, unless somebody else has
    replaced it since.
    """
    original = getattr(owner, name)
    wrapper = wrap(original)
    setattr(owner, name, wrapper)

    def undo() -> None:
        if getattr(owner, name, None) is wrapper:
            setattr(owner, name, original)

    return undo
