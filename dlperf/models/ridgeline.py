"""Ridgeline: one plane that shows which of arithmetic, memory and network bounds a piece of work.

Checconi, Tithi, Petrini, "Ridgeline: A 2D Roofline Model for Distributed Systems", 2022. A piece of
work is F = `flops` [FLOP], B_M = `memory_bytes` and B_N = `network_bytes` [bytes] of one process.
The plane has x = I_M and y = I_A, both logarithmic; since I_N = x y, the lines of equal network
intensity fall at 45 degrees, and the one through the centre is the ridge between network and
compute.

With OI = I_A and CAI = I_N the same three roofs are Cardwell's (2019, equation 2.5):
:func:`dlperf.models.roofline.attainable_with_network_flops_per_s`.

The published model has no latency, and lets everything overlap. Both can be given here:
`n_messages` x `latency_s` joins the network's term, and `overlap_frac` names which share of the
shorter of (local work, network) hides behind the longer; 0 messages and 1 are the published form.

Arguments may be numbers or arrays that broadcast. Bounds err low: no resource reaches its measured
peak while the others run too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlperf.models.arguments import (
    POSITIVE,
    POSITIVE_FINITE,
    Quantity,
    Reals,
    check_fields,
    formula,
)
from dlperf.models.roofline import attainable_with_network_flops_per_s

COMPUTE, MEMORY, NETWORK = 0, 1, 2
RESOURCES = ("compute", "memory", "network")
"""By number: the order of :func:`terms_s`, in which ties are decided too (a point on the ridge is
compute bound).
"""


@dataclass(frozen=True, slots=True)
class Rates:
    """What one process can do: peak [FLOP/s], memory and network bandwidth [bytes/s]. Raises
    DlperfError unless all are positive and finite.

    >>> clx = Rates(4.2e12, 105e9, 12e9)  # Checconi et al., section III: a Cascade Lake socket
    >>> clx.centre, clx.network_balance
    ((8.75, 40.0), 350.0)
    """

    peak_flops_per_s: float
    memory_bytes_per_s: float
    network_bytes_per_s: float

    def __post_init__(self) -> None:
        check_fields(self, **dict.fromkeys(self.__dataclass_fields__, POSITIVE_FINITE))

    @property
    def centre(self) -> tuple[float, float]:
        """Where all three bind: x = memory / network bandwidth [byte per byte], y = peak / memory
        bandwidth [FLOP per byte] (section III).
        """
        return (
            self.memory_bytes_per_s / self.network_bytes_per_s,
            self.peak_flops_per_s / self.memory_bytes_per_s,
        )

    @property
    def network_balance(self) -> float:
        """The network intensity of the ridge, x y = peak / network bandwidth, in FLOP per byte
        (section II).
        """
        return self.peak_flops_per_s / self.network_bytes_per_s


@formula(memory_bytes=POSITIVE)
def arithmetic_intensity(flops: Quantity, memory_bytes: Quantity) -> Quantity:
    """I_A = F / B_M, FLOP per byte of memory (Table I); Cardwell's operational intensity. Raises
    DlperfError for negative FLOPs, or bytes not above 0.

    >>> arithmetic_intensity(80.0, 20.0)
    4.0
    """
    return flops / memory_bytes


@formula(memory_bytes=POSITIVE)
def memory_intensity(memory_bytes: Quantity, network_bytes: Quantity) -> Quantity:
    """I_M = B_M / B_N, bytes of memory per byte of network (Table I); infinite where nothing is
    sent. Raises as :func:`arithmetic_intensity`.

    >>> memory_intensity(20.0, [10.0, 0.0]).tolist()
    [2.0, inf]
    """
    return _per_network_byte(memory_bytes, network_bytes)


@formula()
def network_intensity(flops: Quantity, network_bytes: Quantity) -> Quantity:
    """I_N = F / B_N = I_A I_M, FLOP per byte of network (Table I); Cardwell's communication
    arithmetic intensity (equation 2.4).

    Infinite where nothing is sent. Raises DlperfError for negative arguments.

    >>> network_intensity(80.0, [10.0, 0.0]).tolist()
    [8.0, inf]
    """
    return _per_network_byte(flops, network_bytes)


@formula()
def attainable_flops_per_s(
    memory_intensity: Quantity, arithmetic_intensity: Quantity, rates: Rates
) -> Quantity:
    """Attainable rate at a point of the plane in FLOP/s: min(peak, memory x y, network x x y).
    Figure 3's surface.

    x = `memory_intensity`, which may be infinite, y = `arithmetic_intensity`. Raises DlperfError
    unless both are positive.

    >>> # min(100, 30, 24), min(100, 30, 120)
    >>> attainable_flops_per_s([2.0, 10.0], 3.0, Rates(100.0, 10.0, 4.0)).tolist()
    [24.0, 30.0]
    """
    return attainable_with_network_flops_per_s(
        arithmetic_intensity,
        memory_intensity * arithmetic_intensity,
        rates.peak_flops_per_s,
        rates.memory_bytes_per_s,
        rates.network_bytes_per_s,
    )


@formula()
def region(
    memory_intensity: Quantity, arithmetic_intensity: Quantity, rates: Rates
) -> NDArray[np.int_]:
    """The resource that bounds a point of the plane, as a number into :data:`RESOURCES`, read off
    as in section II.

    Lower left of the centre network, lower right memory, upper right compute; upper left compute on
    and above the ridge x y = peak / network, else network. The same as :func:`bounding_resource`,
    without times. Raises DlperfError unless both coordinates are positive.

    >>> x, y = [1.0, 100.0, 100.0, 1.0, 5.0], [1.0, 1.0, 100.0, 100.0, 100.0]
    >>> [RESOURCES[i] for i in region(x, y, Rates(4.2e12, 105e9, 12e9))]
    ['network', 'memory', 'compute', 'network', 'compute']
    """
    x, y = memory_intensity, arithmetic_intensity
    centre_x, centre_y = rates.centre
    below = np.where(x >= centre_x, MEMORY, NETWORK)
    above = np.where((x >= centre_x) | (x * y >= rates.network_balance), COMPUTE, NETWORK)
    return np.where(y >= centre_y, above, below)


@formula()
def ridge(memory_intensity: Quantity, rates: Rates) -> Quantity:
    """The ridge: y = (peak / network) / x left of the centre, and the centre's y right of it, where
    compute meets memory. For drawing.

    Raises DlperfError unless the intensity is positive.

    >>> ridge([3.5, 8.75, 20.0], Rates(4.2e12, 105e9, 12e9)).tolist()
    [100.0, 40.0, 40.0]
    """
    return np.asarray(np.maximum(rates.network_balance / memory_intensity, rates.centre[1]))


@formula()
def terms_s(
    flops: Quantity,
    memory_bytes: Quantity,
    network_bytes: Quantity,
    rates: Rates,
    n_messages: Quantity = 0,
    latency_s: Quantity = 0.0,
) -> Reals:
    """F / peak, B_M / memory bandwidth and B_N / network bandwidth in seconds, on a last axis of
    three (section III).

    Beyond the paper: the third has `n_messages` x `latency_s` added, messages that wait for one
    another. Raises DlperfError for negative arguments.

    >>> terms_s(40.0, 10.0, 8.0, Rates(20.0, 10.0, 4.0), n_messages=3, latency_s=0.5).tolist()
    [2.0, 1.0, 3.5]
    """
    compute, memory = flops / rates.peak_flops_per_s, memory_bytes / rates.memory_bytes_per_s
    network = network_bytes / rates.network_bytes_per_s + n_messages * latency_s
    return np.stack(np.broadcast_arrays(compute, memory, network), axis=-1)


@formula()
def bounding_resource(
    flops: Quantity,
    memory_bytes: Quantity,
    network_bytes: Quantity,
    rates: Rates,
    n_messages: Quantity = 0,
    latency_s: Quantity = 0.0,
) -> NDArray[np.int_]:
    """The resource whose term is the longest, as a number into :data:`RESOURCES`; the first of
    equals. Arguments and errors as :func:`terms_s`.

    >>> RESOURCES[int(bounding_resource(40.0, 10.0, 8.0, Rates(20.0, 10.0, 4.0)))]
    'compute'
    """
    return np.asarray(
        np.argmax(
            terms_s(flops, memory_bytes, network_bytes, rates, n_messages, latency_s), axis=-1
        )
    )


@formula()
def projected_s(
    flops: Quantity,
    memory_bytes: Quantity,
    network_bytes: Quantity,
    rates: Rates,
    n_messages: Quantity = 0,
    latency_s: Quantity = 0.0,
    overlap_frac: Quantity = 1.0,
) -> Quantity:
    """Projected time in seconds: the longest of the three terms (section III).

    Beyond the paper: with `overlap_frac` o the local part L = max(F / peak, B_M / memory) and the
    network's N make max(L, N) + (1 - o) min(L, N); 1 hides all of the shorter one (the paper), 0
    none (synchronous communication, as Cardwell's programs). Errs low, by what no term holds:
    calls, contention, waiting for slower ranks. Raises DlperfError for negative arguments, or an
    overlap outside 0..1.

    >>> projected_s(40.0, 10.0, 8.0, Rates(20.0, 10.0, 4.0))
    2.0
    >>> # 2 and 2 seconds, half of one hidden
    >>> projected_s(40.0, 10.0, 8.0, Rates(20.0, 10.0, 4.0), overlap_frac=0.5)
    3.0
    """
    local, network = _local_and_network(
        terms_s(flops, memory_bytes, network_bytes, rates, n_messages, latency_s)
    )
    exposed = (1 - overlap_frac) * np.minimum(local, network)
    return np.asarray(np.maximum(local, network) + exposed)


@formula()
def communication_frac(
    flops: Quantity,
    memory_bytes: Quantity,
    network_bytes: Quantity,
    rates: Rates,
    n_messages: Quantity = 0,
    latency_s: Quantity = 0.0,
    overlap_frac: Quantity = 0.0,
) -> Quantity:
    """The share of the projected time in which communication is all that goes on; with no overlap
    (the default) that of Cardwell's Figure 2.4.

    (T - max(F / peak, B_M / memory)) / T with T of :func:`projected_s`; 0 where T is. Raises as
    there.

    >>> communication_frac(40.0, 10.0, 8.0, Rates(20.0, 10.0, 4.0))
    0.5
    """
    total = np.asarray(
        projected_s(flops, memory_bytes, network_bytes, rates, n_messages, latency_s, overlap_frac)
    )
    local, _ = _local_and_network(terms_s(flops, memory_bytes, network_bytes, rates))
    fraction = np.divide(total - local, total, out=np.zeros(np.shape(total)), where=total > 0)
    return np.asarray(fraction)


def _local_and_network(terms: Reals) -> tuple[Reals, Reals]:
    return np.maximum(terms[..., COMPUTE], terms[..., MEMORY]), terms[..., NETWORK]


def _per_network_byte(amount: Quantity, network_bytes: Quantity) -> Quantity:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(network_bytes > 0, amount / network_bytes, np.inf)
