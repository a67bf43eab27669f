"""How data shows itself: ``repr`` in one line, ``str`` as a page, in a notebook as HTML."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar


class Displayed:
    """Base of data that the functions `one_line` and `page` of the module `by` put into words.

    `page` gives blocks of :mod:`dlperf.report.document`. These modules may stand above the data and
    rest on it, so they are imported when they are needed.
    """

    _display_module: ClassVar[str]

    def __init_subclass__(cls, *, by: str, **options: object) -> None:
        super().__init_subclass__(**options)
        cls._display_module = by

    def __repr__(self) -> str:
        return str(import_module(self._display_module).one_line(self))

    def __str__(self) -> str:
        return str(_report("document").to_text(self._page())).rstrip("\n")

    def _repr_html_(self) -> str:
        return str(_report("html").to_fragment(self._page()))

    def _page(self) -> Any:
        return import_module(self._display_module).page(self)


def _report(name: str) -> Any:
    return import_module(f"dlperf.report.{name}")
