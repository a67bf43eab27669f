"""``dlperf validate --distributed`` on loopback: real ranks, small; and every bad input on one
line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dlperf.core.cluster import Cluster
from dlperf.core.errors import DlperfError
from dlperf.microbench.hosts import namespaces, ranks
from tests.end_to_end.test_interrupts import PATIENCE_S, descendants, left_running, words_of

UNUSABLE, FAILED = 2, 1
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without namespaces: the ranks run on loopback."""
    monkeypatch.setattr(namespaces, "why_unavailable", lambda: "network namespaces need root")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def written_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links by hand instead of measuring them, which takes its time; all else is as it is."""
    real = ranks.run_ranks

    def run_ranks(places: list[namespaces.Place], command: list[str], **rest: object) -> None:
        if "dlperf.microbench.network" not in command:
            return real(places, command, **rest)  # type: ignore[arg-type]
        link = {"distance": "socket", "latency_s": 5e-5, "bandwidth_bytes_per_s": 1e9}
        path = Path(command[command.index("-o") + 1])
        path.write_text(
            json.dumps(
                {
                    "schema": "dlperf.cluster",
                    "schema_version": 2,
                    "links": [link],
                    "ranks": [{"host": "here"}] * len(places),
                }
            )
        )
        assert Cluster.load(path).ranks_per_host == len(places)

    monkeypatch.setattr(ranks, "run_ranks", run_ranks)


@pytest.mark.process
@pytest.mark.network
@pytest.mark.usefixtures("no_root", "written_links")
def test_steps_on_loopback(
    dlperf: Callable, targets_file: Path, machine_file: Path, tmp_path: Path
) -> None:
    folder, cache = tmp_path / "out", tmp_path / "kept"
    command = (
        "validate",
        "--distributed",
        f"{targets_file}:net@4",
        "--rates",
        "1gbit,none",
        "--ranks",
        "2",
        "--runs",
        "1",
        "--seconds",
        "0.01",
        "--parts",
        "steps,bound",
        "--machine",
        machine_file,
        "--cache",
        cache,
        "-o",
        folder,
    )
    done = dlperf(*command)
    assert done.status == 0, done.err
    assert "network namespaces need root" in done.err
    assert "they run on loopback, where no rate can be set and no threshold stands" in done.err
    data = json.loads((folder / "distributed.json").read_text())
    kinds = {row["kind"]: row for row in data["rows"]}
    assert set(kinds) == {
        "step",
        "share",
        "buckets",
        "first-step",
        "alone",
    }  # nothing to double: links as they are
    assert {(row["rate"], row["met"]) for row in data["rows"]} == {("none", None)}
    assert kinds["buckets"]["right"] is True
    assert 0 < kinds["alone"]["pairs"][0]["measured"] <= kinds["first-step"]["pairs"][0]["measured"]
    again = dlperf(*command)
    assert again.status == 0
    assert "run 1" not in again.err  # all of it was kept
    assert json.loads((folder / "distributed.json").read_text())["rows"] == data["rows"]


@pytest.mark.process
@pytest.mark.network
@pytest.mark.usefixtures("no_root", "written_links")
def test_a_target_that_fails_on_ranks_is_one_line(
    dlperf: Callable, tmp_path: Path, machine_file: Path
) -> None:
    file = tmp_path / "dying.py"
    file.write_text(
        "import os\nimport torch\nfrom torch import nn\n\n\ndef net(batch_size):\n    if"
        " os.environ.get('RANK') == '1':\n        os.kill(os.getpid(), 9)\n    return nn.Linear(8,"
        " 4), (torch.zeros(batch_size, 8),), torch.sum\n"
    )
    done = dlperf(
        "validate",
        "--distributed",
        f"{file}:net@4",
        "--parts",
        "steps",
        "--runs",
        "2",
        "--seconds",
        "0.01",
        "--machine",
        machine_file,
        "--cache",
        tmp_path / "kept",
    )
    assert done.status == FAILED
    assert done.err.count("rank 1 of 2 was ended by SIGKILL") == 1
    assert "failed: net@4 at none: rank 1 of 2 was ended by SIGKILL" in done.out


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds children in /proc")
def test_an_interrupt_leaves_neither_ranks_nor_hosts(
    tmp_path: Path, machine_file: Path, targets_file: Path
) -> None:
    command = (
        "validate",
        "--distributed",
        f"{targets_file}:net@4",
        "--ranks",
        "2",
        "--machine",
        machine_file,
        "--cache",
        tmp_path / "kept",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "dlperf", *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )

    def measuring(pid: int) -> bool:
        return "dlperf.microbench.network" in words_of(pid)

    try:
        until = time.monotonic() + PATIENCE_S
        while (
            sum(map(measuring, children := descendants(process.pid))) < 2
            and process.poll() is None
            and time.monotonic() < until
        ):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)  # to it alone
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "dlperf: interrupted"
    assert len(children) >= 2
    assert not left_running(children)  # among them those that hold the hosts' namespaces


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--rates", "fast"], "'fast' is no rate"),
        (["--ranks", "1"], "one rank has no link"),
        (["--training"], "two studies"),
        (["--peers"], "--peers"),
        (
            ["--parts", "speed"],
            "--parts speed: is unknown; known are all-reduce, steps, bound, replay",
        ),
        (["--inference"], "leave --inference out"),
        (["trace.json"], "trace.json"),
        (["missing.py:net"], "missing.py"),
        (["--machine", "none.json"], "dlperf calibrate"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_questions(
    dlperf: Callable, machine_file: Path, arguments: list[str], names: str
) -> None:
    done = dlperf(
        "validate",
        "--distributed",
        *(["--machine", machine_file] if "--machine" not in arguments else []),
        *arguments,
    )
    assert done.status == UNUSABLE
    assert names in done.line


@pytest.mark.parametrize(
    "option", [["--rates", "1gbit"], ["--ranks", "2"], ["--quick-links"]], ids=" ".join
)
def test_its_options_are_its_own(dlperf: Callable, option: list[str]) -> None:
    done = dlperf("validate", *option)
    assert done.status == UNUSABLE
    assert f"{option[0]} is for --distributed" in done.line


@pytest.mark.process
def test_ranks_measure_without_anything_that_predicts() -> None:
    code = (
        "import sys, dlperf.studies.distributed.rank_process; print(sorted(n for n in sys.modules"
        " if n.startswith(('dlperf', 'microbench'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    loaded = set(eval(done.stdout))
    plain = (
        "core",
        "core.conversion",
        "core.device_clock",
        "core.errors",
        "core.files",
        "core.garbage",
        "core.streams",
        "core.text",
        "core.version",
        "recorder",
        "recorder.accelerator",
        "recorder.targets",
        "recorder.target_lookup",
        "recorder.tensors",
        "studies",
        "studies.distributed",
        "studies.distributed.rank_process",
    )
    assert loaded <= {"dlperf", *(f"dlperf.{name}" for name in plain)}


@pytest.mark.network
@pytest.mark.process
def test_a_measuring_rank_tells_in_one_line_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    order = {
        "kind": "steps",
        "target": "missing.py:net",
        "batch_size": 4,
        "threads": 1,
        "seconds": 0.01,
        "limit_s": 10.0,
    }
    paper = tmp_path / "order.json"
    paper.write_text(
        json.dumps(
            {**order, "meeting": str(tmp_path / "meeting"), "answer": str(tmp_path / "answer")}
        )
    )
    with pytest.raises(DlperfError, match=r"rank 0 of 1 ended with status 2: error: .*missing\.py"):
        ranks.run_ranks(
            ranks.loopback_places(1),
            [sys.executable, "-m", "dlperf.studies.distributed.rank_process", str(paper)],
            limit_s=60,
        )
