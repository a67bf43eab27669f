"""The accuracy study at the state of each measurement beside the blind one; expected numbers are
worked out beside them.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
from calibrated_cases import machine as law_machine
from calibrated_cases import mm_s
from report_cases import US, around, cnn_items, cnn_trace, mm, prediction
from test_validation import CASE, named, provenance, scaled, scores, studied, whole_study

from dlperf.core.machine import Machine
from dlperf.core.measurement import LayerTimes, Measurement
from dlperf.core.state import Reading, State, usual_state
from dlperf.core.trace import Layer, Trace
from dlperf.studies.accuracy.ablation import Term, ablate
from dlperf.studies.accuracy.cases import Case, join
from dlperf.studies.accuracy.page import study_to_markdown, study_to_text, write_study
from dlperf.studies.accuracy.residuals import N_SHOWN
from dlperf.studies.accuracy.scoring import layer_groups, score, score_at_state, summaries
from dlperf.studies.accuracy.study import Study, Variant, run_study, states_of

N = 512
LAYERS = (Layer("Net", "Net", False, (("", 1),)), Layer("fc", "Linear", True, (("Net", 1),)))
TRACE = Trace("t", 1, LAYERS, (mm(N, N, N, "fc"),), inference=True)
FC_S = mm_s(N, N, N)
"""The step at the reference: 1 us of a call, 2 x 512^3 FLOP at 10 GFLOP/s."""


def reading(core: float) -> Reading:
    return Reading(core * 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3)


def read_machine(*cores: float) -> Machine:
    """The machine of exact models, read at these slowdowns of its core."""
    readings = tuple(map(reading, cores))
    return replace(law_machine(), reference=reading(1.0), readings=readings)


def measured(core: float, *cores: float) -> Measurement:
    """The step at a slowdown of the core, with readings of others before and after."""
    seconds = around(core * FC_S)
    return Measurement(
        "t",
        1,
        1,
        {"forward": seconds, "total": seconds},
        (LayerTimes("fc", "Linear", seconds),),
        inference=True,
        machine=read_machine().cpu.model,
        states=tuple(map(reading, cores)),
    )


def study_of(machine: Machine, *runs: Measurement, predictors: tuple[str, ...] = ()) -> Study:
    return run_study(
        [Case("t", 1, 1, True)],
        [Variant(name, name, machine) for name in predictors or ("calibrated",)],
        lambda threads: len(runs),
        lambda case: TRACE,
        lambda case, trace, run: runs[run - 1],
        lambda line: None,
        provenance=provenance(),
    )


def test_the_state_of_a_case_is_in_the_middle_of_its_runs() -> None:
    machine = read_machine(1.0)
    runs = (measured(1.2, 1.1, 1.3), measured(1.2, 1.5, 1.7))
    assert usual_state(states_of(runs, machine)) == State(core=pytest.approx(1.4))  # of 1.2 and 1.6
    assert not states_of((*runs, measured(1.0)), machine)  # one run without readings
    assert not states_of(runs, law_machine())  # no reference
    other = replace(runs[0], machine="another processor")
    assert not states_of((other,), machine)
    assert not states_of((), machine)


def test_a_case_is_predicted_blind_and_at_its_state() -> None:
    machine = read_machine(1.0, 1.1, 1.2)
    study = study_of(machine, measured(1.5, 1.5, 1.5), predictors=("calibrated", "roofline"))
    ours, roofline = study.scores
    # The step is arithmetic: blind 1.1 times the reference, at the state 1.5 times.
    assert ours.step_error_frac == pytest.approx(1.1 / 1.5 - 1, abs=2e-3)
    assert ours.state == State(core=pytest.approx(1.5))
    assert ours.at_state is not None
    assert ours.at_state.step_error_frac == pytest.approx(0.0, abs=2e-3)
    assert ours.at_state.forward_mape_frac == pytest.approx(0.0, abs=2e-3)
    assert (roofline.state, roofline.at_state) == (None, None)
    layer, *_ = study.layers.itertuples()
    assert layer.at_state_error_frac == pytest.approx(0.0, abs=2e-3)
    assert layer.at_state_s == pytest.approx(1.5 * FC_S, rel=2e-3)
    assert study.state_remarks == ()


def test_a_case_of_unknown_state_is_blind_alone_and_the_page_says_so() -> None:
    study = study_of(read_machine(1.0), measured(1.0))
    (found,) = study.scores
    assert (found.state, found.at_state) == (None, None)
    assert study.residuals.empty
    (remark,) = study.state_remarks
    assert remark.startswith("1 of 1 cases have no prediction at the state")
    assert remark in study_to_text(study, 200)
    assert study.to_json()["state_remarks"] == [remark]
    assert "at state error" not in study_to_markdown(study)
    assert studied(lambda case, trace, run: named(case)).state_remarks == ()  # of roofline alone


def test_residuals_of_a_study_are_those_at_the_state() -> None:
    study = study_of(read_machine(1.0), measured(1.6, 1.5, 1.5))
    at_state = study.scores[0].at_state
    assert at_state is not None
    assert at_state.predicted_s is not None
    missing_s = at_state.predicted_s - 1.6 * FC_S
    assert study.residuals.residual_s.sum() == pytest.approx(missing_s)
    largest = study.residuals.iloc[0]
    assert (largest.operator, largest.phase, largest.bound) == ("aten.mm", "forward", "compute")
    assert largest.error_frac == pytest.approx(1.5 / 1.6 - 1, abs=2e-3)


def test_summaries_have_a_line_at_the_state_under_each_blind_one() -> None:
    blind = scores()
    moved = [replace(one, step_error_frac=0.5 * (one.step_error_frac or 0.0)) for one in blind]
    both = [replace(one, at_state=other) for one, other in zip(blind, moved)]
    found = summaries([*both[:3], blind[3]])
    assert [(s.what, s.at_state, s.n_cases) for s in found[:4]] == [
        ("all", False, 4),
        ("all", True, 3),
        ("1 thread", False, 3),
        ("1 thread", True, 3),
    ]
    assert found[1].step_median_frac == pytest.approx(0.06)  # of 0.025, 0.15, 0.06
    assert found[1].step_bias_frac == pytest.approx(0.025)  # of 0.025, -0.15, 0.06
    assert ("2 threads", True) not in {(s.what, s.at_state) for s in found}


def test_groups_of_layers_have_both_errors() -> None:
    reference = join([scaled(1.0)])
    blind = score(CASE, reference, prediction(cnn_trace(), cnn_items()), "calibrated")
    at_state = prediction(cnn_trace(), cnn_items(factor=0.8))
    _, layers = score_at_state(blind, reference, at_state)
    groups = {(g.kind, g.name, g.phase): g for g in layer_groups(layers).itertuples()}
    conv = groups["family", "Conv2d", "forward"]
    assert conv.bias_frac == pytest.approx(0.2)  # 300 for 250 us
    assert conv.at_state_bias_frac == pytest.approx(-0.04)  # 240 for 250 us
    assert conv.at_state_mape_frac == pytest.approx(0.04)


def test_a_term_left_out_is_left_out_at_the_same_state() -> None:
    from dlperf.forecast.prediction import predict

    machine = read_machine(1.0, 1.5, 2.0)
    whole = predict(TRACE, machine, 1)
    nothing = Term("nothing", "", on_machine=lambda machine: machine)
    (found,) = ablate([(Case("t", 1, 1, True), join([measured(1.5)]), whole)], [nothing])
    assert found.share_frac == pytest.approx(0.0, abs=1e-9)


def test_pages_and_files_have_both_errors(tmp_path: Path) -> None:
    study = study_of(
        read_machine(1.0, 1.1, 1.2), measured(1.5, 1.5, 1.5), predictors=("calibrated", "roofline")
    )
    data = json.loads(json.dumps(study.to_json(), allow_nan=False))
    ours, roofline = data["cases"]
    assert ours["state"]["core"] == pytest.approx(1.5)
    at_state = ours["at_state"]
    assert at_state["step_error_frac"] == pytest.approx(
        at_state["predicted_s"] / ours["actual_s"] - 1
    )
    assert (roofline["state"], roofline["at_state"]) == (None, None)
    assert [(row["predictor"], row["at_state"]) for row in data["summaries"]] == [
        ("calibrated", False),
        ("calibrated", True),
        ("roofline", False),
    ]
    assert data["intervals_at_state"]["n_cases"] == 1
    assert sum(row["residual_s"] for row in data["residuals"]) == pytest.approx(
        at_state["predicted_s"] - ours["actual_s"]
    )
    folder = tmp_path / "accuracy"
    assert "residuals.csv" in {path.name for path in write_study(study, folder)}
    write_study(study, folder)  # over its own files
    cases = pd.read_csv(folder / "cases.csv")
    assert cases.at_state_predicted_s[0] == pytest.approx(at_state["predicted_s"], rel=1e-5)
    assert cases.state_core[0] == pytest.approx(1.5)
    assert pd.isna(cases.at_state_predicted_s[1])
    residuals = pd.read_csv(folder / "residuals.csv")
    assert len(residuals) == len(study.residuals)
    for text in (study_to_text(study, 200), (folder / "accuracy.md").read_text()):
        assert re.search(r"at state +\|? *all", text)
        assert "aten.mm" in text
        assert " ".join(text.split()).count("Blind: for the median of the states") == 1
    page = (folder / "accuracy.md").read_text()
    assert "at state error" in page
    assert "## What is left of the error" in page


def test_an_earlier_study_leaves_nothing_in_the_folder(tmp_path: Path) -> None:
    at_state = study_of(read_machine(1.0), measured(1.6, 1.5, 1.5))
    written = {path.name for path in write_study(at_state, tmp_path)}
    (tmp_path / "ops.csv").write_text("operator,of somebody else\n")
    blind = study_of(read_machine(1.0), measured(1.6))
    later = {path.name for path in write_study(blind, tmp_path, force=True)}
    assert written - later == {"residuals.csv"}
    assert {path.name for path in tmp_path.iterdir()} == later | {"ops.csv"}


def test_a_page_has_the_largest_residuals_alone() -> None:
    study = whole_study()
    row = {"operator": "aten.mm", "phase": "forward", "n_layers": 1, "predicted_s": 2 * US}
    shares = dict.fromkeys(("measured_share_frac", "residual_share_frac"), 1 / 40)
    seconds = {"measured_s": US, "residual_s": US, "absolute_s": US, "error_frac": 1.0}
    rows = [{**row, **shares, **seconds, "bound": f"bound {n}"} for n in range(40)]
    page = study_to_markdown(replace(study, residuals=pd.DataFrame(rows)))
    assert page.count("| aten.mm | forward | bound ") == N_SHOWN
    assert f"of 40 rows, the {N_SHOWN} with the most residual" in page
    assert "add up to +100 % of the measured time" in page


# -- the documentation's page ----------------------------------------------------------------------


@pytest.fixture
def generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``docs/generate_results.py`` with reports of a made-up study."""
    path = Path(__file__).parents[2] / "docs" / "generate_results.py"
    monkeypatch.syspath_prepend(path.parent)
    spec = spec_from_file_location("generate_results", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    study = study_of(read_machine(1.0, 1.1, 1.2), measured(1.6, 1.5, 1.5), measured(1.6, 1.5, 1.5))
    write_study(study, tmp_path / "accuracy")
    (tmp_path / "accuracy" / "ops.csv").write_text("family,error_frac,repeatability_frac\n")
    monkeypatch.setattr(module, "REPORTS", tmp_path)
    return module


def test_the_documentation_has_both_errors_and_what_is_left(generate: ModuleType) -> None:
    page = generate.accuracy()
    assert "| `calibrated` | 1 | 31.2 % |" in page  # 1.1 / 1.6
    assert "| `calibrated`, at the state | 1 | 6.2 % |" in page  # 1.5 / 1.6
    assert "| aten.mm | forward | compute | 1 | 100.0 % | -6.2 % | 100.0 % |" in page


def test_the_documentation_takes_results_without_states(
    generate: ModuleType, tmp_path: Path
) -> None:
    folder = tmp_path / "accuracy"
    (folder / "residuals.csv").unlink()
    cases = pd.read_csv(folder / "cases.csv")
    old = [name for name in cases if not name.startswith(("state_", "at_state_"))]
    cases[old].to_csv(folder / "cases.csv", index=False)
    page = generate.accuracy()
    assert "| `calibrated` | 1 |" in page
    assert "at the state |" not in page
    assert page.count("does not contain what is left of the error at the state") == 1
