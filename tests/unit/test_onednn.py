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

from dlperf.core import host
from dlperf.core.trace import Op
from dlperf.microbench.conv import backward_of, convolution, output_size
from dlperf.predictors.allocator.stages import Stage
from dlperf.predictors.kernels.onednn import (
    BLOCK,
    Convolution,
    Window,
    block_of,
    scratch,
    ways_of,
)

RUN = """
import json, sys, torch
torch.set_num_threads(1)
for case in json.loads(sys.argv[1]):
    image = torch.zeros(case["n"], case["c_in"], *case["size"], requires_grad=True)
    channels = (case["c_in"], case["c_out"] // case["groups"]) if case["transposed"] else (case["c_out"], case["c_in"] // case["groups"])
    weight = torch.zeros(*channels, *case["kernel"], requires_grad=True)
    convolve = getattr(torch.nn.functional, f"conv{'_transpose' if case['transposed'] else ''}{len(case['size'])}d")
    settings = {name: case[name] for name in ("stride", "padding", "dilation", "groups")}
    print("case", flush=True)
    convolve(image, weight, None, **settings).sum().backward()
"""


def cases(count: int) -> list[dict[str, Any]]:
    """Random convolutions of 16 images that are large enough for their kernels."""
    dice = random.Random(7)
    found: list[dict[str, Any]] = []
    while len(found) < count:
        d, kind = (
            dice.choice((1, 2, 2, 2, 3)),
            dice.choice(("dense", "grouped", "depthwise", "transposed")),
        )
        groups = 1 if kind in ("dense", "transposed") else dice.choice((2, 4, 8, 32))
        widths = (1, 2, 3, 4, 5, 8, 12, 16, 24, 32)
        c_in = groups * dice.choice(
            {"depthwise": (1,), "grouped": (3, 4, 6, 8, 12, 16)}.get(kind, widths)
        )
        c_out = (
            c_in * dice.choice((1, 1, 2))
            if kind == "depthwise"
            else groups * dice.choice(widths if kind == "transposed" else (4, 8, 16, 20, 32))
        )
        side, stride, dilation = (
            dice.choice((1, 2, 3, 3, 3, 5, 7) if d < 3 else (3,)),
            dice.choice((1, 1, 2)),
            dice.choice((1, 1, 2)),
        )
        padding = dice.choice((0, side // 2, dilation * (side // 2), side - 1))
        size, kernel = (
            (
                dice.choice((9, 14, 20)) if d < 3 else dice.choice((2, 7)),
                *(dice.choice((9, 14, 20)) if d < 3 else 7,) * (d - 1),
            ),
            (side,) * d,
        )
        if (side == 1 and (padding or dilation > 1)) or (
            kind == "transposed" and (dilation > 1 or padding > side // 2)
        ):
            continue
        if min(output_size(size, kernel, stride, padding, kind == "transposed", dilation)) < 1:
            continue
        case = {
            "transposed": kind == "transposed",
            "n": 16,
            "c_in": c_in,
            "c_out": c_out,
            "size": size,
            "kernel": kernel,
        }
        found.append(
            {**case, "stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        )
    return found


def told(asked: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The implementation of each pass of each case, by oneDNN's own verbose output."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(asked)],
        env={**os.environ, "ONEDNN_VERBOSE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found: list[dict[str, str]] = []
    for line in done.stdout.splitlines():
        if line == "case":
            found.append({})
        elif ",exec,cpu,convolution," in line or ",exec,cpu,deconvolution," in line:
            fields = line.split(",")
            index = fields.index("cpu") + 1
            found[-1][fields[index + 2]] = fields[index + 1]
    return found


def _word(implementation: str, block: int) -> str:
    known = {"gemm": "gemm", "brgconv_strided": "strided"}
    if block == BLOCK:
        known["jit:avx2"] = "half"
    return next(
        (word for part, word in known.items() if part in implementation.replace("avx2+", "")), "own"
    )


@pytest.mark.process
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX512", "AVX2"),
    reason="the implementations are those of x86",
)
def test_kernels_are_those_that_onednn_takes() -> None:
    block = block_of(host.this_cpu().flags)
    asked = cases(160)
    wrong = []
    n_seen = {"gemm": 0, "half": 0, "strided": 0, "own": 0}
    n_transposed = 0
    for case, implementations in zip(asked, told(asked)):
        d, transposed = len(case["size"]), case["transposed"]
        moves = tuple((case[name],) * d for name in ("stride", "padding", "dilation"))
        channels = case["c_in"] // case["groups"], case["c_out"] // case["groups"]
        after = output_size(
            case["size"],
            case["kernel"],
            case["stride"],
            case["padding"],
            transposed,
            case["dilation"],
        )
        window = Window(case["kernel"], *moves, after if transposed else case["size"])
        ours = Convolution(
            *(reversed(channels) if transposed else channels), case["groups"], window, block
        )
        ways = {
            "forward_training": ways_of(transposed, None),
            "backward_data": ways_of(transposed, (True, False)),
            "backward_weights": ("weight",),
        }
        for name, implementation in implementations.items():
            predicted = ours.implementation(ways[name][0])
            expected = predicted if predicted in n_seen else "own"
            n_seen[expected] += 1
            n_transposed += transposed
            if _word(implementation, block) != expected:
                wrong.append((name, implementation, expected, case))
    assert len(wrong) <= 0.01 * sum(n_seen.values()), (
        wrong
    )  # what is left: images smaller than the kernel's reach, two groups of three channels
    n_half = n_seen.pop("half")
    assert (n_half > 10) is (block == BLOCK)
    assert min(n_seen.values()) > 10
    assert n_transposed > 60


@pytest.mark.process
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX2", reason="conditions of 256-bit kernels"
)
def test_kernels_of_256_bits_refuse_rows_that_reach_too_far() -> None:
    """Kernel, padding, dilation and length of a row around each limit."""
    rows = [(side, side // 2, 1, 40) for side in (7, 9, 13, 15)]
    rows += [(side, 0, 1, 40) for side in (8, 9, 14)] + [(3, 4, 4, 40), (3, 8, 8, 40)]
    asked = [
        {"n": 16, "c_in": 16, "c_out": 16, "size": (1, length), "kernel": (1, side), "stride": 1}
        | {"padding": (0, padding), "dilation": (1, dilation), "groups": 1, "transposed": False}
        for side, padding, dilation, length in rows
    ]
    passes = {"forward_training": "output", "backward_data": "input", "backward_weights": "weight"}
    for (side, padding, dilation, length), implementations in zip(rows, told(asked)):
        window = Window((1, side), (1, 1), (0, padding), (1, dilation), (1, length))
        ours = Convolution(16, 16, 1, window, block_of(("avx2",)))
        for name, implementation in implementations.items():
            is_product = ours.implementation(passes[name]) == "gemm"
            assert ("gemm" in implementation) is is_product, (name, window)


@pytest.mark.parametrize(
    ("flags", "channels"), [(("avx2",), [3]), (("avx2", "avx512f"), [1, 2, 3])]
)
def test_a_first_layers_weight_has_kernels_for_few_channels(
    flags: tuple[str, ...], channels: list[int]
) -> None:
    window = Window((3, 3), (1, 1), (1, 1), (1, 1), (14, 14))
    plain = [
        c_in
        for c_in in range(1, 8)
        if Convolution(c_in, 16, 1, window, block_of(flags)).implementation("weight") == "first"
    ]
    assert plain == channels


def test_products_need_columns_and_no_blocks() -> None:
    # a 5x5 depthwise convolution: blocks for the forward and the gradient of the input, one
    # channel's 25 taps at 8 x 8 places for that of the weight
    forward = convolution(16, 32, 32, (8, 8), (5, 5), 1, 2, groups=32)
    by_input, by_weight = scratch(backward_of(forward))
    assert len(by_input.read + by_input.written) == 3
    assert by_weight == Stage((25 * 64 * 4,))
    odd = convolution(16, 12, 12, (8, 8), (3, 3), 1, 1, groups=4)
    assert scratch(Op(odd.name, odd.args, outputs=backward_of(odd).inputs[:1])) == (
        Stage((3 * 9 * 64 * 4,)),
    )
    # In 3d the columns are those of one depth.
    deep = convolution(8, 12, 28, (9, 18, 18), (3, 3, 3), 1, 1)
    assert scratch(backward_of(deep))[1].held[0] == 12 * 27 * 18 * 18 * 4


def test_blocks_have_as_many_channels_as_a_vector_numbers() -> None:
    op = convolution(16, 20, 20, (8, 8), (3, 3), 1, 1)
    for block, channels in ((16, 32), (8, 24)):
        image, weight = 4 * 16 * channels * 64, 4 * channels * channels * 9
        assert scratch(op, block) == (Stage((), (image, weight), (image,)),)


def test_a_stride_beyond_the_kernel_leaves_gaps_and_one_as_long_does_not() -> None:
    """The gradient of a depthwise weight has a kernel of its own unless taps are skipped."""
    found = [
        Convolution(1, 1, 32, Window((3, 3), (step, step), (0, 0), (1, 1), (15, 15)))
        for step in (2, 3, 4)
    ]
    assert [one.implementation("weight") for one in found] == ["blocked", "blocked", "gemm"]
