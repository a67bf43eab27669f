"""The live ETA of a run beside the times that were measured, as sentences and JSON data."""

from __future__ import annotations

import math
from typing import Any

from dlperf.core.units import format_seconds
from dlperf.runner.eta import EtaResult, describe, format_interval
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


def _what(live: LiveEta) -> str:
    return "epoch" if live.is_epoch else "run"


def _outcome(live: LiveEta, result: EtaResult) -> str:
    """The measured time; of a run that ended before its forecast number of steps, its steps."""
    steps = None if live.first is None else live.first.steps
    is_over = not live.is_epoch and live.ended is not None and result.measured_s is None
    if is_over and steps is not None and live.n_steps < steps:
        return f"the run ended after {live.n_steps} of {math.ceil(steps)} steps"
    return str(result)


def eta_lines(live: LiveEta) -> list[str]:
    """The forecasts beside the measured times, in sentences."""
    first, training = live.first, live.training
    if first is None:
        return []
    found, what = [f"live forecast after {first.after_steps} steps: "], _what(live)
    if first.epoch_s is None and first.steps is None:
        found[0] = f"live forecast, not of the whole {what}: {describe(first, live.is_epoch)}"
    else:
        interval = format_interval(first.epoch_s, first.low_s, first.high_s)
        found[0] += f"{what} {interval}; {_outcome(live, live.epoch)}"
    if live.half is not None:
        half = f"live forecast half way through the {what}: {format_seconds(live.half.epoch_s)}"
        found.append(f"{half}; {_outcome(live, live.epoch_at_half)}")
    if training.predicted_s is not None:
        found.append(
            f"all {first.n_epochs} epochs, without what lies between them:"
            f" {format_seconds(training.predicted_s)}; {training}"
        )
    if live.run.predicted_s is not None:
        found.append(
            "whole run with the pauses between epochs, forecast after the first of them:"
            f" {format_seconds(live.run.predicted_s)}; {live.run}"
        )
    return found
