"""The study of data-parallel steps: arithmetic by hand, and its runs with a launch that answers at
once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest
from calibrated_cases import machine as made_up
from calibrated_cases import mm, trace

from dlperf.core.cluster import Cluster, Collective, Link, Rank
from dlperf.core.errors import WorkFailed
from dlperf.core.units import KIB, MIB
from dlperf.distributed.scaling import CollectiveTime, Scaling
from dlperf.distributed.scaling import ScalingPoint as Forecast
from dlperf.forecast.prediction import predict
from dlperf.microbench.network.collectives import SIZES
from dlperf.studies.accuracy.archive import Archive
from dlperf.studies.distributed import page as distributed_page
from dlperf.studies.distributed.cases import (
    CalibratedLink,
    DistributedForecast,
    DistributedStudy,
)
from dlperf.studies.distributed.runs import (
    ALL_REDUCE_BYTES,
    RECORDED_STEPS,
    DistributedCase,
    RankRunner,
    StepRun,
)
from dlperf.studies.distributed.study import doubled, factor_of, run_study, step_rows
from dlperf.studies.results import Pair, Provenance

PROVENANCE = Provenance(
    "Made-up CPU",
    "m.json",
    "full",
    "2026-01-01",
    {"torch": "2"},
    "dlperf validate --distributed",
    "2026-01-02",
    remarks=("a remark",),
)


def row(
    kind: str,
    *pairs: tuple[float, float],
    rate: str = "1gbit",
    at: str = "1gbit",
    case: str = "net@8",
    **rest: object,
) -> DistributedForecast:
    return DistributedForecast(
        kind, case, 2, rate, at, tuple(Pair(*pair) for pair in pairs), **rest
    )  # type: ignore[arg-type]


def test_errors_and_floors_are_relative_for_times_and_points_for_shares() -> None:
    step = row("step", (1.1, 1.0), (1.1, 1.1))
    assert step.error_frac == pytest.approx((0.1 + 0.0) / 2)
    assert step.repeatability_frac == pytest.approx(0.1 / 1.05)
    share = row("share", (0.50, 0.40), (0.50, 0.44))
    assert share.error_frac == pytest.approx((0.10 + 0.06) / 2)
    assert share.repeatability_frac == pytest.approx(0.04)
    assert row("share", (0.5, 0.4)).repeatability_frac is None


def test_rows_are_judged_by_their_own_bar_and_never_over_links_as_they_are() -> None:
    assert row("step", (1.24, 1.0)).met is True  # the worst may be off by 25 %
    assert row("step", (1.26, 1.0)).met is False
    assert row("share", (0.5, 0.43)).met is True
    assert row("share", (0.5, 0.41)).met is False  # 9 points
    assert row("buckets", (4.0, 4.0), right=False).met is False
    assert row("step", (9.0, 1.0), rate="none", at="none").met is None
    assert row("alone", (9.0, 1.0)).met is None  # no threshold


def test_verdicts_hold_calibrated_and_changed_links_apart() -> None:
    study = DistributedStudy(
        PROVENANCE,
        "here",
        (
            row("all-reduce", (1.08, 1.0), case="1.00 MiB"),
            row("all-reduce", (0.86, 1.0), case="3.00 MiB"),
            row("all-reduce", (1.5, 1.0), case="1.00 MiB", rate="300mbit"),
            row("step", (1.05, 1.0)),
            row("step", (1.20, 1.0), case="b@8"),
            row("step", (1.0, 1.3), rate="none", at="none"),
            row("bound", (0.4, 0.5), right=True),
            row("bound", (0.2, 0.05), right=False, case="b@8"),
        ),
    )
    found = {(v.kind, v.where, v.statistic): v for v in study.checks}
    own = found["all-reduce", "2 ranks, 1gbit", "mean"]
    assert (own.n, own.value, own.threshold, own.met) == (2, pytest.approx(0.11), 0.12, True)
    assert found["all-reduce", "2 ranks, 300mbit from 1gbit", "mean"].met is False
    assert found["step", "links as calibrated", "median"].value == pytest.approx(0.125)
    assert found["step", "links as calibrated", "median"].met is False
    assert found["step", "links as calibrated", "worst"].met is True
    unshaped = found["step", "links as they are", "worst"]
    assert (unshaped.threshold, unshaped.met) == (None, None)
    assert found["bound", "links as calibrated", "right"].value == 0.5
    assert found["bound", "links as calibrated", "right"].met is False
    assert [v.kind for v in study.checks] == sorted(
        (v.kind for v in study.checks), key=["all-reduce", "step", "bound"].index
    )


def test_no_size_is_one_of_a_calibration() -> None:
    assert not {*ALL_REDUCE_BYTES} & {size for sizes in SIZES.values() for size in sizes}
    assert 256 * KIB <= min(ALL_REDUCE_BYTES) < max(ALL_REDUCE_BYTES) <= 64 * MIB


def test_rates() -> None:
    assert (doubled("300mbit"), doubled("500mbit"), doubled("none")) == ("600mbit", "1gbit", "none")
    assert factor_of("300mbit", "1gbit") == pytest.approx(0.3)


# -- forecasts beside runs -------------------------------------------------------------------------


def forecast(bound: str = "network", gain: float = 0.3) -> Scaling:
    told = {
        "ranks": 2,
        "step_s": 0.10,
        "low_s": 0.08,
        "high_s": 0.12,
        "first_step_s": 0.2,
        "compute_s": 0.06,
        "exposed_communication_s": 0.04,
    }
    numbers = Forecast(
        **{
            **{column.name: 1.0 for column in fields(Forecast)},
            **told,
            "bound": bound,
            "network_gain_frac": gain,
        }
    )  # type: ignore[arg-type]
    return Scaling(
        target="net",
        batch_size=8,
        scaling="weak",
        threads=1,
        ranks_per_node=1,
        buckets_bytes=(400, 800),
        collectives=(CollectiveTime("all_reduce", 4, 2, 1.0),),
        rows=(numbers,),
    )


def case(target: str = "nets.py:net") -> DistributedCase:
    return DistributedCase(target, 8, predict(trace(mm(16, 16, 16)), made_up(), 1))


def test_a_forecast_beside_its_runs() -> None:
    runs = [StepRun(0.11, 0.066, 0.25, (400, 800)), StepRun(0.13, 0.065, 0.15, (400, 800))]
    twice = [StepRun(0.099, 0.06, 0.1, ()), StepRun(0.104, 0.06, 0.1, ())]
    rows = {row.kind: row for row in step_rows(forecast(), case(), "1gbit", "300mbit", runs, twice)}
    assert rows["step"].pairs == (Pair(0.10, 0.11), Pair(0.10, 0.13))
    assert rows["step"].changed
    assert rows["step"].inside is True  # 0.12, the median run, lies just within 0.08 .. 0.12
    assert [pair.measured for pair in rows["share"].pairs] == pytest.approx([0.4, 0.5])
    assert rows["share"].predicted == pytest.approx(0.4)
    assert [pair.measured for pair in rows["bound"].pairs] == pytest.approx([0.1, 0.2])
    assert rows["bound"].right is True  # on average they gain 15 %
    assert rows["first-step"].predicted == 0.2
    assert set(rows) == {
        "step",
        "share",
        "bound",
        "first-step",
    }  # the others do not hang on the link, and stand where it was calibrated
    own = {row.kind: row for row in step_rows(forecast(), case(), "1gbit", "1gbit", runs)}
    assert own["buckets"].right is True
    assert own["alone"].predicted == 0.06


def test_wrong_buckets_and_a_wrong_bound_are_told() -> None:
    runs, twice = [StepRun(0.11, 0.066, 0.25, (1200,))], [StepRun(0.105, 0.06, 0.1, ())]
    rows = {row.kind: row for row in step_rows(forecast(), case(), "1gbit", "1gbit", runs, twice)}
    assert rows["buckets"].right is False
    assert rows["buckets"].remark == "DDP 1200, predicted 400, 800"
    assert rows["bound"].right is False  # 4.5 % are gained, and the forecast names the network
    rows = {
        row.kind: row
        for row in step_rows(forecast("compute", 0.02), case(), "1gbit", "1gbit", runs, twice)
    }
    assert rows["bound"].right is True


# -- a study whose ranks answer at once ------------------------------------------------------------

LATENCY_S = 1e-4


def made_up_cluster(n: int, bytes_per_s: float) -> Cluster:
    collectives = tuple(
        Collective(
            "all_reduce",
            size,
            n,
            1,
            samples_s=[2 * LATENCY_S + 2 * (n - 1) / n * size / bytes_per_s] * 3,
        )
        for size in (4, MIB, 64 * MIB)
    )
    hosts = tuple(Rank(f"host{k}") for k in range(n))
    return Cluster(
        (Link("network", (), LATENCY_S, bytes_per_s),),
        collectives,
        ranks=hosts,
        mode="full",
        complete=True,
    )


def replay(recording: Path, cluster: Cluster, recorded_on: Cluster) -> tuple[float, float]:
    """50 ms of computing and a million bytes over the link."""
    link = cluster.link("network")
    assert link is not None
    assert link.bandwidth_bytes_per_s is not None
    return 0.05 + 1e6 / link.bandwidth_bytes_per_s, json.loads(recording.read_text())["step_s"]


class Ranks:
    """Launches nothing: answers as ranks would, whose steps take 50 ms and 100 MB at the link's
    rate; `broken` targets fail.
    """

    def __init__(self, broken: str = "") -> None:
        self.log: list[tuple[str, int, str]] = []
        self.broken = broken

    def __call__(self, words: Sequence[str], n: int, rate: str) -> None:
        rates = {"1gbit": 125e6, "2gbit": 250e6, "300mbit": 37.5e6, "600mbit": 75e6, "none": 1e9}
        if words[1] == "dlperf.microbench.network":
            self.log.append(("links", n, rate))
            made_up_cluster(n, rates[rate]).save(words[words.index("-o") + 1])
            return
        order = json.loads(Path(words[-1]).read_text())
        if words[1:3] == ["dlperf", "run"]:
            self.log.append((f"recording {order['target']}", n, rate))
            trace = {"schema": "dlperf.communication", "step_s": 0.05 + 1.1e6 / rates[rate]}
            Path(words[words.index("--communication") + 1]).write_text(json.dumps(trace))
            return
        what = "all-reduces" if order["kind"] == "all-reduces" else order["target"]
        self.log.append((what, n, rate))
        if self.broken and self.broken in what:
            raise WorkFailed("rank 1 of 2 was ended by SIGKILL")
        if what == "all-reduces":
            answer = {
                "all_reduce_s": {
                    str(size): 2 * LATENCY_S + 2 * (n - 1) / n * size / rates[rate]
                    for size in order["sizes"]
                }
            }
        else:
            answer = {
                "step_s": 0.05 + 1e6 / rates[rate],
                "compute_s": 0.05,
                "first_step_s": 0.1,
                "bucket_bytes": [1024],
            }
        Path(order["answer"]).write_text(json.dumps(answer))


def runner(
    folder: Path, ranks: Ranks, fresh: bool = False, say: Callable[[str], None] = lambda line: None
) -> RankRunner:
    return RankRunner(ranks, 2, 4.0, Archive(folder / "kept", fresh), say)


def test_a_study_forecasts_every_rate_from_every_shaped_one(tmp_path: Path) -> None:
    ranks = Ranks()
    found = run_study(
        runner(tmp_path, ranks),
        [],
        (2, 4),
        ("1gbit", "300mbit", "none"),
        ("all-reduce",),
        lambda line: None,
        replay,
    )
    assert not found.failures
    pairs = {(row.ranks, row.rate, row.calibrated_at) for row in found.rows}
    shaped = [
        ("1gbit", "1gbit"),
        ("300mbit", "300mbit"),
        ("1gbit", "300mbit"),
        ("300mbit", "1gbit"),
        ("none", "none"),
    ]
    assert pairs == {(n, rate, at) for n in (2, 4) for rate, at in shaped} - {
        (4, "none", "none")
    }  # which repeats only to a factor
    assert {row.case for row in found.rows} >= {"320 KiB", "48.0 MiB"}
    assert all(len(row.pairs) == 2 for row in found.rows)
    # what was run: each link once, then all of the first run before any of the second
    runs = [entry for entry in ranks.log if entry[0] == "all-reduces"]
    assert runs[:5] == runs[5:]
    assert len(set(runs[:5])) == 5
    # a scaling_forecast-up link whose collectives are latency and bytes is forecast well at any rate
    assert max(abs(row.error_frac) for row in found.rows if row.case == "48.0 MiB") < 0.05


def test_the_bound_needs_links_of_twice_the_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks()
    monkeypatch.setattr("dlperf.studies.distributed.study.forecast", lambda *_: forecast())
    found = run_study(
        runner(tmp_path, ranks),
        [case()],
        (2,),
        ("1gbit", "300mbit"),
        ("steps", "bound"),
        lambda line: None,
        replay,
    )
    assert {(what, rate) for what, _, rate in ranks.log} == {
        ("links", "1gbit"),
        ("links", "300mbit"),
        *(("nets.py:net", rate) for rate in ("1gbit", "300mbit", "2gbit", "600mbit")),
    }
    fast, *_ = (row for row in found.rows if (row.kind, row.rate) == ("bound", "1gbit"))
    assert fast.measured == pytest.approx(1 - 0.054 / 0.058)
    assert fast.right is False  # 7 % are gained, and the forecast names the network
    slow, *_ = (row for row in found.rows if (row.kind, row.rate) == ("bound", "300mbit"))
    assert slow.right is True
    assert {row.kind for row in found.rows} == {
        "step",
        "share",
        "buckets",
        "bound",
        "first-step",
        "alone",
    }
    assert not [row for row in found.rows if row.rate in ("2gbit", "600mbit")]


def test_recordings_are_replayed_at_the_other_rates(tmp_path: Path) -> None:
    ranks = Ranks()
    found = run_study(
        runner(tmp_path, ranks),
        [case()],
        (2, 4),
        ("1gbit", "300mbit", "none"),
        ("replay",),
        lambda line: None,
        replay,
    )
    assert not found.failures
    assert {(what, n, rate) for what, n, rate in ranks.log if what != "links"} == {
        ("recording nets.py:net", 2, rate) for rate in ("1gbit", "300mbit")
    }
    there, back = found.rows
    assert (there.kind, there.rate, there.calibrated_at) == ("replay", "300mbit", "1gbit")
    assert there.predicted == pytest.approx(0.05 + 1e6 / 37.5e6)
    assert there.measured == pytest.approx(0.05 + 1.1e6 / 37.5e6)  # what was recorded at 300mbit
    assert len(there.pairs) == 2
    assert (back.rate, back.calibrated_at) == ("1gbit", "300mbit")
    assert back.measured == pytest.approx(0.05 + 1.1e6 / 125e6)
    again = Ranks()
    assert (
        run_study(
            runner(tmp_path, again),
            [case()],
            (2, 4),
            ("1gbit", "300mbit", "none"),
            ("replay",),
            lambda line: None,
            replay,
        ).rows
        == found.rows
    )
    assert again.log == []


def test_finished_measurements_are_kept(tmp_path: Path) -> None:
    first, again, anew = Ranks(), Ranks(), Ranks()
    rows = run_study(
        runner(tmp_path, first), [], (2,), ("1gbit",), ("all-reduce",), lambda line: None, replay
    ).rows
    kept = runner(tmp_path, again)
    assert (
        run_study(kept, [], (2,), ("1gbit",), ("all-reduce",), lambda line: None, replay).rows
        == rows
    )
    assert again.log == []
    assert kept.archive.remark.startswith("3 of 3 measurements were kept from before")
    run_study(
        runner(tmp_path, anew, fresh=True),
        [],
        (2,),
        ("1gbit",),
        ("all-reduce",),
        lambda line: None,
        replay,
    )
    assert len(anew.log) == len(first.log) == 3


def test_a_study_says_how_long_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlperf.studies.distributed.runs.available_cores", lambda: 2)
    monkeypatch.setattr(
        DistributedCase, "gradient_bytes", 37_500_000
    )  # a second at 300mbit; the computing of this case is next to nothing
    monkeypatch.setattr("dlperf.studies.distributed.study.forecast", lambda *_: forecast())
    lines: list[str] = []
    ask = ([case()], (2,), ("300mbit",), ("steps", "replay"), lambda line: None, replay)
    run_study(replace(runner(tmp_path, Ranks(), say=lines.append), links_s=57.0), *ask)
    steps_s, recording_s = (
        3 + 12 + 8,
        3 + 5 + RECORDED_STEPS,
    )  # 12 is the least number of steps; 3 s to start, 8 that are not kept, 5 s in dlperf run
    total_s = 3 + 57 + 2 * (steps_s + recording_s)
    assert (
        lines[0] == f"5 measurements, about {round(total_s / 60)} min; what is finished stays in"
        f" {tmp_path / 'kept'}"
    )
    assert (
        lines[1]
        == f"1 of 5, about {round(total_s / 60)} min left: the links of 2 ranks, links of 300mbit"
    )
    assert (
        lines[-1] == "5 of 5, about 1 min left: run 2: recording net@8, 2 ranks, links of 300mbit"
    )
    next((tmp_path / "kept").glob("steps-*")).unlink()
    lines.clear()
    run_study(runner(tmp_path, Ranks(), say=lines.append), *ask)
    assert lines[0].startswith("1 measurements, about 1 min, 4 others are kept from before")
    assert len(lines) == 2


def test_an_all_reduce_is_expected_to_take_what_its_bytes_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlperf.studies.distributed.runs.available_cores", lambda: 2)
    monkeypatch.setattr("dlperf.studies.distributed.runs.ALL_REDUCE_BYTES", (37_500_000,))
    own = runner(tmp_path, Ranks())
    assert own.all_reduces(2, "300mbit", 1).expected_s == pytest.approx(
        3 + 2 * (8 + 1)
    )  # half of 4 x 4 s in each pass, and a call to warm up
    assert own.all_reduces(4, "300mbit", 1).expected_s == pytest.approx(
        6 + 2 * (8 + 1.5)
    )  # 2 (n - 1) / n, two ranks a core to start
    assert own.all_reduces(2, "3mbit", 1).expected_s == pytest.approx(
        3 + 2 * 3 * 100
    )  # two calls a pass at least


def test_an_interrupted_study_goes_on(tmp_path: Path) -> None:
    class Interrupting(Ranks):
        def __call__(self, words: Sequence[str], n: int, rate: str) -> None:
            if len(self.log) == 2:
                raise KeyboardInterrupt
            super().__call__(words, n, rate)

    with pytest.raises(KeyboardInterrupt):
        run_study(
            runner(tmp_path, Interrupting()),
            [],
            (2,),
            ("1gbit",),
            ("all-reduce",),
            lambda line: None,
            replay,
        )
    rest = Ranks()
    assert len(
        run_study(
            runner(tmp_path, rest), [], (2,), ("1gbit",), ("all-reduce",), lambda line: None, replay
        ).rows
    ) == len(ALL_REDUCE_BYTES)
    assert len(rest.log) == 1


def test_a_case_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, lines = Ranks(broken="bad"), []
    monkeypatch.setattr("dlperf.studies.distributed.study.forecast", lambda *_: forecast())
    found = run_study(
        runner(tmp_path, ranks),
        [case("nets.py:bad"), case()],
        (2,),
        ("1gbit",),
        ("steps",),
        lines.append,
        replay,
    )
    assert found.failures == lines == ["bad@8 at 1gbit: rank 1 of 2 was ended by SIGKILL"]
    assert {row.case for row in found.rows} == {"net@8"}
    assert sum(what == "nets.py:bad" for what, *_ in ranks.log) == 1  # it is not tried again


@pytest.mark.slow
def test_page_and_folder(tmp_path: Path) -> None:
    rows = (
        row("all-reduce", (0.01, 0.011), (0.01, 0.012), case="1.00 MiB"),
        row("all-reduce", (0.03, 0.031), (0.03, 0.032), case="3.00 MiB"),
        row("all-reduce", (0.01, 0.011), (0.01, 0.012), case="1.00 MiB", rate="300mbit"),
        row("step", (0.1, 0.11), (0.1, 0.12), inside=True),
        row("step", (0.1, 0.2), rate="none", at="none"),
        row("share", (0.5, 0.4), (0.5, 0.44)),
        row("buckets", (4.0, 8.0), right=False, remark="DDP 8, predicted 4"),
        row("replay", (0.1, 0.11), (0.1, 0.12), rate="300mbit"),
    )
    study = DistributedStudy(
        PROVENANCE,
        "each on a host of its own",
        rows,
        (CalibratedLink(2, "1gbit", 1e-4, 1.2e8),),
        ("bad@8 at 1gbit: a rank died",),
    )
    text = distributed_page.study_to_text(study, 200)
    assert "failed: bad@8 at 1gbit: a rank died" in text
    assert "In 1 of the 1 measured steps behind shaped links" in text
    folder = tmp_path / "out"
    (folder / "earlier").mkdir(parents=True)
    (folder / "earlier" / "page.md").write_text(
        "<!-- dlperf something -->\n"
    )  # reports of other commands may lie in folders beside
    written = distributed_page.write_study(study, folder)
    plots = ["steps.png", "shares.png", "replay.png", "all-reduce.png"]
    assert [path.name for path in written] == [
        "distributed.md",
        "distributed.json",
        "distributed.csv",
        *plots,
    ]
    assert distributed_page.write_study(study, folder) == written  # its own files it may replace
    page = written[0].read_text()
    assert (
        "| step of DistributedDataParallel | links as calibrated | 1 | median \\|error\\| | 12.9 |"
        " 8.7 | &lt;= 10.0 | NO |" in page
    )
    assert (
        "| net@8 | 2 | 1gbit | 1gbit | 8 B | 4 B | WRONG | - | right | NO | DDP 8, predicted 4 |"
        in page
    )
    assert "![" in page
    assert "- a remark" in page
    data = json.loads(written[1].read_text())
    assert (data["schema"], len(data["rows"])) == ("dlperf.distributed_validation", len(rows))
    assert data["rows"][3]["met"] is True
    assert data["rows"][4]["met"] is None
    assert (
        written[2]
        .read_text()
        .startswith(
            "kind,case,run,unit,ranks,rate,calibrated_at,predicted,measured,error,repeatability,threshold,right,met,inside\n"
        )
    )


def test_an_empty_study_has_a_page(tmp_path: Path) -> None:
    study = DistributedStudy(
        replace(PROVENANCE, remarks=()), "here", (), (), ("everything: failed",)
    )
    assert [path.name for path in distributed_page.write_study(study, tmp_path / "out")] == [
        "distributed.md",
        "distributed.json",
    ]
