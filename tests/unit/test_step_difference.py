from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dlperf.core.errors import DlperfError
from dlperf.report.step_difference import compare_steps
from dlperf.report.step_times import LayerTimes, StepTimes, steps_of_file

Layers = Sequence[tuple[str, str, float, int]]


def step(*layers: tuple[str, str, float, int], half_s: float | None = 0.0) -> StepTimes:
    """A step of (name, type, forward milliseconds, FLOPs)."""
    own = tuple(
        LayerTimes(name, kind, {"forward": ms / 1e3}, "compute", (flops, flops))
        for name, kind, ms, flops in layers
    )
    total_s = sum(layer.total_s for layer in own)
    ends = (None, None) if half_s is None else (total_s - half_s, total_s + half_s)
    phases: dict[str, float | None] = {"forward": total_s}
    return StepTimes("net", "measured", "net", 8, 1, False, "cpu", phases, total_s, *ends, own)


OLD = (("0", "Linear", 1.0, 100), ("1", "ReLU", 0.1, 10), ("2", "Linear", 2.0, 200))


@pytest.mark.parametrize(
    ("new", "changes"),
    [
        (OLD, {"0": "same", "1": "same", "2": "same"}),
        ((*OLD, ("3", "ReLU", 0.1, 20)), {"0": "same", "1": "same", "2": "same", "3": "added"}),
        (OLD[:2], {"0": "same", "1": "same", "2": "removed"}),
        # A layer put in front shifts the names of the others.
        (
            (("0", "Dropout", 0.3, 7), *((str(int(n) + 1), *rest) for n, *rest in OLD)),
            {"0": "added", "0 -> 1": "renamed", "1 -> 2": "renamed", "2 -> 3": "renamed"},
        ),
        (
            (OLD[0], OLD[1], ("2", "Linear", 3.0, 300)),
            {"0": "same", "1": "same", "2": "changed"},
        ),
        ((OLD[0], ("1", "GELU", 0.2, 12), OLD[2]), {"0": "same", "1": "changed", "2": "same"}),
    ],
)
def test_layers_are_paired(new: Layers, changes: dict[str, str]) -> None:
    (found,) = compare_steps([step(*OLD)], [step(*new)])
    assert {row.layer: row.change for row in found.layers} == changes
    differences_s = sum(row.difference_s for row in found.layers)
    assert differences_s == pytest.approx(found.second.total_s - found.first.total_s)


@pytest.mark.parametrize(("half_s", "exceeds"), [(0.1e-3, True), (1e-3, False), (None, None)])
def test_the_step_is_compared_by_its_intervals(half_s: float | None, exceeds: bool | None) -> None:
    new = (*OLD[:2], ("2", "Linear", 3.0, 300))
    (found,) = compare_steps([step(*OLD, half_s=half_s)], [step(*new, half_s=half_s)])
    assert found.growth_frac == pytest.approx(1.0 / 3.1)
    assert found.exceeds_intervals is exceeds


def test_steps_of_several_targets_are_paired_by_case() -> None:
    first = [replace(step(*OLD), target=name) for name in ("a", "b", "c")]
    second = [replace(step(*OLD), target=name) for name in ("c", "d", "a")]
    pairs = [(one.first.target, one.second.target) for one in compare_steps(first, second)]
    assert pairs == [("c", "c"), ("a", "a")]


def test_what_cannot_be_compared_is_refused() -> None:
    training, inference = step(*OLD), replace(step(*OLD), inference=True)
    with pytest.raises(DlperfError, match="training step, net inference"):
        compare_steps([training], [inference])
    with pytest.raises(DlperfError, match="no step in common"):
        compare_steps([training, training], [replace(training, batch_size=9)])


def test_what_else_differs_is_noted() -> None:
    (found,) = compare_steps([step(*OLD)], [replace(step(*OLD), threads=2, machine="other")])
    assert [note.rpartition(": ")[2] for note in found.notes] == [
        "threads 1, threads 2",
        "cpu, other",
    ]


def test_a_damaged_file_names_its_entry(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('{"schema": "dlperf.prediction", "schema_version": 1, "target": 3}')
    with pytest.raises(DlperfError, match=r"p\.json: .*target"):
        steps_of_file(str(path))
