"""Cardwell, "Performance models for distributed-memory HPC systems and deep neural networks",
Purdue 2019: Tables 3.6, 3.7, 3.8.

Chapter 2 is in :mod:`dlperf.studies.papers.cardwell_parallel`. Printed inputs: the matrix product
times of Tables 3.3 and 3.4, the STREAM bandwidths of section 3.6. They make a Machine; the
784-50-10 network makes a Trace; the ``gemm-table`` predictor does the rest. The measured times of
Tables 3.6 and 3.7 enter the errors only.

Readings that reproduce every printed value:

- a table row "M N K" is batch, inputs, outputs: (M x N) times (N x K);
- ReLU takes 4 x batch x 50 / M_peak seconds, the sigmoid 30 x 4 x batch x 10 / M_peak;
- error = |actual - predicted| / actual with the prediction *not rounded* (the rounded one that
  stands beside it would give 100 % for 0.000000); MAPE is the mean of the four rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from dlperf.core.clock import Samples
from dlperf.core.machine import Bandwidth, Cpu, Kernel, Machine
from dlperf.core.trace import Layer, Op, TensorSpec, Trace
from dlperf.core.units import MEGA
from dlperf.forecast.prediction import predict
from dlperf.studies.papers.cardwell_parallel import PAPER
from dlperf.studies.papers.cardwell_parallel import tables as chapter_2
from dlperf.studies.papers.tables import Entry, Table, row

BATCH_SIZES = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class System:
    """One system of chapter 3.

    `gemm_s`: (batch, inputs, outputs, seconds), Table 3.3 or 3.4; `stream_mb_per_s`: section 3.6;
    `results`: (layer, batch, actual s, predicted s, error %), Table 3.6 or 3.7; `mape`: (batch, %),
    Table 3.8.
    """

    name: str
    processor: str
    n_cores: int
    stream_mb_per_s: float
    gemm_table: str
    gemm_s: tuple[tuple[int, int, int, float], ...]
    result_table: str
    results: tuple[tuple[str, int, str, str, str], ...]
    mape: tuple[tuple[int, str], ...]


CARBONATE = System(
    "Carbonate",
    "Intel Xeon E5-2680 v3",
    24,
    12_937.6,
    "Table 3.3",
    (
        (32, 784, 50, 0.000143),
        (32, 784, 10, 0.000074),
        (32, 50, 50, 0.000015),
        (32, 50, 10, 0.000005),
        (64, 784, 50, 0.000157),
        (64, 784, 10, 0.000050),
        (64, 50, 50, 0.000030),
        (64, 50, 10, 0.000010),
        (128, 784, 50, 0.000207),
        (128, 784, 10, 0.000064),
        (128, 50, 50, 0.000064),
        (128, 50, 10, 0.000027),
    ),
    "Table 3.6",
    (
        ("fc1", 32, "0.000103", "0.000143", "38.83"),
        ("relu", 32, "0.000033", "0.000000", "98.50"),
        ("fc2", 32, "0.000008", "0.000005", "37.50"),
        ("sigmoid", 32, "0.000011", "0.000003", "73.02"),
        ("fc1", 64, "0.000249", "0.000157", "36.95"),
        ("relu", 64, "0.000066", "0.000001", "98.50"),
        ("fc2", 64, "0.000013", "0.000010", "23.08"),
        ("sigmoid", 64, "0.000022", "0.000006", "73.02"),
        ("fc1", 128, "0.000206", "0.000207", "0.49"),
        ("relu", 128, "0.000144", "0.000002", "98.63"),
        ("fc2", 128, "0.000028", "0.000027", "3.57"),
        ("sigmoid", 128, "0.000047", "0.000012", "74.74"),
    ),
    ((32, "61.96"), (64, "57.89"), (128, "44.36")),
)

BRIDGES = System(
    "Bridges",
    "Intel Xeon E5-2695 v3",
    28,
    11_442.7,
    "Table 3.4",
    (
        (32, 784, 50, 0.000102),
        (32, 784, 10, 0.000028),
        (32, 50, 50, 0.000011),
        (32, 50, 10, 0.000003),
        (64, 784, 50, 0.000169),
        (64, 784, 10, 0.000046),
        (64, 50, 50, 0.000019),
        (64, 50, 10, 0.000005),
        (128, 784, 50, 0.000326),
        (128, 784, 10, 0.000102),
        (128, 50, 50, 0.000041),
        (128, 50, 10, 0.000010),
    ),
    "Table 3.7",
    (
        ("fc1", 32, "0.000093", "0.000102", "9.68"),
        ("relu", 32, "0.000034", "0.000001", "98.35"),
        ("fc2", 32, "0.000005", "0.000003", "40.00"),
        ("sigmoid", 32, "0.000011", "0.000003", "69.49"),
        ("fc1", 64, "0.000183", "0.000169", "7.65"),
        ("relu", 64, "0.000067", "0.000001", "98.33"),
        ("fc2", 64, "0.000008", "0.000005", "37.50"),
        ("sigmoid", 64, "0.000021", "0.000007", "68.04"),
        ("fc1", 128, "0.000349", "0.000326", "6.59"),
        ("relu", 128, "0.000130", "0.000002", "98.28"),
        ("fc2", 128, "0.000018", "0.000010", "44.44"),
        ("sigmoid", 128, "0.000040", "0.000013", "66.44"),
    ),
    ((32, "54.38"), (64, "52.88"), (128, "53.94")),
)

SYSTEMS = (CARBONATE, BRIDGES)


def machine(system: System) -> Machine:
    """A test system as a Machine: its STREAM bandwidth and its table of matrix products, one
    thread.
    """
    T = TensorSpec.contiguous
    kernels = tuple(
        Kernel(
            Op("aten.mm.default", (T(batch, n_in), T(n_in, n_out)), outputs=(T(batch, n_out),)),
            "gemm",
            1,
            Samples((seconds,)),
        )
        for batch, n_in, n_out, seconds in system.gemm_s
    )
    swept_bytes = round(system.stream_mb_per_s * MEGA)  # in one second
    stream = Bandwidth("triad", 1, swept_bytes, swept_bytes, Samples((1.0,)))
    cpu = Cpu(f"{system.name} ({system.processor})", system.n_cores)
    return Machine(cpu, kernels, (stream,), notes=(f"{PAPER}, {system.gemm_table}",))


def network(batch_size: int) -> Trace:
    """The forward pass of the 784-50-10 network (Table 3.1) as a Trace: fc1, ReLU, fc2, sigmoid."""
    layers, ops = [], []
    values = TensorSpec.contiguous(batch_size, 784)
    for name, kind, n_outputs in (
        ("fc1", "Linear", 50),
        ("relu", "ReLU", 50),
        ("fc2", "Linear", 10),
        ("sigmoid", "Sigmoid", 10),
    ):
        result = TensorSpec.contiguous(batch_size, n_outputs)
        inputs: tuple[TensorSpec, ...] = (values,)
        parameters: tuple[tuple[str, TensorSpec], ...] = ()
        if kind == "Linear":
            n_inputs = values.shape[1]
            bias = TensorSpec.contiguous(n_outputs)
            parameters = (("weight", TensorSpec.contiguous(n_outputs, n_inputs)), ("bias", bias))
            inputs = (bias, values, TensorSpec((n_inputs, n_outputs), (1, n_inputs)))
        operation = "addmm" if kind == "Linear" else name
        ops.append(Op(f"aten.{operation}.default", inputs, outputs=(result,), layer=name))
        layers.append(Layer(name, kind, True, (("", 1),), (values,), (result,), parameters))
        values = result
    return Trace(
        f"784-50-10 ({PAPER})",
        batch_size,
        tuple(layers),
        tuple(ops),
        inference=True,
        recorded_on="the paper's Table 3.1",
    )


def predicted_s(system: System) -> dict[tuple[str, int], float]:
    """The predicted time of each (layer, batch size) in seconds, not rounded."""
    found = {}
    for batch_size in BATCH_SIZES:
        step = predict(network(batch_size), machine(system), threads=1, predictor="gemm-table")
        for layer, seconds in zip(step.layers["layer"], step.layers["forward_s"]):
            found[layer, batch_size] = float(seconds)
    return found


def error_percent(actual_s: float, prediction_s: float) -> float:
    """Absolute percentage error, 100 |actual - predicted| / actual (equation 2.6's summand).

    >>> round(error_percent(0.000206, 0.000207), 2)
    0.49
    """
    return 100.0 * abs(actual_s - prediction_s) / actual_s


def results(system: System) -> Table:
    """Table 3.6 or 3.7: predicted times and their errors."""
    ours = predicted_s(system)
    return Table(
        PAPER,
        f"{system.result_table}, {system.name}",
        ("layer", "batch", "actual_s"),
        ("predicted_s", "error_%"),
        tuple(
            row(
                (layer, batch, actual),
                Entry(predicted, ours[layer, batch]),
                Entry(error, error_percent(float(actual), ours[layer, batch])),
            )
            for layer, batch, actual, predicted, error in system.results
        ),
        (
            (
                "Errors are those of the predictions before rounding; the actual times are printed"
                " measurements and enter nothing else."
            ),
        ),
    )


def summary() -> Table:
    """Table 3.8: mean absolute percentage errors."""
    rows = []
    for system in SYSTEMS:
        ours = predicted_s(system)
        for batch_size, mape in system.mape:
            errors = [
                error_percent(float(actual), ours[layer, batch])
                for layer, batch, actual, _, _ in system.results
                if batch == batch_size
            ]
            rows.append(row((system.name, batch_size), Entry(mape, fmean(errors))))
    return Table(PAPER, "Table 3.8", ("system", "batch"), ("MAPE_%",), tuple(rows))


def tables() -> list[Table]:
    """Every table of the paper that can be recomputed."""
    return [*chapter_2(), results(CARBONATE), results(BRIDGES), summary()]
