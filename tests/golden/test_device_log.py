"""A log of a device's allocations, and the peaks of a transformer on it.

``torch.cuda.memory._dump_snapshot`` wrote the logs (github.com/Wedsonlin/assignment2-systems, MIT
licence): a language model of 24 layers, 423 million parameters in float32, 4 sequences.
"""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dlperf
from dlperf.core.units import MIB
from dlperf.predictors.allocator.caching import CachingAllocator

UNIT = 512
FAR = 2**40
"""Between the addresses of two segments."""


class Started(CachingAllocator):
    """An allocator in the state in which the log begins."""

    def __init__(self, log: dict[str, Any]) -> None:
        super().__init__()
        used: dict[int, list[tuple[int, int]]] = {}
        for segment, offset, size in log["blocks"]:
            used.setdefault(segment, []).append((offset * UNIT, size * UNIT))
        for number, n_units in enumerate(log["segments"]):
            base, size = number * FAR, n_units * UNIT
            is_small = number in log["small"]
            pool, free_from = self._small if is_small else self._large, 0
            for offset, n_bytes in (*used.get(number, []), (size, 0)):
                if offset > free_from:
                    pool.put(base + free_from, offset - free_from)
                if n_bytes:
                    self._used[base + offset] = (n_bytes, is_small)
                    self.allocated_bytes += n_bytes
                free_from = offset + n_bytes
            self._segments[base] = size
            self.reserved_bytes += size


def test_every_block_lies_where_the_device_put_it() -> None:
    """A training step at 128 tokens: 6526 allocations, 6305 frees."""
    path = Path(__file__).with_name("device_log.json.gz")
    log = json.loads(gzip.decompress(path.read_bytes()))
    device = Started(log)
    found, expected = [], []
    for segment, offset, n_bytes in log["events"]:
        address = segment * FAR + offset * UNIT
        if n_bytes:
            expected.append((address, 0))
            found.append(device.allocate(n_bytes))
        else:
            device.free(address)
    assert len(found) == 6526
    assert found == expected
    assert device.peak_allocated_bytes / MIB == pytest.approx(6701.094, abs=0.001)


# -- the same model, in its author's formulas ------------------------------------------------------


def softmax(x: Tensor) -> Tensor:
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * x


class Layer(nn.Module):
    def __init__(self, width: int, n_heads: int, inner: int, turns: Tensor) -> None:
        super().__init__()
        self.n_heads, self.turns = n_heads, turns
        self.qkv = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self.before_attention, self.before_gate = Scale(width), Scale(width)

    def turned(self, x: Tensor) -> Tensor:
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = self.turns.unbind(0)
        first = cos * a - sin * b
        second = sin * a + cos * b
        return torch.cat((first, second), -1)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for f in self.qkv)
        q, k = self.turned(q), self.turned(k)
        places = torch.arange(x.shape[1], device=x.device)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
        scores = torch.where(places[:, None] >= places, scores, float("-inf"))
        found = torch.einsum("bhqk,bhkd->bhqd", softmax(scores), v).transpose(1, 2).flatten(2)
        return self.out(found)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        y = self.before_gate(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class LanguageModel(nn.Module):
    def __init__(self, length: int, n_layers: int) -> None:
        super().__init__()
        width, n_heads, inner, words = 1024, 16, 4096, 10_000
        self.words = nn.Parameter(torch.empty(words, width))
        self.register_buffer("turns", torch.empty(2, length, width // n_heads // 2))
        layers = (Layer(width, n_heads, inner, self.turns) for _ in range(n_layers))
        self.layers, self.scale = nn.Sequential(*layers), Scale(width)
        self.out = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.scale(self.layers(self.words[tokens])))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "peak_mib"), [(128, 1658.371), (256, 1712.553), (1024, 2746.012)]
)
def test_peak_of_a_transformer(length: int, peak_mib: float) -> None:
    """Allocated memory at the peak of a forward without gradients, float32, as in the logs.

    Two of the 24 layers are recorded; each other one adds 4 x 4 MiB, 3 x 16 MiB and 2 x 4 KiB.
    """
    with torch.device("meta"):
        model, tokens = LanguageModel(length, 2), torch.empty(4, length, dtype=torch.long)
    found = dlperf.device_memory(dlperf.record(model, tokens, inference=True))
    others_bytes = 22 * (64 * MIB + 8192)
    peak_bytes = found.peak_allocated_bytes + others_bytes
    assert peak_bytes / MIB == pytest.approx(peak_mib, rel=0.002)
