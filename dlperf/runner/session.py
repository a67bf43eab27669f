"""One watched run: the watcher is set when torch has been imported, not before: what the script
sets up for it keeps its effect.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import statistics
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dlperf.runner.core_speed import SpeedSamples, UsualSpeed, usual_speed
from dlperf.runner.rendezvous import Rendezvous

if TYPE_CHECKING:
    from dlperf.core.machine import Machine
    from dlperf.runner.collectives import CollectiveRecorder
    from dlperf.runner.live_eta import LiveEta
    from dlperf.runner.ranks import RankFindings
    from dlperf.runner.watcher import Watcher


class Session:
    """One watched run: sets the watcher when torch has been imported."""

    def __init__(
        self,
        threads: int | None,
        machine: Machine | None,
        n_epochs: int | None,
        exchange: Rendezvous,
    ) -> None:
        self.watcher: Watcher | None = None
        self.live: LiveEta | None = None
        self.recorder: CollectiveRecorder | None = None
        self.error: BaseException | None = None
        self._threads, self._machine, self._n_epochs, self._exchange = (
            threads,
            machine,
            n_epochs,
            exchange,
        )
        self._speed_samples = SpeedSamples()
        self._speed_samples.take()
        self._finder: _AfterTorch | None = None

    def watch_when_torch_comes(self) -> None:
        """Now, if it is there already."""
        if "torch" in sys.modules:
            self._begin()
        else:
            self._finder = _AfterTorch(self._begin)
            sys.meta_path.insert(0, self._finder)

    def _begin(self) -> None:
        try:
            import torch

            from dlperf.runner.watched_training import WatchPlan
            from dlperf.runner.watcher import Watcher

            if self._threads is not None:
                torch.set_num_threads(self._threads)
            self._speed_samples.take()
            world = self._exchange.world
            watcher = Watcher(
                speed_samples=self._speed_samples,
                plan=WatchPlan(layered=0) if world.rank else WatchPlan(),
            )
            if not world.rank:
                self._show_forecasts_of(watcher)
            watcher.install()
            self.watcher = watcher
            if world.n_ranks > 1:
                self._record_calls(watcher)
        except Exception as error:  # the script goes on without us
            self.error = error

    def _show_forecasts_of(self, watcher: Watcher) -> None:
        import torch

        from dlperf.runner.live_eta import LiveEta, StderrLine

        usual = _usual_speed(self._machine, torch.get_num_threads())
        live = LiveEta(watcher.epochs, watcher.clock, StderrLine(), self._n_epochs)
        watcher.on_watched = lambda watcher: _forecast_from(live, watcher, usual)
        self.live = live

    def _record_calls(self, watcher: Watcher) -> None:
        """Torch may be of another build than ours: then its calls are not recorded, and everything
        else goes on.
        """
        from dlperf.runner.collectives import CollectiveRecorder

        self.recorder = CollectiveRecorder(watcher.clock, self._exchange.meet)
        try:
            self.recorder.install()
        except Exception as error:
            self.recorder.fail(error)
        watcher.follow(self.recorder)

    def findings(self, status: int) -> RankFindings:
        """What this rank found, once its script has ended, which imported torch."""
        import torch

        from dlperf.runner.findings import why_no_training
        from dlperf.runner.ranks import RankFindings

        error = self.error or (self.watcher.error if self.watcher is not None else None)
        reason = "" if error is None else f"watching failed: {type(error).__name__}: {error}"
        if not reason and self.watcher is not None and self.watcher.watched is None:
            reason = why_no_training(self.watcher)
        recorder = self.recorder if error is None else None  # which has not seen the run to its end
        return RankFindings.of(
            self._exchange.world.rank, status, reason, recorder, torch.get_num_threads()
        )

    def end(self) -> None:
        """Take out whatever is still set."""
        if self.live is not None:
            self.live.finish()
        if self._finder is not None and self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        if self.watcher is not None:
            self.watcher.remove()


def _usual_speed(machine: Machine | None, threads: int) -> UsualSpeed:
    """The pace as the machine file has it; unknown where that is of another machine or torch."""
    from dlperf.core import host
    from dlperf.report.machine_check import find_mismatches

    return (
        UsualSpeed()
        if machine is None or find_mismatches(machine, host.this_cpu(), host.versions())
        else usual_speed(machine, threads)
    )


def _forecast_from(live: LiveEta, watcher: Watcher, usual: UsualSpeed) -> None:
    """The watching is over: what it saw goes to the forecast."""
    from dlperf.runner.step_rate import ObservedStep

    watched = watcher.watched
    if watched is None or not watched.plain:
        return
    seen = [
        ObservedStep(
            step.interval_s,
            step.loading_s,
            step.loaded.n_made,
            step.loaded.is_idle,
            step.loaded.n_workers,
            step.processor_s / step.interval_s if step.interval_s else 1.0,
            probed,
        )
        for steps, probed in ((watched.plain, False), (watched.probed, True))
        for step in steps
        if step.interval_s is not None
    ]
    looks = [s.speed_sample_s for s in watched.plain if s.speed_sample_s is not None]
    passes = round(statistics.median(step.n_passes for step in watched.plain))
    live.begin(
        seen, passes, watched.root_type, lambda: watcher.speed_samples.core_state(looks, usual)
    )


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Calls back once torch has been imported; the import itself is left as it is."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        """torch's own spec, its loader followed by the call back; None for everything else."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Followed(spec.loader, self._then)
        return spec


class _Followed(importlib.abc.Loader):
    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: Any) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then()
