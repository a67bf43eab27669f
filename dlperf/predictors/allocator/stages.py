"""The memory that an operator takes and gives back within itself."""

from __future__ import annotations

from typing import NamedTuple


class Stage(NamedTuple):
    """Bytes of the blocks of one pass of an operator, in the order in which they are made.

    `held` live throughout. `read` are freed as soon as the pass has computed the first of
    `written`, of which the others, copies of it, are made then. The result is made while all of
    `written` live, and `after` are made once it is there. `untouched` live throughout, too, but
    nothing is written to them.
    """

    held: tuple[int, ...] = ()
    read: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    untouched: tuple[int, ...] = ()


Scratch = tuple[Stage, ...]
"""The stages of an operator, one after the other; () for one without such memory."""
