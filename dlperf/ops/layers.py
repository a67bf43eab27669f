"""FLOPs of what layers are made of besides contractions: norms, pooling, softmax, losses,
embeddings, resampling; and of optimizers.
"""

from __future__ import annotations

import math

from dlperf.core.trace import Op
from dlperf.ops.registry import (
    argument,
    aten,
    find,
    flop_formula,
    flops_per_element,
    n_first_in,
    n_first_list,
    n_first_out,
    n_larger,
    n_tensor,
    tensor,
)

# -- normalisation ---------------------------------------------------------------------------------

LAYER_NORM_FLOPS = 8
"""Per element: mean 1, variance 3 (subtract, square, sum), normalise 2, scale and shift 2."""
_FIXED_NORM_FLOPS = 4
"""Per element with given statistics: subtract, divide, scale, shift."""

flops_per_element(
    LAYER_NORM_FLOPS,
    n_first_in,
    aten("native_layer_norm layer_norm native_group_norm group_norm instance_norm"),
)
flops_per_element(
    _FIXED_NORM_FLOPS,
    n_first_in,
    aten("_native_batch_norm_legit_no_training _batch_norm_no_update"),
)
# Normalised input again 2, shift's gradient 1, scale's 2, input's gradient 5 (scale, two mean
# terms, two subtractions).
flops_per_element(
    10,
    n_first_in,
    aten(
        "native_layer_norm_backward native_group_norm_backward native_batch_norm_backward"
        " batch_norm_backward cudnn_batch_norm_backward miopen_batch_norm_backward"
    ),
)
# Square, sum, divide, scale; backward: normalised input 1, scale's gradient 2, input's gradient 5.
flops_per_element(4, n_first_in, aten("_fused_rms_norm rms_norm"))
flops_per_element(8, n_first_in, aten("_fused_rms_norm_backward"))
# g v / |v|: square, sum, scale; backward: product with v, sum; scale, product, subtract.
flops_per_element(3, n_first_in, aten("_weight_norm_interface _weight_norm"))
flops_per_element(5, n_first_in, aten("_weight_norm_interface_backward"))


@flop_formula(
    "aten.native_batch_norm",
    "aten._native_batch_norm_legit",
    "aten._native_batch_norm_legit_functional",
    "aten.batch_norm",
    "aten._batch_norm_impl_index",
    "aten._batch_norm_with_update",
    "aten._batch_norm_with_update_functional",
    "aten.cudnn_batch_norm",
    "aten.miopen_batch_norm",
)
def batch_norm(op: Op) -> int:
    """8 FLOP per element in training; 4 with given statistics."""
    # `training` is the first plain bool among the arguments; where the schema has none the
    # statistics are taken from the batch
    training = next(
        (value for value in op.args if isinstance(value, bool)),
        dict(op.kwargs).get("training", True),
    )
    return (LAYER_NORM_FLOPS if training else _FIXED_NORM_FLOPS) * n_first_in(op)


# -- softmax ---------------------------------------------------------------------------------------

SOFTMAX_FLOPS = 5
"""Per element: maximum, subtract, exponential, sum, divide (subtract the logarithm in log_softmax).
"""

flops_per_element(
    SOFTMAX_FLOPS,
    n_first_in,
    aten("_softmax softmax _safe_softmax _masked_softmax _log_softmax log_softmax special_softmax"),
)
# Product, sum, subtract, product (sum, exponential, product, subtract).
flops_per_element(
    4,
    n_first_in,
    aten("_softmax_backward_data _log_softmax_backward_data _masked_softmax_backward"),
)


# -- pooling ---------------------------------------------------------------------------------------


_POOLS = """
max_pool{0}d max_pool{0}d_with_indices avg_pool{0}d avg_pool{0}d_backward mkldnn_max_pool{0}d
fractional_max_pool{0}d
"""


@flop_formula(*aten(" ".join(_POOLS.format(n_dims) for n_dims in (1, 2, 3))))
def pool(op: Op) -> int:
    """One comparison or sum per element of each output's window, padding included; in the backward
    each output's gradient is added to every element of its window.
    """
    backward = op.packet.endswith("_backward")
    size = argument(op, 2 if backward else 1, "kernel_size", 1)
    sizes = size if isinstance(size, tuple) else (size,)
    n_dims = int(op.packet.partition("_pool")[2][0])
    window: int = math.prod(sizes) if len(sizes) > 1 else sizes[0] ** n_dims
    return window * (tensor(op, 0).numel if backward else n_first_out(op))


# Each input element once, or one scaled sum per element of the input's gradient. Where the sizes do
# not divide, windows overlap and the count errs low.
_ADAPTIVE = ("_adaptive_avg_pool", "adaptive_avg_pool", "mkldnn_adaptive_avg_pool")
flops_per_element(
    1,
    n_larger,
    (
        *(f"aten.adaptive_max_pool{n}d" for n in (1, 2, 3)),
        *(
            f"aten.{name}{n}d{way}"
            for name in _ADAPTIVE
            for n in (1, 2, 3)
            for way in ("", "_backward")
        ),
    ),
)
# Each element of the incoming gradient is added where it came from.
flops_per_element(
    1,
    n_first_in,
    (
        *(
            f"aten.{name}_backward"
            for name in """
            max_pool1d max_pool2d max_pool2d_with_indices max_pool3d_with_indices mkldnn_max_pool2d
            mkldnn_max_pool3d adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d
            fractional_max_pool3d reflection_pad1d reflection_pad2d reflection_pad3d
            replication_pad1d replication_pad2d replication_pad3d upsample_nearest1d
            upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
            _upsample_nearest_exact2d _upsample_nearest_exact3d embedding_dense embedding
            index_select gather unfold masked_scatter value_selecting_reduction
            """.split()
        ),
        "aten.col2im",
    ),
)


# -- losses ----------------------------------------------------------------------------------------

# FLOP per element of the first input, of the second for backwards, whose first is the incoming
# gradient; the reduction's sum included.
_PER_ELEMENT = {
    "mse_loss": 3,
    "mse_loss_backward": 3,  # difference, square, sum; difference, two products
    "l1_loss": 3,
    "smooth_l1_loss": 5,
    "smooth_l1_loss_backward": 4,
    "huber_loss": 5,
    "huber_loss_backward": 4,
    "binary_cross_entropy": 8,
    "binary_cross_entropy_backward": 5,  # two logarithms, two products, two differences, sum twice
    "binary_cross_entropy_with_logits": 8,
    "soft_margin_loss": 5,
    "soft_margin_loss_backward": 5,
    "kl_div": 4,
    "multi_margin_loss": 4,
    "multi_margin_loss_backward": 4,
    "multilabel_margin_loss_forward": 4,
    "multilabel_margin_loss_backward": 4,
}


# Multi-label margins are counted for one target a sample.
for _name, _flops in _PER_ELEMENT.items():
    flops_per_element(_flops, n_tensor(1 if _name.endswith("_backward") else 0), aten(_name))

# One sum or product per target.
flops_per_element(
    1, n_tensor(1), aten("nll_loss_forward nll_loss2d_forward nll_loss nll_loss2d nll_loss_nd")
)
flops_per_element(1, n_tensor(2), aten("nll_loss_backward nll_loss2d_backward"))
# Three dot products.
flops_per_element(6, n_first_in, aten("cosine_similarity"))


@flop_formula("aten._ctc_loss", "aten.ctc_loss")
def ctc_loss(op: Op) -> int:
    """Log-sum-exp of three predecessors and a sum, 13 FLOP, for each state and time step of the
    forward variables.
    """
    return 13 * op.outputs[-1].numel


@flop_formula("aten._ctc_loss_backward")
def ctc_loss_backward(op: Op) -> int:
    """The backward variables as the forward ones, then 3 FLOP per log-probability."""
    return 13 * tensor(op, 6, "log_alpha").numel + 3 * tensor(op, 1).numel


@flop_formula("aten._cdist_forward", "aten._pdist_forward", "aten.cdist", "aten._euclidean_dist")
def distances(op: Op) -> int:
    """Difference, power, sum: 3 FLOP per coordinate of each pair."""
    return 3 * n_first_out(op) * op.inputs[0].shape[-1]


@flop_formula("aten._cdist_backward", "aten._pdist_backward")
def distances_backward(op: Op) -> int:
    """Difference, two products, sum: 4 FLOP per coordinate of each pair."""
    return 4 * tensor(op, 0).numel * tensor(op, 1).shape[-1]


# -- embeddings, scattered sums --------------------------------------------------------------------


_LOOK_UPS = dict.fromkeys(
    aten(
        "_embedding_bag _embedding_bag_forward_only embedding_bag _embedding_bag_dense_backward"
        " _embedding_bag_backward"
    ),
    (1, 1),
) | {
    "aten._embedding_bag_per_sample_weights_backward": (2, 2),
    "aten.embedding_renorm": (3, 1),
}
"""FLOP per element of a looked-up row (the sum of its bag, or the bag's gradient; a dot product;
norm and scale), and the index of the indices among the arguments.
"""


@flop_formula(*_LOOK_UPS)
def look_up(op: Op) -> int:
    """Each looked-up row, or its gradient, as wide as the first argument."""
    flops, indices = find(_LOOK_UPS, op.packet) or (0, 0)
    return flops * tensor(op, indices).numel * tensor(op, 0).shape[-1]


# One operation per element of the source; a gather computes nothing.
flops_per_element(1, n_tensor(3), aten("scatter_add scatter_reduce index_add index_reduce"))
flops_per_element(0, n_first_out, aten("_unsafe_index _unsafe_masked_index"))


@flop_formula("aten.index_put", "aten._index_put_impl", "aten._unsafe_index_put")
def index_put(op: Op) -> int:
    """One sum per value where it accumulates, else a copy."""
    return tensor(op, 2).numel if argument(op, 3, "accumulate", False) else 0


# -- resampling, Fourier transforms ----------------------------------------------------------------

_TAPS = {
    "linear1d": 2,
    "bilinear2d": 4,
    "_bilinear2d_aa": 4,
    "trilinear3d": 8,
    "bicubic2d": 16,
    "_bicubic2d_aa": 16,
}


# One multiply-add per neighbour of each element of the fine side.
for _name, _taps in _TAPS.items():
    _packet = f"aten._upsample_{_name[1:]}" if _name.startswith("_") else f"aten.upsample_{_name}"
    flops_per_element(2 * _taps, n_first_out, (_packet,))
    flops_per_element(2 * _taps, n_first_in, (f"{_packet}_backward",))


_NEIGHBOURS = {0: 2, 1: 1, 2: 4}
"""Neighbours along an axis by interpolation mode: bilinear, nearest, bicubic."""


@flop_formula(
    *aten("grid_sampler_2d grid_sampler_3d grid_sampler _grid_sampler_2d_cpu_fallback"),
    *aten("grid_sampler_2d_backward grid_sampler_3d_backward"),
    "aten._grid_sampler_2d_cpu_fallback_backward",
)
def grid_sampler(op: Op) -> int:
    """One multiply-add per neighbour of each output element; the weights, common to all channels,
    are not counted. Backward: one for the input's gradient and one for each coordinate's.
    """
    n_dims = len(op.inputs[0].shape) - 2
    backward = op.packet.endswith("_backward")
    n_taps: int = _NEIGHBOURS[argument(op, 3 if backward else 2, "interpolation_mode", 0)] ** n_dims
    return 2 * n_taps * ((1 + n_dims) * n_first_in(op) if backward else n_first_out(op))


@flop_formula("aten.affine_grid_generator", "aten.affine_grid_generator_backward")
def affine_grid(op: Op) -> int:
    """One small matrix-vector product per grid point: 2 (d + 1) FLOP per coordinate."""
    grid = op.inputs[0] if op.packet.endswith("_backward") else op.outputs[0]
    return 2 * (grid.shape[-1] + 1) * grid.numel


@flop_formula(
    "aten._fft_r2c", "aten._fft_c2r", "aten._fft_c2c"
)  # dims are the second argument in all three
def fourier_transform(op: Op) -> int:
    """5 N log2 n for n-point complex transforms of N elements in all, half of it where one side is
    real.
    """
    larger = max((*op.inputs, *op.outputs), key=lambda spec: spec.numel)
    points = math.prod(larger.shape[dim] for dim in argument(op, 1, "dim", ()))
    return (
        round((5.0 if op.packet.endswith("c2c") else 2.5) * larger.numel * math.log2(points))
        if points > 1
        else 0
    )


# -- fused optimizers ------------------------------------------------------------------------------


_OPTIMIZERS = dict.fromkeys(aten("_fused_adam _fused_adamw"), 12) | {
    "aten._fused_sgd": 2,
    "aten._fused_adagrad": 7,
}
"""FLOP per parameter. Adam: first moment 3 (lerp), second 3 (g g, multiply-add), root, divide, sum
of epsilon 3, update 3. SGD: update 2. Adagrad: sum of squares 2, root, epsilon 2, quotient, update
3.
"""
_OPTIONS = {"weight_decay": 2, "amsgrad": 1, "momentum": 2, "nesterov": 2}
"""Further FLOP per parameter; momentum with dampening has one more."""


@flop_formula(*_OPTIMIZERS)
def fused_optimizer(op: Op) -> int:
    """A few FLOP per parameter, see the tables."""
    options = dict(op.kwargs)
    flops = (find(_OPTIMIZERS, op.packet) or 0) + sum(
        extra for name, extra in _OPTIONS.items() if options.get(name)
    )
    dampened = bool(options.get("momentum") and options.get("dampening"))
    return n_first_list(op) * (flops + dampened)


# Check and product.
flops_per_element(2, n_first_list, aten("_amp_foreach_non_finite_check_and_unscale"))


# One product.
flops_per_element(1, n_first_in, aten("_amp_update_scale"))
