"""A process that imports torch and takes first steps with tiny tensors, and prints by how many
bytes each of them made it grow.

Started by :func:`dlperf.microbench.memory.measure_footprints` as ``python -m
dlperf.microbench.first_steps``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Call = Callable[[Tensor], Tensor]


def calls() -> tuple[Call, ...]:
    """Ordinary functions of images, of many kinds, some with the operator that comes before them in
    networks.
    """
    labels = torch.zeros(4, 4, dtype=torch.long)
    return (
        lambda x: F.cross_entropy(x.flatten(2)[..., 0], labels[:, 0]),
        F.relu,
        F.gelu,
        torch.sigmoid,
        torch.tanh,
        F.silu,
        F.leaky_relu,
        lambda x: x.softmax(1),
        lambda x: F.layer_norm(x, (8,)),
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.group_norm(x, 2),
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.adaptive_avg_pool2d(x, 1),
        lambda x: F.dropout(x, 0.5),
        lambda x: torch.cat((x, x), 1),
        lambda x: x.transpose(1, 2).contiguous(),
        lambda x: x.flatten(0, 1) @ x.flatten(0, 1),
        lambda x: x * x.mean((2, 3), keepdim=True),
        lambda x: x.exp() - 1,
        lambda x: F.mse_loss(x, torch.zeros_like(x)),
        lambda x: F.embedding(labels, x.flatten(0, 2)),
        lambda x: x / (x + 1).sqrt(),
        lambda x: x.chunk(2, 1)[0] + 1,
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: torch.where(x > 0, x, -x),
        lambda x: F.interpolate(x, scale_factor=2),
        lambda x: x.clamp(0, 1),
        lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x)),
        lambda x: x.amax(1) + x.log().sum(1),
    )


def _resident_bytes() -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def _forward(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def _train(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def _call_all() -> None:
    images = torch.rand(4, 4, 8, 8) + 0.1
    for call in calls():
        call(images.clone().requires_grad_()).sum().backward()  # type: ignore[no-untyped-call]


def main() -> None:
    """Print bytes: a forward pass, training, a convolution trained, and on average each operator of
    `calls` that ran in none of them.
    """
    torch.set_num_threads(1)
    linear, image = (
        (nn.Linear(64, 64), torch.randn(32, 64)),
        (nn.Conv2d(16, 16, 3, padding=1), torch.randn(4, 16, 8, 8)),
    )
    taken = [_resident_bytes()]
    for run, (model, x) in ((_forward, linear), (_train, linear), (_train, image)):
        run(model, x)
        taken.append(_resident_bytes())
    _call_all()
    taken.append(_resident_bytes())
    from dlperf.microbench.cold_work import Operators  # its imports take memory

    with Operators() as known:
        _train(*linear)
        _train(*image)
    with Operators() as called:
        _call_all()
    *sizes, further = (after - before for before, after in itertools.pairwise(taken))
    print(*sizes, further // len(called.packets.keys() - known.packets.keys()))


if __name__ == "__main__":
    main()
