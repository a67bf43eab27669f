"""Choi, Kale, Richards, Bhatele, "End-to-end Performance Modeling of Distributed GPU Applications",
ICS 2020: Tables 2 to 5 and what follows from them.

Tables 2 to 4 (fitted parameters of three machines) and 5 (message counts) are kept as printed.
Recomputed are the k of Table 5, the message counts of Jacobi2D and MiniMD from where ranks are
placed, and the times of a message by the postal, max-rate and K-model.

What cannot be recomputed: Figures 5 to 15. The measured times are drawn, not printed, and the
predictions need MPI traces that were not published (their errors are printed: with Jacobi2D on 256
nodes of Summit 59 % postal, 31 % max-rate, 15 % K). Nor the parameters: the ping-pongs behind them
were not published. Nor MiniFE's counts: with 156 messages 135 leave the node, so 21 stay, an odd
number, which a pattern where neighbours send to each other cannot give; they were counted in a run.

Readings: the printed message counts of Jacobi2D are those of a periodic grid with six (Summit),
four (Lassen) consecutive ranks of a longer row on a node, and of two whole columns of two on
Bridges; those of MiniMD of a periodic 16 x 8 x 8 grid, last axis fastest (of 1,024 ranks; Bridges,
where at most eight may run, has the counts of this grid too). The halo of Jacobi2D is 16,384
doubles, sent by rendezvous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlperf.core.units import MEGA
from dlperf.models.point_to_point import (
    MessageCounts,
    blocks,
    count_messages,
    halo,
    k_model_senders,
    max_rate_s,
    max_rate_short_s,
    postal_s,
)
from dlperf.studies.papers.tables import Entry, Row, Table, row

PAPER = "Choi et al. 2020"
DISTANCES, PROTOCOLS = (
    ("intra-socket", "inter-socket", "inter-node"),
    ("short", "eager", "rendezvous"),
)
JACOBI_HALO_BYTES = 16_384 * 8
MINIFE_FACE_BYTES = 40_000 * 8


@dataclass(frozen=True, slots=True)
class System:
    """A machine: GPUs (and ranks) a node k', and its fitted parameters as printed, by distance and
    protocol; what the paper does not give is absent.

    `postal`: Table 2 (alpha s, beta s/byte); `short`: Table 3 (alpha, beta), by distance;
    `max_rate`: Table 4 (alpha s, R_Cb, R_Ci bytes/s).
    """

    name: str
    n_per_node: int
    postal: dict[tuple[str, str], tuple[str, str]]
    short: dict[str, tuple[str, str]]
    max_rate: dict[tuple[str, str], tuple[str, str, str]]


SUMMIT = System(
    "Summit",
    6,
    {
        ("intra-socket", "short"): ("4.79E-7", "2.99E-10"),
        ("intra-socket", "eager"): ("5.96E-7", "1.12E-10"),
        ("intra-socket", "rendezvous"): ("2.18E-6", "5.37E-11"),
        ("inter-socket", "short"): ("8.52E-7", "3.33E-10"),
        ("inter-socket", "eager"): ("1.03E-6", "2.27E-10"),
        ("inter-socket", "rendezvous"): ("4.60E-6", "1.18E-10"),
        ("inter-node", "short"): ("1.24E-6", "1.01E-9"),
        ("inter-node", "eager"): ("2.86E-6", "1.55E-10"),
        ("inter-node", "rendezvous"): ("7.59E-6", "8.70E-11"),
    },
    {
        "intra-socket": ("6.29E-7", "6.21E-10"),
        "inter-socket": ("1.02E-6", "1.45E-9"),
        "inter-node": ("1.51E-6", "6.32E-10"),
    },
    {
        ("intra-socket", "eager"): ("7.65E-7", "9.07E9", "4.32E9"),
        ("intra-socket", "rendezvous"): ("3.59E-6", "1.80E10", "1.53E10"),
        ("inter-socket", "eager"): ("1.33E-6", "5.29E9", "2.69E9"),
        ("inter-socket", "rendezvous"): ("4.04E-6", "8.28E9", "7.08E9"),
        ("inter-node", "eager"): ("2.39E-6", "6.68E9", "1.27E9"),
        ("inter-node", "rendezvous"): ("9.33E-6", "1.23E10", "2.58E7"),
    },
)
LASSEN = System(
    "Lassen",
    4,
    {
        ("intra-socket", "short"): ("3.61E-7", "1.16E-10"),
        ("intra-socket", "eager"): ("5.21E-7", "6.44E-11"),
        ("intra-socket", "rendezvous"): ("2.92E-6", "3.49E-11"),
        ("inter-socket", "short"): ("8.24E-7", "1.05E-9"),
        ("inter-socket", "eager"): ("1.11E-6", "2.16E-10"),
        ("inter-socket", "rendezvous"): ("2.54E-6", "1.24E-10"),
        ("inter-node", "short"): ("1.21E-6", "1.19E-9"),
        ("inter-node", "eager"): ("2.86E-6", "1.52E-10"),
        ("inter-node", "rendezvous"): ("8.81E-6", "7.18E-11"),
    },
    {"inter-socket": ("1.08E-6", "1.45E-9"), "inter-node": ("1.55E-6", "8.84E-10")},
    {
        ("inter-socket", "eager"): ("1.53E-6", "4.70E9", "3.84E9"),
        ("inter-socket", "rendezvous"): ("3.41E-6", "8.41E9", "7.09E9"),
        ("inter-node", "eager"): ("2.36E-6", "4.92E9", "2.31E9"),
        ("inter-node", "rendezvous"): ("1.06E-5", "1.79E10", "2.22E9"),
    },
)
BRIDGES = System(
    "Bridges",
    2,
    {
        ("inter-socket", "short"): ("6.02E-7", "1.46E-9"),
        ("inter-socket", "eager"): ("7.68E-7", "2.05E-10"),
        ("inter-socket", "rendezvous"): ("8.76E-7", "1.81E-10"),
        ("inter-node", "short"): ("1.36E-6", "3.55E-9"),
        ("inter-node", "eager"): ("2.98E-6", "4.20E-10"),
        ("inter-node", "rendezvous"): ("2.94E-5", "1.59E-10"),
    },
    {"inter-node": ("1.39E-6", "5.51E-9")},
    {
        ("inter-node", "eager"): ("2.16E-6", "2.20E9", "1.35E9"),
        ("inter-node", "rendezvous"): ("3.26E-5", "6.35E9", "2.08E8"),
    },
)
SYSTEMS = (SUMMIT, LASSEN, BRIDGES)

TABLE_5 = {
    "Jacobi2D": (("14", "24", "3.50"), ("10", "16", "2.50"), ("4", "8", "1.00")),
    "MiniFE": (("135", "156", "5.19"), ("92", "104", "3.54"), ("50", "52", "1.92")),
    "MiniMD": (("28", "36", "4.67"), ("18", "24", "3.00"), ("10", "12", "1.67")),
}
"""K_inter, K_total and k of each application on Summit, Lassen and Bridges."""

GRIDS = {
    "Jacobi2D": ((32, 48), (32, 32), (3, 2)),
    "MiniMD": ((16, 8, 8), (16, 8, 8), (16, 8, 8)),
}
"""The process grids that the counts are recomputed with, by machine; Jacobi2D's largest run on
Summit had 1,536 ranks, on Bridges six.
"""


def senders(application: str, system: System) -> float:
    """The K-model's k, equation 4, from the printed message counts."""
    n_inter, n_total, _ = TABLE_5[application][SYSTEMS.index(system)]
    return float(k_model_senders(float(n_inter), float(n_total), system.n_per_node))


def message_s(
    system: System,
    n_bytes: float,
    model: str,
    k: float,
    distance: str = "inter-node",
    protocol: str = "rendezvous",
) -> float:
    """A message's time in seconds by `model`: "postal" (equation 1, no k), else equation 3 for
    short messages and equation 2 for others.

    The max-rate model has k = k', the K-model that of :func:`senders`. Where Tables 3 and 4 say so,
    the postal model stands in.
    """
    if model == "postal" or (
        distance not in system.short
        if protocol == "short"
        else (distance, protocol) not in system.max_rate
    ):
        alpha, beta = system.postal[distance, protocol]
        return float(postal_s(n_bytes, float(alpha), float(beta)))
    if protocol == "short":
        alpha, beta = system.short[distance]
        return float(max_rate_short_s(n_bytes, float(alpha), float(beta), k))
    alpha, base, added = system.max_rate[distance, protocol]
    return float(max_rate_s(n_bytes, float(alpha), float(base), float(added), k))


def placed(application: str, system: System) -> MessageCounts:
    """K_inter and K_total of an application's halo exchange on the grid of :data:`GRIDS`, nodes
    filled one after another.
    """
    grid = GRIDS[application][SYSTEMS.index(system)]
    return count_messages(halo(grid), blocks(math.prod(grid), system.n_per_node))


def k_values() -> Table:
    """Table 5: k = K_inter / K_total x k'."""
    return Table(
        PAPER,
        "Table 5",
        ("application", "system", "k'", "K_inter", "K_total"),
        ("k",),
        tuple(
            row(
                (application, system.name, system.n_per_node, n_inter, n_total),
                Entry(k, senders(application, system)),
            )
            for application, printed in TABLE_5.items()
            for system, (n_inter, n_total, k) in zip(SYSTEMS, printed)
        ),
    )


def _counted_row(keys: tuple[str, str, str], printed: Sequence[str], found: MessageCounts) -> Row:
    return row(keys, *map(Entry, printed, (found.n_inter, found.n_total, found.k)))


def counted() -> Table:
    """Table 5's message counts from placements, and the example of Figure 1."""
    figure = count_messages(halo((8, 6)), blocks(48, 6))
    rows = [
        _counted_row(
            (application, system.name, " x ".join(map(str, grid))),
            printed,
            placed(application, system),
        )
        for application, grids in GRIDS.items()
        for system, grid, printed in zip(SYSTEMS, grids, TABLE_5[application])
    ]
    return Table(
        PAPER,
        "message counts from placement",
        ("application", "system", "grid"),
        ("K_inter", "K_total", "k"),
        (_counted_row(("Figure 1", "Summit", "8 x 6"), ("12", "24", "3"), figure), *rows),
        (
            (
                "Periodic halo exchanges, last axis fastest. The grids are ours: the paper names"
                " none but Figure 1's (columns of six, here rows)."
            ),
            "MiniFE cannot be recomputed: 156 - 135 = 21 messages inside a node cannot be pairs.",
        ),
    )


def _halo_row(system: System) -> Row:
    k = senders("Jacobi2D", system)
    cases = (("postal", 1), ("K", k), ("max-rate", system.n_per_node))
    times_s = (message_s(system, JACOBI_HALO_BYTES, model, n) for model, n in cases)
    return row((system.name, f"{k:.2f}"), *(seconds * MEGA for seconds in times_s))


def models() -> Table:
    """A halo message of Jacobi2D between nodes by the three models: postal < K < max-rate, as in
    Figure 5.
    """
    return Table(
        PAPER,
        "a halo message of Jacobi2D by three models",
        ("system", "k"),
        ("postal_us", "K_us", "max-rate_us"),
        tuple(map(_halo_row, SYSTEMS)),
        (
            (
                "Rendezvous, inter-node, 131,072 bytes; Tables 2 and 4. The paper draws the sums"
                " over a run's messages (Figure 5) and prints errors only:"
            ),
            (
                "59, 31, 15 % (Summit), 27, 15, 5 % (Lassen), 7, 16, 2 % (Bridges) for postal,"
                " max-rate and K; they need traces and measured times."
            ),
        ),
    )


def _node_row(n_per_node: int) -> Row:
    """Shares of MiniFE's face messages by distance, and their mean times."""
    faces = halo((16, 4, 4), periodic=False)
    nodes, sockets = (
        np.array(blocks(256, size))[faces] for size in (n_per_node, max(n_per_node // 2, 1))
    )
    shares = {
        "intra-socket": np.mean(sockets[:, 0] == sockets[:, 1]),
        "inter-node": np.mean(nodes[:, 0] != nodes[:, 1]),
    }
    shares["inter-socket"] = 1 - sum(shares.values())
    times_us = []
    for model in ("postal", "max-rate"):
        of = {
            distance: message_s(
                LASSEN,
                MINIFE_FACE_BYTES,
                model if distance == "inter-node" else "postal",
                n_per_node,
                distance,
            )
            for distance in shares
        }
        times_us.append(sum(share * of[distance] for distance, share in shares.items()) * MEGA)
    percents = (100 * shares[distance] for distance in reversed(DISTANCES))
    return row((n_per_node,), *percents, *times_us)


def fatter_nodes() -> Table:
    """Section 6.1 on Lassen: 256 ranks of MiniFE on nodes of 1 to 16 in two sockets; the mean of
    their face messages.
    """
    return Table(
        PAPER,
        "section 6.1, GPUs per node",
        ("GPUs/node",),
        ("inter-node_%", "inter-socket_%", "intra-socket_%", "postal_us", "max-rate_us"),
        tuple(map(_node_row, (1, 2, 4, 8, 16))),
        (
            (
                "320,000 bytes, rendezvous; a 16 x 4 x 4 grid, nodes and sockets filled one after"
                " another; inside a node the postal model."
            ),
            (
                "As section 6.1 says, fatter nodes are faster by the postal model (but for two,"
                " whose only neighbour is on the slower other socket) and slower by"
            ),
            (
                "max-rate, where from 8 on more messages that stay inside make up for it; the sums"
                " of Figure 14 need the trace."
            ),
        ),
    )


def tables() -> list[Table]:
    """Every table of the paper that can be recomputed."""
    return [k_values(), counted(), models(), fatter_nodes()]
