"""Seeded fuzz of every kind of file that is read.

A damaged file gives a finite answer, or one line that names it and exit status 2.

DLPERF_FUZZ_SEED chooses other damages, DLPERF_FUZZ_FILES their number for each kind of file.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import math
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import report_cases as cases
from calibrated_cases import machine as made_up_machine
from calibrated_cases import mm, relu, step_keys, trace

from dlperf.cli import main as cli
from dlperf.cli.main import main
from dlperf.core import host
from dlperf.core.clock import Samples
from dlperf.core.cluster import (
    Cluster,
    Collective,
    Interference,
    Link,
    Message,
    Rank,
    Reduction,
    Timed,
)
from dlperf.core.co_run import CoRun
from dlperf.core.communication import Communication, Event, RankStep
from dlperf.core.costs import Cost
from dlperf.core.machine import Footprint, KernelModelFit
from dlperf.core.trace import OptimizerInfo, Parameter, Storage, TensorSpec
from dlperf.core.verification import Disturbance

SEED = int(os.environ.get("DLPERF_FUZZ_SEED", "0"))
N_FILES = int(os.environ.get("DLPERF_FUZZ_FILES", "200"))
NASTY: list[Any] = [
    math.nan,
    math.inf,
    -math.inf,
    -1,
    0,
    1e308,
    5e-324,
    2**31,
    2**40,
    2**52,
    2**70,
    10**4000,
    1.5,
    True,
    False,
    None,
    "abc",
    "",
    [],
    {},
    [[[[[]]]]],
    [0],
    [None],
    "x" * 100_000,
    "\x1b[2J\n\x00",
    "\ud800",
    {"tensor": 0},
    {"tensor": -1},
    "=1+1",
    -0.0,
    [1, 2, 3, 4],
]


def network() -> Any:
    """A step of two layers with storages, parameters, arrivals and an optimizer."""
    spec = TensorSpec.contiguous(16, 16, storage=0)
    ops = (
        mm(16, 16, 16, node=-1, grad=True),
        relu(1024),
        mm(16, 16, 16, "(loss)"),
        relu(1024, phase="backward", node=1),
        mm(16, 16, 16, phase="backward", node=2),
        relu(256, "fc", "optimizer", shares=(("fc", 0.5), ("act", 0.5))),
    )
    return replace(
        trace(*ops, inference=False),
        batch_size=4,
        target="nowhere.py:net",
        storages=(Storage(1024, kind="parameter"), Storage(64, 0, 3), Storage(8, 1, 6, "")),
        optimizer=OptimizerInfo("SGD", "for-loop", 1),
        parameters=(Parameter("fc.weight", "fc", spec),),
        buffers=(("mean", spec),),
        arrivals=((0, 5),),
        notes=("a note",),
        versions={"torch": "2"},
    )


def machine() -> Any:
    """Every entry of a machine file."""
    costs = [Cost(key, 1, Samples((1e-6, 2e-6))) for key in step_keys()]
    made = made_up_machine()
    curves = (
        KernelModelFit(("gemm", "float32"), "gemm", 1, (1.0, 2.0, 3.0), 0.1, 0.01, (0.1, 0.2)),
    )
    return replace(
        made,
        costs=tuple(costs),
        kernel_models=curves,
        footprints=(Footprint("forward", 1000),),
        notes=("a note",),
        disturbances=(Disturbance("a", 1, 50.0, 1, 2),),
        co_runs=(CoRun("compute", 2, Samples((2.0, 3.0)), Samples((1.0, 2.0))),),
        versions={"torch": "2"},
        created="today",
        complete=True,
        groups=("a",),
    )


def cluster() -> Cluster:
    """Every entry of a cluster file."""

    def sweep(what: str, seconds: float) -> list[Message]:
        return [
            Message(what, size, 1, 8, samples_s=[seconds + size * 1e-9] * 2)
            for size in (0, 1024, 2**20)
        ]

    messages = (*sweep("ping_pong", 1e-4), *sweep("train", 2e-4), *sweep("send", 1e-5))
    series = [Timed(samples_s=[value]) for value in (1e-3, 2e-3, 0.1, 0.2)]
    return Cluster(
        (Link("network", messages), Link("socket", (), 1e-6, 1e10)),
        tuple(
            Collective("all_reduce", size, 2, 1, samples_s=[1e-3 + size * 1e-9])
            for size in (1024, 2**20)
        ),
        (Reduction(1024, samples_s=[1e-7]),),
        (Interference("gemm", 1, 1000, 2, 1, *series),),
        (Rank("a", 0, "s"), Rank("b", 0, "t")),
        complete=True,
        mode="full",
        notes=("busy",),
        versions={"torch": "2"},
        created="today",
        groups=("links",),
        co_runs=(CoRun("compute", 2, Samples((2.0,)), Samples((1.0,))),),
    )


def communication() -> Communication:
    """Two ranks, two steps, a collective, a message, a broadcast."""

    def call(number: int, kind: str, at_s: float, peer: int | None = None) -> tuple[Event, Event]:
        return Event("launch", number, kind, 64, 0, at_s, at_s + 0.01, peer, at_s + 0.1), Event(
            "wait", number, kind, 64, 0, at_s + 0.01, at_s + 0.1, peer
        )

    first = RankStep(
        0.0, 1.0, (*call(0, "all_reduce", 0.2), *call(1, "broadcast", 0.4, 0)), first=True
    )
    zero, one = (
        RankStep(
            1.0, 2.0, (*call(2, "all_reduce", 0.2), *call(3, kind, 0.5, 1 - rank)), first=False
        )
        for rank, kind in enumerate(("send", "recv"))
    )
    return Communication(
        ("a", "b"),
        ((0, 1), (0, 1)),
        ((first, zero), (first, one)),
        "train.py",
        machine="cpu",
        notes=("n",),
        versions={"torch": "2"},
    )


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every entry."""
    inner = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    return [index for key, value in inner for index in ((*path, key), *places(value, (*path, key)))]


def varied(found: list[tuple[Any, ...]]) -> dict[str, list[tuple[Any, ...]]]:
    """The paths by kind, list positions aside: many kernels weigh no more than one batch size."""
    kinds: dict[str, list[tuple[Any, ...]]] = {}
    for path in found:
        kinds.setdefault(
            ".".join(
                "*" if isinstance(part, int) and index < len(path) - 1 else str(part)
                for index, part in enumerate(path)
            ),
            [],
        ).append(path)
    return kinds


@functools.cache
def _paths(text: str) -> dict[str, list[tuple[Any, ...]]]:
    return varied(
        [path for path in places(json.loads(text)) if path[-1] not in ("schema", "schema_version")]
    )


def damaged(text: str, draw: random.Random) -> tuple[bytes, str]:
    """A damaged file, and what was done to it."""
    how = draw.choice(
        ("value",) * 8 + ("delete", "shorten", "duplicate", "truncate", "flip", "swap")
    )
    if how == "truncate":
        cut = draw.randrange(len(text))
        return text[:cut].encode(), f"truncated at {cut}"
    if how == "flip":
        raw = bytearray(text.encode())
        for _ in range(draw.randint(1, 4)):
            raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        return bytes(raw), "bytes flipped"
    kinds = _paths(text)
    path = draw.choice(kinds[draw.choice(list(kinds))])
    data = json.loads(text)
    parent = data
    for key in path[:-1]:
        parent = parent[key]
    last, value = path[-1], parent[path[-1]]
    if how == "delete":
        del parent[last]
    elif how in ("shorten", "duplicate") and isinstance(parent, list):
        parent[:] = (
            parent[: draw.randrange(len(parent))]
            if how == "shorten"
            else [*parent, copy.deepcopy(draw.choice(parent))]
        )
    elif how == "swap":
        other = draw.choice(kinds[draw.choice(list(kinds))])
        for key in other:
            data = data[key]
        parent[last], root = copy.deepcopy(data), json.loads(text)
        inner = root
        for key in path[:-1]:
            inner = inner[key]
        inner[last] = parent[last]
        data = root
    else:
        how, parent[last] = "value", draw.choice(NASTY)
    new = str(parent[last])[:60] if how in ("value", "swap") else ""
    what = f"{how} at {path}: {str(value)[:60]} -> {new}"
    return json.dumps(data).encode(), what[:300]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """An intact file of each kind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        cli, "_parser", functools.cache(cli._parser)
    )  # what no file can change is made once
    monkeypatch.setattr(host, "versions", functools.cache(host.versions))
    monkeypatch.setenv("DLPERF_MACHINE", str(tmp_path / "none" / "machine.json"))
    found = {
        name: tmp_path / f"{name}.json"
        for name in ("machine", "trace", "measurement", "cluster", "communication")
    }
    machine().save(found["machine"])
    network().save(found["trace"])
    traced = replace(cases.cnn_trace(), target="nowhere.py:net")
    replace(
        cases.cnn_measurement(),
        trace=traced,
        noise={"core_slowdown": 1.0},
        notes=("n",),
        peak_memory_bytes=8,
    ).save(found["measurement"])
    cluster().save(found["cluster"])
    communication().save(found["communication"])
    return found


COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "machine show": ("machine", ("machine", "show", "{machine}")),
    "machine diff": ("machine", ("machine", "diff", "{machine}", "{machine}")),
    "predict, machine": (
        "machine",
        ("predict", "{trace}", "--machine", "{machine}", "--threads", "1"),
    ),
    "predict, trace": (
        "trace",
        (
            "predict",
            "{trace}",
            "--machine",
            "{machine}",
            "--threads",
            "1",
            "--predictor",
            "roofline",
        ),
    ),
    "report": (
        "measurement",
        ("report", "{measurement}", "--machine", "{machine}", "--predictor", "roofline"),
    ),
    "scale, cluster": (
        "cluster",
        (
            "scale",
            "{trace}",
            "--machine",
            "{machine}",
            "--threads",
            "1",
            "--ranks",
            "2",
            "--cluster",
            "{cluster}",
        ),
    ),
    "replay, cluster": (
        "cluster",
        ("scale", "--trace", "{communication}", "--cluster", "{cluster}"),
    ),
    "cluster show": ("cluster", ("machine", "show", "{cluster}")),
    "scale, communication": (
        "communication",
        ("scale", "--trace", "{communication}", "--cluster", "{cluster}"),
    ),
}
LINE = re.compile(r"dlperf \w+: error: (?P<path>\S+): .{8,700}")
NOT_FINITE = re.compile(r"(?<![\w'./])[-+]?(nan|inf)(?![\w'])", re.IGNORECASE)


def problem_of(
    arguments: list[str], path: Path, run: Callable[[list[str]], int] = main
) -> tuple[int, str]:
    """The exit status, and what is wrong with how the command ended, "" for nothing."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run([*arguments, "--json", str(path.parent / "answer.out"), "--force"])
    errors = [line for line in err.getvalue().splitlines() if "error:" in line]
    if "Traceback" in err.getvalue() or "internal error" in err.getvalue():
        return status, f"broke: {err.getvalue()[-400:]}"
    if set(out.getvalue() + err.getvalue()) & set("\x1b\x00"):
        return status, "a control character came through"
    if status == 0:
        return status, (
            f"said {errors}"
            if errors
            else (
                "not finite: " + out.getvalue()[-2000:] if NOT_FINITE.search(out.getvalue()) else ""
            )
        )
    if status != 2 or len(errors) != 1:
        return status, f"status {status}: {err.getvalue()[-400:]}"
    found = LINE.fullmatch(errors[0])
    return status, "" if found and found["path"] == str(path) else f"an odd line: {errors[0]}"


@pytest.mark.parametrize("name", COMMANDS)
def test_damaged_files_are_read_or_refused_in_one_line(name: str, files: dict[str, Path]) -> None:
    kind, template = COMMANDS[name]
    arguments = [part.format(**files) for part in template]
    path = files[kind]
    assert problem_of(arguments, path) == (0, "")  # as it is
    text, draw = path.read_text(), random.Random(f"{SEED} {name}")
    statuses: Counter[int] = Counter()
    problems = []
    n_files = N_FILES // sum(other == kind for other, _ in COMMANDS.values())
    for number in range(n_files):
        content, what = damaged(text, draw)
        path.write_bytes(content)
        status, problem = problem_of(arguments, path)
        statuses[status] += 1
        if problem:
            problems.append(f"{number} ({what}): {problem}")
    assert not problems, "\n".join([f"{len(problems)} of {n_files}", *problems])
    assert statuses.total() == n_files
    assert set(statuses) <= {0, 2}
    assert statuses[2] > n_files / 4
