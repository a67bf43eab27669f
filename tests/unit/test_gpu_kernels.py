"""FLOPs, bytes and time of GPU kernels from counters, their place under the roofs, their names.

Figures of the excerpts in tests/golden/frozen/profiles are those that their publishers computed
(github.com/leleucas/Actual-Parameter-Collection-for-Machine-Learning-Operators,
bert_flashattn_nsight_processed_res.csv).
"""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from dlperf.models import gpu_counters
from dlperf.ops.gpu_kernels import Instructions, KernelWork, placement
from dlperf.ops.roofs import Ceiling, Roof, Roofs
from dlperf.profiler.gpu_kernels import GpuKernel, GpuProfile, load
from dlperf.profiler.kernel_names import short_name, short_names
from dlperf.studies.papers import yang

PROFILES = Path(__file__).parents[1] / "golden" / "frozen" / "profiles"
THREAD = "sm__sass_thread_inst_executed_op_{}_pred_on.sum"
OPS = [letter + op for letter in "hfd" for op in ("add", "mul", "fma")]
PLAIN: dict[str, float] = {
    "gpu__time_duration.sum": 1e-3,
    "dram__bytes.sum": 100,
    "lts__t_bytes.sum": 200,
    "l1tex__t_bytes.sum": 400,
    "sm__inst_executed_pipe_tensor.sum": 0,
    **{THREAD.format(op): 0 for op in OPS},
}


def profile(
    tmp_path: Path,
    *launches: dict[str, float],
    capability: str = "8.0",
    kernels: tuple[str, ...] = (),
    **options: float,
) -> GpuProfile:
    """A raw page in base units; a launch without a counter has an empty cell for it."""
    names = list(dict.fromkeys(name for launch in launches for name in launch))
    lines = [["ID", "Kernel Name", "CC", *names], ["", "", "", *("" for _ in names)]]
    for number, launch in enumerate(launches):
        kernel = kernels[number] if kernels else "k"
        lines.append([str(number), kernel, capability])
        lines[-1] += [str(launch[name]) if name in launch else "" for name in names]
    path = tmp_path / "ncu.csv"
    path.write_text("\n".join(",".join(f'"{cell}"' for cell in line) for line in lines) + "\n")
    return load(path, **options)


def only(found: GpuProfile) -> GpuKernel:
    (kernel,) = found.kernels
    return kernel


def without(name: str) -> dict[str, float]:
    return {key: value for key, value in PLAIN.items() if key != name}


# -- FLOPs, bytes, time ----------------------------------------------------------------------------


def test_the_publishers_sums(tmp_path: Path) -> None:
    path = tmp_path / "flash.csv"
    path.write_bytes(gzip.decompress((PROFILES / "flash-attention.csv.gz").read_bytes()))
    found = load(path)
    assert found.is_assumed  # an old profile, without the device
    # time, CUDA-core FLOPs, tensor FLOPs at 512 each, bytes at DRAM, L2, L1; intensity at DRAM
    published = {
        "fmha": (7.775999216912372e-06, 307200, 1048576, 61824, 708160, 341632, 21.9296066252588),
        "cutlass": (7.744004369827265e-06, 196608, 3145728, 415488, 2319200, 1354752, 8.04436),
        "splitK": (5.919999999994322e-06, 184320, 491520, 82432, 467552, 167936, 8.19876),
    }
    assert len(found.kernels) == len(published)
    for word, (time_s, cuda, tensor, dram, l2, l1, intensity) in published.items():
        (work,) = (k.work for k in found.kernels if word in k.kernel)
        assert work.time_s == pytest.approx(time_s, rel=1e-15)
        assert (work.flops, work.tensor_flops) == (cuda + tensor, tensor)
        assert work.level_bytes == {"DRAM": dram, "L2": l2, "L1": l1}
        assert work.intensity("DRAM") == pytest.approx(intensity, rel=1e-5)
        assert work.flops_per_s == pytest.approx((cuda + tensor) / time_s)


def test_launches_of_a_kernel_are_summed(tmp_path: Path) -> None:
    path = tmp_path / "attention.csv"
    path.write_bytes(gzip.decompress((PROFILES / "attention.csv.gz").read_bytes()))
    sums = [k for k in load(path).kernels if k.kernel == "ampere_sgemm_32x32_sliced1x4_tn"]
    assert [k.launches for k in sums] == [2]
    assert sums[0].work.level_bytes["DRAM"] == 303360 + 303488  # "303,360" and "303,488"


def test_flops_by_precision_and_the_share_of_fma(tmp_path: Path) -> None:
    counters = {THREAD.format(op): n for n, op in enumerate(OPS, 1)}
    work = only(profile(tmp_path, {**PLAIN, **counters})).work
    assert [work.flops_of(p) for p in ("half", "float", "double")] == [
        1 + 2 + 2 * 3,
        4 + 5 + 2 * 6,
        7 + 8 + 2 * 9,
    ]
    assert work.flops == 9 + 21 + 33
    assert work.fma_frac == (3 + 6 + 9) / 45  # of 1 + 2 + ... + 9 instructions


@pytest.mark.parametrize(
    ("capability", "kernel", "flops"),
    [
        ("", "k", 512),
        ("7.0", "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn", 512),
        ("7.0", "k", 512),
        ("7.5", "k", 2 * 16 * 8 * 8),
        ("8.0", "k", 2 * 16 * 8 * 16),
        ("8.0", "ampere_fp16_s1688gemm_fp16_128x128_nn", 2 * 16 * 8 * 8),
        ("8.0", "sm80_xmma_fprop_tf32f32_tensor16x8x8_kernel_cudnn", 2 * 16 * 8 * 8),
        ("8.0", "cutlass_tf32_tensorop", 2 * 16 * 8 * 8),
        ("8.9", "k", 2 * 16 * 8 * 16),
        ("9.0", "k", None),
        ("12.0", "k", None),
    ],
)
def test_a_tensor_instruction_by_device_and_shape(
    tmp_path: Path, capability: str, kernel: str, flops: float | None
) -> None:
    launch = {**PLAIN, "sm__inst_executed_pipe_tensor.sum": 10}
    found = profile(tmp_path, launch, capability=capability, kernels=(kernel,))
    work, missing = only(found).work, only(found).missing
    assert work.tensor_flops == (None if flops is None else 10 * flops)
    assert work.flops == work.tensor_flops
    assert missing == (("sm__ops_path_tensor_src_*.sum",) if flops is None else ())
    assert found.is_assumed == (capability == "")


def test_flops_of_a_tensor_instruction_can_be_given(tmp_path: Path) -> None:
    launch = {**PLAIN, "sm__inst_executed_pipe_tensor.sum": 10}
    for capability in ("", "7.0", "9.0"):
        found = profile(tmp_path, launch, capability=capability, flops_per_instruction=1000)
        assert only(found).work.flops == 10_000
        assert not found.is_assumed


def test_packed_half_precision_of_the_a100_is_no_tensor_work(tmp_path: Path) -> None:
    """On the A100 HFMA2 of the CUDA cores runs in the tensor pipe and is counted there."""
    name = "sm__inst_executed_pipe_tensor.sum"
    # 960 warp instructions, and 30,720 = 960 x 32 by threads: splitKreduce of the excerpt
    launch = {**PLAIN, name: 960, THREAD.format("hfma"): 30720}
    assert only(profile(tmp_path, launch)).work.tensor_flops == 0
    assert only(profile(tmp_path, launch, capability="7.0")).work.tensor_flops == 960 * 512
    partly = {**PLAIN, name: 1, THREAD.format("hfma"): 3}  # one warp with three threads
    assert only(profile(tmp_path, partly)).work.tensor_flops == 0
    counted = {
        **PLAIN,
        "sm__inst_executed_pipe_tensor_op_hmma.sum": 100,
        "sm__inst_executed_pipe_tensor_op_hmma_type_hfma2.sum": 60,
        "sm__inst_executed_pipe_tensor_op_dmma.sum": 5,
    }
    # 40 HMMA.16816 and 5 DMMA of 8x8x4
    assert only(profile(tmp_path, counted)).work.tensor_flops == 40 * 4096 + 5 * 512


def test_operations_that_the_device_counts_itself_come_first(tmp_path: Path) -> None:
    path = "sm__ops_path_tensor_src_"
    launch = {
        **PLAIN,
        "sm__inst_executed_pipe_tensor.sum": 10,
        f"{path}fp16_dst_fp32.sum": 1000,
        f"{path}fp16_dst_fp32_sparsity_off.sum": 900,
        f"{path}fp16_dst_fp32_sparsity_on.sum": 100,
        f"{path}bf16_dst_fp32_sparsity_off.sum": 30,
        f"{path}tf32_dst_fp32.sum": 20,
        f"{path}fp64.sum": 7,
        f"{path}int8.sum": 5000,
    }
    work = only(profile(tmp_path, launch, capability="9.0")).work
    assert work.tensor == {"float16": 1000, "bfloat16": 30, "tf32": 20, "float64": 7}


@pytest.mark.parametrize(
    ("level", "counters"),
    [
        ("DRAM", {"dram__bytes_read.sum": 60, "dram__bytes_write.sum": 40}),
        ("DRAM", {"dram__bytes_op_read.sum": 60, "dram__bytes_op_write.sum": 40}),
        ("DRAM", {"dram__sectors_read.sum": 2, "dram__sectors_write.sum": 1.125}),
        ("DRAM", {"dram__bytes.sum.per_second": 100_000}),
        ("L2", {"lts__t_sectors.sum": 3.125}),
        ("L2", {"lts__t_sectors_op_read.sum": 2, "lts__t_sectors_op_write.sum": 1.125}),
        (
            "L1",
            {
                "l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum": 50,
                "l1tex__t_bytes_pipe_lsu_mem_global_op_st.sum": 30,
                "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum": 20,
            },
        ),
        (
            "L1",
            {
                "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": 2,
                "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": 1.125,
            },
        ),
    ],
)
def test_bytes_by_other_counters(tmp_path: Path, level: str, counters: dict[str, float]) -> None:
    """100 bytes: a sector has 32; PLAIN takes 1 ms."""
    total = {"DRAM": "dram__bytes.sum", "L2": "lts__t_bytes.sum", "L1": "l1tex__t_bytes.sum"}
    kernel = only(profile(tmp_path, {**without(total[level]), **counters}))
    assert kernel.work.level_bytes[level] == pytest.approx(100)
    assert not kernel.missing


def test_time_by_cycles_and_counts_per_cycle(tmp_path: Path) -> None:
    """What ncu --set roofline has: counts for each cycle of the smsp, and its clock rate."""
    launch = {
        **{key: value for key, value in PLAIN.items() if not key.startswith("sm__sass")},
        "smsp__cycles_elapsed.avg": 2e6,
        "smsp__cycles_elapsed.avg.per_second": 1e9,
        **{
            f"smsp__sass_thread_inst_executed_op_{op}_pred_on.sum.per_cycle_elapsed": 0.5
            for op in OPS
        },
    }
    work = only(profile(tmp_path, launch)).work
    assert work.time_s == 2e-3  # not gpu__time_duration: the paper's formula comes first
    assert work.flops == 3 * (1 + 1 + 2) * 0.5 * 2e6


# -- what is missing -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAIN)
def test_a_kernel_without_a_counter_has_no_zero_for_it(tmp_path: Path, name: str) -> None:
    found = profile(tmp_path, PLAIN, without(name), kernels=("whole", "partial"))
    kernels = {kernel.kernel: kernel for kernel in found.kernels}
    assert kernels["whole"].missing == ()
    assert kernels["partial"].missing == (name,)
    work = kernels["partial"].work
    values = [work.time_s, work.flops, *work.level_bytes.values()]
    assert values.count(None) == 1
    assert found.total.time_s is None or name != "gpu__time_duration.sum"


def test_a_sum_with_an_unknown_part_is_unknown(tmp_path: Path) -> None:
    kernel = only(profile(tmp_path, PLAIN, without("dram__bytes.sum")))
    assert kernel.launches == 2
    assert kernel.work.level_bytes == {"DRAM": None, "L2": 400, "L1": 800}


def test_precisions_that_nobody_profiled_are_in_no_sum(tmp_path: Path) -> None:
    launch = {
        "sm__cycles_elapsed.avg": 1e6,
        "sm__cycles_elapsed.avg.per_second": 1e9,
        **{THREAD.format(f"d{op}"): 10 for op in ("add", "mul", "fma")},
    }
    found = profile(tmp_path, launch)
    work, missing = only(found).work, only(found).missing
    assert found.precisions == ("double",)
    assert work.flops == 40
    assert work.flops_of("float") is None
    assert work.tensor_flops is None
    assert "sm__inst_executed_pipe_tensor.sum" in missing
    assert "dram__bytes.sum" in missing


def test_a_profile_without_any_counter_is_listed(tmp_path: Path) -> None:
    work = only(profile(tmp_path, {"launch__waves_per_multiprocessor": 3})).work
    assert (work.time_s, work.flops, work.fma_frac) == (None, None, None)


# -- roofs -----------------------------------------------------------------------------------------


def test_gpp_is_as_the_paper_reproduction_has_it(tmp_path: Path) -> None:
    """The V100 roofs and points of Yang's example, as counters of a profile."""
    clock = 1e9
    roofs: dict[str, float] = {
        "dram__cycles_elapsed.avg.per_second": clock,
        "lts__cycles_elapsed.avg.per_second": clock,
        "l1tex__cycles_elapsed.avg.per_second": clock,
        "sm__cycles_elapsed.avg.per_second": clock,
        "dram__bytes.sum.peak_sustained": 828.758,
        "lts__t_bytes.sum.peak_sustained": 2996.77,
        "l1tex__t_bytes.sum.peak_sustained": 14336,
        "sm__sass_thread_inst_executed_op_dfma_pred_on.sum.peak_sustained": 7068.86 / 2,
    }
    for point, row in zip(yang.GPP, yang.gpp().rows):
        flops = 1.6e12  # 60 of 100 instructions are FMA
        launch = {
            **PLAIN,
            **roofs,
            "sm__cycles_elapsed.avg": flops / (point.gflops_per_s * 1e9) * clock,
            THREAD.format("dfma"): 0.6e12,
            THREAD.format("dadd"): 0.4e12,
        }
        names = ("l1tex__t_bytes.sum", "lts__t_bytes.sum", "dram__bytes.sum")
        launch |= {name: flops / x for name, x in zip(names, point.intensities)}
        found = profile(tmp_path, launch, capability="7.0")
        work = only(found).work
        place = placement(work, found.roofs)
        assert place is not None
        attainable, reached = (entry.recomputed for entry in row.entries[:2])
        assert place.attainable_flops_per_s / 1e9 == pytest.approx(attainable, rel=1e-9)
        assert work.time_s is not None
        assert 100 * place.least_s / work.time_s == pytest.approx(reached, rel=1e-9)
        assert {"compute": "FMA mix", "DRAM": "HBM"}[place.bound] == row.keys[1]


ROOFS = Roofs(
    (Roof("L1", 400.0, ""), Roof("L2", 200.0, ""), Roof("DRAM", 100.0, "")),
    (Ceiling("tensor float16", 1000.0, 1000.0, ""), Ceiling("float32", 100.0, 50.0, "")),
)


def work_of(
    tensor: dict[str, float] | None = None, dram: float | None = 100.0, n_fma: float = 0.0
) -> KernelWork:
    instructions = {"float": Instructions(0.0, 0.0, n_fma)}
    moved = {"L1": 100.0, "L2": 100.0, "DRAM": dram}
    return KernelWork(10.0, instructions, tensor, tensor is not None, moved)


def test_the_lowest_roof() -> None:
    # 100 bytes take 1 s at DRAM; 40 FMA are 80 FLOP, 0.8 s; with 600 tensor FLOP 0.6 s more
    assert placement(work_of(n_fma=40), ROOFS) == ("DRAM", 1.0, 80.0)
    place = placement(work_of({"float16": 600.0}, n_fma=40), ROOFS)
    assert place is not None
    assert place.bound == "compute"
    assert place.least_s == pytest.approx(0.8 + 0.6)
    assert placement(work_of({"": 600.0}, n_fma=40), ROOFS) == place  # the highest of the roofs


def test_no_place_without_a_count_or_a_roof() -> None:
    assert placement(work_of(dram=None), ROOFS) is None
    assert placement(work_of(n_fma=1), Roofs(ROOFS.bandwidths, ())) is None
    assert placement(work_of({"": 1.0}), Roofs(ROOFS.bandwidths, ROOFS.ceilings[1:])) is None
    assert placement(work_of(n_fma=1), Roofs(ROOFS.bandwidths[:2], ROOFS.ceilings)) is None


def test_a_level_without_a_roof_limits_nothing() -> None:
    only_dram = Roofs(ROOFS.bandwidths[2:], ROOFS.ceilings)
    assert placement(work_of(n_fma=40), only_dram) == ("DRAM", 1.0, 80.0)


def test_a_precision_without_a_roof_has_the_highest_of_its_kind() -> None:
    half = KernelWork(1.0, {"half": Instructions(n_fma=100)}, None, False, work_of().level_bytes)
    assert placement(half, ROOFS) == ("compute", 2.0, 100.0)  # 200 FLOP at float32's 100 FLOP/s


def test_formulas() -> None:
    assert gpu_counters.thread_flops(1, 2, 3) == 9
    assert gpu_counters.tensor_flops(3, 512) == 1536
    assert gpu_counters.elapsed_s(3e6, 1.5e9) == pytest.approx(2e-3)


# -- names -----------------------------------------------------------------------------------------

NATIVE = "void at::native::"


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (
            (
                f"{NATIVE}vectorized_elementwise_kernel<(int)4, at::native::<unnamed>::"
                "launch_clamp_scalar(at::TensorIteratorBase &, c10::Scalar)::[lambda() (instance 1)],"
                " at::detail::Array<char *, (int)2>>(int, T2, T3)"
            ),
            "elementwise: ReLU (clamp)",
        ),
        (
            (
                f"{NATIVE}elementwise_kernel<(int)128, (int)2, void at::native::gpu_kernel_impl<"
                "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase &)::[lambda()]>>(int, T3)"
            ),
            "elementwise: copy",
        ),
        (
            (
                f"{NATIVE}vectorized_elementwise_kernel<(int)4, at::native::BUnaryFunctor<float, float,"
                " float, at::native::binary_internal::MulFunctor<float>>>(int, T2, T3)"
            ),
            "elementwise: mul",
        ),
        (
            (
                f"{NATIVE}reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float,"
                " float, float, float>, unsigned int, float, 4> >(x)"
            ),
            "reduce: mean",
        ),
        ("ampere_sgemm_32x32_sliced1x4_tn", "gemm 32x32 tn"),
        ("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn", "gemm 128x128 tn"),
        (
            (
                "void cutlass::Kernel<cutlass_80_wmma_tensorop_f16_s161616gemm_f16_32x32_128x2_tn_align8>"
                "(T1::Params)"
            ),
            "gemm 32x32 tn",
        ),
        (
            "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16",
            "convolution forward 128x128",
        ),
        ("void cudnn::detail::bn_bw_1C11_kernel_new<float, 512>(float)", "batch norm backward"),
        ("void <unnamed>::softmax_warp_forward<float, (int)5>(T2 *)", "softmax forward"),
        ("void fmha_fwd_loop_kernel<FMHA_kernel_traits<(int)128>>(P)", "attention forward"),
        ("triton_poi_fused_addmm_gelu_0", "triton_poi_fused_addmm_gelu_0"),
        ("saxpy(int, float, float *, float *)", "saxpy"),
        ("", ""),
    ],
)
def test_short_names(kernel: str, name: str) -> None:
    assert short_name(kernel) == name


def test_kernels_with_the_same_short_name_get_numbers() -> None:
    names = short_names(["ampere_sgemm_128x128_tn", "k(int)", "volta_sgemm_128x128_tn"])
    assert list(names.values()) == ["gemm 128x128 tn #1", "k", "gemm 128x128 tn #2"]


def test_names_that_no_line_can_show() -> None:
    assert list(short_names(["", "evil\x1b[31m\nname"]).values()) == [
        "(unnamed)",
        "evil\\x1b[31m\\nname",
    ]


@pytest.mark.process
def test_mangled_names() -> None:
    """With c++filt they are demangled; without it they stay."""
    (name,) = short_names(["_Z9vectorAddPKfS0_Pfi"]).values()
    assert name in ("vectorAdd", "_Z9vectorAddPKfS0_Pfi")
