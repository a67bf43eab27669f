"""The demo's verdict on itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

JUDGE = Path(__file__).resolve().parents[2] / "scripts" / "judge"


@pytest.mark.parametrize(
    ("ratio", "status", "verdict", "warned"),
    [
        (1.0, 0, "passed", False),
        (1.29, 0, "passed", False),
        (1.31, 0, "doubtful", True),
        (0.72, 0, "doubtful", True),
        (1.49, 0, "doubtful", True),
        (1.52, 1, "failed", True),
        (0.65, 1, "failed", True),
        (10.2, 1, "failed", True),
    ],
)
def test_one_line_judges_both_networks(
    tmp_path: Path, ratio: float, status: int, verdict: str, warned: bool
) -> None:
    def report(target: str, ratio: float) -> dict[str, object]:
        step = {"total_s": 2e-3 * ratio, "low_s": 1.8e-3, "high_s": 2.3e-3}
        return {
            "target": target,
            "measured": {"step": {"total_s": 2e-3}},
            "predicted": [{"predictor": "calibrated", "step": step}],
        }

    (tmp_path / "r.json").write_text(
        json.dumps({"reports": [report("mlp", 1.01), report("lenet", ratio)]})
    )
    (tmp_path / "s.json").write_text(
        json.dumps({"machine": "m.json", "self_tests": [{"name": "MLP", "error_frac": 0.04}]})
    )
    done = subprocess.run(
        [sys.executable, JUDGE, tmp_path / "r.json", tmp_path / "s.json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == status
    (line,) = done.stdout.splitlines()
    assert line.startswith(
        f"demo {verdict}: mlp predicted 2.02 ms (1.8 to 2.3), measured 2 ms: +1 %, inside the"
        " interval; lenet predicted"
    )
    assert ("The self-test of m.json said: MLP +4 %" in done.stderr) is warned
