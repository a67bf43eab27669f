"""FLOPs of what layers are made of besides contractions: norms, pooling, softmax, losses,
embeddings, resampling; and of optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dlperf.core.trace import Op
from dlperf.ops.registry import (
    argument,
    flop_formula,
    n_first_in,
    n_first_list,
    n_first_out,
    tensor,
)

# -- normalisation ---------------------------------------------------------------------------------

LAYER_NORM_FLOPS = 8
"""Per element: mean 1, variance 3 (subtract, square, sum), normalise 2, scale and shift 2."""
_NORM_BACKWARD_FLOPS = 10
"""Per element: normalised input again 2, shift's gradient 1, scale's 2, input's gradient 5 (scale,
two mean terms, two subtractions).
"""
_FIXED_NORM_FLOPS = 4
"""Per element with given statistics: subtract, divide, scale, shift."""


@flop_formula(
    "aten.native_layer_norm",
    "aten.layer_norm",
    "aten.native_group_norm",
    "aten.group_norm",
    "aten.instance_norm",
)
def norm(op: Op) -> int:
    """8 FLOP per element."""
    return LAYER_NORM_FLOPS * n_first_in(op)


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


@flop_formula("aten._native_batch_norm_legit_no_training", "aten._batch_norm_no_update")
def fixed_batch_norm(op: Op) -> int:
    """4 FLOP per element."""
    return _FIXED_NORM_FLOPS * n_first_in(op)


@flop_formula(
    "aten.native_layer_norm_backward",
    "aten.native_group_norm_backward",
    "aten.native_batch_norm_backward",
    "aten.batch_norm_backward",
    "aten.cudnn_batch_norm_backward",
    "aten.miopen_batch_norm_backward",
)
def norm_backward(op: Op) -> int:
    """10 FLOP per element."""
    return _NORM_BACKWARD_FLOPS * n_first_in(op)


@flop_formula("aten._fused_rms_norm", "aten.rms_norm")
def rms_norm(op: Op) -> int:
    """Square, sum, divide, scale: 4 FLOP per element."""
    return 4 * n_first_in(op)


@flop_formula("aten._fused_rms_norm_backward")
def rms_norm_backward(op: Op) -> int:
    """Normalised input 1, scale's gradient 2, input's gradient 5: 8 FLOP per element."""
    return 8 * n_first_in(op)


@flop_formula("aten._weight_norm_interface", "aten._weight_norm")
def weight_norm(op: Op) -> int:
    """g v / |v|: square, sum, scale: 3 FLOP per element of v."""
    return 3 * n_first_in(op)


@flop_formula("aten._weight_norm_interface_backward")
def weight_norm_backward(op: Op) -> int:
    """Product with v, sum; scale, product, subtract: 5 FLOP per element of v."""
    return 5 * n_first_in(op)


# -- softmax ---------------------------------------------------------------------------------------

SOFTMAX_FLOPS = 5
"""Per element: maximum, subtract, exponential, sum, divide (subtract the logarithm in log_softmax).
"""


@flop_formula(
    "aten._softmax",
    "aten.softmax",
    "aten._safe_softmax",
    "aten._masked_softmax",
    "aten._log_softmax",
    "aten.log_softmax",
    "aten.special_softmax",
)
def softmax(op: Op) -> int:
    """5 FLOP per element."""
    return SOFTMAX_FLOPS * n_first_in(op)


@flop_formula(
    "aten._softmax_backward_data",
    "aten._log_softmax_backward_data",
    "aten._masked_softmax_backward",
)
def softmax_backward(op: Op) -> int:
    """Product, sum, subtract, product (sum, exponential, product, subtract): 4 FLOP per element."""
    return 4 * n_first_in(op)


# -- pooling ---------------------------------------------------------------------------------------


def _window(op: Op, place: int, n_dims: int) -> int:
    size = argument(op, place, "kernel_size", 1)
    sizes = size if isinstance(size, tuple) else (size,)
    return math.prod(sizes) if len(sizes) > 1 else sizes[0] ** n_dims


def _pool(n_dims: int) -> Callable[[Op], int]:
    def pool(op: Op) -> int:
        """One comparison or sum per element of each output's window; padding counts as if it were
        there.
        """
        return _window(op, 1, n_dims) * n_first_out(op)

    return pool


def _average_pool_backward(n_dims: int) -> Callable[[Op], int]:
    def average_pool_backward(op: Op) -> int:
        """Each output's gradient is added to every element of its window."""
        return _window(op, 2, n_dims) * tensor(op, 0).numel

    return average_pool_backward


for _n_dims in (1, 2, 3):
    flop_formula(
        f"aten.max_pool{_n_dims}d",
        f"aten.max_pool{_n_dims}d_with_indices",
        f"aten.avg_pool{_n_dims}d",
        f"aten.mkldnn_max_pool{_n_dims}d",
        f"aten.fractional_max_pool{_n_dims}d",
    )(_pool(_n_dims))
    flop_formula(f"aten.avg_pool{_n_dims}d_backward")(_average_pool_backward(_n_dims))


@flop_formula(
    *(
        f"aten.{name}pool{n}d"
        for name in ("_adaptive_avg_", "adaptive_avg_", "adaptive_max_", "mkldnn_adaptive_avg_")
        for n in (1, 2, 3)
    )
)
def adaptive_pool(op: Op) -> int:
    """Each input element once; windows overlap where the sizes do not divide, and then the count
    errs low.
    """
    return max(n_first_in(op), n_first_out(op))


@flop_formula(
    *(
        f"aten.{name}pool{n}d_backward"
        for name in ("_adaptive_avg_", "adaptive_avg_", "mkldnn_adaptive_avg_")
        for n in (1, 2, 3)
    )
)
def adaptive_average_pool_backward(op: Op) -> int:
    """One scaled sum per element of the input's gradient."""
    return max(n_first_in(op), n_first_out(op))


@flop_formula(
    *(
        f"aten.{name}_backward"
        for name in (
            "max_pool1d",
            "max_pool2d",
            "max_pool2d_with_indices",
            "max_pool3d_with_indices",
            "mkldnn_max_pool2d",
            "mkldnn_max_pool3d",
            "adaptive_max_pool2d",
            "adaptive_max_pool3d",
            "fractional_max_pool2d",
            "fractional_max_pool3d",
            "reflection_pad1d",
            "reflection_pad2d",
            "reflection_pad3d",
            "replication_pad1d",
            "replication_pad2d",
            "replication_pad3d",
            "upsample_nearest1d",
            "upsample_nearest2d",
            "upsample_nearest3d",
            "_upsample_nearest_exact1d",
            "_upsample_nearest_exact2d",
            "_upsample_nearest_exact3d",
            "embedding_dense",
            "embedding",
            "index_select",
            "gather",
            "unfold",
            "masked_scatter",
            "value_selecting_reduction",
        )
    ),
    "aten.col2im",
)
def sum_per_gradient(op: Op) -> int:
    """Each incoming element is added to the place that it came from."""
    return n_first_in(op)


# -- losses ----------------------------------------------------------------------------------------

_PER_ELEMENT = {  # per element of the first input (of the second for backwards, whose first is the incoming gradient); the reduction's sum included
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


@flop_formula(*(f"aten.{name}" for name in _PER_ELEMENT))
def loss(op: Op) -> int:
    """A few FLOP per element compared, see the table; multi-label margins are counted for one
    target a sample.
    """
    name = op.packet[len("aten.") :].rstrip("_")
    return _PER_ELEMENT[name] * tensor(op, 1 if name.endswith("_backward") else 0).numel


@flop_formula(
    "aten.nll_loss_forward",
    "aten.nll_loss2d_forward",
    "aten.nll_loss",
    "aten.nll_loss2d",
    "aten.nll_loss_nd",
)
def nll_loss(op: Op) -> int:
    """One sum per target."""
    return tensor(op, 1).numel


@flop_formula("aten.nll_loss_backward", "aten.nll_loss2d_backward")
def nll_loss_backward(op: Op) -> int:
    """One product per target."""
    return tensor(op, 2).numel


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


@flop_formula("aten.cosine_similarity")
def cosine_similarity(op: Op) -> int:
    """Three dot products: 6 FLOP per coordinate."""
    return 6 * n_first_in(op)


@flop_formula("aten._cdist_backward", "aten._pdist_backward")
def distances_backward(op: Op) -> int:
    """Difference, two products, sum: 4 FLOP per coordinate of each pair."""
    return 4 * tensor(op, 0).numel * tensor(op, 1).shape[-1]


# -- embeddings, scattered sums --------------------------------------------------------------------


@flop_formula("aten._embedding_bag", "aten._embedding_bag_forward_only", "aten.embedding_bag")
def embedding_bag(op: Op) -> int:
    """Each looked-up row is added to its bag."""
    return tensor(op, 1).numel * tensor(op, 0).shape[-1]


@flop_formula(
    "aten._embedding_bag_dense_backward",
    "aten._embedding_bag_backward",
    "aten._embedding_bag_per_sample_weights_backward",
)
def embedding_bag_backward(op: Op) -> int:
    """Each looked-up row receives its bag's gradient (with per-sample weights: one dot product a
    row, 2 FLOP an element).
    """
    gradient = tensor(op, 0)
    if op.packet.endswith("per_sample_weights_backward"):
        return 2 * tensor(op, 2).numel * gradient.shape[-1]
    return tensor(op, 1).numel * gradient.shape[-1]


@flop_formula("aten.embedding_renorm")
def embedding_renorm(op: Op) -> int:
    """Norm and scale of each looked-up row: 3 FLOP per element."""
    return 3 * tensor(op, 1).numel * tensor(op, 0).shape[-1]


@flop_formula("aten.index_put", "aten._index_put_impl", "aten._unsafe_index_put")
def index_put(op: Op) -> int:
    """One sum per value where it accumulates, else a copy."""
    return tensor(op, 2).numel if argument(op, 3, "accumulate", False) else 0


@flop_formula("aten.scatter_add", "aten.scatter_reduce", "aten.index_add", "aten.index_reduce")
def scatter_sum(op: Op) -> int:
    """One operation per element of the source."""
    return tensor(op, 3).numel


@flop_formula("aten._unsafe_index", "aten._unsafe_masked_index")
def unchecked_index(op: Op) -> int:
    """A gather."""
    return 0


# -- resampling, Fourier transforms ----------------------------------------------------------------

_TAPS = {
    "linear1d": 2,
    "bilinear2d": 4,
    "_bilinear2d_aa": 4,
    "trilinear3d": 8,
    "bicubic2d": 16,
    "_bicubic2d_aa": 16,
}


def _upsample_name(name: str) -> str:
    return f"aten._upsample_{name[1:]}" if name.startswith("_") else f"aten.upsample_{name}"


def _resample(n_taps: int) -> Callable[[Op], int]:
    def resample(op: Op) -> int:
        """One multiply-add per neighbour of each element of the fine side."""
        return 2 * n_taps * (n_first_in(op) if op.packet.endswith("_backward") else n_first_out(op))

    return resample


for _name, _taps in _TAPS.items():
    flop_formula(_upsample_name(_name), _upsample_name(_name) + "_backward")(_resample(_taps))


def _sampler_taps(op: Op, place: int, n_dims: int) -> int:
    n_taps = {0: 2, 1: 1, 2: 4}[
        argument(op, place, "interpolation_mode", 0)
    ]  # bilinear, nearest, bicubic
    return int(n_taps**n_dims)


@flop_formula(
    "aten.grid_sampler_2d",
    "aten.grid_sampler_3d",
    "aten.grid_sampler",
    "aten._grid_sampler_2d_cpu_fallback",
)
def grid_sampler(op: Op) -> int:
    """One multiply-add per neighbour of each output element; the weights, common to all channels,
    are not counted.
    """
    return 2 * _sampler_taps(op, 2, len(op.inputs[0].shape) - 2) * n_first_out(op)


@flop_formula(
    "aten.grid_sampler_2d_backward",
    "aten.grid_sampler_3d_backward",
    "aten._grid_sampler_2d_cpu_fallback_backward",
)
def grid_sampler_backward(op: Op) -> int:
    """Per neighbour a multiply-add for the input's gradient and one for each coordinate's."""
    n_dims = len(op.inputs[0].shape) - 2
    return 2 * (1 + n_dims) * _sampler_taps(op, 3, n_dims) * n_first_in(op)


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


@flop_formula("aten._fused_adam", "aten._fused_adamw")
def fused_adam(op: Op) -> int:
    """Per parameter: first moment 3 (lerp), second 3 (g g, multiply-add), root, divide, sum of
    epsilon 3, update 3; decay 2, amsgrad 1.
    """
    options = dict(op.kwargs)
    return n_first_list(op) * (
        12 + (2 if options.get("weight_decay") else 0) + (1 if options.get("amsgrad") else 0)
    )


@flop_formula("aten._fused_sgd")
def fused_sgd(op: Op) -> int:
    """Per parameter: update 2; weight decay 2, momentum 3 (1 without dampening less), Nesterov 2."""
    options = dict(op.kwargs)
    momentum = (3 if options.get("dampening") else 2) if options.get("momentum") else 0
    return n_first_list(op) * (
        2
        + (2 if options.get("weight_decay") else 0)
        + momentum
        + (2 if options.get("nesterov") else 0)
    )


@flop_formula("aten._fused_adagrad")
def fused_adagrad(op: Op) -> int:
    """Per parameter: sum of squares 2, root and epsilon 2, quotient and update 3; weight decay 2."""
    return n_first_list(op) * (7 + (2 if dict(op.kwargs).get("weight_decay") else 0))


@flop_formula("aten._amp_foreach_non_finite_check_and_unscale")
def unscale(op: Op) -> int:
    """Check and product: 2 FLOP per element."""
    return 2 * n_first_list(op)


@flop_formula("aten._amp_update_scale")
def update_scale(op: Op) -> int:
    """One product."""
    return 1
