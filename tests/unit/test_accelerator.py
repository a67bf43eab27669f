"""Steps and kernels of an accelerator, timed by the events of a made-up one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_up_device import EVENT_S, MadeUpDevice
from torch import nn

from dlperf.__main__ import main
from dlperf.cli import device_calibration
from dlperf.core import shelf
from dlperf.core.clock import Clock, Repeats, Sampler, Samples
from dlperf.core.device_clock import DeviceClock, DevicePeaks, seconds_of, stamper
from dlperf.core.errors import DlperfError, WorkFailed
from dlperf.core.machine import Machine
from dlperf.core.measurement import Measurement
from dlperf.forecast.prediction import predict
from dlperf.microbench import device as device_microbench
from dlperf.microbench.device import DevicePoint, measure_device, plan
from dlperf.microbench.network import team
from dlperf.profiler.layer_times import HookOverhead, PhaseTimes, StepTimes, overhead_factors
from dlperf.profiler.probe import LayerProbe
from dlperf.profiler.step_profiler import measure
from dlperf.recorder import accelerator
from dlperf.recorder.accelerator import accelerator_of, find_accelerator
from dlperf.recorder.recording import record
from dlperf.recorder.targets import resolve
from dlperf.report.comparison import compare
from dlperf.runner.findings import Findings
from dlperf.runner.watched_training import WatchPlan
from dlperf.runner.watcher import Watcher
from dlperf.studies.kernel_table import import_table

# -- the clock ------------------------------------------------------------------------------------


def test_moments_are_read_after_the_device_was_waited_for_and_events_come_back() -> None:
    device = MadeUpDevice()
    clock = device.clock()
    stamps = [clock.stamp(), clock.stamp(), clock.stamp()]
    assert "wait" not in device.log
    assert clock.seconds(stamps) == pytest.approx([0.0, EVENT_S, 2 * EVENT_S])
    assert device.log.count("wait") == 1
    clock.stamp()
    assert device.log.count("new") == 3


def test_a_moment_that_cannot_be_noted_fails_where_it_is_read() -> None:
    device = MadeUpDevice()
    device.is_current_stream_capturing = lambda: True  # type: ignore[attr-defined]
    clock = device.clock()
    stamps = [clock.stamp(), clock.stamp()]
    with pytest.raises(WorkFailed, match="no event was recorded: a graph is captured"):
        clock.seconds(stamps)
    assert device.log == []  # nothing was recorded or waited for inside the graph


def test_without_a_device_moments_are_those_of_the_host() -> None:
    ticks = iter([1.0, 4.0])
    clock = Clock(now=lambda: next(ticks))
    now = stamper(clock)
    assert seconds_of(clock, [now(), now()]) == [1.0, 4.0]
    on_device = Clock(device=MadeUpDevice().clock())
    assert seconds_of(on_device, []) == []


def test_samples_on_a_device_are_streams_of_calls_behind_a_head_start() -> None:
    device, calls = MadeUpDevice(), list[str]()
    clock = DeviceClock(device, "cpu", lambda n: calls.append(f"head {n}"))
    sampler = Sampler(lambda: calls.append("call"), Repeats(1e-4, 1, 1), Clock(device=clock))
    sampler.take()
    assert calls == ["head 1", "call"] * 3  # warm, to count the calls, the sample
    assert sampler.result().values == pytest.approx((EVENT_S,))


# -- steps ----------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.relu(self.first(x)))
        return out


INPUTS = (torch.ones(5, 4),)


@pytest.fixture(scope="module")
def measured() -> tuple[Measurement, MadeUpDevice]:
    device = MadeUpDevice()
    clock = Clock(device=device.clock(), switches=lambda: 0)
    return measure(Net(), INPUTS, seconds=0.01, clock=clock), device


def test_a_step_is_timed_by_events_and_waited_for_at_its_end_alone(
    measured: tuple[Measurement, MadeUpDevice],
) -> None:
    found, device = measured
    assert {name: samples.median for name, samples in found.step.items()} == pytest.approx(
        {**dict.fromkeys(("zero_grad", "forward", "backward", "optimizer"), EVENT_S)}
        | {"total": 4 * EVENT_S}
    )
    assert found.machine == "Testor GPU"
    assert found.noise["host_s"] > 0.0
    steps = "".join(entry[0] for entry in device.log if entry != "new").split("w")
    assert "rrrrr" in steps  # five moments, then the device is waited for


def test_layers_have_the_time_between_their_events() -> None:
    device, net = MadeUpDevice(), Net()
    probe = LayerProbe(net, Clock(device=device.clock(), switches=lambda: 0))
    with probe:
        for _ in range(2):  # the second step takes the events of the first
            probe.start()
            probe.resume()
            net(*INPUTS).sum().backward()
            probe.stop()
            times = probe.finish()
    first, second = (probe.names.index((name, "Linear")) for name in ("first", "second"))
    assert times.forward.seconds[first] == times.forward.seconds[second] == pytest.approx(EVENT_S)
    assert times.backward is not None
    assert min(times.backward.seconds[index] for index in (first, second)) > 0.0


def test_hooks_that_the_device_hides_cost_nothing() -> None:
    times = StepTimes(PhaseTimes({0: 1.0}, {0: 0.5}), None)
    assert overhead_factors([({"forward": 1.0}, times)]) == (1.0, 1.0)
    assert overhead_factors([({"forward": 1.0}, times)], least=0.0)[0] == 0.0
    assert HookOverhead(1.0).to_noise((0.0, 0.0))["hook_inside_s"] == 0.0


def test_a_measurement_keeps_the_memory_of_its_device(
    measured: tuple[Measurement, MadeUpDevice], tmp_path: Path
) -> None:
    from dataclasses import replace

    found = replace(measured[0], device_memory=DevicePeaks(3000, 4096))
    found.save(tmp_path / "m.json")
    assert Measurement.load(tmp_path / "m.json").device_memory == DevicePeaks(3000, 4096)
    assert "device_memory" not in measured[0].to_json()
    trace = record(Net(), INPUTS)
    report = compare(predict(trace, shelf.device("a100"), 1), replace(found, threads=1))
    text = report.to_text(200)
    assert "device memory, allocated" in text
    assert "measured 2.93 KiB" in text
    assert report.to_json()["measured"]["device_memory"]["reserved_bytes"] == 4096
    replace(found, trace=trace, threads=1).save(tmp_path / "whole.json")
    assert main(["report", str(tmp_path / "whole.json"), "--machine", "a100"]) == 0
    data = json.loads((tmp_path / "m.json").read_text())
    data["device_memory"]["allocated_bytes"] = -1
    (tmp_path / "m.json").write_text(json.dumps(data))
    with pytest.raises(DlperfError, match=r"device_memory\.allocated_bytes is -1"):
        Measurement.load(tmp_path / "m.json")


# -- a program that trains ------------------------------------------------------------------------


def train(model: nn.Module, n_steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(n_steps):
        optimizer.zero_grad()
        loss = model(*INPUTS).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def watched(device: MadeUpDevice | None, n_steps: int = 25) -> tuple[Watcher, list[float]]:
    torch.manual_seed(3)
    clock = Clock(device=None if device is None else device.clock(), switches=lambda: 0)
    watcher = Watcher(clock=clock, plan=WatchPlan())
    watcher.install()
    losses = train(Net(), n_steps)
    watcher.remove()
    return watcher, losses


def test_watched_steps_of_a_device_have_its_times_and_the_results_stay() -> None:
    device = MadeUpDevice()
    watcher, losses = watched(device)
    assert losses == watched(None)[1]
    assert watcher.watched is not None
    assert watcher.error is None
    for step in watcher.watched.plain:
        assert step.interval_s is not None
        parts = (step.forward_s, step.backward_s, step.optimizer_s, step.zero_grad_s)
        assert all(part > 0.0 for part in parts)
        assert sum(parts) + step.outside_s == pytest.approx(step.interval_s)
        assert list(step.by_optimizer.values()) == pytest.approx([step.optimizer_s])
        assert step.laps == []
    first = device.log.index("record")
    assert "wait" not in device.log[first : first + 15]  # the first steps are not waited for
    findings = Findings(watcher)
    assert findings.measurement.machine == "Testor GPU"
    assert findings.measurement.device_memory == DevicePeaks(3000, 2**21)
    assert any("dlperf calibrate --device" in note for note in findings.notes)


def test_a_device_that_fails_ends_the_watching_and_not_the_program() -> None:
    device = MadeUpDevice()

    def current_stream(_: Any) -> str:
        raise RuntimeError("the device is lost")

    device.current_stream = current_stream  # type: ignore[method-assign]
    watcher, losses = watched(device)
    assert len(losses) == 25
    assert "the device is lost" in str(watcher.error)


# -- which accelerator ----------------------------------------------------------------------------


def at(*names: str) -> list[Any]:
    return [SimpleNamespace(device=torch.device(name)) for name in names]


def test_tensors_lie_on_the_cpu_or_on_one_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "accelerator_type", lambda: "cuda")
    assert accelerator_of("Net", at("cpu", "meta")) is None
    assert accelerator_of("Net", at("cpu", "cuda:1")) == torch.device("cuda:1")
    with pytest.raises(DlperfError, match="Net: lies on cuda:0 and cuda:1; dlperf measures one"):
        accelerator_of("Net", at("cuda:1", "cuda:0"))
    with pytest.raises(DlperfError, match="Net: lies on xpu:0; dlperf records"):
        accelerator_of("Net", at("xpu:0"))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("a100", "--device a100: is a device of the shelf"),
        ("gpu", "--device gpu: is no device of torch; name an accelerator"),
        ("cpu", "--device cpu: is no accelerator; leave it out for the processor"),
        ("xpu", "--device xpu: torch finds no such accelerator here"),
        ("cuda:x", "--device cuda:x: is no device of torch"),
        ("", "is no device of torch"),
    ],
)
def test_another_device_is_told_the_way_out(name: str, line: str) -> None:
    with pytest.raises(DlperfError, match=line) as caught:
        find_accelerator(name)
    assert "\n" not in str(caught.value)


def test_no_cuda_device_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = r"no CUDA device: torch\.cuda\.is_available\(\) is false .*dlperf predict --device a100"
    with pytest.raises(DlperfError, match=line):
        find_accelerator("cuda")


def test_a_device_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(accelerator, "accelerator_type", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(DlperfError, match=r"--device cuda:7: this machine has 2 cuda device"):
        find_accelerator("cuda:7")


@pytest.mark.parametrize(
    "command",
    [
        ["calibrate", "--device", "cuda", "--quick"],
        ["measure", "torch.nn:ReLU", "--input", "3", "--inference", "--device", "cuda", "-o", "m"],
        ["report", "torch.nn:ReLU", "--input", "3", "--inference", "--device", "cuda"],
    ],
)
def test_commands_without_a_cuda_device_end_with_status_2(
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("DLPERF_MACHINE", str(tmp_path / "machine.json"))
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no CUDA device: torch.cuda.is_available() is false" in line


@pytest.mark.parametrize("others", [["--refresh"], ["--threads", "1"], ["--for", "lenet@4"]])
def test_a_calibration_of_a_device_takes_nothing_of_the_processors(
    others: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "--device", "cuda", *others]) == 2
    assert "--device measures an accelerator; leave" in capsys.readouterr().err


def test_the_builder_runs_on_the_device(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "def net(n):\n"
        "    y = torch.zeros(n)\n"
        "    assert y.device.type == 'meta'\n"
        "    return torch.nn.Linear(2, 1), {'input': torch.ones(n, 2)}, lambda out: out.mean()\n"
    )
    built = resolve(f"{tmp_path / 'net.py'}:net", 3).on(torch.device("meta")).build()
    assert {p.device.type for p in built.model.parameters()} == {"meta"}
    assert isinstance(built.inputs, dict)
    assert built.inputs["input"].device.type == "meta"


# -- calibration ----------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> MadeUpDevice:
    """The processor in place of a device, whose time is made up, and few points."""
    made_up = MadeUpDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda _: made_up)
    monkeypatch.setattr(device_microbench, "DTYPES", ("float32", "bfloat16"))
    monkeypatch.setattr(device_microbench, "_SQUARES", (32, 64))
    for name in ("N_PRODUCTS", "N_CONVOLUTIONS"):
        monkeypatch.setattr(device_microbench, name, {"quick": 4, "full": 8})
    return made_up


CPU = torch.device("cpu")


def test_every_operator_of_a_thorough_plan_can_be_called() -> None:
    smallest = {}
    for point in sorted(plan("thorough", 2**20), key=lambda point: -point.bytes()):
        smallest[point.op.packet] = point
    assert {"aten.silu", "aten.exp", "aten.mm", "aten.convolution"} <= {*smallest}
    for point in smallest.values():
        point.call(CPU)()


def test_a_plan_fits_the_memory_and_has_every_family() -> None:
    points = plan("quick", 2**34)
    assert {point.family for point in points} == {"elementwise", "gemm", "conv2d"}
    assert len({point.name for point in points}) > 0.9 * len(points)
    assert max(point.bytes() for point in points) <= 0.1 * 2**34
    assert len(plan("quick", 2**24)) < len(points)


@pytest.mark.parametrize(
    "cells",
    [
        {"n": 2, "c_in": 4, "h": 9, "w": 9, "c_out": 8, "kh": 3, "kw": 3}
        | {"stride_h": 2, "stride_w": 2, "pad_h": 1, "pad_w": 1},
        {"m": 2, "n": 3, "k": 4},
        {"m": 2, "n": 3, "k": 4, "batch": 5},
        {"shape": "24", "op": "sigmoid"},
    ],
)
def test_a_point_calls_the_kernel_of_its_row(cells: dict[str, Any]) -> None:
    family = "conv2d" if "kh" in cells else "gemm" if "m" in cells else "elementwise"
    point = DevicePoint(family, cells | {"dtype": "float32"})
    result: Any = point.call(CPU)()
    (row,) = point.rows(Samples((1e-3,)))
    assert tuple(result.shape) == row.op.outputs[0].shape


def test_a_calibration_makes_a_machine_whose_kernels_are_imported(device: MadeUpDevice) -> None:
    found = measure_device(CPU, "quick", {}, Clock(switches=lambda: 0))
    assert found.is_complete
    assert not found.left_out
    sheet = found.machine.data_sheet
    assert sheet.launch_s > 0.0
    assert "bfloat16" in sheet.matrix_flops_per_s
    machine, _ = import_table(found.machine, found.table)
    assert {kernel.family for kernel in machine.kernels} >= {"gemm", "conv2d", "relu"}
    assert all(len(kernel.samples.values) == 3 for kernel in machine.kernels)
    assert predict(record(Net(), INPUTS), machine).step.total_s > 0.0  # type: ignore[operator]


def test_a_kernel_without_memory_or_code_is_left_out_by_name(
    device: MadeUpDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = DevicePoint.call

    def call(self: DevicePoint, where: Any) -> Callable[[], object]:
        if self.family == "conv2d":
            raise torch.OutOfMemoryError("out of memory: 3 GiB\nof 4")
        if self.cells["dtype"] == "bfloat16":
            raise RuntimeError("not implemented for BFloat16\nsee elsewhere")
        return real(self, where)

    monkeypatch.setattr(DevicePoint, "call", call)
    found = measure_device(CPU, "quick", {}, Clock(switches=lambda: 0))
    first, second = sorted(found.left_out)
    assert "the device is out of memory" in first + second
    assert "not implemented for BFloat16" in first + second
    assert "conv2d n=" in first + second
    assert "empty" in device.log
    assert found.machine.data_sheet.matrix_flops_per_s == {}


def test_a_device_on_which_nothing_runs_fails(
    device: MadeUpDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(self: DevicePoint, where: Any) -> Callable[[], object]:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(DevicePoint, "call", call)
    with pytest.raises(WorkFailed, match="no kernel image is available"):
        measure_device(CPU, "quick", {}, Clock(switches=lambda: 0))


def test_an_interrupted_calibration_keeps_its_kernels_and_resumes(
    device: MadeUpDevice,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "cuda.json"
    monkeypatch.setattr(accelerator, "find_accelerator", lambda name: CPU)
    command = ["calibrate", "--device", "cuda", "--quick", "-o", str(path)]
    real, called = DevicePoint.call, list[str]()

    def call(self: DevicePoint, where: Any) -> Callable[[], object]:
        called.append(self.name)
        if self.family == "conv2d" and stops:
            raise KeyboardInterrupt
        return real(self, where)

    monkeypatch.setattr(DevicePoint, "call", call)
    stops = True
    assert main(command) == 130
    assert "the same command resumes it" in capsys.readouterr().err
    first = Machine.load(path)
    assert first.kernels
    assert not first.complete
    stops, n_before = False, len(called)
    assert main(command) == 0
    assert not {*called[: n_before - 1]} & {*called[n_before:]}
    machine = Machine.load(path)
    assert machine.complete
    assert len(machine.kernels) > len(first.kernels)
    assert "Testor GPU, accelerator as measured, quick" in capsys.readouterr().out
    # a prediction finds it by its name where a calibration puts it
    monkeypatch.setenv("DLPERF_MACHINE", str(tmp_path / "machine.json"))
    (tmp_path / "net.py").write_text(
        "import torch\ndef net(n):\n    return torch.nn.Linear(4, 2), (torch.ones(n, 4),), torch.sum\n"
    )
    assert main(["predict", f"{tmp_path / 'net.py'}:net", "--device", "cuda"]) == 0
    shown = capsys.readouterr().out
    assert "kernels stand on those timed on Testor GPU, the others on its roofs" in shown
    assert main(["predict", f"{tmp_path / 'net.py'}:net", "--device", "xpu"]) == 2
    assert "device 'xpu' is unknown" in capsys.readouterr().err


def test_the_file_of_another_machine_is_not_overwritten(
    device: MadeUpDevice, tmp_path: Path
) -> None:
    shelf.device("a100").save(tmp_path / "a100.json")
    with pytest.raises(DlperfError, match=r"a100\.json: is of NVIDIA A100.*, not of Testor GPU"):
        device_calibration._known(tmp_path / "a100.json", "Testor GPU")


# -- ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_devices", "has_nccl", "line"),
    [
        (0, True, "there is no CUDA device"),
        (2, False, "was built without it"),
        (1, True, r"a CUDA device a rank: 2 ranks of this node, 1 device;"),
    ],
)
def test_nccl_takes_a_device_a_rank(
    n_devices: int, has_nccl: bool, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: n_devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_devices)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: has_nccl)
    with pytest.raises(DlperfError, match=f"--backend nccl: .*{line}.*use --backend gloo"):
        team.choose_backend("nccl")
    assert team.choose_backend(None) == "gloo"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert team.choose_backend(None) == team.choose_backend("nccl") == "nccl"


def test_messages_of_nccl_go_over_its_own_group() -> None:
    group = team.Group((0, 1), 2, "data", "control")
    for backend, expected in (("gloo", None), ("nccl", "data")):
        assert team.Team.messages(SimpleNamespace(backend=backend), group) == expected  # type: ignore[arg-type]
