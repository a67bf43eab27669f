"""The shelf: devices by their data sheets, each value with its source.

What neither a data sheet nor a cited micro-benchmark says is left out, and counts as unknown.
"""

from __future__ import annotations

import difflib

from dlperf.core.data_sheet import UNMEASURED, DataSheet
from dlperf.core.errors import DlperfError
from dlperf.core.machine import Machine
from dlperf.core.machine_entries import Cpu
from dlperf.core.version import VERSION

_KIB, _MIB = 1024, 1024**2
_GPU_BENCHES = (
    "Ernst, gpu-benches (github.com/te42kyfo/gpu-benches; Ernst et al. 2023,"
    " doi.org/10.1016/j.jpdc.2022.11.003)"
)
_V100 = "NVIDIA V100 data sheet (volta-v100-datasheet-update-us-1165301-r5), PCIe"
_VOLTA = "NVIDIA Tesla V100 GPU architecture white paper (WP-08608-001)"
_A100 = "NVIDIA A100 data sheet (nvidia-a100-datasheet-us-nvidia-1758950-r4-web)"
_AMPERE = "NVIDIA A100 Tensor Core GPU architecture white paper"
_H100 = "NVIDIA H100 data sheet, PCIe; without sparsity"
_HOPPER = "NVIDIA H100 Tensor Core GPU architecture white paper"
_CLOCKS = "TechPowerUp GPU database (techpowerup.com/gpu-specs)"
_MI300X = "AMD Instinct MI300X accelerator data sheet (amd.com)"
_EPYC = "AMD EPYC 7763 product page (amd.com/en/products/cpu/amd-epyc-7763)"
_XEON = "Intel ARK, Xeon Platinum 8380 (ark.intel.com, product 212287)"


def _nvidia(sheet: str, architecture: str, clocks: str, bench: str, launch: str) -> dict[str, str]:
    found = {
        "flops_per_s": sheet,
        "matrix_flops_per_s": sheet,
        "dram_bytes_per_s": sheet,
        "memory_bytes": sheet,
        "n_units": architecture,
        "caches_bytes": architecture,
        "caches_bytes_per_s": f"{_GPU_BENCHES}: {bench}",
        "sustained_frac": clocks,
        "dram_latency_s": f"{_GPU_BENCHES}: {bench}",
        "launch_s": launch,
        "compute_capability": "NVIDIA, developer.nvidia.com/cuda-gpus",
    }
    return {name: source for name, source in found.items() if source}


def _a100(name: str, dram_bytes_per_s: float, base_mhz: int) -> tuple[Cpu, DataSheet]:
    """An A100 of 80 GB; the two differ in their memory's bandwidth and their base clock."""
    bench = "gpu-l2-cache/a100_80.txt, cuda-latency/a100_80.txt (570 cycles of 1.41 GHz)"
    sheet = DataSheet(
        "accelerator",
        {"float32": 19.5e12, "float64": 9.7e12},
        dram_bytes_per_s,
        {"tf32": 156e12, "float16": 312e12, "bfloat16": 312e12, "float64": 19.5e12},
        (0.0, 5.43e12, 0.0),
        sustained_frac=base_mhz / 1410,
        launch_s=2.6e-6,
        dram_latency_s=404e-9,
        compute_capability=8.0,
        sources=_nvidia(
            f"{_A100}, {name}",
            _AMPERE,
            f"{_CLOCKS}, A100 {name}: {base_mhz} and 1410 MHz",
            bench,
            f"{_GPU_BENCHES}: gpu-small-kernels/a100_80.txt (64 KiB at 25 GB/s)",
        ),
    )
    return Cpu(f"NVIDIA A100 {name}", 108, (192 * _KIB, 40 * _MIB, 0), 80 * 10**9), sheet


_SHELF: dict[str, tuple[Cpu, DataSheet]] = {
    "v100": (
        Cpu("NVIDIA V100 PCIe 16GB", 80, (128 * _KIB, 6 * _MIB, 0), 16 * 10**9),
        DataSheet(
            "accelerator",
            {"float32": 14e12, "float64": 7e12},
            900e9,
            {"float16": 112e12},
            (13.7e12, 2.54e12, 0.0),
            sustained_frac=1245 / 1380,
            dram_latency_s=316e-9,
            compute_capability=7.0,
            sources=_nvidia(
                _V100,
                _VOLTA,
                f"{_CLOCKS}, Tesla V100 PCIe 16 GB: 1245 and 1380 MHz",
                "README.md, V100-PCIE-16GB (436 cycles of 1.38 GHz)",
                "",
            ),
        ),
    ),
    "a100": _a100("80GB PCIe", 1935e9, 1065),
    "a100-sxm": _a100("80GB SXM4", 2039e9, 1275),
    "h100": (
        Cpu("NVIDIA H100 PCIe 80GB", 114, (256 * _KIB, 50 * _MIB, 0), 80 * 10**9),
        DataSheet(
            "accelerator",
            {"float32": 51e12, "float64": 26e12},
            2000e9,
            {"tf32": 378e12, "float16": 756e12, "bfloat16": 756e12, "float64": 51e12},
            (0.0, 7.0e12, 0.0),
            dram_latency_s=375e-9,
            launch_s=2.5e-6,
            compute_capability=9.0,
            sources=_nvidia(
                _H100,
                _HOPPER,
                "",
                "gpu-l2-cache/h100_pcie.txt, gpu-latency/h100_pcie.txt (658 cycles of 1.755 GHz)",
                f"{_GPU_BENCHES}: gpu-small-kernels/h200.txt, the same chip (64 KiB at 26 GB/s)",
            ),
        ),
    ),
    "mi300x": (
        Cpu("AMD Instinct MI300X", 304, (32 * _KIB, 32 * _MIB, 256 * _MIB), 192 * 10**9),
        DataSheet(
            "accelerator",
            {"float32": 163.4e12, "float64": 81.7e12},
            5300e9,
            {"tf32": 653.7e12, "float16": 1307.4e12, "bfloat16": 1307.4e12, "float64": 163.4e12},
            (0.0, 0.0, 17.2e12),
            sources={
                **dict.fromkeys(
                    (
                        *("flops_per_s", "matrix_flops_per_s", "dram_bytes_per_s"),
                        *("memory_bytes", "n_units"),
                    ),
                    _MI300X,
                ),
                "caches_bytes": "AMD CDNA 3 architecture white paper",
                "caches_bytes_per_s": "AMD CDNA 3 architecture white paper: Infinity Cache",
            },
        ),
    ),
    "epyc-7763": (
        Cpu("AMD EPYC 7763", 64, (32 * _KIB, 512 * _KIB, 256 * _MIB), 0),
        DataSheet(
            "processor",
            {"float32": 64 * 32 * 3.5e9, "float64": 64 * 16 * 3.5e9},
            204.8e9,
            sustained_frac=2.45 / 3.5,
            sources={
                "flops_per_s": (
                    "64 cores x 3.5 GHz (product page) x 2 FMA units of 256 bit (AMD, Software"
                    " Optimization Guide for family 19h)"
                ),
                "dram_bytes_per_s": _EPYC,
                "n_units": _EPYC,
                "caches_bytes": f"{_EPYC} (L3); Software Optimization Guide for family 19h",
                "sustained_frac": f"{_EPYC}: 2.45 and 3.5 GHz",
            },
        ),
    ),
    "xeon-8380": (
        Cpu("Intel Xeon Platinum 8380", 40, (48 * _KIB, 1280 * _KIB, 60 * _MIB), 0),
        DataSheet(
            "processor",
            {"float32": 40 * 64 * 3.4e9, "float64": 40 * 32 * 3.4e9},
            204.8e9,
            sustained_frac=2.3 / 3.4,
            sources={
                "flops_per_s": f"{_XEON}: 40 cores x 3.4 GHz x 2 AVX-512 FMA units",
                "dram_bytes_per_s": f"{_XEON}: 8 channels of DDR4-3200 x 8 bytes",
                "n_units": _XEON,
                "caches_bytes": (
                    f"{_XEON} (L3); Intel 64 and IA-32 Architectures Optimization Reference Manual"
                    " (L1, L2)"
                ),
                "sustained_frac": f"{_XEON}: 2.3 and 3.4 GHz",
            },
        ),
    ),
}


def names() -> tuple[str, ...]:
    """Names of the devices on the shelf.

    >>> "a100" in names()
    True
    """
    return tuple(_SHELF)


def device(name: str) -> Machine:
    """A device of the shelf as a machine. Raises DlperfError for an unknown name."""
    found = _SHELF.get(name.lower())
    if found is None:
        near = nearest(name)
        raise DlperfError(
            f"device {name!r:.60} is unknown; known are {', '.join(_SHELF)}"
            f"{f' (did you mean {near}?)' if near else ''}; dlperf machine new makes others,"
            " dlperf calibrate --device cuda measures this machine's"
        )
    return data_sheet_machine(*found)


def nearest(name: str) -> str | None:
    """The device whose name is most like one that may be misspelt; None where none is like it.

    >>> nearest("a101")
    'a100'
    """
    return next(iter(difflib.get_close_matches(name.lower(), _SHELF, 1)), None)


def data_sheet_machine(cpu: Cpu, sheet: DataSheet) -> Machine:
    """A machine that is known by its data sheet alone."""
    return Machine(
        cpu, mode=UNMEASURED, complete=True, versions={"dlperf": VERSION}, data_sheet=sheet
    )
