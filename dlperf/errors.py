"""The one exception that carries a line meant for the user."""
from __future__ import annotations

from numbers import Integral


class DlperfError(Exception):
    """The input or the usage is unfit; the message names the thing, the value and the way out.

    The command line prints the message as one line and exits with status 2.
    """


class WorkFailed(DlperfError):
    """The input was fine but the work failed: a model that raised, a disk that filled. Exit status 1."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM in the middle of long work; the message says what of it was kept, and is empty where nothing could be."""


def check_type(call: str, name: str, value: object, kind: type | tuple[type, ...], way_out: str) -> None:
    """Refuse a value of another type in one line: what `call` got as `name`, and what to give instead.

    >>> check_type("compare", "measurement", 3, str, "dlperf.measure makes one")
    Traceback (most recent call last):
        ...
    dlperf.errors.DlperfError: compare: the measurement is 3 (of type int); expected a str: dlperf.measure makes one
    """
    if isinstance(value, kind):
        return
    kinds = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
    raise DlperfError(f"{call}: the {name} is {' '.join(repr(value).split()):.60} (of type {type(value).__name__}); expected a {kinds}: {way_out}")


def check_count(name: str, value: object, least: int = 1) -> None:
    """Refuse what is no whole number of at least `least`, text and truth values included.

    >>> check_count("threads", "2")
    Traceback (most recent call last):
        ...
    dlperf.errors.DlperfError: threads is '2' (of type str); it must be a whole number of at least 1
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise DlperfError(f"{name} is {value!r:.60} (of type {type(value).__name__}); it must be a whole number of at least {least}")
    if value < least:
        raise DlperfError(f"{name} is {value}; it must be at least {least}")
