"""The length of a run inside the Trainers of Lightning and transformers, by their own numbers.

A Trainer is found in the frames of its running loop; its library is not imported for that.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from dlperf.runner.evaluation import Evaluation
from dlperf.runner.frame_names import Names


@dataclass(frozen=True)
class TrainerLength:
    """What a Trainer tells while a step ends: its epochs, or the steps that are left.

    `n_epochs` (with `n_begun`: those begun so far) is None where the number of steps is limited,
    and `steps_left` where it is not. Both are None where nothing limits the run. `evaluation`: the
    Trainer's own.
    """

    n_epochs: int | None = None
    n_begun: int | None = None
    steps_left: float | None = None
    evaluation: Evaluation | None = None


def trainer_length(
    frame: FrameType | None, n_steps: int, passes: int, updates: int
) -> TrainerLength | None:
    """The length that the innermost Trainer around `frame` tells; None without a Trainer.

    `n_steps`: the steps so far, this one included. A step has `passes` batches and `updates` steps
    of optimizers.
    """
    while frame is not None:
        known = _TRAINERS.get(frame.f_globals.get("__name__", ""))
        code = frame.f_code
        if known is not None and code.co_varnames[:1] == ("self",) and code.co_argcount:
            names = Names(frame, asks_for_locals="locals" in code.co_names)
            try:
                trainer = names.get("self")
                if isinstance(trainer, frame.f_globals.get("Trainer", ())):
                    found = known[0](trainer, n_steps, passes, updates)
                    with contextlib.suppress(Exception):  # another release
                        found = replace(found, evaluation=known[1](trainer, passes))
                    return found
            except Exception:  # another release: as without a Trainer
                return None
            finally:
                trainer = None
                names.forget()
        frame = frame.f_back
    return None


def _transformers(trainer: Any, n_steps: int, _passes: int, _updates: int) -> TrainerLength:
    """The epochs, or the steps where these are limited, or some were made before.

    The Trainer counts a step after it has ended.
    """
    args, state = trainer.args, trainer.state
    if args.max_steps > 0 or state.global_step >= n_steps or args.num_train_epochs % 1:
        steps_left = state.max_steps - state.global_step - 1
        return TrainerLength(steps_left=steps_left)
    return TrainerLength(int(args.num_train_epochs))


def _transformers_evaluation(trainer: Any, _passes: int) -> Evaluation | None:
    args, data = trainer.args, getattr(trainer, "eval_dataset", None)
    strategy = getattr(args, "eval_strategy", None) or getattr(args, "evaluation_strategy", "no")
    when = getattr(strategy, "value", strategy)
    if when == "no" or data is None:
        return None
    try:
        n_samples = sum(map(len, data.values())) if isinstance(data, dict) else len(data)
        batches = n_samples / args.train_batch_size
    except Exception:  # a stream
        batches = None
    return Evaluation(batches, every_steps=trainer.state.eval_steps if when == "steps" else None)


def _lightning(trainer: Any, _n_steps: int, passes: int, updates: int) -> TrainerLength:
    """The epochs, or the steps where these are limited.

    Lightning counts each step of an optimizer, after it has ended. Its limit holds between batches.
    """
    epochs, batches = trainer.max_epochs or -1, trainer.num_training_batches
    has_limit = trainer.max_steps != -1 or trainer.limit_train_batches != 1.0
    if epochs > 0 and not has_limit:
        return TrainerLength(epochs, trainer.current_epoch + 1)
    ends = []
    if trainer.max_steps != -1:
        ends.append(math.ceil((trainer.max_steps - trainer.global_step - 1) / updates))
    if epochs > 0 and math.isfinite(batches):
        if trainer.lightning_module.automatic_optimization:
            per_epoch = math.ceil(batches / trainer.accumulate_grad_batches)
            ends.append(per_epoch * epochs - trainer.global_step - 1)
        else:
            n_left = batches * epochs - trainer.fit_loop.total_batch_idx - 1
            ends.append(n_left / passes)
    return TrainerLength(steps_left=min(ends, default=None))


def _lightning_evaluation(trainer: Any, passes: int) -> Evaluation | None:
    """The validation: after each epoch (or some), or after a number of batches."""
    if not trainer.enable_validation or not sum(trainer.num_val_batches):
        return None
    loaders = trainer.val_dataloaders
    own, training = (
        getattr(one[0] if isinstance(one, (list, tuple)) else one, "batch_size", None)
        for one in (loaders, trainer.train_dataloader)
    )
    ratio = own / training if isinstance(own, int) and isinstance(training, int) else 1.0
    batches = sum(trainer.num_val_batches) * ratio
    every, epochs = trainer.val_check_batch, trainer.check_val_every_n_epoch
    found = Evaluation(batches if math.isfinite(batches) else None)
    if epochs is None or every < trainer.num_training_batches:
        return replace(found, every_steps=every / passes)
    return replace(found, every_epochs=epochs)


_LIGHTNING = (_lightning, _lightning_evaluation)
_TRAINERS: dict[str, tuple[Callable[..., TrainerLength], Callable[..., Evaluation | None]]] = {
    "transformers.trainer": (_transformers, _transformers_evaluation),
    "lightning.pytorch.trainer.trainer": _LIGHTNING,
    "pytorch_lightning.trainer.trainer": _LIGHTNING,
}
"""Length and evaluation, by the module that defines the Trainer's loop."""
