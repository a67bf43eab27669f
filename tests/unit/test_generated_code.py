"""Work of generated kernels: instructions are counted by hand in each source."""

from __future__ import annotations

import pytest

from dlperf.core.trace import Op, TensorSpec
from dlperf.ops.counts import op_bytes, op_flops
from dlperf.ops.fused import FUSED
from dlperf.recorder.generated_code import GeneratedKernel, generated_kernels


def kernel(body: str, signature: str = "const float* in_ptr0, float* out_ptr0") -> GeneratedKernel:
    source = (
        "cpp_fused_add_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''\n"
        '#include "prefix.h"\n'
        f'extern "C"  void  kernel({signature})\n{{\n{body}\n}}\n'
        "''')\n"
    )
    ((name, found),) = generated_kernels(source)
    assert name == "cpp_fused_add_0"
    return found


def loop(name: str, size: str, step: int, body: str, first: str = "0L") -> str:
    head = (
        f"for(int64_t {name}=static_cast<int64_t>({first}); {name}<static_cast<int64_t>({size});"
        f" {name}+=static_cast<int64_t>({step}L))"
    )
    return f"{head}\n{{\n{body}\n}}"


VECTOR = """
auto tmp0 = at::vec::Vectorized<float>::loadu(in_ptr0 + static_cast<int64_t>(x0), 8);
auto tmp1 = static_cast<float>(2.0);
auto tmp2 = at::vec::Vectorized<float>(tmp1);
auto tmp3 = tmp0 * tmp2;
tmp3.store(out_ptr0 + static_cast<int64_t>(x0));
"""
"""Load, product, store: 3 instructions; the constant and its broadcast are free."""


def test_statements_count_once_per_iteration() -> None:
    assert kernel(loop("x0", "80L", 8, VECTOR)).instructions({}) == 10 * 3
    nested = loop("x1", "5L", 1, "#pragma GCC ivdep\n" + loop("x0", "84L", 8, VECTOR))
    assert kernel(nested).instructions({}) == 5 * 11 * 3  # 84 / 8 rounded up
    assert kernel(loop("x0", "80L", 1, "", first="80L")).instructions({}) == 0


def test_sizes_of_a_call_are_known() -> None:
    found = kernel(loop("x0", "4L*ks0", 8, VECTOR), "const float* in_ptr0, const int64_t ks0")
    assert found.parameters == (("in_ptr0", False), ("ks0", False))
    assert found.instructions({"ks0": 20}) == 10 * 3
    assert kernel(loop("x0", "ks0 + ks1", 1, VECTOR)).instructions({"ks0": 9}) == 3


def test_the_rest_after_whole_vectors_is_left_out() -> None:
    both = f"if(C10_LIKELY(x0 < 80L))\n{{{VECTOR}}}\nif(C10_UNLIKELY(x0 >= 80L))\n{{{VECTOR}}}\n"
    assert kernel(loop("x0", "84L", 8, both)).instructions({}) == 11 * 3
    alone = f"if(C10_UNLIKELY(x0 >= 0L && x0 < 4L))\n{{{VECTOR}}}\n"  # there are no whole ones
    assert kernel(loop("x0", "4L", 8, alone)).instructions({}) == 3


@pytest.mark.parametrize(
    ("statement", "instructions"),
    [
        ("auto tmp1 = tmp0.exp();", 27),
        ("auto tmp1 = tmp0.erf();", 40),
        ("auto tmp1 = tmp0.tanh();", 94),
        ("auto tmp1 = std::log(tmp0);", 40),
        ("auto tmp1 = tmp0 / tmp2;", 4),
        ("auto tmp1 = tmp0.expand();", 1),
        ("out_ptr0[static_cast<int64_t>(tmp0 + 4L*x0)] = tmp1;", 50),
        ("out_ptr0[static_cast<int64_t>(x0)] = tmp1;", 1),
        ("auto tmp1 = at::vec::VecMask<float,1>(tmp0 <= tmp2);\ntmp1.store(out_ptr0);", 1 + 450),
        ("auto tmp1 = 4L;", 0),
    ],
)
def test_functions_count_as_their_implementations(statement: str, instructions: int) -> None:
    assert kernel(loop("x0", "10L", 1, statement)).instructions({}) == 10 * instructions


def test_a_mask_is_forgotten_where_its_name_is_used_again() -> None:
    masked = "auto tmp1 = at::vec::VecMask<float,1>(tmp0 <= tmp2);"
    body = f"{masked}\nauto tmp1 = tmp0 + tmp2;\ntmp1.store(out_ptr0);"
    assert kernel(body).instructions({}) == 3


def test_parameters_and_threads_are_read() -> None:
    found = kernel("#pragma omp parallel\n", "float* in_out_ptr0, const bool* in_ptr1")
    assert found.parameters == (("in_out_ptr0", True), ("in_ptr1", False))
    assert (found.is_parallel, kernel("").is_parallel) == (True, False)


def test_work_of_a_fused_kernel() -> None:
    read, written = TensorSpec.contiguous(100, storage=0), TensorSpec.contiguous(50, storage=1)
    work = (("instructions", 40), ("lanes", 8), ("threads", 1))
    op = Op(f"{FUSED}.default", ((read,),), work, (written,))
    assert op_flops(op) == 40 * 8
    assert op_bytes(op) == 400 + 200
    table = TensorSpec.contiguous(10**6, storage=0)
    looked_up = Op(f"{FUSED}.default", ((table,),), work, (written,))
    assert op_bytes(looked_up) == 8 * 40 * 8  # no more than the instructions reach
