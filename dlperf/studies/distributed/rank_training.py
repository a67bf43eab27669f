"""A data-parallel training of a target as its user would write it, to be recorded:
``dlperf run --communication FILE -m dlperf.studies.distributed.rank_training ORDER``.

It is started once for each rank, as :mod:`dlperf.studies.distributed.rank_process` is, and knows
nothing of being watched.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

from dlperf.recorder.targets import resolve
from dlperf.studies.distributed.rank_process import meeting


def main() -> None:
    """Train the ordered number of steps. Raises what the training raises."""
    order = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with meeting(order):
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


if __name__ == "__main__":
    main()
