"""FLOPs and time of a GPU kernel from the counters of NVIDIA's profiler.

The method of Yang, Kurth, Williams, "Hierarchical Roofline Analysis for GPUs", CUG 2019, with the
counters of Nsight Compute (C. Yang, "Hierarchical Roofline Analysis: How to Collect Data using
Performance Tools on Intel CPUs and NVIDIA GPUs", arXiv 2009.02449;
gitlab.com/NERSC/roofline-on-nvidia-gpus). Intensities, the share of FMA and the roofs are those of
:mod:`dlperf.models.memory_hierarchy`.
"""

from __future__ import annotations

from dlperf.models.arguments import Quantity, formula

SECTOR_BYTES = 32
"""What a sector of L1, L2 or DRAM holds (Nsight Compute, Kernel Profiling Guide)."""


@formula()
def thread_flops(n_add: Quantity, n_mul: Quantity, n_fma: Quantity) -> Quantity:
    """FLOPs of the CUDA cores in one precision: add + mul + 2 fma.

    Arguments count the instructions that threads executed, predicated ones left out
    (``sm__sass_thread_inst_executed_op_*_pred_on.sum``). Divisions and elementary functions count
    as the additions, products and multiply-adds that they are made of. Raises DlperfError for
    negative counts.

    >>> thread_flops(10, 20, 30)
    90.0
    """
    return n_add + n_mul + 2 * n_fma


@formula()
def tensor_flops(n_tensor: Quantity, flops_per_instruction: Quantity) -> Quantity:
    """FLOPs of the tensor cores: warp instructions x FLOP per instruction.

    An instruction that multiplies m x k by k x n has 2 m n k FLOP; which shape it has depends on
    architecture and precision (:func:`flops_of_shape`). Raises DlperfError for negative counts.

    >>> tensor_flops(100, 512)
    51200.0
    """
    return n_tensor * flops_per_instruction


def flops_of_shape(m: int, n: int, k: int) -> int:
    """FLOPs of a tensor-core instruction of a shape: 2 m n k.

    >>> flops_of_shape(16, 8, 16), flops_of_shape(8, 8, 4)
    (4096, 512)
    """
    return 2 * m * n * k


@formula()
def elapsed_s(cycles: Quantity, cycles_per_s: Quantity) -> Quantity:
    """Time of a kernel in seconds: cycles / clock rate
    (``sm__cycles_elapsed.avg / sm__cycles_elapsed.avg.per_second``).

    Raises DlperfError for negative cycles, or a rate that is not positive.

    >>> elapsed_s(5000, 1e9)
    5e-06
    """
    return cycles / cycles_per_s
