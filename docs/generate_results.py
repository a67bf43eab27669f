"""Results of the pages, made from ``reports/``."""

from __future__ import annotations

import csv
import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from markdown_text import escaped, table

REPORTS = Path(__file__).resolve().parent.parent / "reports"
_LEAST_LAYERS = 20
_PHASE_SHARE_FRAC = 0.01
Row = dict[str, str]


def accuracy() -> str:
    """The present accuracy study: errors by predictor, blind and at the state, what is left of
    them, and errors by study, by kind of operator and layer.
    """
    cases = _rows("accuracy/cases.csv")
    own = [row for row in cases if row["predictor"] == "calibrated"]
    heads = ("predictor", "steps:", "median:", "worst:", "bias:", "layers:", "in interval:", "±:")
    by_predictor = defaultdict(list)
    for row in cases:
        if not row["step_error_frac"]:
            continue  # predicts no whole step
        by_predictor[row["predictor"]].append(row)
    rows = []
    for name, group in by_predictor.items():
        rows.append([f"`{name}`", *_errors(group)])
        if at_state := _at_state(group):
            rows.append([f"`{name}`, at the state", *_errors(at_state)])
    rows.append(["*repeatability*", str(len(own)), _percent(_repeatability(own))] + [""] * 5)
    return "\n\n".join(
        (
            _provenance(own),
            table(heads, rows),
            _residuals(),
            "## Other studies with the same predictor",
            _studies(),
            "## Single operators that no calibration sampled",
            _operators(),
            "## Types of layers",
            _layer_types(),
            "",
        )
    )


def _rows(path: str) -> list[Row]:
    with (REPORTS / path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _values(rows: Iterable[Row], column: str) -> list[float]:
    return [float(row[column]) for row in rows if row[column]]


def _percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{100 * value:{sign}.1f} %"


def _repeatability(rows: Sequence[Row]) -> float:
    return statistics.median(_values(rows, "repeatability_frac"))


def _errors(rows: Sequence[Row]) -> list[str]:
    """Number of steps, median, worst and median signed error, error of layers, intervals."""
    errors = _values(rows, "step_error_frac")
    layers = [_values(rows, f"{phase}_mape_frac") for phase in ("forward", "backward")]
    inside = [row["inside"] == "True" for row in rows if row["inside"]]
    widths = _values(rows, "width_frac")
    sizes = [abs(error) for error in errors]
    return [
        str(len(rows)),
        _percent(statistics.median(sizes) if sizes else None),
        _percent(max(sizes, default=None)),
        _percent(statistics.median(errors) if errors else None, "+"),
        _percent(statistics.fmean(map(statistics.fmean, layers)) if all(layers) else None),
        _percent(statistics.fmean(inside) if inside else None),
        _percent(statistics.median(widths) if widths else None),
    ]


def _machine(row: Row) -> str:
    return row["machine"].replace("(R)", "").removesuffix(" Processor")


def _provenance(rows: Sequence[Row]) -> str:
    row = rows[0]
    return (
        f"Measured on {_machine(row)}, {row['created'][:10]}, with "
        f"{', '.join(row['versions'].split('; '))}."
    )


_NO_RESIDUALS = (
    "This study does not contain what is left of the error at the state; a new one of"
    " `dlperf validate` does."
)
_AT_STATE = "at_state_"
_N_RESIDUALS = 15


def _at_state(rows: Iterable[Row]) -> list[Row]:
    """The cases that were also predicted at the state, with the errors of those predictions."""
    return [
        row | {key.removeprefix(_AT_STATE): row[key] for key in row if key.startswith(_AT_STATE)}
        for row in rows
        if row.get(f"{_AT_STATE}predicted_s")
    ]


def _residuals() -> str:
    """The operators with the largest parts of the error that is left at the state; of an older
    study a sentence.
    """
    if not (REPORTS / "accuracy/residuals.csv").exists():
        return _NO_RESIDUALS
    rows = [
        [
            *(escaped(row[name]) or "-" for name in ("operator", "phase", "bound")),
            row["n_layers"],
            _percent(float(row["measured_share_frac"])),
            _percent(float(row["error_frac"]) if row["error_frac"] else None, "+"),
            _percent(float(row["residual_share_frac"])),
        ]
        for row in _rows("accuracy/residuals.csv")[:_N_RESIDUALS]
    ]
    heads = ("operator", "phase", "bound", "layers:", "time:", "error:", "residual:")
    return "## What is left of the error at the state\n\n" + table(heads, rows)


def _studies() -> str:
    """One line for each study below reports/accuracy."""
    rows = []
    for path in sorted((REPORTS / "accuracy").glob("*/cases.csv")):
        found: dict[str, list[Row]] = defaultdict(list)
        for row in _rows(str(path.relative_to(REPORTS))):
            if row["predictor"].startswith("calibrated"):
                found[row["predictor"]].append(row)
        for name, group in found.items():
            label = path.parent.name.replace("-", " ") + name.removeprefix("calibrated")
            n, median, worst, _, _, inside, width = _errors(group)
            where = f"{label} ({_machine(group[0])}, {group[0]['created'][:10]})"
            rows.append([where, n, median, worst, _percent(_repeatability(group)), inside, width])
    heads = (
        "study",
        "steps:",
        "median:",
        "worst:",
        "repeatability:",
        "in interval:",
        "±:",
    )
    return table(heads, rows)


def _operators() -> str:
    by_family = defaultdict(list)
    for row in _rows("accuracy/ops.csv"):
        by_family[row["family"]].append(row)
    rows = []
    for name, group in by_family.items():
        errors = [abs(error) for error in _values(group, "error_frac")]
        numbers = (statistics.median(errors), statistics.fmean(errors), _repeatability(group))
        rows.append([name, str(len(group)), *map(_percent, numbers)])
    return table(("family", "operators:", "median:", "mean:", "repeatability:"), rows)


def _layer_types() -> str:
    """Median errors of the types with many layers; layers of less than 1 % of a phase left out."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in _rows("accuracy/layers.csv"):
        counts = row["predictor"] == "calibrated" and row["error_frac"]
        if counts and float(row["phase_share_frac"]) >= _PHASE_SHARE_FRAC:
            found[row["family"]][row["phase"]].append(abs(float(row["error_frac"])))
    rows = [
        [
            name,
            str(len(phases["forward"])),
            *(
                _percent(statistics.median(phases[phase]) if phases[phase] else None)
                for phase in ("forward", "backward")
            ),
        ]
        for name, phases in sorted(found.items(), key=lambda one: -len(one[1]["forward"]))
        if len(phases["forward"]) >= _LEAST_LAYERS
    ]
    return table(("type", "layers:", "forward, median:", "backward, median:"), rows)


def first_table(path: str, wanted: Callable[[str], bool] = lambda line: True) -> str:
    """The provenance and the first table of a study's page."""
    lines = (REPORTS / path).read_text(encoding="utf-8").splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("|"))
    rows = list(itertools.takewhile(lambda line: line.startswith("|"), lines[start:]))
    provenance = next(line for line in lines if "torch 2" in line)
    return "\n".join([provenance, "", *rows[:2], *filter(wanted, rows[2:]), ""])


def is_shown(line: str) -> bool:
    """Of the distributed study what was forecast from the links as calibrated."""
    return not any(word in line for word in (" from ", "another rate (", "as they are", "none |"))
