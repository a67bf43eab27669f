"""Passes over the same measurements, one of which may have been slowed."""

from __future__ import annotations

from dlperf.microbench.network.passes import Passes


def passes(*series: tuple[float, ...]) -> Passes[str]:
    found: Passes[str] = Passes()
    for number, values in enumerate(series):
        found.add("all_reduce", number, values)
    return found


def test_passes_that_agree_count_together_and_in_order() -> None:
    both = passes((1.0, 1.3, 1.1), (1.2, 1.0))
    assert both.samples()["all_reduce"].values == (1.0, 1.3, 1.1, 1.2, 1.0)
    assert both.n_slowed() == (0, 1)


def test_a_slowed_pass_does_not_count_whichever_it_is() -> None:
    for series in (((2.0, 2.2), (1.0, 1.1)), ((1.0, 1.1), (2.0, 2.2))):
        assert passes(*series).samples()["all_reduce"].values == (1.0, 1.1)
        assert passes(*series).n_slowed() == (1, 1)


def test_one_slow_sample_is_part_of_a_pass() -> None:
    # a link loses a packet now and then: that belongs to its times
    assert passes((1.0, 1.1, 9.0), (1.0, 1.2)).samples()["all_reduce"].values == (
        1.0,
        1.1,
        9.0,
        1.0,
        1.2,
    )


def test_a_measurement_that_a_pass_had_no_time_for() -> None:
    found = passes((1.0,), ())
    found.add("broadcast", 0, ())
    assert found.samples()["all_reduce"].values == (1.0,)
    assert set(found.samples()) == {"all_reduce"}
    assert found.n_slowed() == (0, 0)
