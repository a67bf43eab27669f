"""A data-parallel training of a target as its user would write it, to be recorded:
``dlperf run --communication FILE -m dlperf.studies.distributed.rank_training ORDER``.

It is started once for each rank, as :mod:`dlperf.studies.distributed.rank_process` is, and knows
nothing of being watched.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dlperf.recorder.targets import resolve


def main() -> None:
    """Train the ordered number of steps. Raises what the training raises."""
    order = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(order["threads"])
    torch.manual_seed(0)
    limit, rank, n_ranks = (
        datetime.timedelta(seconds=order["limit_s"]),
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
    )
    dist.init_process_group(
        "gloo",
        init_method=f"file://{order['meeting']}",
        rank=rank,
        world_size=n_ranks,
        timeout=limit,
    )
    built = resolve(order["target"], order["batch_size"]).build()
    inputs, loss, optimizer = built.inputs, built.loss, built.optimizer
    assert loss is not None
    assert optimizer is not None
    model = DistributedDataParallel(built.model.train())
    for _ in range(order["steps"]):
        optimizer.zero_grad()
        output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
        loss(output).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
