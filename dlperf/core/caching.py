"""Results kept with immutable data that has no cheap hash."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
MAX_RESULTS = 64


def cached_by_identity(
    function: Callable[Concatenate[T, P], R],
) -> Callable[Concatenate[T, P], R]:
    """`function` with the most recently used results kept.

    The key is the identity of the first argument and the values of the other positional ones. An
    entry goes with its first argument, or when more recent ones exceed MAX_RESULTS.

    >>> calls = []
    >>> length = cached_by_identity(lambda items: calls.append(items) or len(items))
    >>> items = {1, 2}
    >>> length(items), length(items), length({1, 2}), len(calls)
    (2, 2, 2, 2)
    """
    results: OrderedDict[tuple[object, ...], tuple[weakref.ref[T], R]] = OrderedDict()

    @wraps(function)
    def cached(owner: T, /, *args: P.args, **options: P.kwargs) -> R:
        assert not options, "cached calls take positional arguments"
        key = id(owner), *args
        if key not in results or results[key][0]() is not owner:
            found = function(owner, *args, **options)
            results[key] = weakref.ref(owner, lambda gone: forget(key, gone)), found
            if len(results) > MAX_RESULTS:
                results.popitem(last=False)
        results.move_to_end(key)
        return results[key][1]

    def forget(key: tuple[object, ...], gone: weakref.ref[T]) -> None:
        if key in results and results[key][0] is gone:
            del results[key]

    return cached
