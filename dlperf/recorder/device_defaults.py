"""What PyTorch chooses on a device where a program leaves the choice to it."""

from __future__ import annotations

import torch

from dlperf.recorder.attribution import optimizers_in
from dlperf.recorder.targets import Built


def with_device_defaults(built: Built) -> Built:
    """The step with ``foreach=True`` where an optimizer chooses between its loops itself.

    On a device torch.optim runs each operation once over all parameters, unless `foreach` or
    `fused` is given, the step is differentiable, or the learning rate is a tensor
    (torch/optim/optimizer.py, _default_to_fused_or_foreach).
    """
    for optimizer in optimizers_in(built.optimizer):
        for group in optimizer.param_groups:
            chooses = "foreach" in group and group["foreach"] is None and not group.get("fused")
            fixed = group.get("differentiable") or isinstance(group.get("lr"), torch.Tensor)
            if chooses and not fixed:
                group["foreach"] = True
    return built
