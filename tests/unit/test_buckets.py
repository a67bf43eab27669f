"""DDP's buckets: the closing rule, both orders, and what decides them. Equality with DDP itself is
tested end to end.
"""

from __future__ import annotations

import pytest

from dlperf.core.errors import DlperfError
from dlperf.core.units import KIB, MIB
from dlperf.models.buckets import (
    Gradient,
    ReducerOptions,
    assign,
    first_buckets,
    rebuilt_buckets,
    sizes_bytes,
)


def sized(*n_bytes: int, dtype: str = "float32") -> tuple[Gradient, ...]:
    return tuple(Gradient(n, dtype) for n in n_bytes)


def test_a_bucket_closes_when_it_reaches_its_cap() -> None:
    gradients = sized(512 * KIB, 512 * KIB, 4)
    assert assign(gradients, range(3), (MIB, 25 * MIB)) == ((0, 1), (2,))  # 1 MiB exactly is full


def test_a_bucket_may_pass_its_cap_and_the_next_has_another() -> None:
    gradients = sized(900 * KIB, 30 * MIB, 20 * MIB, 4 * MIB, 1 * MIB, 8)
    buckets = assign(gradients, range(6), (MIB, 25 * MIB))
    assert buckets == ((0, 1), (2, 3, 4), (5,))  # 900 KiB stay open; 20 + 4 + 1 = 25 MiB are full
    assert sizes_bytes(gradients, buckets) == (900 * KIB + 30 * MIB, 25 * MIB, 8)


def test_each_dtype_has_buckets_and_caps_of_its_own() -> None:
    gradients = (*sized(MIB), *sized(MIB, dtype="bfloat16"), *sized(2 * MIB, 24 * MIB))
    assert assign(gradients, range(4), (MIB, 25 * MIB)) == ((0,), (1,), (2, 3))


def test_what_is_left_comes_last_the_newest_dtype_first() -> None:
    gradients = (*sized(4), *sized(4, dtype="bfloat16"), *sized(4))
    assert assign(gradients, range(3), (MIB,)) == ((1,), (0, 2))


def test_a_sparse_gradient_is_alone() -> None:
    gradients = (Gradient(4), Gradient(4, sparse=True), Gradient(4))
    assert assign(gradients, range(3), (MIB,)) == ((1,), (0, 2))


def test_the_first_iteration_has_one_bucket_for_each_dtype() -> None:
    gradients = (*sized(30 * MIB, 30 * MIB), *sized(4, dtype="float64"))
    assert first_buckets(gradients) == (
        (2,),
        (0, 1),
    )  # sorted by their first parameter, and reversed


def test_looking_for_unused_parameters_keeps_the_first_buckets() -> None:
    gradients, options = (
        sized(MIB, 20 * MIB, 6 * MIB, 4),
        ReducerOptions(find_unused_parameters=True),
    )
    assert first_buckets(gradients, options) == ((3,), (1, 2), (0,))
    assert rebuilt_buckets(gradients, (3, 2, 1), options) == first_buckets(gradients, options)


def test_rebuilt_buckets_follow_the_arrivals() -> None:
    gradients = sized(MIB, 20 * MIB, 6 * MIB, 4)
    assert rebuilt_buckets(gradients, (3, 0, 2, 1)) == ((3, 0), (2, 1))


def test_ones_own_cap_holds_for_the_first_bucket_too() -> None:
    gradients = sized(MIB, MIB, MIB)
    assert rebuilt_buckets(gradients, (2, 1, 0), ReducerOptions(bucket_bytes=2 * MIB)) == (
        (2, 1),
        (0,),
    )


def test_unused_parameters_are_refused_or_come_last_in_a_static_graph() -> None:
    gradients = sized(4, 4, 4)
    with pytest.raises(DlperfError, match="1 trained parameter"):
        rebuilt_buckets(gradients, (2, 0))
    assert rebuilt_buckets(gradients, (2, 0), ReducerOptions(static_graph=True)) == ((2, 0, 1),)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"bucket_bytes": 0}, "bucket_bytes is 0"), ({"accumulate": 0}, "accumulate is 0")],
)
def test_options_that_make_no_sense(options: dict[str, int], message: str) -> None:
    with pytest.raises(DlperfError, match=message):
        ReducerOptions(**options)  # type: ignore[arg-type]
