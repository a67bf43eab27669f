"""Checconi, Tithi, Petrini, "Ridgeline: A 2D Roofline Model for Distributed Systems", 2022: the
case study of section III.

One fully connected layer of 4096 x 4096, data parallel, fp32, on a Cascade Lake socket of 4.2
TFLOP/s, 105 GB/s memory and 12 GB/s network. The paper prints these rates, a few batch sizes, and
draws the rest. Readings that give every batch size it names:

- F = 6 B W^2: three matrix products (forward, gradient of the activations, of the weights), 2 FLOP
  a multiply-add; updates, biases, transposes are ignored;
- B_M = 4 (2 B W + W^2): one pass over inputs, outputs and weights, against all three products;
- B_N = 2 x 4 W^2: an all-reduce sends and receives each gradient about once, whatever the number of
  nodes.
"""

from __future__ import annotations

import numpy as np

from dlperf.core.units import GIGA, TERA
from dlperf.models import ridgeline as model
from dlperf.models.roofline import attainable_flops_per_s
from dlperf.studies.papers.tables import Entry, Row, Table, row

PAPER = "Checconi, Tithi, Petrini 2022"
CASCADE_LAKE = model.Rates(4.2 * TERA, 105 * GIGA, 12 * GIGA)
WIDTH = 4096
ITEM_BYTES = 4
BATCH_SIZES = tuple(2**power for power in range(14))
FIRST_ON_RIDGELINE = 256
"""Figure 6 starts here."""


def counts(batch_size: int) -> tuple[float, float, float]:
    """F in FLOP, B_M and B_N in bytes of a step: three products of 2 B W^2; input, output and
    weights once; the all-reduce of the weights' gradients.
    """
    return (
        6.0 * batch_size * WIDTH**2,
        float(ITEM_BYTES * (2 * batch_size * WIDTH + WIDTH**2)),
        2.0 * ITEM_BYTES * WIDTH**2,
    )


def place(batch_size: int) -> tuple[float, float]:
    """(x, y) of a batch size on the plane: memory and arithmetic intensity."""
    flops, memory, network = counts(batch_size)
    return float(model.memory_intensity(memory, network)), float(
        model.arithmetic_intensity(flops, memory)
    )


def centre() -> Table:
    """The centre of the cross and the ridge's network intensity, from the printed rates."""
    (x, y), balance = CASCADE_LAKE.centre, CASCADE_LAKE.network_balance
    return Table(
        PAPER,
        "centre of the Ridgeline",
        ("quantity", "follows from"),
        ("value",),
        (
            row(("x, bytes of memory per byte of network", "105 / 12"), x),
            row(("y, FLOP per byte of memory", "4200 / 105"), y),
            row(("x y on the ridge, FLOP per byte of network", "4200 / 12"), balance),
        ),
        ("The paper prints the rates and draws the centre.",),
    )


def _roofline_row(batch_size: int) -> Row:
    _, y = place(batch_size)
    clx = CASCADE_LAKE
    rate = attainable_flops_per_s(y, clx.peak_flops_per_s, clx.memory_bytes_per_s)
    return row((batch_size, "compute" if y >= clx.centre[1] else "memory"), y, rate / TERA)


def roofline() -> Table:
    """Figures 4a and 4b: arithmetic intensity and attainable rate without a network."""
    return Table(
        PAPER,
        "Figures 4a and 4b, the roofline",
        ("batch", "bound"),
        ("I_A_FLOP/byte", "TFLOP/s"),
        tuple(map(_roofline_row, BATCH_SIZES)),
    )


def _ridgeline_row(batch_size: int) -> Row:
    x, y = place(batch_size)
    terms_ms = 1000 * model.terms_s(*counts(batch_size), CASCADE_LAKE)
    projected_ms = 1000 * model.projected_s(*counts(batch_size), CASCADE_LAKE)
    region = model.RESOURCES[int(model.region(x, y, CASCADE_LAKE))]
    return row((batch_size, region), x, y, x * y, *terms_ms, projected_ms)


def ridgeline() -> Table:
    """Figures 4c and 6: point on the plane, three terms and projected time by batch size."""
    return Table(
        PAPER,
        "Figures 4c and 6, the Ridgeline",
        ("batch", "region"),
        ("I_M", "I_A", "I_N", "compute_ms", "memory_ms", "all-reduce_ms", "projected_ms"),
        tuple(map(_ridgeline_row, BATCH_SIZES)),
    )


def ridge_batch() -> float:
    """The batch size, not rounded, at which computing takes as long as the all-reduce: I_N = peak /
    network.
    """
    flops, _, network_bytes = counts(1)
    return CASCADE_LAKE.network_balance * network_bytes / flops


def statements() -> Table:
    """The batch sizes that the text names, found anew among powers of two."""
    x, y = np.array([place(b) for b in BATCH_SIZES]).T
    batches, regions = np.array(BATCH_SIZES), model.region(x, y, CASCADE_LAKE)
    on_ridge = batches[np.argmin(abs(x * y / CASCADE_LAKE.network_balance - 1))]
    right = batches[(batches > on_ridge) & (regions == model.COMPUTE)].min()
    return Table(
        PAPER,
        "section III, statements",
        ("quantity", "value"),
        ("batch",),
        (
            row(
                ("least batch that can reach the peak, no network", "32 or higher"),
                Entry("32", int(batches[y >= CASCADE_LAKE.centre[1]].min())),
            ),
            row(
                ("batch on the ridge", "512 is indeed on the ridgeline"),
                Entry("512", int(on_ridge)),
            ),
            row(("next batch, compute bound", "1024 and higher"), Entry("1024", int(right))),
            row(
                ("largest network-bound batch", "any lower than 512"),
                Entry("256", int(batches[regions == model.NETWORK].max())),
            ),
            row(
                ("computing takes as long as the all-reduce at", "up to 512 less, Figure 4c"),
                ridge_batch(),
            ),
        ),
        (
            (
                "Batch 512 has I_N = 384 against 350, within 10 % of the ridge; exactly on it would"
                " be 466.7."
            ),
        ),
    )


def tables() -> list[Table]:
    """Every number of the case study."""
    return [centre(), roofline(), ridgeline(), statements()]
