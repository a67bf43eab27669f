"""Counters of Nsight Compute become the work of kernels, summed over the launches of each.

FLOPs, bytes and time follow Yang, Kurth, Williams 2019 (:mod:`dlperf.models.gpu_counters`). A
counter counts under any of the names that profilers of several versions give it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from pathlib import Path

from dlperf.models import gpu_counters
from dlperf.models.gpu_counters import SECTOR_BYTES, flops_of_shape
from dlperf.ops.gpu_kernels import LEVELS, PRECISIONS, Instructions, KernelWork
from dlperf.ops.roofs import Ceiling, Roof, Roofs
from dlperf.profiler import kernel_names
from dlperf.profiler.ncu_table import Launch, read

_OPS = ("add", "mul", "fma")
_WARP = 32
_LETTERS = {"half": "h", "float": "f", "double": "d"}
_THREAD = "sass_thread_inst_executed_op_{}{}_pred_on"
_UNITS = ("sm", "smsp")
"""Multiprocessors, and their four parts: the same counters, summed over either."""
_TENSOR, _HMMA, _DMMA = (f"inst_executed_pipe_tensor{op}" for op in ("", "_op_hmma", "_op_dmma"))
_WARPGROUP, _HFMA2 = f"{_TENSOR}_op_gmma", f"{_HMMA}_type_hfma2"
_PATH = re.compile(
    r"sm__ops_path_tensor_src_([a-z0-9]+)(?:_dst_([a-z0-9]+))?(?:_v\d)?(_sparsity_on|_sparsity_off)?\.sum"
)
_PATH_NAME = "sm__ops_path_tensor_src_*.sum"
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}

VOLTA_FLOPS = 512
"""FLOP per tensor-core instruction of the V100 (HMMA.884 in four steps), and what Yang's scripts,
the section files of NERSC (gitlab.com/NERSC/roofline-on-nvidia-gpus) and of Nsight Compute
(``inst_executed_pipe_tensor_x512``) take for any device.
"""
_HMMA_FLOPS = {
    7.0: VOLTA_FLOPS,
    7.2: VOLTA_FLOPS,
    7.5: flops_of_shape(16, 8, 8),
    8.0: flops_of_shape(16, 8, 16),
    8.6: flops_of_shape(16, 8, 16),
    8.7: flops_of_shape(16, 8, 16),
    8.9: flops_of_shape(16, 8, 16),
    9.0: flops_of_shape(16, 8, 16),
}
"""By compute capability the largest dense shape of HMMA in float16 (1688 on Turing, 16816 from the
A100 on): PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions".
"""
_TF32_FLOPS = flops_of_shape(16, 8, 8)
_DMMA_FLOPS = flops_of_shape(8, 8, 4)
_SHARED_PIPE = 8.0
"""The capability on which HFMA2 of the CUDA cores runs in the tensor pipe, and is counted there."""
_WARPGROUPS = 9.0
"""From this capability on there are instructions of a warp group, whose shapes vary."""
_SHAPE = re.compile(r"(?<![0-9a-z])[a-z]{1,2}(884|1688|16816)gemm|tensor(\d+)x(\d+)x(\d+)", re.I)
_SHAPES = {"884": VOLTA_FLOPS, "1688": flops_of_shape(16, 8, 8), "16816": flops_of_shape(16, 8, 16)}


@dataclass(frozen=True, slots=True)
class _Choice:
    """Counters that give the bytes of a level together; those of `more` count where they exist."""

    names: tuple[str, ...]
    scale: float = 1.0
    more: tuple[str, ...] = ()


def _parts(begin: str, *ends: str) -> tuple[str, ...]:
    return tuple(begin + end for end in ends)


def _l1(what: str, scale: float) -> _Choice:
    begin = f"l1tex__t_{what}_pipe_lsu_mem_"
    more = ("global_op_atom", "global_op_red", "local_op_ld", "local_op_st")
    return _Choice(_parts(begin, "global_op_ld", "global_op_st"), scale, _parts(begin, *more))


_BYTES = {
    "L1": (
        _Choice(("l1tex__t_bytes",)),
        _Choice(("l1tex__t_sectors",), SECTOR_BYTES),
        _l1("bytes", 1.0),
        _l1("sectors", SECTOR_BYTES),
    ),
    "L2": (
        _Choice(("lts__t_bytes",)),
        _Choice(("lts__t_sectors",), SECTOR_BYTES),
        _Choice(
            _parts("lts__t_sectors_op_", "read", "write"),
            SECTOR_BYTES,
            _parts("lts__t_sectors_op_", "atom", "red"),
        ),
    ),
    "DRAM": (
        _Choice(("dram__bytes",)),
        _Choice(_parts("dram__bytes_", "read", "write")),
        _Choice(_parts("dram__bytes_op_", "read", "write")),
        _Choice(("dram__sectors",), SECTOR_BYTES),
        _Choice(_parts("dram__sectors_", "read", "write"), SECTOR_BYTES),
        _Choice(_parts("dram__sectors_op_", "read", "write"), SECTOR_BYTES),
    ),
}
_TIMES = ("gpu__time_duration.sum", "gpu__time_duration.avg", "gpu__time_duration.max")
_WANTED = re.compile(
    r"(sm|smsp|lts|l1tex|dram)__(cycles_elapsed\.avg(\.per_second)?|"
    r"(sass_thread_inst_executed_op_[hfd](add|mul|fma)_pred_on|inst_executed_pipe_tensor\w*|"
    r"ops_path_tensor_src_\w+|t_(bytes|sectors)(_(pipe|op)_\w+)?|(bytes|sectors)(_\w+)?)"
    r"\.sum(\.per_second|\.per_cycle_elapsed|\.peak_sustained)?)|gpu__time_duration\.\w+"
)


def is_wanted(name: str) -> bool:
    """Whether a metric says something of FLOPs, bytes, time or peaks."""
    return _WANTED.fullmatch(name) is not None


# -- one launch ------------------------------------------------------------------------------------


@dataclass
class _Counters:
    """The counters of a launch, and the names of those that were looked for in vain."""

    metrics: Mapping[str, float]
    missing: dict[str, None] = field(default_factory=dict)

    @property
    def time_s(self) -> float | None:
        """Cycles over clock rate as in the paper, else the duration as measured."""
        for unit in _UNITS:
            cycles = self.metrics.get(f"{unit}__cycles_elapsed.avg")
            rate = self.metrics.get(f"{unit}__cycles_elapsed.avg.per_second")
            if cycles is not None and rate:
                return float(gpu_counters.elapsed_s(cycles, rate))
        return next((self.metrics[name] for name in _TIMES if name in self.metrics), None)

    def sum_of(self, name: str) -> float | None:
        """A counter as its sum; else from its rate in seconds or cycles."""
        if f"{name}.sum" in self.metrics:
            return self.metrics[f"{name}.sum"]
        rate, time_s = self.metrics.get(f"{name}.sum.per_second"), self.time_s
        if rate is not None and time_s is not None:
            return rate * time_s
        per_cycle = self.metrics.get(f"{name}.sum.per_cycle_elapsed")
        cycles = self._cycles(name.partition("__")[0])
        return None if per_cycle is None or cycles is None else per_cycle * cycles

    def _cycles(self, unit: str) -> float | None:
        cycles = self.metrics.get(f"{unit}__cycles_elapsed.avg")
        rate, time_s = self.metrics.get(f"{unit}__cycles_elapsed.avg.per_second"), self.time_s
        if cycles is None and rate is not None and time_s is not None:
            return rate * time_s
        return cycles

    def of_multiprocessors(self, name: str) -> float | None:
        """A counter of the multiprocessors, or of their parts."""
        found = (self.sum_of(f"{unit}__{name}") for unit in _UNITS)
        return next((value for value in found if value is not None), None)

    def needed(self, name: str) -> float | None:
        """The same; its name is kept where it is missing."""
        found = self.of_multiprocessors(name)
        if found is None:
            self.missing[f"sm__{name}.sum"] = None
        return found

    def level_bytes(self, level: str) -> float | None:
        """The bytes that a level moved."""
        for choice in _BYTES[level]:
            found = [self.sum_of(name) for name in choice.names]
            if None not in found:
                more = [self.sum_of(name) for name in choice.more]
                return choice.scale * sum(value for value in (*found, *more) if value is not None)

        def n_found(choice: _Choice) -> int:
            return sum(self.sum_of(name) is not None for name in choice.names)

        nearest = max(_BYTES[level], key=n_found)
        self.missing.update({f"{n}.sum": None for n in nearest.names if self.sum_of(n) is None})
        return None


def _precision(counters: _Counters, precision: str) -> Instructions | None:
    found = [counters.needed(_THREAD.format(_LETTERS[precision], op)) for op in _OPS]
    known = [value for value in found if value is not None]
    return Instructions(*known) if len(known) == len(found) else None


def _path_flops(metrics: Mapping[str, float]) -> dict[str, float]:
    """FLOPs of the tensor cores by dtype of their inputs, as newer devices count them themselves;
    empty where they do not. Operations on whole numbers are no FLOPs.

    A sum counts once where its parts, with and without sparsity, are there too.
    """
    found: dict[tuple[str, str], dict[str, float]] = {}
    for name, value in metrics.items():
        if match := _PATH.fullmatch(name):
            source, to, part = (group or "" for group in match.groups())
            found.setdefault((source, to), {})[part] = value
    totals: dict[str, float] = {}
    for (source, _), parts in found.items():
        if not source.startswith(("int", "uint", "b1")):
            dtype = _DTYPES.get(source, source)
            totals[dtype] = totals.get(dtype, 0.0) + parts.get("", sum(parts.values()))
    return totals


def _flops_per_instruction(kernel: str, capability: float | None) -> float | None:
    """FLOP of a tensor-core instruction: by the shape in the kernel's name, else by the device;
    None where there is no one number for it.
    """
    if capability is None:
        return VOLTA_FLOPS
    if (match := _SHAPE.search(kernel)) is not None:
        return _SHAPES.get(match[1]) or flops_of_shape(*map(int, match.groups()[1:]))
    if "tf32" in kernel.lower():
        return _TF32_FLOPS
    return _HMMA_FLOPS.get(capability)


def _tensor_instructions(
    launch: Launch, counters: _Counters, half: Instructions | None
) -> dict[str, float] | None:
    """Warp instructions of the tensor cores by counter: of HMMA, or of all, and of DMMA."""
    hmma, dmma = (counters.of_multiprocessors(name) for name in (_HMMA, _DMMA))
    found = hmma if hmma is not None else counters.needed(_TENSOR)
    if found is None:
        return None
    if launch.capability == _SHARED_PIPE:
        of_threads = counters.of_multiprocessors(_HFMA2)
        if of_threads is None and half is not None:
            of_threads = math.ceil(half.n_fma / _WARP)
        found = max(0.0, found - (of_threads or 0.0))
    return {
        _HMMA if hmma is not None else _TENSOR: found,
        _DMMA: (dmma or 0.0) * (hmma is not None),
    }


def _tensor(
    launch: Launch, counters: _Counters, half: Instructions | None, given: float | None
) -> dict[str, float] | None:
    """FLOPs of the tensor cores by dtype, ``""`` for one that is unknown."""
    if found := _path_flops(launch.metrics):
        return found
    instructions = _tensor_instructions(launch, counters, half)
    if instructions is None:
        return None
    of_warpgroups = counters.of_multiprocessors(_WARPGROUP)
    per_instruction = given or _flops_per_instruction(launch.kernel, launch.capability)
    mixes = (launch.capability or 0.0) >= _WARPGROUPS and _TENSOR in instructions
    n_dmma = instructions.pop(_DMMA)
    ((_, n_hmma),) = instructions.items()
    if not given and (of_warpgroups or (n_hmma and (mixes or per_instruction is None))):
        counters.missing[_PATH_NAME] = None
        return None
    return {
        "": float(gpu_counters.tensor_flops(n_hmma, per_instruction or 0.0)),
        "float64": float(gpu_counters.tensor_flops(n_dmma, _DMMA_FLOPS)),
    }


# -- kernels ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GpuKernel:
    """The work of all launches of a kernel. `kernel` is its name as the profiler has it, `name` the
    short one, `missing` the counters that the file has no value for.
    """

    kernel: str
    name: str
    launches: int
    work: KernelWork
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """The kernels of a file, those that take longest first.

    `precisions` are those that were profiled. `is_assumed` says that the file does not tell the
    device, and that its tensor-core instructions count as those of the V100.
    """

    file: str
    kernels: tuple[GpuKernel, ...]
    roofs: Roofs
    precisions: tuple[str, ...]
    device: str = ""
    capability: float | None = None
    is_assumed: bool = False

    @property
    def total(self) -> KernelWork:
        """The work of all kernels."""
        return reduce(add, (kernel.work for kernel in self.kernels))


def load(
    path: str | Path,
    flops_per_instruction: float | None = None,
    capability: float | None = None,
) -> GpuProfile:
    """The kernels of a CSV file of Nsight Compute.

    `flops_per_instruction` is the FLOP of a tensor-core instruction, in place of the device's;
    `capability` the compute capability where the file does not tell it. Raises DlperfError for a
    file that cannot be read.
    """
    table = read(path, is_wanted)
    launches = [
        launch if launch.capability else replace(launch, capability=capability)
        for launch in table.launches
    ]
    names = set().union(*(launch.metrics for launch in launches))
    precisions = [p for p in PRECISIONS if any(_is_of(p, name) for name in names)]
    has_tensor = any(_TENSOR in name or _PATH.fullmatch(name) for name in names)
    found: dict[str, list[tuple[KernelWork, tuple[str, ...]]]] = {}
    for launch in launches:
        own = _work(launch, precisions, has_tensor, flops_per_instruction)
        found.setdefault(launch.kernel, []).append(own)
    short = kernel_names.short_names(list(found))
    kernels = [
        GpuKernel(
            kernel,
            short[kernel],
            len(own),
            reduce(add, (work for work, _ in own)),
            tuple(dict.fromkeys(name for _, missing in own for name in missing)),
        )
        for kernel, own in found.items()
    ]
    all_capabilities = {launch.capability for launch in launches}
    counted = any(kernel.work.tensor_flops for kernel in kernels)
    by_path = any(_PATH.fullmatch(name) for name in names)
    return GpuProfile(
        str(path),
        tuple(sorted(kernels, key=lambda kernel: -(kernel.work.time_s or 0.0))),
        _roofs(launches),
        tuple(precisions),
        table.device,
        next(iter(all_capabilities)) if len(all_capabilities) == 1 else None,
        counted and not by_path and not flops_per_instruction and None in all_capabilities,
    )


def _is_of(precision: str, name: str) -> bool:
    begin = _THREAD.format(_LETTERS[precision], "").removesuffix("_pred_on")
    return f"__{begin}" in name and not name.endswith("peak_sustained")


def _work(
    launch: Launch, precisions: Sequence[str], has_tensor: bool, given: float | None
) -> tuple[KernelWork, tuple[str, ...]]:
    """The work of a launch, and the names of the counters that it lacks."""
    counters = _Counters(launch.metrics)
    if counters.time_s is None:
        counters.missing[_TIMES[0]] = None
    found = {precision: _precision(counters, precision) for precision in PRECISIONS}
    tensor = None
    if has_tensor:
        tensor = _tensor(launch, counters, found["half"], given)
    else:
        counters.missing[f"sm__{_TENSOR}.sum"] = None
    level_bytes = {level: counters.level_bytes(level) for level in LEVELS}
    instructions = {precision: found[precision] for precision in precisions}
    work = KernelWork(counters.time_s, instructions, tensor, has_tensor, level_bytes)
    return work, tuple(counters.missing)


# -- roofs -----------------------------------------------------------------------------------------


def _roofs(launches: Sequence[Launch]) -> Roofs:
    """The roofs that the profiler itself gives: peak per cycle x clock rate of the unit, at the
    highest rate of all launches. As Yang's section files have them; empty where the file has none.
    """
    peaks: dict[str, float] = {}
    for launch in launches:
        for name, value in launch.metrics.items():
            base, _, end = name.partition(".sum.")
            rate = launch.metrics.get(f"{base.partition('__')[0]}__cycles_elapsed.avg.per_second")
            if end == "peak_sustained" and rate and value:
                peaks[base] = max(peaks.get(base, 0.0), value * rate)
    bandwidths = [
        Roof(level, peaks[name], name)
        for level, name in zip(LEVELS, (_BYTES[level][0].names[0] for level in LEVELS))
        if name in peaks
    ]
    ceilings = []
    for precision, dtype in PRECISIONS.items():
        name = f"sm__{_THREAD.format(_LETTERS[precision], 'fma')}"
        if name in peaks:
            ceilings.append(Ceiling(dtype, 2 * peaks[name], peaks[name], "half of FMA"))
    ceilings.sort(key=lambda ceiling: -ceiling.fma_flops_per_s)
    return Roofs(tuple(bandwidths), tuple(ceilings))
