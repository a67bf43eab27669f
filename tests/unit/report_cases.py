"""Made-up machines, traces, predictions and measurements for the tests of reports; no number here
was measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlperf.core.clock import Samples
from dlperf.core.machine import Bandwidth, Cpu, Kernel, Machine
from dlperf.core.measurement import LayerTimes, Measurement
from dlperf.core.prediction import Item, Prices
from dlperf.core.trace import LOSS, Layer, Op, TensorSpec, Trace
from dlperf.forecast.prediction import Prediction

T = TensorSpec.contiguous
US = 1e-6


def mm(
    m: int, n: int, k: int, layer: str = "", phase: str = "forward", dtype: str = "float32"
) -> Op:
    """An (m x k)(k x n) product: 2 m n k FLOP."""
    return Op(
        "aten.mm.default",
        (T(m, k, dtype=dtype), T(k, n, dtype=dtype)),
        outputs=(T(m, n, dtype=dtype),),
        phase=phase,
        layer=layer,
    )


def relu(n: int, layer: str, phase: str = "forward") -> Op:
    if phase == "backward":
        return Op(
            "aten.threshold_backward.default",
            (T(n), T(n), 0),
            outputs=(T(n),),
            phase=phase,
            layer=layer,
        )
    return Op("aten.relu.default", (T(n),), outputs=(T(n),), phase=phase, layer=layer)


def machine(*, with_gemm: bool = True, with_bandwidth: bool = True) -> Machine:
    """L1 200, L2 100, L3 40, DRAM 10 GB/s; 80 GFLOP/s in float32, 40 in float64."""
    size = 512
    flops = 2 * size**3
    peaks = (("float32", 80e9), ("float64", 40e9))
    kernels = [
        Kernel(
            mm(size, size, size, dtype=dtype),
            "gemm",
            1,
            Samples((flops / rate, 1.1 * flops / rate)),
        )
        for dtype, rate in peaks
    ]
    sets = ((16 << 10, 200e9), (512 << 10, 100e9), (8 << 20, 40e9), (256 << 20, 10e9))
    bandwidths = [Bandwidth("triad", 1, n, 3 * n, Samples((3 * n / rate,))) for n, rate in sets]
    return Machine(
        Cpu("Made-up CPU", 2, (32 << 10, 1 << 20, 32 << 20)),
        tuple(kernels) if with_gemm else (),
        tuple(bandwidths) if with_bandwidth else (),
        versions={"dlperf": "0"},
        created="2020-01-01",
    )


def prediction(
    trace: Trace,
    items: Sequence[Item],
    predictor: str = "calibrated",
    *,
    on: Machine | None = None,
    threads: int = 1,
    **prices: object,
) -> Prediction:
    prices = {"low_factor": 0.9, "high_factor": 1.1, **prices}
    return Prediction(trace, on or machine(), threads, predictor, Prices(tuple(items), **prices))  # type: ignore[arg-type]


def around(seconds: float) -> Samples:
    """Three samples whose median is `seconds`: spread (1.08 - 0.92) = 16 % of it (quantiles 0.1 and
    0.9 of 0.9, 1.0, 1.1).
    """
    return Samples((0.9 * seconds, seconds, 1.1 * seconds))


# Seconds by layer: (type, predicted forward, backward, optimizer; measured forward, backward,
# optimizer), microseconds
CNN = {
    "features.0": ("Conv2d", 300, 600, 20, 250, 500, 25),
    "features.1": ("ReLU", 40, 60, 0, 50, 50, None),
    "classifier": ("Linear", 100, 200, 40, 110, 160, 50),
    LOSS: ("Loss", 10, 5, 0, 20, 10, None),
}
ZERO_GRAD_US = (15, 10)


def cnn_trace(
    *, batch_size: int = 32, inference: bool = False, target: str = "nets.py:cnn"
) -> Trace:
    """Net: features (Conv2d as a 32 x 64 x 128 product, ReLU), classifier (Linear), loss."""
    layers = (
        Layer("Net", "Net", False, (("", 1),)),
        Layer("features", "Sequential", False, (("Net", 1),)),
        Layer("features.0", "Conv2d", True, (("features", 1),)),
        Layer("features.1", "ReLU", True, (("features", 1),)),
        Layer("classifier", "Linear", True, (("Net", 1),)),
    )
    ops = [
        mm(32, 64, 128, "features.0"),
        relu(4096, "features.1"),
        mm(32, 10, 64, "classifier"),
        relu(32, LOSS),
    ]
    if not inference:
        ops += [relu(32, LOSS, "backward"), mm(64, 10, 32, "classifier", "backward")]
        ops += [relu(4096, "features.1", "backward"), mm(128, 64, 32, "features.0", "backward")]
        ops += [
            Op("aten.add_.Tensor", (T(n), T(n)), (("alpha", -0.01),), (T(n),), "optimizer", layer)
            for layer, n in (("features.0", 8192), ("classifier", 640))
        ]
    return Trace(target, batch_size, layers, tuple(ops), inference=inference)


def cnn_items(*, inference: bool = False, factor: float = 1.0) -> list[Item]:
    items = []
    for layer, (_, forward, backward, optimizer, *_rest) in CNN.items():
        for phase, us, bound in (
            ("forward", forward, "compute"),
            ("backward", backward, "L2"),
            ("optimizer", optimizer, "overhead"),
        ):
            if us and (phase == "forward" or not inference):
                items.append(Item(layer, phase, 0.75 * us * US * factor, bound, "interpolated"))
                items.append(
                    Item(layer, phase, 0.25 * us * US * factor, "overhead", "measured", "dispatch")
                )
    if not inference:
        items.append(
            Item(
                "Net",
                "zero_grad",
                ZERO_GRAD_US[0] * US * factor,
                "overhead",
                "measured",
                "zero_grad",
            )
        )
    return items


def cnn_measurement(
    *,
    inference: bool = False,
    batch_size: int = 32,
    extra: Sequence[LayerTimes] = (),
    without: Sequence[str] = (),
) -> Measurement:
    layers = []
    for layer, (kind, _, _, _, forward, backward, optimizer) in CNN.items():
        if layer not in without:
            rest = (
                ()
                if inference
                else (around(backward * US), None if optimizer is None else around(optimizer * US))
            )
            layers.append(LayerTimes(layer, kind, around(forward * US), *rest))
    sums = {
        "forward": 250 + 50 + 110 + 20,
        "backward": 500 + 50 + 160 + 10,
        "optimizer": 25 + 50,
        "zero_grad": ZERO_GRAD_US[1],
    }
    step = {
        name: around(us * US) for name, us in sums.items() if name == "forward" or not inference
    }
    total = sum(us for name, us in sums.items() if name == "forward" or not inference) * US
    return Measurement(
        "nets.py:cnn",
        batch_size,
        1,
        {**step, "total": around(total)},
        (*layers, *extra),
        inference=inference,
        repeat=around(1.02 * total),
        versions={"torch": "0.0"},
        machine="Made-up CPU",
    )


def cnn() -> tuple[Prediction, Measurement]:
    """The small network, trained: predicted 1375 + 15 us, measured 1225 + 10 us."""
    return prediction(cnn_trace(), cnn_items()), cnn_measurement()


def gemm_table(trace: Trace | None = None) -> Prediction:
    """A predictor that speaks of the classifier's forward and of nothing else."""
    items = [Item("classifier", "forward", 90 * US, "compute", "measured")]
    return prediction(
        trace or cnn_trace(),
        items,
        "gemm-table",
        phases=("forward",),
        unsupported=("features.0", "features.1", LOSS),
        low_factor=None,
        high_factor=None,
    )


def wide(
    n_layers: int = 60, prefix: str = "encoder.blocks", per_block: int = 4, name: str = "linear"
) -> tuple[Prediction, Measurement]:
    """`n_layers` linear layers in blocks of `per_block`, of rising time; even ones predicted a
    third high, odd ones exactly.
    """
    layers, ops, items, times = [Layer("Wide", "Wide", False, (("", 1),))], [], [], []
    total_us = 0.0
    for i in range(n_layers):
        layer = (
            f"{prefix}.{i // per_block}.{name}{i % per_block}" if per_block > 1 else f"{prefix}.{i}"
        )
        layers.append(Layer(layer, "Linear", True, (("Wide", 1),)))
        size = 16 + 4 * i
        ops += [mm(32, size, size, layer), mm(size, size, 32, layer, "backward")]
        us = 2 + size * size / 500
        factor = 4 / 3 if i % 2 == 0 else 1.0
        items.append(
            Item(
                layer,
                "forward",
                us * factor * US,
                ("compute", "L1", "L2", "DRAM")[i % 4],
                "interpolated",
            )
        )
        items.append(Item(layer, "backward", 2 * us * factor * US, "compute", "interpolated"))
        items.append(Item(layer, "backward", 5 * US, "overhead", "interpolated", "dispatch"))
        times.append(LayerTimes(layer, "Linear", around(us * US), around(2 * us * US + 5 * US)))
        total_us += 3 * us + 5
    trace = Trace("wide.py:wide", 32, tuple(layers), tuple(ops))
    sums = {
        "forward": total_us / 3,
        "backward": total_us * 2 / 3,
        "optimizer": 1,
        "zero_grad": 1,
        "total": total_us,
    }
    step = {phase: around(us * US) for phase, us in sums.items()}
    return prediction(trace, items), Measurement("wide.py:wide", 32, 1, step, tuple(times))


def single() -> tuple[Prediction, Measurement]:
    """A root that is a leaf, named by its type, in inference."""
    trace = Trace(
        "",
        1,
        (Layer("Linear", "Linear", True, (("", 1),)),),
        (mm(1, 4, 4, "Linear"),),
        inference=True,
    )
    items = [Item("Linear", "forward", 8 * US, "overhead", "measured")]
    step = {"forward": around(7 * US), "total": around(7 * US)}
    return prediction(trace, items), Measurement(
        "", 1, 1, step, (LayerTimes("Linear", "Linear", around(7 * US)),), inference=True
    )


def hostile(name: str) -> tuple[Prediction, Measurement]:
    """One layer with a name that somebody else chose."""
    trace = Trace(
        name,
        4,
        (Layer("Net", "Net", False, (("", 1),)), Layer(name, name, True, (("Net", 1),))),
        (mm(4, 4, 4, name),),
    )
    items = [
        Item(name, "forward", 5 * US, "compute", "measured"),
        Item(name, "backward", 9 * US, "compute", "measured"),
    ]
    step = {
        name_: around(us * US)
        for name_, us in (
            ("forward", 6),
            ("backward", 8),
            ("optimizer", 1),
            ("zero_grad", 1),
            ("total", 16),
        )
    }
    return prediction(trace, items), Measurement(
        name,
        4,
        1,
        step,
        (LayerTimes(name, name, around(6 * US), around(8 * US)),),
        machine=name,
        notes=(name,),
    )
