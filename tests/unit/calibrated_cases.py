"""Made-up machines whose kernels follow exact models, so that every prediction can be worked out by
hand; no number here was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlperf.core.clock import Samples
from dlperf.core.costs import KINDS, STEP_COSTS, Cost, CostKey
from dlperf.core.machine import Bandwidth, Cpu, Kernel, Machine
from dlperf.core.trace import Layer, Op, TensorSpec, Trace

T = TensorSpec.contiguous
PEAK_FLOPS_PER_S = 1e10
CALL_S = 1e-6
ELEMENTS_PER_S = 1e9
KIB, MIB = 2**10, 2**20
LEVELS = {"L1": 2e11, "L2": 1e11, "L3": 4e10, "DRAM": 1e10}


def mm(m: int, n: int, k: int, layer: str = "fc", phase: str = "forward", **rest: object) -> Op:
    return Op(
        "aten.mm.default", (T(m, k), T(k, n)), outputs=(T(m, n),), phase=phase, layer=layer, **rest
    )  # type: ignore[arg-type]


def relu(n: int, layer: str = "act", phase: str = "forward", **rest: object) -> Op:
    return Op("aten.relu.default", (T(n),), outputs=(T(n),), phase=phase, layer=layer, **rest)  # type: ignore[arg-type]


def mm_s(m: int, n: int, k: int) -> float:
    """The model of products: a call and 10 GFLOP/s."""
    return CALL_S + 2 * m * n * k / PEAK_FLOPS_PER_S


def relu_s(n: int) -> float:
    """The model of elementwise kernels: a call and 10^9 elements a second."""
    return CALL_S + n / ELEMENTS_PER_S


def cost(key: CostKey | str, seconds: float, threads: int = 1) -> Cost:
    """A cost of one sample; a kind alone is a key, too."""
    return Cost(key if isinstance(key, CostKey) else CostKey(key), threads, Samples((seconds,)))


def step_keys() -> list[CostKey]:
    """Every cost of a step, at 8 where its kind has amounts."""
    return [
        key._replace(at=8 if KINDS[key.kind].at else 0)
        for keys in STEP_COSTS.values()
        for key in keys
    ]


def machine(
    costs: Mapping[Any, float] | None = None,
    *,
    threads: int = 1,
    factor: float = 1.0,
    extra: tuple[Kernel, ...] = (),
) -> Machine:
    """Products of 16 to 256 a side, relu of 64 to 2^20 elements, four bandwidths; every time
    multiplied by `factor`.
    """
    sides = (16, 64, 256)
    kernels = [
        Kernel(mm(m, n, k), "gemm", threads, Samples((factor * mm_s(m, n, k),)))
        for m in sides
        for n in sides
        for k in sides
    ]
    kernels += [
        Kernel(relu(n), "pointwise", threads, Samples((factor * relu_s(n),)))
        for n in (64, 1024, 2**15, 2**20)
    ]
    sets = zip((16 * KIB, 512 * KIB, 8 * MIB, 256 * MIB), LEVELS.values())
    bandwidths = tuple(
        Bandwidth("triad", threads, size, 3 * size, Samples((factor * 3 * size / rate,)))
        for size, rate in sets
    )
    found = tuple(cost(key, factor * seconds, threads) for key, seconds in (costs or {}).items())
    return Machine(
        Cpu("Made-up CPU", 4, (32 * KIB, MIB, 32 * MIB)), (*kernels, *extra), bandwidths, found
    )


def trace(*ops: Op, inference: bool = True, **rest: object) -> Trace:
    """A root and a leaf for every layer that an op names."""
    names = [
        name for name in dict.fromkeys(op.layer for op in ops) if name and not name.startswith("(")
    ]
    layers = (
        Layer("Net", "Net", False, (("", 1),)),
        *(Layer(name, "X", True, (("Net", 1),)) for name in names),
    )
    return Trace("made-up", 1, layers, ops, inference=inference, **rest)  # type: ignore[arg-type]
