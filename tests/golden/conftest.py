"""The frozen files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from frozen_results import FOLDER


@pytest.fixture(scope="session")
def frozen_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked files, traces beside the others.

    ``elsewhere.json`` is the machine file under another processor's name. The command line
    extrapolates from it on every host, and its answers do not depend on the host. ``nodes.json``
    is the cluster file with a link between nodes by hand. ``attention.csv`` and
    ``flash-attention.csv`` are excerpts of profiles of an A100, whose first line names the source.
    """
    folder = tmp_path_factory.mktemp("frozen")
    for path in (*FOLDER.rglob("*.json.gz"), *FOLDER.rglob("*.csv.gz")):
        (folder / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    machine = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
    machine["cpu"]["model"] = "a processor that no host has"
    (folder / "elsewhere.json").write_text(json.dumps(machine), encoding="utf-8")
    cluster = json.loads((folder / "cluster.json").read_text(encoding="utf-8"))
    link = {"distance": "network", "latency_s": 5e-5, "bandwidth_bytes_per_s": 1.25e8}
    cluster["links"] = [link, *cluster["links"]]
    (folder / "nodes.json").write_text(json.dumps(cluster), encoding="utf-8")
    return folder
