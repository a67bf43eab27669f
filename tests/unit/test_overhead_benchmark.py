from __future__ import annotations

import pytest

from benchmarks.overhead import Overhead, Round, Run, to_markdown


def a_round(
    plain_us: tuple[float, float], watched_us: float, added_s: float = 0.5, before_s: float = 0.2
) -> Round:
    """Plain runs of 3 and 5 s, so of 4 s, with 3.5 s of the processor."""
    first, second = plain_us
    return Round(
        Run(0.1, 3.0, 3.0, first / 1e6),
        Run(0.1 + before_s, 4.0 + added_s, 3.5 + added_s, watched_us / 1e6),
        Run(0.1, 5.0, 4.0, second / 1e6),
    )


def test_overhead_is_a_run_less_the_plain_ones_around_it() -> None:
    found = Overhead.of(
        "mlp",
        [
            a_round((100, 104), 102, added_s=0.4, before_s=0.1),
            a_round((100, 100), 101, added_s=0.9, before_s=0.3),
            a_round((98, 102), 103, added_s=0.6, before_s=0.2),
        ],
    )
    assert found.wall_s.median == pytest.approx(0.6)
    assert (found.wall_s.least, found.wall_s.most) == pytest.approx((0.4, 0.9))
    assert (found.cpu_s.median, found.before_s.median) == pytest.approx((0.6, 0.2))
    assert (found.step_s, found.watched_step_s) == pytest.approx((100e-6, 102e-6))
    assert found.step_frac == pytest.approx(0.01)  # of 0 (102 / 102), 0.01 and 0.03 (103 / 100)
    assert found.repeatability_frac == pytest.approx(102 / 98 - 1)  # above 104 / 100
    assert (found.is_short, found.slows_steps) == (True, False)
    assert "| mlp | 0.20 (0.10 .. 0.30) | 0.60 (0.40 .. 0.90) |" in to_markdown([found], 3, "here")


@pytest.mark.parametrize(
    ("watched_us", "added_s", "verdicts"),
    [
        (101.0, 1.0, ("at most 1 s in every script", "no slower than plain runs differ")),
        (103.0, 1.2, ("more than 1 s in gan", "slower, by more than plain runs differ, in gan")),
        (90.0, 0.1, ("at most 1 s in every script", "no slower than plain runs differ")),
    ],
)
def test_the_report_judges_itself(
    watched_us: float, added_s: float, verdicts: tuple[str, str]
) -> None:
    found = Overhead.of("gan", [a_round((100, 101), watched_us, added_s)] * 3)
    text = to_markdown([found], 3, "here")
    assert all(verdict in text for verdict in verdicts)
    assert ("**too much**" in text, "**slower**" in text) == (added_s > 1, watched_us > 101)
