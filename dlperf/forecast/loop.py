"""A training loop's own work around its steps, in seconds from the costs of the machine file."""

from __future__ import annotations

from dataclasses import dataclass

from dlperf.core.errors import check_count
from dlperf.core.machine import lacks
from dlperf.core.prediction import PredictedStep
from dlperf.core.trace import Op, TensorSpec
from dlperf.predictors.kernel_cost_model import cost_model_of

_PAGE_BYTES = 4096


@dataclass(frozen=True)
class Loop:
    """A training loop.

    `accumulate` batches go to one step of the optimizer; the last ones of an epoch make a step
    however few they are. `drop_last`, `shuffle`, `loader_workers` (None: not given, which is 0) and
    `persistent_workers` are those of a DataLoader. `clip`: the gradients' norm is clipped before
    each update; `scheduler`: the learning rate's scheduler steps with each update; `checkpoint`:
    the parameters are saved after each epoch; `look`: the loss's value is read at each batch
    (``.item()``), and `accuracy`: right answers are counted at each.

    Raises DlperfError for accumulate below 1 or a negative number of workers.
    """

    accumulate: int = 1
    drop_last: bool = False
    shuffle: bool = True
    loader_workers: int | None = None
    persistent_workers: bool = False
    clip: bool = False
    scheduler: bool = False
    checkpoint: bool = False
    look: bool = True
    accuracy: bool = False

    def __post_init__(self) -> None:
        check_count("accumulate", self.accumulate)
        if self.loader_workers is not None:
            check_count("loader_workers", self.loader_workers, 0)


def _cost_s(prediction: PredictedStep, name: str, asked: bool = True) -> float:
    """A cost at the prediction's state; 0 if the file lacks it and nobody `asked`."""
    machine = prediction.machine
    if not machine.costs_of(f"loop_{name}"):
        if not asked:
            return 0.0
        way_out = f"; {machine.calibration()} adds it"
        raise lacks(machine, f"cost of {name.split('_')[0]!r}", way_out)
    return machine.cost_value(f"loop_{name}", prediction.threads, state=prediction.state)


def _parameters_s(prediction: PredictedStep, name: str) -> float:
    """Seconds of work on all parameters: a call, each tensor, each byte."""
    parameters = parameters_of(prediction)
    call_s, tensor_s, byte_s = (
        _cost_s(prediction, f"{name}_{what}") for what in ("call", "tensor", "byte")
    )
    return call_s + len(parameters) * tensor_s + sum(spec.nbytes for spec in parameters) * byte_s


def parameters_of(prediction: PredictedStep) -> list[TensorSpec]:
    """The parameters of the network, shared ones once."""
    found: dict[object, TensorSpec] = {}
    for layer in prediction.trace.layers:
        for name, spec in layer.parameters:
            found[spec.storage if spec.storage >= 0 else (layer.name, name)] = spec
    return list(found.values())


def visit_s(prediction: PredictedStep, loop: Loop) -> float:
    """Seconds of the loop's work at each batch, in training and evaluation."""
    look_s = _cost_s(prediction, "item", asked=False) if loop.look else 0.0
    return look_s + (_cost_s(prediction, "accuracy") if loop.accuracy else 0.0)


def update_s(prediction: PredictedStep, loop: Loop) -> float:
    """Seconds of the loop's work at each update: clipping and the scheduler."""
    seconds = _cost_s(prediction, "scheduler") if loop.scheduler else 0.0
    return seconds + (_parameters_s(prediction, "clip") if loop.clip else 0.0)


def pause_s(prediction: PredictedStep, loop: Loop) -> float:
    """Seconds between two epochs: a checkpoint of the parameters."""
    return _parameters_s(prediction, "save") if loop.checkpoint else 0.0


def accumulation_s(prediction: PredictedStep) -> float:
    """Overhead of a backward that adds to gradients instead of putting them in place, in
    seconds.
    """
    machine, state, what_if = prediction.machine, prediction.state, prediction.what_if.state
    model = cost_model_of(machine, prediction.threads)
    call_s = state.interpreter * what_if.interpreter * model.cost_s("native_call")
    seconds = 0.0
    for spec in parameters_of(prediction):
        priced = model.kernel_s(Op("aten.add_.Tensor", (spec, spec)))
        n_bytes = 3 * spec.nbytes  # two gradients read, one written
        level = machine.level_of(n_bytes)
        slowdown = state.factor(level) * what_if.factor(level)
        if priced is not None:
            seconds += slowdown * priced[0]
        else:
            seconds += slowdown * n_bytes / model.caches.bytes_per_s[level] + call_s
    return seconds


def first_step_s(prediction: PredictedStep) -> float | None:
    """Overhead of a process's first step, in seconds; None where the machine file lacks it.

    It is what every first step takes (code read in, the engine started), the making of a kernel for
    each convolution of another shape, and the first touch of all the memory that the step holds.
    """
    machine, threads = prediction.machine, prediction.threads
    if not machine.costs_of("loop_first_step"):
        return None
    n_convolutions = len(
        {op.signature for op in prediction.trace.ops if op.packet == "aten.convolution"}
    )
    own_bytes = sum(footprint.n_bytes for footprint in machine.footprints)
    touched_bytes = max(0, (prediction.step.peak_memory_bytes or 0) - own_bytes)
    fault_s = machine.cost_value("page_fault", threads, 0.0, state=prediction.state)
    fault_s *= prediction.what_if.page_faults
    return (
        _cost_s(prediction, "first_step")
        + n_convolutions * _cost_s(prediction, "first_convolution")
        + touched_bytes / _PAGE_BYTES * fault_s
    )
