"""How data shows itself: ``repr`` is one line, ``str`` a page, a notebook gets that page."""

from __future__ import annotations

from html import escape
from importlib import import_module
from typing import ClassVar


class Displayed:
    """Base of data that the functions `one_line` and `page` of the module `by` put into words.

    That module may stand above the data and rest on it, so it is imported when it is needed.
    """

    _display_module: ClassVar[str]

    def __init_subclass__(cls, *, by: str, **options: object) -> None:
        super().__init_subclass__(**options)
        cls._display_module = by

    def __repr__(self) -> str:
        return str(import_module(self._display_module).one_line(self))

    def __str__(self) -> str:
        return str(import_module(self._display_module).page(self))

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"
