"""What a training script does around its steps, and what that costs.

Nothing here imports torch; the costs stand in the machine file (``microbench/loop.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlperf.core.errors import DlperfError
from dlperf.core.trace import Op, TensorSpec
from dlperf.predictors.kernel_cost_model import cost_model_of

if TYPE_CHECKING:
    from dlperf.forecast.prediction import Prediction

_PAGE_BYTES = 4096


@dataclass(frozen=True)
class Loop:
    """A training loop.

    `accumulate` batches go to one step of the optimizer; the last ones of an epoch make a step
    however few they are. `drop_last`, `shuffle`, `loader_workers` (None: not said, which is 0) and
    `persistent_workers` are those of a DataLoader. `clip`: the gradients' norm is clipped before
    each update; `scheduler`: the learning rate's scheduler steps with each update; `checkpoint`:
    the parameters are saved after each epoch; `look`: the loss's value is asked for at each batch
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
        if self.accumulate < 1:
            raise DlperfError(f"accumulate is {self.accumulate}; it must be at least 1")
        if self.loader_workers is not None and self.loader_workers < 0:
            raise DlperfError(f"loader_workers is {self.loader_workers}; it must be at least 0")


def _cost_s(prediction: Prediction, name: str, asked: bool) -> float:
    """A cost under the machine's usual unrest; 0 for one that was not asked for and is not there."""
    machine = prediction.machine
    if not any(cost.name == f"loop/{name}" for cost in machine.costs):
        if not asked:
            return 0.0
        where = f" -o {machine.path}" if machine.path else ""
        raise DlperfError(
            f"{machine.path or 'machine'}: holds no cost of {name.split('_')[0]!r}; dlperf"
            f" calibrate{where} adds it"
        )
    return machine.contention_slowdown(prediction.threads) * machine.cost_s(
        f"loop/{name}", prediction.threads
    )


def parameters_of(prediction: Prediction) -> list[TensorSpec]:
    """The parameters of the network, shared ones once."""
    found: dict[object, TensorSpec] = {}
    for layer in prediction.trace.layers:
        for name, spec in layer.parameters:
            found[spec.storage if spec.storage >= 0 else (layer.name, name)] = spec
    return list(found.values())


def visit_s(prediction: Prediction, loop: Loop) -> float:
    """Seconds of what is done at each batch, in training and evaluation."""
    look_s = _cost_s(prediction, "item", asked=False) if loop.look else 0.0
    return look_s + (_cost_s(prediction, "accuracy", asked=True) if loop.accuracy else 0.0)


def update_s(prediction: Prediction, loop: Loop) -> float:
    """Seconds of what is done at each update: clipping (a call, each parameter's tensor and bytes),
    the scheduler.
    """
    seconds = _cost_s(prediction, "scheduler", asked=True) if loop.scheduler else 0.0
    if loop.clip:
        parameters = parameters_of(prediction)
        call_s, tensor_s, byte_s = (
            _cost_s(prediction, f"clip_{what}", asked=True) for what in ("call", "tensor", "byte")
        )
        seconds += (
            call_s + len(parameters) * tensor_s + sum(spec.nbytes for spec in parameters) * byte_s
        )
    return seconds


def accumulation_s(prediction: Prediction) -> float:
    """Seconds that a backward takes more where gradients are there already: each is added to
    instead of put in place.
    """
    cost_model = cost_model_of(prediction.machine, prediction.threads)
    rate = cost_model.caches.bytes_per_s
    seconds = 0.0
    for spec in parameters_of(prediction):
        priced = cost_model.kernel_s(Op("aten.add_.Tensor", (spec, spec)))
        # two gradients read, one written
        seconds += (
            priced[0]
            if priced is not None
            else 3 * spec.nbytes / rate[prediction.machine.level_of(3 * spec.nbytes)]
            + cost_model.cost_s("native_call")
        )
    return prediction.machine.contention_slowdown(prediction.threads) * seconds


def pause_s(prediction: Prediction, loop: Loop) -> float:
    """Seconds between two epochs: a checkpoint of the parameters."""
    if not loop.checkpoint:
        return 0.0
    parameters = parameters_of(prediction)
    call_s, tensor_s, byte_s = (
        _cost_s(prediction, f"save_{what}", asked=True) for what in ("call", "tensor", "byte")
    )
    return call_s + len(parameters) * tensor_s + sum(spec.nbytes for spec in parameters) * byte_s


def first_step_s(prediction: Prediction) -> float | None:
    """Seconds that the first step of a process takes more than the next ones; None where the
    machine file does not say.

    That is what every first step takes (code read in, the engine started), the making of a kernel
    for each convolution of another shape, and the first touch of all the memory that the step
    holds.
    """
    machine, threads = prediction.machine, prediction.threads
    if not any(cost.name == "loop/first_step" for cost in machine.costs):
        return None
    n_convolutions = len(
        {op.signature for op in prediction.trace.ops if op.packet == "aten.convolution"}
    )
    own_bytes = sum(footprint.n_bytes for footprint in machine.footprints)
    touched_bytes = max(0, (prediction.step.peak_memory_bytes or 0) - own_bytes)
    fault_s = machine.contention_slowdown(threads) * machine.cost_s("page_fault", threads, 0.0)
    made_s = n_convolutions * _cost_s(prediction, "first_convolution", asked=True)
    return (
        _cost_s(prediction, "first_step", asked=True)
        + made_s
        + touched_bytes / _PAGE_BYTES * fault_s
    )
