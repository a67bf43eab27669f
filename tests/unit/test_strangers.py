"""Wrong arguments to the public functions: one line that says what is missing and what was given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import report_cases as cases
import torch
from torch import nn

import dlperf
from dlperf import DlperfError, Machine
from dlperf.core.errors import WorkFailed
from dlperf.recorder import accelerator, targets
from dlperf.recorder.recording import record_target

NET, INPUTS = nn.Linear(4, 2), (torch.ones(3, 4),)
PREDICTION, MEASUREMENT = cases.cnn()
TRACE, MACHINE = PREDICTION.trace, PREDICTION.machine


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: dlperf.record(nn.Linear, INPUTS),
            "the model is the class Linear; expected an nn.Module",
        ),
        (lambda: dlperf.record(INPUTS, NET), "the model is of type tuple; expected an nn.Module"),
        (
            lambda: dlperf.record("nets.py:net", INPUTS),
            "the model is of type str; expected an nn.Module",
        ),
        (lambda: dlperf.record(NET, 3), "the inputs are of type int; expected a tuple"),
        (lambda: dlperf.record(NET, None), "the inputs are None; expected a tuple"),
        (
            lambda: dlperf.record(NET, INPUTS, loss=3),
            "the loss is of type int; expected a function",
        ),
        (
            lambda: dlperf.record(NET, INPUTS, optimizer=torch.optim.SGD),
            "the optimizer is the class SGD; expected",
        ),
        (lambda: dlperf.predict(MACHINE, TRACE), "predict: the trace is <Machine Made-up CPU"),
        (
            lambda: dlperf.predict("trace.json", MACHINE),
            r"the trace is 'trace.json' \(of type str\); expected a Trace",
        ),
        (
            lambda: dlperf.predict(TRACE, "machine.json"),
            r"the machine is 'machine.json' \(of type str\); expected a Machine",
        ),
        (
            lambda: dlperf.predict(NET, MACHINE),
            r"\(of type Linear\); expected a Trace: dlperf.record makes one",
        ),
        (
            lambda: dlperf.predict(TRACE, MACHINE, "calibrated"),
            r"threads is 'calibrated' \(of type str\)",
        ),
        (
            lambda: dlperf.predict(TRACE, MACHINE, state="reference"),
            r"the state is 'reference' \(of type str\); expected a State or list or tuple",
        ),
        (
            lambda: dlperf.predict(TRACE, MACHINE, state=[1.3]),
            r"the state is 1.3 \(of type float\); expected a State: machine.states are some",
        ),
        (
            lambda: dlperf.measure(INPUTS, NET),
            r"measure: the model is .* \(of type tuple\); expected a Module",
        ),
        (
            lambda: dlperf.measure(nn.Linear, INPUTS),
            "expected a Module: an instance, not its class or its name",
        ),
        (lambda: dlperf.measure(NET, None), "Linear: the inputs are None; expected a tuple"),
        (
            lambda: dlperf.measure(NET, "x.pt"),
            "Linear: the inputs are of type str; expected a tuple",
        ),
        (
            lambda: dlperf.measure(NET, INPUTS, loss=3),
            "the loss is of type int; expected a function",
        ),
        (
            lambda: dlperf.measure(NET, INPUTS, optimizer="sgd"),
            "the optimizer is of type str; expected a torch.optim.Optimizer",
        ),
        (
            lambda: dlperf.compare(MEASUREMENT, PREDICTION),
            "compare: the prediction is <Measurement nets.py:cnn",
        ),
        (
            lambda: dlperf.compare("a.json", MEASUREMENT),
            r"the prediction is 'a.json' \(of type str\); expected a Prediction",
        ),
        (lambda: dlperf.compare(PREDICTION, None), r"the measurement is None \(of type NoneType\)"),
        (
            lambda: dlperf.profile(nn.Linear),
            "profile: the model is .*expected a Module: an instance",
        ),
        (lambda: dlperf.profile(NET, 3), r"profile: the machine is 3 \(of type int\)"),
        (lambda: Machine.load(3), r"the path is 3 \(of type int\)"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_named_in_one_line(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(DlperfError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("function", "missing"),
    [
        (dlperf.record, "model"),
        (dlperf.predict, "trace"),
        (dlperf.measure, "model"),
        (dlperf.compare, "prediction"),
        (dlperf.profile, "model"),
    ],
)
def test_missing_arguments_are_named_by_python(function: Callable[..., Any], missing: str) -> None:
    with pytest.raises(TypeError, match=f"missing .* required positional arguments?: '{missing}'"):
        function()


def test_a_machine_is_loaded_from_where_the_command_line_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLPERF_MACHINE", str(tmp_path / "mine.json"))
    with pytest.raises(
        DlperfError,
        match=(
            r"mine\.json: there is no such machine file; dlperf calibrate makes it \(with --quick"
        ),
    ):
        Machine.load()
    MACHINE.save(tmp_path / "mine.json")
    assert Machine.load().path == str(tmp_path / "mine.json")
    with pytest.raises(
        DlperfError,
        match=(
            r"other\.json: there is no such machine file; dlperf calibrate -o .*other\.json"
            r" makes it"
        ),
    ):
        Machine.load(tmp_path / "other.json")


# -- accelerators -------------------------------------------------------------------------


@pytest.fixture
def _accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU were an accelerator."""
    monkeypatch.setattr(accelerator, "CPU_DEVICES", ("meta",))


@pytest.mark.usefixtures("_accelerated")
@pytest.mark.parametrize("call", [dlperf.record, dlperf.measure])
def test_a_model_on_an_accelerator_is_told_what_dlperf_does(call: Callable[..., Any]) -> None:
    with pytest.raises(
        DlperfError,
        match=(
            "Linear: lies on cpu; dlperf records, measures and predicts steps on the CPU, and on an"
            " accelerator of this machine"
        ),
    ):
        call(NET, INPUTS)


@pytest.mark.usefixtures("_accelerated")
def test_inputs_on_an_accelerator_count_too() -> None:
    with pytest.raises(DlperfError, match="ReLU: lies on cpu; "):
        dlperf.record(nn.ReLU(), INPUTS, inference=True)


def test_the_meta_device_is_recorded_and_not_measured() -> None:
    net, inputs = nn.Linear(4, 2, device="meta"), (torch.ones(3, 4, device="meta"),)
    assert any("meta device" in note for note in dlperf.record(net, inputs).notes)
    with pytest.raises(
        DlperfError, match="lies on the meta device, which has no data to compute with"
    ):
        dlperf.measure(net, inputs)


@pytest.mark.parametrize("use", ["build", "record"])
def test_a_builder_that_asks_for_cuda_is_told_the_way_out(tmp_path: Path, use: str) -> None:
    (tmp_path / "net.py").write_text(
        "def net(batch_size):\n    raise AssertionError('Torch not compiled with CUDA enabled')\n"
    )
    target = targets.resolve(f"{tmp_path / 'net.py'}:net", 4)
    line = (
        r"Torch not compiled with CUDA enabled \(.*net.py:2\); dlperf records, measures and"
        r" predicts steps on the CPU"
    )
    with pytest.raises(DlperfError, match=line) as caught:
        target.build() if use == "build" else record_target(target)
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, WorkFailed)  # the input is unusable, exit status 2
