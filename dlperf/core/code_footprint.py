"""Which operators run the same code, so that one of them brings it into the caches for the next."""

from __future__ import annotations

from collections.abc import Sequence

_SHARED = {
    "mm": "bmm baddbmm mv dot vdot matmul",
    "addmm": "addmv _addmm_activation linear",
    "convolution": (
        "mkldnn_convolution mkldnn_rnn_layer convolution_backward mkldnn_rnn_layer_backward"
    ),
    "native_batch_norm": (
        "_native_batch_norm_legit _native_batch_norm_legit_no_training _batch_norm_with_update"
    ),
    "native_batch_norm_backward": "batch_norm_backward",
    "native_layer_norm": "native_group_norm",
    "native_layer_norm_backward": "native_group_norm_backward",
    "_log_softmax": "_softmax",
    "_log_softmax_backward_data": "_softmax_backward_data",
    "nll_loss_forward": "nll_loss2d_forward",
    "nll_loss_backward": "nll_loss2d_backward",
    "max_pool2d_with_indices": "max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d",
    "max_pool2d_with_indices_backward": (
        "max_pool3d_with_indices_backward adaptive_max_pool2d_backward adaptive_max_pool3d_backward"
    ),
    "avg_pool2d": "avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d",
    "avg_pool2d_backward": (
        "avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward"
        " upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward"
        " upsample_linear1d_backward upsample_bilinear2d_backward upsample_trilinear3d_backward"
        " upsample_bicubic2d_backward reflection_pad1d_backward reflection_pad2d_backward"
        " reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward"
        " replication_pad3d_backward grid_sampler_2d_backward col2im"
    ),
    "upsample_nearest2d": (
        "upsample_nearest1d upsample_nearest3d upsample_bilinear2d upsample_bicubic2d"
        " upsample_linear1d upsample_trilinear3d reflection_pad1d reflection_pad2d reflection_pad3d"
        " replication_pad1d replication_pad2d replication_pad3d grid_sampler_2d im2col max_unpool2d"
    ),
    "mse_loss": "smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss multi_margin_loss",
    "mse_loss_backward": (
        "smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward"
        " soft_margin_loss_backward multi_margin_loss_backward"
    ),
    "where": "masked_fill masked_fill_",
    "select_backward": "slice_backward diagonal_backward",
    "clone": "copy_ _to_copy contiguous",
    "transpose": (
        "t permute view _unsafe_view expand unsqueeze squeeze select slice split split_with_sizes"
        " as_strided unfold narrow chunk"
    ),
    "embedding": "index_select gather index take _embedding_bag",
    "embedding_dense_backward": (
        "index_put index_put_ index_add index_add_ scatter scatter_ scatter_add scatter_add_"
        " _index_put_impl_ index_copy scatter_reduce _embedding_bag_backward"
    ),
    "native_dropout": "bernoulli bernoulli_ normal_ uniform_ rand randn rand_like randn_like",
    "var_mean": "var std std_mean logsumexp",
    "mean": "amax amin max min argmax argmin norm linalg_vector_norm",
    "sum": "prod cumsum",
    "cat": "stack",
}
_SIZES = {
    "aten.mm": 3,
    "aten.addmm": 5,
    "aten.convolution": 20,
    "aten.native_batch_norm": 4,
    "aten.native_batch_norm_backward": 4,
    "aten.native_layer_norm": 5,
    "aten.native_layer_norm_backward": 4,
    "aten._log_softmax": 2,
    "aten._log_softmax_backward_data": 2,
    "aten.nll_loss_forward": 2,
    "aten.nll_loss_backward": 3,
    "aten.max_pool2d_with_indices": 4,
    "aten.max_pool2d_with_indices_backward": 4,
    "aten.embedding": 4,
    "aten.embedding_dense_backward": 3,
    "aten.gelu": 7,
    "aten.gelu_backward": 8,
    "aten.native_dropout": 5,
    "aten.native_dropout_backward": 3,
    "aten.sum": 3,
    "aten.mean": 5,
    "aten.cat": 3,
    "aten.binary_cross_entropy_with_logits": 7,
    "aten.mse_loss": 5,
    "aten.mse_loss_backward": 3,
    "aten._scaled_dot_product_flash_attention_for_cpu": 6,
    "aten.avg_pool2d": 4,
    "aten.avg_pool2d_backward": 3,
    "aten.upsample_nearest2d": 6,
    "aten.var_mean": 4,
    "aten.where": 2,
    "aten.pow": 2,
    "aten.rsub": 4,
    "aten.select_backward": 4,
    "aten.clone": 2,
    "aten.transpose": 2,
    "backward": 10,
    "optimizer": 10,
}
"""What a cold call takes more, in what an elementwise operator's does: medians after 4, 16 and 64
MiB of other work, which agree. The engine's call and the optimizer's with zero_grad: with these,
operators after forwards alone and after whole steps lie on one curve (Intel Xeon, torch 2.13).
"""
UNIT_BYTES = 20 * 2**10
"""Bytes of data that drive as much out of a core's own caches as a footprint of 1 does, its
instructions, pages and what it learnt of branches together: with 16 to 24 KiB steps of 60 random
networks, most of 0.4 to 4 ms, are predicted best (Intel Xeon, torch 2.13).
"""
CALLED = ("backward", "optimizer")
"""Phases whose call runs code of its own before their operators."""
_BRINGS = {"aten.addmm": "aten.mm"}
"""What runs another operator's code on the way to its own."""
CONVOLUTION, CONVOLUTION_KERNEL = "aten.convolution", "convolution_kernel"
"""The code that all convolutions share, forward and backward, and what each shape has of its own:
oneDNN compiles a kernel for it.
"""
LONG_OPTIMIZER, LONG_OPTIMIZER_OPERATORS = "long_optimizer", 7
"""The code of an optimizer of many operators, and how many different ones: those of Adam's loop."""
_MEASURED = {
    f"aten.{other}": f"aten.{name}" for name, others in _SHARED.items() for other in others.split()
}


def code_of(packet: str) -> str:
    """The operator that stands for the code of this one.

    >>> code_of("aten.bmm"), code_of("aten.relu")
    ('aten.mm', 'aten.relu')
    """
    return _MEASURED.get(packet, packet)


def codes_of(packet: str) -> tuple[str, ...]:
    """Every code that an operator brings into the caches, its own first.

    >>> codes_of("aten.linear")
    ('aten.addmm', 'aten.mm')
    """
    own = code_of(packet)
    return (own, _BRINGS[own]) if own in _BRINGS else (own,)


def relative_footprint(packet: str) -> int:
    """Relative code footprint of an operator, in elementwise operators.

    >>> relative_footprint("aten.relu"), relative_footprint("aten.convolution")
    (1, 20)
    """
    return _SIZES.get(code_of(packet), 1)


def code_since(code: str, recent: Sequence[str]) -> int:
    """Code footprint that ran since some code last ran: of the `recent` operators after the last
    one that ran it (in the order of their last run), of all where none did.

    >>> code_since("aten.mm", ("aten.relu", "aten.addmm", "aten.convolution", "aten.mul"))
    21
    """
    found = 0
    for packet in reversed(recent):
        if code in codes_of(packet):
            break
        found += relative_footprint(packet)
    return found
