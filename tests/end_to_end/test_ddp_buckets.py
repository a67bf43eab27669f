"""Predicted bucket sizes against those that DistributedDataParallel logs, in a group of one rank on
loopback.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]

MODELS = """
import torch
from torch import nn


def linear(*sizes):
    return [nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3000, 128)
        self.body = nn.Linear(128, 128)
        self.head = nn.Linear(128, 3000, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.relu(self.body(self.embedding(x))))


class Backwards(nn.Module):
    '''Layers that are used in another order than they are defined in.'''

    def __init__(self):
        super().__init__()
        self.last, self.middle, self.first = nn.Linear(900, 10), nn.Linear(700, 900), nn.Linear(500, 700)

    def forward(self, x):
        return self.last(torch.relu(self.middle(torch.relu(self.first(x)))))


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(600, 600), nn.Linear(600, 600).double(), nn.Linear(600, 10)

    def forward(self, x):
        return self.c(self.b(self.a(x).double()).float())


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare, self.also = nn.Linear(600, 600), nn.Linear(300, 300), nn.Linear(600, 600)

    def forward(self, x):
        return self.also(self.used(x))


def frozen():
    model = nn.Sequential(*linear(600, 900, 900, 10))
    model[1].requires_grad_(False)
    return model


X = {"tied": torch.zeros(2, 5, dtype=torch.long), "normed": torch.zeros(2, 3, 12, 12), "large": torch.zeros(2, 1200)}
BUILD = {
    "small": lambda: nn.Sequential(*linear(600, 30, 10)),
    "wide": lambda: nn.Sequential(*linear(600, 900, 1100, 400, 10)),
    "large": lambda: nn.Sequential(*linear(1200, 2600, 2600, 1400, 900)),
    "normed": lambda: nn.Sequential(nn.Conv2d(3, 300, 3), nn.BatchNorm2d(300), nn.Conv2d(300, 200, 3), nn.BatchNorm2d(200), nn.Flatten(), nn.Linear(12800, 30)),
    "tied": Tied, "frozen": frozen, "backwards": Backwards, "two_dtypes": TwoDtypes, "unused": Unused,
}
OPTIONS = {"unused": {"find_unused_parameters": True}, "static": {"static_graph": True}}
"""

REAL = """
import json
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from models import BUILD, X

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
found = {}
for name, build in BUILD.items():
    for variant, options in (("plain", {}), ("capped", {"bucket_cap_mb": 3}), ("unused", {"find_unused_parameters": True}), ("static", {"static_graph": True})):
        if name == "unused" and variant in ("plain", "capped"):
            continue
        model = DistributedDataParallel(build(), **options)
        first = None
        for _ in range(5):
            model(X.get(name, torch.zeros(2, 500 if name == "backwards" else 600))).float().mean().backward()
            logged = model._get_ddp_logging_data()
            first = first or logged["bucket_sizes"]
        found[f"{name}/{variant}"] = [first, logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]]
print(json.dumps(found))
dist.destroy_process_group()
"""

PREDICTED = """
import json
import torch
from dlperf import record
from dlperf.models import buckets
from dlperf.distributed.step_profile import arrivals_of; from dlperf.distributed.step_profile import gradients_of
from models import BUILD, X

found = {}
for name, build in BUILD.items():
    trace = record(build(), X.get(name, torch.zeros(2, 500 if name == "backwards" else 600)), loss=lambda y: y.float().mean())
    gradients, arrivals = gradients_of(trace), arrivals_of(trace)
    variants = ("plain", {}), ("capped", {"bucket_bytes": 3 * 2**20}), ("unused", {"find_unused_parameters": True}), ("static", {"static_graph": True})
    for variant, options in variants:
        if name == "unused" and variant in ("plain", "capped"):
            continue
        chosen = buckets.ReducerOptions(**options)
        both = buckets.first_buckets(gradients, chosen), buckets.rebuilt_buckets(gradients, arrivals, chosen)
        found[f"{name}/{variant}"] = [", ".join(map(str, buckets.sizes_bytes(gradients, cut))) for cut in both]
print(json.dumps(found))
"""


def run(code: str, folder: Path) -> dict[str, list[str]]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def both(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    folder = tmp_path_factory.mktemp("buckets")
    (folder / "models.py").write_text(MODELS)
    return run(REAL, folder), run(PREDICTED, folder)


def test_predicted_buckets_are_those_of_ddp(
    both: tuple[dict[str, list[str]], dict[str, list[str]]],
) -> None:
    real, predicted = both
    assert len(real) == 4 * 8 + 2
    assert predicted == real
    assert any(
        sizes.count(",") >= 2 for _, sizes in real.values()
    )  # some have several buckets, or nothing was tested
