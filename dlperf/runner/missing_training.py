"""Why a watched program has no training to report on, in one line."""

from __future__ import annotations

from dlperf.runner.watcher import Watcher

_IN_PROCESSES = "; if it trains in processes of its own, they are not watched"


def why_no_training(watcher: Watcher) -> str:
    """The reason, in one line, why a watcher has no findings."""
    if watcher.reason is not None:
        return f"no training to watch: {watcher.reason}"
    n, n_elsewhere = watcher.epochs.n_steps, watcher.epochs.n_in_other_threads
    seen = steps_seen(watcher) if n < watcher.plan.n_least else _counted(n)
    if watcher.watched is not None:
        return f"the training of {watcher.watched.root_type} ended too early: {seen}"
    if n < n_elsewhere:
        return (
            "no training was found: it trains in another thread, which is not watched"
            f" ({_counted(n_elsewhere)} there)"
        )
    return (
        "no training was found: no module called in training mode was stepped by optimizers in"
        f" a period, or ran backward eight times without any ({seen})"
        f"{_IN_PROCESSES if not n else ''}"
    )


def steps_seen(watcher: Watcher) -> str:
    """The number of optimizer steps seen, and how many are needed."""
    seen, plan = _counted(watcher.epochs.n_steps), watcher.plan
    return f"{seen}, at least {plan.n_least} are needed, {plan.n_steps} with the times of layers"


def _counted(n: int) -> str:
    return f"{n} optimizer step{'s were' if n != 1 else ' was'} seen"
