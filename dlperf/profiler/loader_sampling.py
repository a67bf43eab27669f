"""Samples of a user's own data loader: the cost of dataset and collation, in this process."""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from dlperf.core.clock import Clock, quantile, undisturbed
from dlperf.core.errors import DlperfError, WorkFailed, one_line
from dlperf.core.loader_sample import SampledLoader
from dlperf.recorder.targets import calling, find_callable
from dlperf.recorder.tensors import tensors_of

_WARM_UP, _MOST_BATCHES = 2, 40
LONGEST_S = 5.0
LONGEST_BATCH_S = 30.0
_END = object()
_LEAST_WAITING_FRAC = 0.05  # less is the resolution of the clocks


def load(spec: str, batch_size: int, n_workers: int, clock: Clock = Clock()) -> SampledLoader:
    """The sample of the loader that :func:`make_loader` makes."""
    return sample_loader(
        make_loader(spec, batch_size, n_workers), batch_size, name=spec, clock=clock
    )


def make_loader(spec: str, batch_size: int, n_workers: int) -> DataLoader[Any]:
    """The loader that ``FILE.py:CALLABLE`` returns for (batch_size, num_workers).

    A dataset becomes a shuffled loader. Raises DlperfError where the function cannot be called or
    returns neither a DataLoader nor a Dataset, WorkFailed where it raises.
    """
    try:
        make = find_callable(spec, (batch_size, n_workers), "CALLABLE(batch_size, num_workers)")
    except DlperfError as error:
        raise DlperfError(str(error).replace(f"target {spec}", f"loader {spec}", 1)) from error
    with calling(f"loader {spec}:"):
        made = make(batch_size, n_workers)
    if isinstance(made, Dataset):
        made = DataLoader(
            made, batch_size, shuffle=not isinstance(made, IterableDataset), num_workers=n_workers
        )
    if not isinstance(made, DataLoader):
        raise DlperfError(
            f"loader {spec}: returned {type(made).__name__}; expected a torch.utils.data.DataLoader"
            " or Dataset"
        )
    return made


def sample_loader(
    loader: DataLoader[Any],
    batch_size: int,
    *,
    name: str = "loader",
    clock: Clock = Clock(),
    longest_s: float = LONGEST_S,
    processor_s: Callable[[], float] = time.process_time,
) -> SampledLoader:
    """Mean time of a loader's batches in this process, whatever its number of workers.

    Two batches warm up; up to 40 are timed, for at most `longest_s`. Raises WorkFailed where the
    loader raises, is empty, or a batch takes more than half a minute; DlperfError for batches of
    another size than `batch_size`.
    """
    pairs: list[tuple[float, bool]] = []
    waited: list[float] = []
    first = batch = None
    try:
        with contextlib.redirect_stdout(sys.stderr), _limit(LONGEST_BATCH_S, name) as renew:
            iterator = iter(_in_process(loader))
            begun = clock.now()
            while len(pairs) < _WARM_UP + _MOST_BATCHES and (
                len(pairs) <= _WARM_UP or clock.now() - begun < longest_s
            ):
                renew()
                before, used, begin = clock.switches(), processor_s(), clock.now()
                batch = next(iterator, _END)
                if batch is _END:
                    break
                end = clock.now()
                waited.append(1.0 - (processor_s() - used) / (end - begin) if end > begin else 0.0)
                pairs.append((end - begin, clock.switches() != before))
                first = batch if first is None else first
                if pairs[-1][1] and clock.back_off is not None:
                    clock.back_off()
    except WorkFailed:
        raise
    except Exception as error:
        raise WorkFailed(f"loader {name}: raises {one_line(error)}") from error
    if first is None:
        raise WorkFailed(f"loader {name}: is empty; nothing can be trained with it")
    # the part of a batch's time without need of a processor; processes that take it away raise it
    waiting_frac = min(1.0, quantile(waited[_WARM_UP:] or waited, 0.25))
    samples = undisturbed(pairs[_WARM_UP:] or pairs, least_frac=0.1)
    tensors = list(tensors_of(first))
    n_rows = next((int(tensor.shape[0]) for tensor in tensors if tensor.dim() > 0), batch_size)
    n_batches, n_samples = _length(loader), _length(loader.dataset)
    if n_rows != batch_size and not (n_samples is not None and n_samples < batch_size):
        raise DlperfError(
            f"loader {name}: gives batches of {n_rows}, the target has {batch_size}; give it as"
            " --batch-size"
        )
    ended = f", and ended after {len(pairs)} batches" if batch is _END else ""
    notes = (
        ()
        if n_batches is not None
        else (f"loader {name}: has no length{ended}; the samples that were asked for count",)
    )
    return SampledLoader(
        name,
        n_rows,
        samples.mean,
        tuple(tensor.numel() * tensor.element_size() for tensor in tensors),
        len(samples.values),
        n_batches,
        n_samples,
        bool(loader.drop_last),
        bool(loader.persistent_workers),
        notes,
        waiting_frac if waiting_frac > _LEAST_WAITING_FRAC else 0.0,
    )


def _in_process(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The same batches, fetched by this process."""
    if loader.num_workers == 0:
        return loader
    common: dict[str, Any] = {"collate_fn": loader.collate_fn, "generator": loader.generator}
    if loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset):
        return DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, **common)
    if not isinstance(loader.dataset, IterableDataset):
        common["sampler"] = loader.sampler
    if loader.batch_size is not None:
        common["drop_last"] = loader.drop_last
    return DataLoader(loader.dataset, batch_size=loader.batch_size, **common)


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError, AttributeError):
        return None


@contextlib.contextmanager
def _limit(seconds: float, name: str) -> Iterator[Callable[[], object]]:
    """Raises WorkFailed `seconds` after the last call of the function that it yields.

    No effect where there are no alarms (another thread, another system).
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not (is_main and hasattr(signal, "setitimer")):
        yield lambda: None
        return

    def give_up(_number: int, _frame: FrameType | None) -> None:
        raise WorkFailed(
            f"loader {name}: took more than {math.ceil(seconds)} s over one batch; it was given up"
        )

    before = signal.signal(signal.SIGALRM, give_up)
    try:
        yield functools.partial(signal.setitimer, signal.ITIMER_REAL, seconds)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
