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

from dlperf.core.units import GIGA, TERA
from dlperf.models import ridgeline as model
from dlperf.models.roofline import attainable_flops_per_s
from dlperf.studies.papers.tables import Entry, Row, Table

PAPER = "Checconi, Tithi, Petrini 2022"
CASCADE_LAKE = model.Rates(4.2 * TERA, 105 * GIGA, 12 * GIGA)
WIDTH = 4096
ITEM_BYTES = 4
BATCH_SIZES = tuple(2**power for power in range(14))
FIRST_ON_RIDGELINE = 256
"""Figure 6 starts here."""


def layer_flops(batch_size: int, width: int = WIDTH) -> float:
    """F of a step in FLOP: three products of 2 B W^2."""
    return 6.0 * batch_size * width**2


def layer_memory_bytes(batch_size: int, width: int = WIDTH) -> float:
    """B_M of a step in bytes: input, output and weights once."""
    return float(ITEM_BYTES * (2 * batch_size * width + width**2))


def layer_network_bytes(width: int = WIDTH) -> float:
    """B_N of a step in bytes: the all-reduce of the weights' gradients."""
    return 2.0 * ITEM_BYTES * width**2


def counts(batch_size: int) -> tuple[float, float, float]:
    """F, B_M and B_N of the case study."""
    return layer_flops(batch_size), layer_memory_bytes(batch_size), layer_network_bytes()


def place(batch_size: int) -> tuple[float, float]:
    """(x, y) of a batch size on the plane: memory and arithmetic intensity."""
    flops, memory, network = counts(batch_size)
    return float(model.memory_intensity(memory, network)), float(
        model.arithmetic_intensity(flops, memory)
    )


def centre() -> Table:
    """The centre of the cross and the ridge's network intensity, from the printed rates."""
    (x, y), balance = CASCADE_LAKE.centre, CASCADE_LAKE.network_balance
    rows = (
        Row(("x, bytes of memory per byte of network", "105 / 12"), (Entry("", x),)),
        Row(("y, FLOP per byte of memory", "4200 / 105"), (Entry("", y),)),
        Row(("x y on the ridge, FLOP per byte of network", "4200 / 12"), (Entry("", balance),)),
    )
    return Table(
        PAPER,
        "centre of the Ridgeline",
        ("quantity", "follows from"),
        ("value",),
        rows,
        ("The paper prints the rates and draws the centre.",),
    )


def roofline() -> Table:
    """Figures 4a and 4b: arithmetic intensity and attainable rate without a network."""
    rows = []
    for batch_size in BATCH_SIZES:
        _, y = place(batch_size)
        rate = float(
            attainable_flops_per_s(
                y, CASCADE_LAKE.peak_flops_per_s, CASCADE_LAKE.memory_bytes_per_s
            )
        )
        rows.append(
            Row(
                (str(batch_size), "compute" if y >= CASCADE_LAKE.centre[1] else "memory"),
                (Entry("", y), Entry("", rate / TERA)),
            )
        )
    return Table(
        PAPER,
        "Figures 4a and 4b, the roofline",
        ("batch", "bound"),
        ("I_A_FLOP/byte", "TFLOP/s"),
        tuple(rows),
    )


def ridgeline() -> Table:
    """Figures 4c and 6: point on the plane, three terms and projected time by batch size."""
    rows = []
    for batch_size in BATCH_SIZES:
        x, y = place(batch_size)
        terms = 1000 * model.terms_s(*counts(batch_size), CASCADE_LAKE)
        projected = 1000 * float(model.projected_s(*counts(batch_size), CASCADE_LAKE))
        entries = (x, y, x * y, *terms.tolist(), projected)
        rows.append(
            Row(
                (str(batch_size), model.RESOURCES[int(model.region(x, y, CASCADE_LAKE))]),
                tuple(Entry("", float(value)) for value in entries),
            )
        )
    quantities = ("I_M", "I_A", "I_N", "compute_ms", "memory_ms", "all-reduce_ms", "projected_ms")
    return Table(
        PAPER, "Figures 4c and 6, the Ridgeline", ("batch", "region"), quantities, tuple(rows)
    )


def ridge_batch() -> float:
    """The batch size, not rounded, at which computing takes as long as the all-reduce: I_N = peak /
    network.
    """
    return CASCADE_LAKE.network_balance * layer_network_bytes() / layer_flops(1)


def statements() -> Table:
    """The batch sizes that the text names, found anew among powers of two."""
    clear = min(b for b in BATCH_SIZES if place(b)[1] >= CASCADE_LAKE.centre[1])
    on_ridge = min(
        BATCH_SIZES, key=lambda b: abs(place(b)[0] * place(b)[1] / CASCADE_LAKE.network_balance - 1)
    )
    right = min(
        b
        for b in BATCH_SIZES
        if b > on_ridge and model.region(*place(b), CASCADE_LAKE) == model.COMPUTE
    )
    left = max(b for b in BATCH_SIZES if model.region(*place(b), CASCADE_LAKE) == model.NETWORK)
    rows = (
        Row(
            ("least batch that can reach the peak, no network", "32 or higher"),
            (Entry("32", clear),),
        ),
        Row(("batch on the ridge", "512 is indeed on the ridgeline"), (Entry("512", on_ridge),)),
        Row(("next batch, compute bound", "1024 and higher"), (Entry("1024", right),)),
        Row(("largest network-bound batch", "any lower than 512"), (Entry("256", left),)),
        Row(
            ("computing takes as long as the all-reduce at", "up to 512 less, Figure 4c"),
            (Entry("", ridge_batch()),),
        ),
    )
    notes = (
        (
            "Batch 512 has I_N = 384 against 350, within 10 % of the ridge; exactly on it would be"
            " 466.7."
        ),
    )
    return Table(PAPER, "section III, statements", ("quantity", "says"), ("batch",), rows, notes)


def tables() -> list[Table]:
    """Every number of the case study."""
    return [centre(), roofline(), ridgeline(), statements()]
