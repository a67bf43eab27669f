"""Threads of the BLAS libraries that numpy and scipy call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import TypeVar

from threadpoolctl import ThreadpoolController

F = TypeVar("F", bound=Callable[..., object])


@cache
def _blas() -> ThreadpoolController:
    """The BLAS libraries of this process; looking for them takes milliseconds."""
    return ThreadpoolController()


def one_blas_thread(function: F) -> F:
    """`function` with one BLAS thread: on small matrices a team of threads is slower."""

    @wraps(function)
    def limited(*args: object, **kwargs: object) -> object:
        with _blas().limit(limits=1, user_api="blas"):
            return function(*args, **kwargs)

    return limited  # type: ignore[return-value]
