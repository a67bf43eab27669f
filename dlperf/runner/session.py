"""One watched run: hooks are set after the script has imported torch, not before.

So what the script sets up for torch (threads, environment) keeps its effect.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import statistics
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dlperf.core.errors import one_line
from dlperf.runner.core_speed import SpeedSamples, own_usual_speed
from dlperf.runner.rendezvous import Rendezvous
from dlperf.runner.state_readings import StateReadings

if TYPE_CHECKING:
    from dlperf.core.machine import Machine
    from dlperf.runner.collectives import CollectiveRecorder
    from dlperf.runner.live_eta import LiveEta
    from dlperf.runner.ranks import RankFindings
    from dlperf.runner.watcher import Watcher


class Session:
    """One watched run. Ranks other than 0 time no layers and have no ETA.

    `length`: the user's numbers of epochs and steps. `shows_eta`: on stderr. `on_watched` is called
    after the watched steps, before the ETA begins; it may not raise.
    """

    def __init__(
        self,
        threads: int | None,
        machine: Machine | None,
        length: tuple[int | None, int | None],
        rendezvous: Rendezvous,
        shows_eta: bool = True,
        on_watched: Callable[[], None] | None = None,
    ) -> None:
        self.watcher: Watcher | None = None
        self.live: LiveEta | None = None
        self.recorder: CollectiveRecorder | None = None
        self.error: BaseException | None = None
        self._threads, self._machine, self._length = threads, machine, length
        self._rendezvous = rendezvous
        self._shows_eta, self._on_watched = shows_eta, on_watched
        self._speed_samples = SpeedSamples()
        self._speed_samples.take()
        self._state_readings = StateReadings(machine)
        self._finder: _AfterTorch | None = None

    def watch_after_torch(self) -> None:
        """Watch once torch is imported, or now where it is."""
        if "torch" in sys.modules:
            self._begin()
        else:
            self._finder = _AfterTorch(self._begin)
            sys.meta_path.insert(0, self._finder)

    def _begin(self) -> None:
        try:
            import torch

            from dlperf.runner.live_eta import LiveEta
            from dlperf.runner.stderr_line import StderrLine
            from dlperf.runner.watched_training import WatchPlan
            from dlperf.runner.watcher import Watcher

            if self._threads is not None:
                torch.set_num_threads(self._threads)
            self._speed_samples.take()
            world = self._rendezvous.world
            plan = WatchPlan(layered=0) if world.rank else WatchPlan()
            watcher = Watcher(
                speed_samples=self._speed_samples, plan=plan, state_readings=self._state_readings
            )
            if not world.rank:
                line = StderrLine() if self._shows_eta else None
                self.live = LiveEta(watcher.epochs, watcher.clock, line, *self._length)
                watcher.on_watched = self._begin_eta
            self.watcher = watcher
            watcher.install()
            if world.n_ranks > 1:
                from dlperf.runner.collectives import CollectiveRecorder

                self.recorder = CollectiveRecorder(watcher.clock, self._rendezvous.meet)
                try:
                    self.recorder.install()
                except Exception as error:  # another build of torch: no calls are recorded
                    self.recorder.fail(error)
                watcher.follow(self.recorder)
        except Exception as error:  # the script goes on without us
            self.error = error

    def _begin_eta(self, watcher: Watcher) -> None:
        """The watching is over: its steps go to the ETA."""
        from dlperf.runner.step_rate import ObservedStep

        watched = watcher.watched
        if self.live is None or watched is None or not watched.plain:
            return
        if self._on_watched is not None:
            self._on_watched()
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
        samples = watched.speed_samples_s
        usual = own_usual_speed(self._machine, watched.threads)
        forward_s = statistics.median(step.forward_s for step in watched.plain)
        loading_s = statistics.median(step.loading_s for step in watched.plain)
        seen_s = (forward_s + loading_s) / watched.n_batches if forward_s else 0.0
        self.live.begin(
            seen,
            watched.n_batches,
            watched.root_type,
            lambda: self._speed_samples.core_state(samples, usual),
            seen_s,
        )

    @property
    def failure(self) -> BaseException | None:
        """The error of dlperf's own that ended the watching."""
        return self.error or (None if self.watcher is None else self.watcher.error)

    def rank_findings(self, status: int) -> RankFindings:
        """This rank's findings, once its script has ended, which imported torch."""
        import torch

        from dlperf.runner.missing_training import why_no_training
        from dlperf.runner.ranks import RankFindings

        failure, reason = self.failure, ""
        if failure is not None:
            reason = f"watching failed: {one_line(failure)}"
        elif self.watcher is not None and self.watcher.watched is None:
            reason = why_no_training(self.watcher)
        return RankFindings.of(
            self._rendezvous.world.rank,
            status,
            reason,
            self.recorder if failure is None else None,  # else it has not seen the whole run
            torch.get_num_threads(),
        )

    def end(self) -> None:
        """Remove whatever is still set."""
        if self.live is not None:
            self.live.finish()
        if self._finder is not None and self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        if self.watcher is not None:
            self.watcher.remove()


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Calls back once torch is imported; the import itself does not change."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        """torch's own spec, with the callback after its loader; None for other modules."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderWithCallback(spec.loader, self._then)
        return spec


class _LoaderWithCallback(importlib.abc.Loader):
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
