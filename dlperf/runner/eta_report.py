"""The live ETA of a run beside the times that were measured, as sentences and JSON data."""

from __future__ import annotations

from typing import Any

from dlperf.core.units import format_seconds
from dlperf.runner.eta import describe, format_interval
from dlperf.runner.live_eta import LiveEta


def eta_to_json(live: LiveEta) -> dict[str, Any]:
    """The forecast and the measured times; empty where there was no forecast."""
    first, half = live.first, live.half
    if first is None:
        return {}
    return {
        "after_steps": first.after_steps,
        "epoch_s": first.epoch_s,
        "low_s": first.low_s,
        "high_s": first.high_s,
        "step_s": first.step_s,
        "by_loader": first.by_loader,
        "core_slowdown": live.core_state.slowdown,
        "usual_core_slowdown": live.core_state.usual,
        "epoch_measured_s": live.epoch.measured_s,
        "error_frac": live.epoch.error_frac,
        "n_epochs": live.n_epochs,
        "n_epochs_from_user": live.is_users_number,
        "half": None if half is None else half.to_json() | live.epoch_at_half.to_json(),
        "training": live.training.to_json(),
        "run": live.run.to_json(),
        "history": [[eta.after_steps, eta.epoch_s, eta.left_s] for eta in live.history],
    }


def eta_lines(live: LiveEta) -> list[str]:
    """The forecasts beside the measured times, in sentences."""
    first, training = live.first, live.training
    if first is None:
        return []
    found = [f"live forecast after {first.after_steps} steps: "]
    if first.epoch_s is None and first.steps is None:
        found[0] += describe(first, live.is_epoch)
    else:
        interval = format_interval(first.epoch_s, first.low_s, first.high_s)
        found[0] += f"{'epoch' if live.is_epoch else 'run'} {interval}; {live.epoch}"
    if live.half is not None:
        found.append(f"half way: {format_seconds(live.half.epoch_s)}; {live.epoch_at_half}")
    if training.predicted_s is not None:
        found.append(
            f"all {first.n_epochs} epochs, without what lies between them:"
            f" {format_seconds(training.predicted_s)}; {training}"
        )
    if live.run.predicted_s is not None:
        found.append(
            "whole run, once the pause after an epoch was seen:"
            f" {format_seconds(live.run.predicted_s)}; {live.run}"
        )
    return found
