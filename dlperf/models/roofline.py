"""Roofline models: Williams 2009, its extension by communication (Cardwell 2019, chapter 2), its
parameterised form (chapter 3).

Every argument may be a number or a numpy array; arrays broadcast against each other. All rates are
in SI base units: FLOP/s and bytes/s, so a ratio of them is in FLOP per byte. None of these models
knows latency: where an operation is so small that starting it is what takes time, they err low,
without limit.
"""

from __future__ import annotations

import numpy as np

from dlperf.models.arguments import POSITIVE, Quantity, formula


@formula(moved_bytes=POSITIVE)
def operational_intensity(flops: Quantity, moved_bytes: Quantity) -> Quantity:
    """Operational intensity I = F / M: FLOPs per byte moved to and from memory.

    Williams, Waterman, Patterson 2009; Cardwell 2019, equations 2.2 and 3.2 (`OI = F / M`). With
    the bytes sent over the network in place of `moved_bytes` it is Cardwell's communication
    arithmetic intensity (equation 2.4).

    F = `flops` [FLOP], M = `moved_bytes` [bytes]. M is what crosses the boundary of the level that
    is modelled; counting every argument once assumes that the level above holds what is used again,
    and errs high where it does not. Raises DlperfError for negative FLOPs, or bytes that are not
    positive.

    >>> operational_intensity(100.0, 400.0)
    0.25
    """
    return flops / moved_bytes


@formula()
def ridge_point(peak_flops_per_s: Quantity, bytes_per_s: Quantity) -> Quantity:
    """Ridge point: the least operational intensity at which the peak can be reached, in FLOP per
    byte.

    Williams et al. 2009; Cardwell 2019, section 2.1: where `bandwidth x OI = peak`. With a network
    bandwidth it is the ridge point of communication arithmetic intensity (section 2.3).

    Raises DlperfError for rates that are not positive.

    >>> ridge_point(20e9, 10e9)
    2.0
    """
    return peak_flops_per_s / bytes_per_s


@formula()
def attainable_flops_per_s(
    intensity: Quantity, peak_flops_per_s: Quantity, bytes_per_s: Quantity
) -> Quantity:
    """Attainable performance in FLOP/s: min(peak, bandwidth x intensity).

    Williams et al. 2009; Cardwell 2019, equation 2.1, and 2.3 with the network in place of the
    memory.

    OI = `intensity` [FLOP/byte], peak floating-point performance = `peak_flops_per_s`, peak memory
    bandwidth = `bytes_per_s`. An upper bound: it supposes that computing and moving overlap without
    loss and that both run at their measured peak. Raises DlperfError for a negative intensity, or
    rates that are not positive.

    >>> attainable_flops_per_s(0.5, peak_flops_per_s=20e9, bytes_per_s=10e9)
    5000000000.0
    """
    return np.asarray(np.minimum(peak_flops_per_s, bytes_per_s * intensity))


@formula()
def time_s(
    flops: Quantity, moved_bytes: Quantity, peak_flops_per_s: Quantity, bytes_per_s: Quantity
) -> Quantity:
    """Least time of a piece of work in seconds: max(F / peak, M / bandwidth).

    The same model as :func:`attainable_flops_per_s`, solved for time, so that work without FLOPs or
    without bytes has one too.

    F = `flops` [FLOP], M = `moved_bytes` [bytes]. A lower bound on the time: it errs low by
    everything but arithmetic and bandwidth (dispatch, latency, page faults), and high where the
    data was still in a faster memory. Raises DlperfError for negative work, or rates that are not
    positive.

    >>> time_s(flops=40.0, moved_bytes=10.0, peak_flops_per_s=20.0, bytes_per_s=10.0)
    2.0
    """
    return np.asarray(np.maximum(flops / peak_flops_per_s, moved_bytes / bytes_per_s))


@formula()
def attainable_with_network_flops_per_s(
    operational: Quantity,
    communication: Quantity,
    peak_flops_per_s: Quantity,
    memory_bytes_per_s: Quantity,
    network_bytes_per_s: Quantity,
) -> Quantity:
    """Attainable performance of one process in FLOP/s with memory and network: min(peak, mem_bw x
    OI, net_bw x CAI).

    Cardwell 2019, equation 2.5. OI = `operational`, CAI = `communication` [both FLOP/byte]; the
    peaks are single-threaded dgemm, the best STREAM kernel, and ping-pong at its best message size
    (Table 2.3).

    Holds for synchronous communication between nodes; neither latency nor contention is in it, so
    it is an upper bound that errs high for small messages. A process that sends nothing has
    infinite CAI, which is allowed. Raises DlperfError for negative intensities, or rates that are
    not positive.

    >>> attainable_with_network_flops_per_s(
    ...     2.0, 0.5, peak_flops_per_s=20.0, memory_bytes_per_s=10.0, network_bytes_per_s=4.0
    ... )
    2.0
    """
    memory = attainable_flops_per_s(operational, peak_flops_per_s, memory_bytes_per_s)
    network = attainable_flops_per_s(communication, peak_flops_per_s, network_bytes_per_s)
    return np.asarray(np.minimum(memory, network))


@formula()
def parameterised_flops_per_s(
    gemm_flops_per_s: Quantity, intensity: Quantity, bytes_per_s: Quantity
) -> Quantity:
    """Performance of a fully connected layer in FLOP/s: P = min{f(k, m, n), OI x M_peak}.

    Cardwell 2019, equation 3.1. f(k, m, n) = `gemm_flops_per_s`, the rate measured for a matrix
    product of exactly that size; OI = `intensity` (equation 3.2) [FLOP/byte]; M_peak =
    `bytes_per_s` (STREAM).

    Holds for the sizes that were measured and for the library that they were measured with. The
    memory term hardly ever decides, because a measured product has already waited for memory. Bias
    and call overhead are not in it: errs low. Raises DlperfError for a negative intensity, or rates
    that are not positive.

    >>> parameterised_flops_per_s(8e9, intensity=2.0, bytes_per_s=10e9)
    8000000000.0
    """
    return attainable_flops_per_s(intensity, gemm_flops_per_s, bytes_per_s)


@formula()
def activation_s(
    n_elements: Quantity, bytes_per_s: Quantity, weight: float = 1.0, item_bytes: int = 4
) -> Quantity:
    """Time of an activation function in seconds: weight x item_bytes x n / M_peak.

    Cardwell 2019, section 3.3.1 and Tables 3.6, 3.7, whose values it reproduces: n = batch x
    outputs = `n_elements`, M_peak = `bytes_per_s` (STREAM), each element counted once at 4 bytes;
    `weight` is 1 for ReLU and 30 for the sigmoid (an elementary function weighs as much as 30
    elements).

    Errs low, by 98 % (ReLU) and 70 % (sigmoid) in the paper's own tables: reading and writing are
    not both counted, and neither the call's cost nor the caches are in it. Raises DlperfError for
    negative counts, or rates that are not positive.

    >>> activation_s(50, bytes_per_s=100.0)
    2.0
    """
    return weight * item_bytes * n_elements / bytes_per_s
