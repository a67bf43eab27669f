"""The length of a run inside the Trainers of Lightning and transformers, by their own numbers.

A Trainer is found in the frames of its running loop; its library is not imported for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from dlperf.runner.frame_names import Names


@dataclass(frozen=True)
class TrainerLength:
    """What a Trainer tells while a step ends: its epochs, or the steps that are left.

    `n_epochs` (with `n_begun`: those begun so far) is None where the number of steps is limited,
    and `steps_left` where it is not. Both are None where nothing limits the run.
    """

    n_epochs: int | None = None
    n_begun: int | None = None
    steps_left: float | None = None


def trainer_length(
    frame: FrameType | None, n_steps: int, passes: int, updates: int
) -> TrainerLength | None:
    """The length that the innermost Trainer around `frame` tells; None without a Trainer.

    `n_steps`: the steps so far, this one included. A step has `passes` batches and `updates` steps
    of optimizers.
    """
    while frame is not None:
        length = _LENGTHS.get(frame.f_globals.get("__name__", ""))
        code = frame.f_code
        if length is not None and code.co_varnames[:1] == ("self",) and code.co_argcount:
            names = Names(frame, asks_for_locals="locals" in code.co_names)
            try:
                trainer = names.get("self")
                if isinstance(trainer, frame.f_globals.get("Trainer", ())):
                    return length(trainer, n_steps, passes, updates)
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
        return TrainerLength(steps_left=state.max_steps - state.global_step - 1)
    return TrainerLength(int(args.num_train_epochs))


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


_LENGTHS: dict[str, Callable[[Any, int, int, int], TrainerLength]] = {
    "transformers.trainer": _transformers,
    "lightning.pytorch.trainer.trainer": _lightning,
    "pytorch_lightning.trainer.trainer": _lightning,
}
"""By the module that defines the Trainer's loop."""
