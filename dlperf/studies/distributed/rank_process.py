"""What one rank of a study measures, with nothing but torch: steps of DistributedDataParallel, or
all-reduces. Nothing here predicts anything.

``python -m dlperf.studies.distributed.rank_process ORDER`` is started once for each rank
(:mod:`dlperf.microbench.hosts`), with RANK and WORLD_SIZE in its environment; ORDER is a JSON file,
and rank 0 writes the answer where it says. The ranks meet through a file, so nothing listens but
gloo, on the interface that GLOO_SOCKET_IFNAME names.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dlperf.core.errors import DlperfError, WorkFailed
from dlperf.recorder.targets import resolve

_WARM_UP_STEPS, _BLOCKS = 4, 3


def _decided(value: int) -> int:
    """Rank 0's number, for all."""
    box = torch.tensor([value])
    dist.broadcast(box, 0)
    return int(box)


def _over_ranks(own: Sequence[float], how: Any) -> list[float]:
    values = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(values, how)
    found: list[float] = values.tolist()
    return found


def time_steps(order: dict[str, Any]) -> dict[str, Any]:
    """Seconds of the slowest rank's step, medians over steps that all ranks begin together:
    ``step_s``, ``compute_s`` of the same step without synchronisation, ``first_step_s`` (one
    all-reduce that nothing overlaps); and ``bucket_bytes``, the buckets that DDP says it has.

    Both kinds of step are taken in blocks in turns, so that a machine whose pace changes changes
    both. The first of a block is not kept: it still broadcasts the buffers, or does not, as the
    step before it. About `seconds` of the order go to each kind, and from `least` to `most` steps.
    """
    built = resolve(order["target"], order["batch_size"]).build()
    loss, optimizer = built.loss, built.optimizer
    assert loss is not None
    assert optimizer is not None
    ddp = DistributedDataParallel(built.model.train())

    def step(synchronise: bool) -> float:
        dist.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        with contextlib.nullcontext() if synchronise else ddp.no_sync():
            output = ddp(**built.inputs) if isinstance(built.inputs, dict) else ddp(*built.inputs)
            loss(output).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return time.perf_counter() - begin

    first_s = _over_ranks([step(True)], dist.ReduceOp.MAX)[0]
    warm_s = statistics.median(
        _over_ranks([step(True) for _ in range(_WARM_UP_STEPS)], dist.ReduceOp.MAX)
    )
    n = -(
        -_decided(max(order["least"], min(order["most"], int(order["seconds"] / warm_s))))
        // _BLOCKS
    )
    own: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(_BLOCKS):
        for synchronise, kept in own.items():
            step(synchronise)
            kept += [step(synchronise) for _ in range(n)]
    steps, alone = (
        sorted(_over_ranks(kept, dist.ReduceOp.MAX)) for kept in (own[True], own[False])
    )
    logged = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    buckets = str(logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or "")
    return {
        "step_s": statistics.median(steps),
        "p10_s": steps[len(steps) // 10],
        "p90_s": steps[9 * len(steps) // 10],
        "compute_s": statistics.median(alone),
        "first_step_s": first_s,
        "n_steps": len(steps),
        "bucket_bytes": [int(size) for size in buckets.replace(",", " ").split()],
    }


def time_all_reduces(order: dict[str, Any]) -> dict[str, Any]:
    """Median seconds of all-reduces of float32 vectors by their bytes, the mean over the ranks,
    which start together; each size in several `passes`, and from `least` to `most` calls in each.
    """
    taken: dict[int, list[float]] = {size: [] for size in order["sizes"]}
    share_s = order["seconds"] / (order["passes"] * max(1, len(taken)))
    for _ in range(order["passes"]):
        for size, kept in taken.items():
            vector = torch.zeros(size // 4)

            def call(vector: torch.Tensor = vector) -> float:
                dist.barrier()
                begin = time.perf_counter()
                dist.all_reduce(vector)
                return time.perf_counter() - begin

            call()
            own = [call()]
            n = _decided(max(order["least"], min(order["most"], int(share_s / own[0]))))
            own += [call() for _ in range(n - 1)]
            kept += _over_ranks([one / dist.get_world_size() for one in own], dist.ReduceOp.SUM)
    return {"all_reduce_s": {str(size): statistics.median(kept) for size, kept in taken.items()}}


KINDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "steps": time_steps,
    "all-reduces": time_all_reduces,
}
"""What an order may ask for."""


@contextlib.contextmanager
def meeting(order: dict[str, Any]) -> Iterator[None]:
    """The ordered settings and the process group of all ranks while the block runs. Raises what
    torch.distributed does when another rank is gone.
    """
    torch.set_num_threads(order["threads"])
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{order['meeting']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=order["limit_s"]),
    )
    yield
    dist.barrier()
    dist.destroy_process_group()


def run_order(order: dict[str, Any]) -> None:
    """Meet the other ranks, measure, and let rank 0 write the answer."""
    with meeting(order):
        answer = KINDS[order["kind"]](order)
        if dist.get_rank() == 0:
            Path(order["answer"]).write_text(json.dumps(answer), encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Exit status 0; 2 where the order or its target is unusable, 1 where the work fails, with one
    line on stderr that gives the reason.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what a target prints
            run_order(json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        unusable = isinstance(error, DlperfError) and not isinstance(error, WorkFailed)
        kind = "" if isinstance(error, DlperfError) else f"{type(error).__name__}: "
        print(f"error: {kind}{' '.join(str(error).split())}", file=sys.stderr)
        return 2 if unusable else 1
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # gloo's threads may outlive their group and would abort an ordinary exit
