"""``predict --what-if``: answers, epochs, other predictors, and factors that make no sense."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

ON = ("--threads", "1", "--json", "-")


@pytest.fixture
def predicted(dlperf: Callable, machine_file: Path) -> Callable:
    def predict(*options: object) -> dict:
        done = dlperf("predict", "lenet", "--machine", machine_file, *ON, *options)
        assert done.status == 0, done.err
        return dict(json.loads(done.out))

    return predict


def test_every_resource_moves_the_step_its_way(predicted: Callable) -> None:
    usual = predicted()
    assert usual["what_if"] == {}
    for name in ("flops", "overhead", "page_faults"):
        at = {
            factor: predicted("--what-if", f"{name}={factor}")["step"]["total_s"]
            for factor in (0.5, 1, 2)
        }
        rising = sorted(at.values(), reverse=name == "flops")
        assert list(at.values()) == rising
        assert at[1] == usual["step"]["total_s"]
    assert predicted("--what-if", "flops=0.5")["step"]["total_s"] > usual["step"]["total_s"]


def test_factors_are_named_and_rows_add_up(predicted: Callable) -> None:
    found = predicted("--what-if", "flops=2", "overhead=0.5", "--what-if", "l3_bandwidth=3")
    assert found["what_if"] == {"flops": 2.0, "l3_bandwidth": 3.0, "overhead": 0.5}
    rows = sum(
        row[f"{phase}_s"]
        for row in found["layers"]
        for phase in ("forward", "backward", "optimizer")
    )
    step = found["step"]
    assert rows + step["zero_grad_s"] == pytest.approx(step["total_s"])
    assert step["low_s"] < step["total_s"] < step["high_s"]


def test_inference_predictors_and_epochs_follow(predicted: Callable) -> None:
    slow = ("--what-if", "flops=0.25", "memory_bandwidth=0.25", "overhead=4", "l3_bandwidth=0.25")
    for options in (("--inference",), ("--predictor", "roofline"), ("--predictor", "viebke-b")):
        usual, other = (predicted(*options, *more)["step"] for more in ((), slow))
        assert other["total_s"] == pytest.approx(4 * usual["total_s"], rel=0.35)
        assert other["total_s"] > 2 * usual["total_s"]
    epoch = ("--samples", "100", "--val-samples", "64")
    usual, other = (predicted(*epoch, *more)["epoch"] for more in ((), slow))
    for name in ("steps_s", "evaluation_s", "epoch_s"):
        assert other[name] > 2 * usual[name]


def test_a_scaled_rank_is_the_predicted_step(
    dlperf: Callable, machine_file: Path, predicted: Callable
) -> None:
    factors = ("--what-if", "flops=3", "overhead=0.5")
    done = dlperf("scale", "lenet", "--ranks", "1", "--machine", machine_file, *ON, *factors)
    assert done.status == 0, done.err
    (row,) = json.loads(done.out)["rows"]
    assert row["step_s"] == pytest.approx(predicted(*factors)["step"]["total_s"])


def test_a_factor_that_changes_nothing_says_so(predicted: Callable) -> None:
    note = "page_faults: no time of this step moves with this"
    assert note in predicted("--malloc", "tuned", "--what-if", "page_faults=2")["notes"]
    assert note not in predicted("--what-if", "page_faults=2", "flops=2")["notes"]


def test_the_text_names_the_factors(dlperf: Callable, machine_file: Path) -> None:
    on = ("predict", "lenet", "--machine", machine_file, "--threads", "1")
    assert "what if: flops x 0.5" in dlperf(*on, "--what-if", "flops=0.5").out.splitlines()
    assert "what if" not in dlperf(*on).out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("speed=2", "'speed' is unknown; known are flops, memory_bandwidth, l3_bandwidth"),
        ("link_bandwidth=2", "'link_bandwidth' is unknown"),
        ("flops=0", "flops=0: the factor must be finite and above 0"),
        ("flops=-1", "flops=-1"),
        ("flops=nan", "flops=nan"),
        ("flops=1e999", "flops=inf"),
        ("flops=1,5", "'flops=1,5' is no NAME=FACTOR, such as flops=2"),
        ("flops", "'flops' is no NAME=FACTOR"),
        ("=2", "'=2' is no NAME=FACTOR"),
        ("flops=2 flops=3", "--what-if flops: stands there twice; give one factor"),
    ],
)
def test_factors_that_make_no_sense(
    dlperf: Callable, machine_file: Path, text: str, said: str
) -> None:
    done = dlperf("predict", "lenet", "--machine", machine_file, "--what-if", *text.split())
    assert done.status == 2
    assert said in done.line
