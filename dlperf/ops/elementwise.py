"""FLOPs of elementwise operations, reductions and scans; the operators that compute nothing.

An elementwise function counts 1 FLOP per output element whatever the function is, so that an
exponential weighs as much as a sum: the count states what is computed, the machine file how long it
takes.
"""

from __future__ import annotations

import math

from dlperf.core.trace import Op
from dlperf.ops.registry import (
    argument,
    aten,
    flop_formula,
    flops_per_element,
    n_first_in,
    n_first_list,
    n_first_out,
    n_larger,
)

# -- elementwise functions, reductions, scans ------------------------------------------------------

_UNARY_AND_BINARY = """
__and__ __ilshift__ __ior__ __iand__ __irshift__ __ixor__ __lshift__ __or__ __rshift__ __xor__
_prelu_kernel abs absolute acos acosh add angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh
asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip copysign cos cosh deg2rad
digamma div divide elu eq erf erfc erfinv exp exp2 expm1 fix float_power floor floor_divide fmax
fmin fmod frac frexp gcd ge gelu greater greater_equal gt hardshrink hardsigmoid hardswish hardtanh
heaviside hypot i0 igamma igammac isclose isfinite isin isinf isnan isneginf isposinf isreal lcm
ldexp le leaky_relu less less_equal lgamma log log10 log1p log2 log_sigmoid logaddexp logaddexp2
logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish mul
multiply mvlgamma nan_to_num ne neg negative nextafter not_equal polar polygamma pow prelu rad2deg
reciprocal relu relu6 remainder round rrelu rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc
sinh softplus softshrink special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0
special_bessel_y1 special_chebyshev_polynomial_t special_chebyshev_polynomial_u
special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_entr special_erfcx
special_hermite_polynomial_h special_hermite_polynomial_he special_i0e special_i1 special_i1e
special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr
special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_xlog1py special_zeta sqrt
square sub subtract tan tanh threshold true_divide trunc where xlogy log_sigmoid_forward bucketize
searchsorted complex outer ger
"""
_BACKWARD = """
_prelu_kernel_backward elu_backward gelu_backward hardshrink_backward hardsigmoid_backward
hardswish_backward hardtanh_backward leaky_relu_backward log_sigmoid_backward logit_backward
mish_backward native_dropout_backward rrelu_with_noise_backward sigmoid_backward silu_backward
softplus_backward softshrink_backward tanh_backward threshold_backward
"""
_RANDOM = """
bernoulli cauchy exponential geometric log_normal multinomial normal poisson rand rand_like randint
randint_like randn randn_like random randperm rrelu_with_noise uniform normal_functional
"""


_FOREACH_ONE = """
abs acos add asin atan ceil clamp_max clamp_min cos cosh div erf erfc exp expm1 floor frac lgamma
log log10 log1p log2 max maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sinh
sqrt sub tan tanh trunc
"""
_REDUCTIONS = """
all amax amin any argmax argmin count_nonzero cummax cummin cumprod cumsum equal kthvalue max mean
median min mode nanmedian nanmean nansum nonzero prod sum trace bincount histc masked_select
_is_all_true _is_any_true _grad_sum_to_size topk _cummax_helper _cummin_helper segment_reduce
_segment_reduce_backward allclose
"""

# Of binary functions, scale factors (`alpha`) are not counted.
flops_per_element(1, n_first_out, aten(_UNARY_AND_BINARY + _BACKWARD + _RANDOM))
flops_per_element(1, n_first_list, aten(_FOREACH_ONE, "_foreach_"))
flops_per_element(1, n_larger, aten(_REDUCTIONS))
# Product or quotient, and sum; draw and mask; sigmoid and product.
flops_per_element(
    2,
    n_first_out,
    aten(
        "addcmul addcdiv native_dropout _fused_dropout dropout feature_dropout alpha_dropout"
        " feature_alpha_dropout glu _fused_moving_avg_obs_fq_helper"
    ),
)
flops_per_element(2, n_first_list, aten("addcmul addcdiv norm powsum", "_foreach_"))
# Square or exponential, and sum; both extremes.
flops_per_element(
    2,
    n_first_in,
    aten(
        "aminmax norm linalg_vector_norm logcumsumexp frobenius_norm linalg_norm"
        " cumulative_trapezoid renorm"
    ),
)
# Subtract the maximum (or the other operand), exponential (or power), sum.
flops_per_element(3, n_first_in, aten("logsumexp special_logsumexp dist"))
# a + w (b - a).
flops_per_element(3, n_first_out, aten("lerp"))
flops_per_element(3, n_first_list, aten("lerp", "_foreach_"))
# Sum; subtract the mean, square, sum.
flops_per_element(4, n_first_in, aten("std std_mean var var_mean"))
# g s for one half and g a s (1 - s) for the other, sigmoid included.
flops_per_element(6, n_first_in, aten("glu_backward"))


@flop_formula(*aten("sort argsort msort _unique2 unique_dim unique_consecutive _unique"))
def sort(op: Op) -> int:
    """n log2 n comparisons along the sorted dimension, over all slices."""
    spec = op.inputs[0]
    dim = argument(op, 1, "dim", -1)
    length = (
        spec.shape[dim]
        if spec.shape and type(dim) is int and -len(spec.shape) <= dim < len(spec.shape)
        else spec.numel
    )
    return spec.numel * math.ceil(math.log2(length)) if length > 1 else 0


# -- nothing to compute ----------------------------------------------------------------------------

VIEWS = frozenset(
    aten("""
_conj _neg_view _nested_view_from_buffer _nested_view_from_jagged _reshape_alias _unsafe_view
adjoint alias as_strided broadcast_to chunk conj detach diagonal dsplit empty empty_like
empty_permuted empty_strided expand expand_as hsplit imag is_pinned is_same_size lift lift_fresh mH
mT matrix_H movedim moveaxis narrow new_empty new_empty_strided numpy_T permute positive real
record_stream requires_grad resize resolve_conj resolve_neg select set set_data slice split
split_with_sizes squeeze stride size storage_offset sym_is_contiguous sym_numel sym_size
sym_storage_offset sym_stride swapaxes swapdims t tensor_split transpose unbind unflatten unfold
unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze values view view_as view_as_complex
view_as_real vsplit _assert_async _assert_scalar _assert_tensor_metadata
_has_compatible_shallow_copy_type _version is_nonzero numel dim _fused_sdp_choice _nested_get_values
_use_cudnn_ctc_loss _backward _cudnn_init_dropout_state _functional_assert_async result_type
can_cast output_nr is_leaf retain_grad sym_constrain_range sym_constrain_range_for_size _fw_primal
_make_dual _unpack_dual
""")
) | frozenset(
    {
        "prim.device",
        "prim.layout",
        "profiler._record_function_enter",
        "profiler._record_function_enter_new",
        "profiler._record_function_exit",
    }
)
"""Operators that touch no element: views, metadata, uninitialised memory, markers. 0 FLOP and 0
bytes.
"""

MAYBE_VIEWS = frozenset(
    aten(
        "contiguous flatten ravel reshape reshape_as to type_as pin_memory cpu"
        " _autocast_to_full_precision _autocast_to_reduced_precision _to_dense"
    )
)
"""Operators that copy only where they must: 0 bytes when the output lies in the input's memory."""

_COPIES = """
_conj_physical _copy_from _local_scalar_dense _mkldnn_reshape _mkldnn_transpose _pin_memory
_reshape_copy _to_copy arange as_strided_copy as_strided_scatter block_diag cat channel_shuffle
clone combinations concat concatenate conj_physical constant_pad_nd copy detach_copy diag diag_embed
diagonal_backward diagonal_copy diagonal_scatter embedding expand_copy eye fill flip fliplr flipud
full full_like gather hstack im2col index index_copy index_fill index_select item linspace logspace
masked_scatter meshgrid native_channel_shuffle new_full new_ones new_zeros ones ones_like pad
permute_copy pixel_shuffle pixel_unshuffle put reflection_pad1d reflection_pad2d reflection_pad3d
repeat repeat_interleave replication_pad1d replication_pad2d replication_pad3d roll rot90
scalar_tensor scatter select_backward select_copy select_scatter slice_backward slice_copy
slice_scatter squeeze_copy stack t_copy take take_along_dim tensor tile to_mkldnn to_dense
transpose_copy tril triu tril_indices triu_indices unfold_copy unsqueeze_copy upsample_nearest1d
upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
_upsample_nearest_exact3d view_copy vstack zero zeros zeros_like _efficientzerotensor
mkldnn_reorder_conv2d_weight mkldnn_reorder_conv3d_weight _nested_tensor_from_mask
_nested_from_padded _nested_tensor_from_tensor_list nested_to_padded_tensor to_padded_tensor
max_unpool2d max_unpool3d _pack_padded_sequence one_hot _chunk_cat split_with_sizes_copy split_copy
unbind_copy cartesian_prod column_stack dstack _nested_select_backward _foreach_clone _foreach_copy
_foreach_zero
"""


flops_per_element(0, n_first_out, (*sorted(VIEWS | MAYBE_VIEWS), *aten(_COPIES)))
