"""Which kernels oneDNN takes for a convolution, against what it says itself."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import Any

import pytest
import torch

from dlperf.predictors.onednn import Window, forward_regime, input_by_gemm, scratch, weight_regime
from dlperf.trace import Op
from microbench.conv import backward_of, convolution, output_size

RUN = """
import json, sys, torch
torch.set_num_threads(1)
for case in json.loads(sys.argv[1]):
    image = torch.zeros(case["n"], case["c_in"], *case["size"], requires_grad=True)
    weight = torch.zeros(case["c_out"], case["c_in"] // case["groups"], *case["kernel"], requires_grad=True)
    convolve = getattr(torch.nn.functional, f"conv{len(case['size'])}d")
    print("case", flush=True)
    convolve(image, weight, None, case["stride"], case["padding"], case["dilation"], case["groups"]).sum().backward()
"""


def cases(count: int) -> list[dict[str, Any]]:
    """Random convolutions of 16 images that are large enough for their kernels."""
    dice = random.Random(7)
    found: list[dict[str, Any]] = []
    while len(found) < count:
        d, kind = dice.choice((1, 2, 2, 2, 3)), dice.choice(("dense", "grouped", "depthwise"))
        groups = 1 if kind == "dense" else dice.choice((2, 4, 8, 32))
        c_in = groups * dice.choice({"depthwise": (1,), "dense": (1, 2, 3, 4, 5, 8, 12, 16, 24, 32), "grouped": (3, 4, 6, 8, 12, 16)}[kind])
        c_out = c_in if kind == "depthwise" else groups * dice.choice((4, 8, 16, 20, 32))
        side, stride, dilation = dice.choice((1, 2, 3, 3, 3, 5, 7) if d < 3 else (3,)), dice.choice((1, 1, 2)), dice.choice((1, 1, 2))
        padding = dice.choice((0, side // 2, dilation * (side // 2), side - 1))
        size, kernel = (dice.choice((9, 14, 20)) if d < 3 else 7,) * d, (side,) * d
        if side == 1 and (padding or dilation > 1 or kind == "dense"):
            continue
        if min(output_size(size, kernel, stride, padding, dilation=dilation)) < 1:
            continue
        case = {"n": 16, "c_in": c_in, "c_out": c_out, "size": size, "kernel": kernel}
        found.append({**case, "stride": stride, "padding": padding, "dilation": dilation, "groups": groups})
    return found


def told(asked: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The implementation of each pass of each case, by oneDNN's own verbose output."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(asked)], env={**os.environ, "ONEDNN_VERBOSE": "1"}, capture_output=True, text=True, timeout=300, check=True
    )
    found: list[dict[str, str]] = []
    for line in done.stdout.splitlines():
        if line == "case":
            found.append({})
        elif ",exec,cpu,convolution," in line:
            fields = line.split(",")
            place = fields.index("convolution")
            found[-1][fields[place + 2]] = fields[place + 1]
    return found


def _word(implementation: str) -> str:
    return "gemm" if "gemm" in implementation else "half" if implementation == "jit:avx2" else "own"


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="the regimes are those of 512-bit vectors")
def test_kernels_are_those_that_onednn_takes() -> None:
    asked = cases(120)
    wrong = []
    n_seen = {"gemm": 0, "half": 0, "own": 0}
    for case, implementations in zip(asked, told(asked)):
        d = len(case["size"])
        window = Window(case["kernel"], *((case[name],) * d for name in ("stride", "padding", "dilation")))
        shape = case["c_in"] // case["groups"], case["c_out"] // case["groups"], case["groups"], window
        ours = {
            "forward_training": forward_regime(*shape), "backward_weights": weight_regime(*shape), "backward_data": "gemm" if input_by_gemm(*shape) else "own",
        }  # fmt: skip
        for way, implementation in implementations.items():
            expected = ours[way] if ours[way] in ("gemm", "half") else "own"
            n_seen[expected] += 1
            if _word(implementation) != expected:
                wrong.append((way, implementation, expected, case))
    assert len(wrong) <= 0.01 * sum(n_seen.values()), wrong  # what is left: images smaller than the kernel's reach, two groups of three channels
    assert min(n_seen.values()) > 10


def test_products_need_columns_and_no_blocks() -> None:
    # a 5x5 depthwise convolution: blocks for the forward and the gradient of the input, one channel's 25 taps at 8 x 8 places for that of the weight
    forward = convolution(16, 32, 32, (8, 8), (5, 5), 1, 2, groups=32)
    by_input, by_weight = scratch(backward_of(forward))
    assert len(by_input) == 3
    assert by_weight == (25 * 64 * 4,)
    odd = convolution(16, 12, 12, (8, 8), (3, 3), 1, 1, groups=4)
    assert scratch(Op(odd.name, odd.args, outputs=backward_of(odd).inputs[:1])) == ((3 * 9 * 64 * 4,),)
