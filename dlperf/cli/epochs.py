"""The epoch of ``predict``: what else it needs predicted and sampled, as the options say."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import TYPE_CHECKING

from dlperf.cli.inputs import is_trace, resolve
from dlperf.core.streams import warn

if TYPE_CHECKING:
    from dlperf.core.loader_sample import SampledLoader
    from dlperf.forecast.epoch import Epoch
    from dlperf.forecast.prediction import Prediction


def forecast_epoch(args: Namespace, prediction: Prediction) -> Epoch:
    """The forecast that the options ask for.

    The pass of an evaluation and a smaller last batch are steps of their own, recorded where there
    is code to record.
    """
    from dlperf.forecast.epoch import last_batch_size
    from dlperf.predictors.registry import evaluates_by_forward

    recorded = prediction.trace
    loader = _sampled(args, prediction) if args.loader else None
    drop_last = args.drop_last or (loader is not None and loader.drop_last)
    evaluation = last = None
    if not is_trace(args.target) and not evaluates_by_forward(args.predictor):
        if (args.val_samples or args.test_samples) and not recorded.inference:
            evaluation = _predicted(args, prediction, None, inference=True)
        share = math.ceil(args.samples / (args.workers or 1))  # the largest that a worker has
        size = last_batch_size(share, recorded.batch_size, drop_last)
        if size is not None:
            last = _predicted(args, prediction, size, inference=recorded.inference)
    epoch = prediction.epoch(
        args.samples,
        args.epochs or 1,
        args.val_samples or 0,
        args.test_samples or 0,
        evaluation,
        last,
        loader,
        accumulate=args.accumulate or 1,
        drop_last=drop_last,
        loader_workers=args.loader_workers,
        persistent_workers=args.persistent_workers
        or (loader is not None and loader.persistent_workers),
        clip=args.clip,
        scheduler=args.scheduler,
        checkpoint=args.checkpoint,
        accuracy=args.accuracy,
        workers=args.workers,
    )
    if loader is not None and loader.n_samples is not None and loader.n_samples != args.samples:
        warn(
            f"--loader {args.loader}: has {loader.n_samples:,} samples; the {args.samples:,} of"
            " --samples count"
        )
    for note in epoch.notes:
        warn(note)
    return epoch


def _predicted(
    args: Namespace, prediction: Prediction, batch_size: int | None, inference: bool
) -> Prediction:
    from dlperf.forecast.prediction import predict
    from dlperf.recorder import recording

    trace = recording.record_target(resolve(args, args.target, batch_size, inference=inference))
    return predict(
        trace, prediction.machine, prediction.threads, prediction.predictor, prediction.malloc
    )


def _sampled(args: Namespace, prediction: Prediction) -> SampledLoader:
    from dlperf.cli.loader_timing import sample_apart

    return sample_apart(
        args.loader,
        prediction.trace.batch_size,
        args.loader_workers or 0,
        prediction.threads,
        prediction.machine,
    )
