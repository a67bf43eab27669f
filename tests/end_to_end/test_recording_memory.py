"""A network far larger than memory allows is recorded without its weights: the process stays below
1.5 GiB.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

BUILDER = """
import torch
from torch import nn

D, WORDS, LAYERS = 2048, 32000, 20

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, D)
        layer = nn.TransformerEncoderLayer(D, 16, 4 * D, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(D, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))

def build(batch_size):
    model, words = Model(), torch.randint(0, WORDS, (batch_size, 128))
    return model, (words,), lambda out: nn.functional.cross_entropy(out.flatten(0, 1), words.flatten()), torch.optim.AdamW(model.parameters())
"""
MEASURE = """
import json, resource, sys
from dlperf.recorder.recording import record_target
from dlperf.recorder.targets import resolve
trace = record_target(resolve("big.py:build", 4))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
kinds = {kind: sum(s.nbytes for s in trace.storages if s.kind == kind) for kind in ("parameter", "optimizer")}
print(json.dumps({"peak": peak, "parameters": trace.n_parameters, "on": trace.recorded_on, **kinds}))
"""


def test_a_transformer_of_a_billion_parameters(tmp_path):
    pytest.importorskip("resource")
    (tmp_path / "big.py").write_text(BUILDER)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    # per layer: 4 D^2 + 4 D of attention, 8 D^2 + 5 D of the two linears, 4 D of the norms; the
    # embedding is shared with the head
    d, words, layers = 2048, 32000, 20
    parameters = layers * (12 * d * d + 13 * d) + words * d
    assert seen["parameters"] == parameters > 1.07e9
    assert seen["on"] == "fake tensors"
    assert seen["parameter"] == 4 * parameters
    # AdamW keeps two moments, and a step count (4 bytes) for each tensor: 12 a layer, and the
    # embedding
    assert seen["optimizer"] == 8 * parameters + 4 * (12 * layers + 1)
    assert seen["peak"] < 1.5 * 2**30
