"""Descriptions of normalisation, pooling, softmax, reductions, losses, gathers and joins."""

from __future__ import annotations

import math

from dlperf.core.trace import Op, TensorSpec
from dlperf.ops.registry import argument
from dlperf.predictors.kernels.description import (
    KernelDescription,
    described,
    in_dtypes,
    ints,
    kernel_features,
    log2,
    pass_of,
    tensor,
)
from dlperf.predictors.kernels.elementwise import elementwise
from dlperf.predictors.kernels.onednn import Window
from dlperf.predictors.kernels.sub_kernels import contiguous_clone

LANES = 16
"""Numbers of float32 in a vector of 512 bits."""


def _tails(rows: int, width: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Terms and features of rows that are no whole number of vectors: numbers left over of one
    vector and of two, which ATen's reductions load together; those of rows shorter than a vector,
    which it computes one by one (cpu/vec/functional_base.h, cpu/Reduce.h).
    """
    left, short = width % LANES, width if width < LANES else 0
    return (float(rows * left), float(rows * (width % (2 * LANES))), float(rows * short)), (
        0.5 * (rows and left > 0),
        2.0 * (rows and short > 0),
    )


# -- normalisation, pooling ------------------------------------------------------------------------


@kernel_features(
    "aten.native_batch_norm",
    "aten.native_batch_norm_backward",
    "aten._native_batch_norm_legit",
    "aten._batch_norm_with_update",
    "aten.batch_norm_backward",
)
def _batch_norm(op: Op) -> KernelDescription:
    way, image, _ = pass_of(op)
    is_training = next((value for value in op.args if isinstance(value, bool)), True)
    modes = ("training",) if is_training else ("evaluation", "training")
    n, c, *sides = (*image.shape, 1)
    inner = math.prod(sides)
    return described(
        ((f"batch_norm{way}", dtype, mode) for dtype in (image.dtype, "float32") for mode in modes),
        (log2(n), log2(c), log2(inner)),
        (n * c * inner, n * c, c),
    )


@kernel_features(
    "aten.native_layer_norm",
    "aten.native_layer_norm_backward",
    "aten._fused_rms_norm",
    "aten._fused_rms_norm_backward",
)
def _layer_norm(op: Op) -> KernelDescription:
    way, spec, (shape, *_) = pass_of(op)
    width = math.prod(ints(shape))
    rows = spec.numel // max(width, 1)
    tails, tail_features = _tails(rows, width)
    return described(
        in_dtypes(spec.dtype, f"layer_norm{way}"),
        (log2(rows), log2(width), *tail_features),
        (spec.numel, rows, width, *tails),
    )


@kernel_features("aten.native_group_norm", "aten.native_group_norm_backward")
def _group_norm(op: Op) -> KernelDescription:
    way, spec, rest = pass_of(op)
    n, c, inner = [value for value in rest if isinstance(value, int)][:3]
    return described(
        in_dtypes(spec.dtype, f"group_norm{way}"),
        (log2(n), log2(c), log2(inner)),
        (n * c * inner, n * c),
    )


@kernel_features(
    *(
        f"aten.{name}{d}d{end}"
        for d in (2, 3)
        for name, ends in (
            ("max_pool", ("_with_indices", "_with_indices_backward")),
            ("avg_pool", ("", "_backward")),
        )
        for end in ends
    )
)
def _pool(op: Op) -> KernelDescription:
    way, image, rest = pass_of(op)
    d = 3 if "3d" in op.packet else 2
    window, stride, padding = (ints(values, d) for values in (*rest[:3], (), ())[:3])
    planes = math.prod(image.shape[:-d])
    if way or op.outputs:
        out = (tensor(op.args[0]) if way else op.outputs[0]).numel
    else:
        moves = stride or window, padding or (0,) * d, (1,) * d
        out = planes * math.prod(Window(window, *moves, image.shape[-d:]).out)
    area = math.prod(window)
    return described(
        in_dtypes(image.dtype, op.packet.removeprefix("aten.").replace("3d", "2d")),
        (log2(planes), log2(out / max(planes, 1)), log2(area)),
        (out, out * area, image.numel, planes),
    )


@kernel_features(
    *(
        f"aten.{name}_pool{d}d{way}"
        for name in ("_adaptive_avg", "adaptive_max")
        for d in (2, 3)
        for way in ("", "_backward")
    )
)
def _adaptive_pool(op: Op) -> KernelDescription:
    way, image, rest = pass_of(op)
    planes = math.prod(image.shape[: -3 if "3d" in op.packet else -2])
    out = tensor(op.args[0]).numel if way else planes * math.prod(ints(rest[0]))
    return described(
        in_dtypes(image.dtype, op.packet.removeprefix("aten.").replace("3d", "2d")),
        (log2(planes), log2(image.numel / max(planes, 1)), log2(out / max(planes, 1))),
        (image.numel, out, planes),
    )


# -- rows: softmax, reductions, losses -------------------------------------------------------------


def _split(spec: TensorSpec, dims: tuple[int, ...]) -> tuple[int, int, int]:
    """(outer, reduced, inner) sizes of a reduction over `dims`; all dims if none."""
    rank = len(spec.shape)
    if not rank:
        return 1, 1, 1
    axes = sorted({d % rank for d in dims}) or list(range(rank))
    reduced = math.prod(spec.shape[a] for a in axes)
    inner = math.prod(spec.shape[axes[-1] + 1 :])
    return spec.numel // max(reduced * inner, 1), reduced, inner


_SIMILAR_ROWS = {
    "mean": "sum",
    "_safe_softmax": "_softmax",
    "logsumexp": "var",
    "var_all": "var",
    "logcumsumexp": "cumsum",
}
"""What comes before the same operator along another side."""


def _rows(name: str, spec: TensorSpec, dims: tuple[int, ...]) -> KernelDescription:
    outer, reduced, inner = _split(spec, dims)
    side = "last" if inner == 1 else "first"
    tails, tail_features = _tails(outer if inner == 1 else 0, reduced)
    similar = in_dtypes(spec.dtype, _SIMILAR_ROWS[name]) if name in _SIMILAR_ROWS else ()
    return described(
        (
            (name, spec.dtype, side),
            *((*kernel, side) for kernel in similar),
            (name, spec.dtype, "last"),
            (name, "float32", side),
            (name, "float32", "last"),
        ),
        (log2(outer), log2(reduced), log2(inner), *tail_features),
        (outer * reduced * inner, outer * inner, outer, *tails),
    )


@kernel_features(
    "aten._log_softmax",
    "aten._softmax",
    "aten._log_softmax_backward_data",
    "aten._softmax_backward_data",
    "aten._safe_softmax",
)
def _softmax(op: Op) -> KernelDescription:
    _, spec, (dim, *_) = pass_of(op)
    return _rows(op.packet.removeprefix("aten."), spec, ints(dim))


_REDUCTIONS = {
    "aten.sum": "sum",
    "aten.mean": "mean",
    "aten.max": "max",
    "aten.min": "max",
    "aten.amax": "amax",
    "aten.amin": "amax",
    "aten.argmax": "argmax",
    "aten.argmin": "argmax",
    "aten.var": "var",
    "aten.std": "var",
    "aten.var_mean": "var",
    "aten.std_mean": "var",
    "aten.cumsum": "cumsum",
    "aten.cumprod": "cumsum",
    "aten.prod": "sum",
    "aten.linalg_vector_norm": "norm",
    "aten.norm": "norm",
    "aten.any": "amax",
    "aten.all": "amax",
    "aten.logsumexp": "logsumexp",
    "aten.nansum": "sum",
    "aten.count_nonzero": "sum",
    "aten.aminmax": "amax",
    "aten.cummax": "cumsum",
    "aten.cummin": "cumsum",
    "aten.logcumsumexp": "logcumsumexp",
    "aten.trace": "sum",
    "aten.equal": "amax",
    "aten.histc": "cumsum",
    "aten.multinomial": "cumsum",
}
_DIMENSIONS_FIRST = tuple(
    f"aten.{name}"
    for name in """
    amax amin argmax cumsum cumprod cummax cummin logcumsumexp any all linalg_vector_norm
    """.split()
)
"""Reductions whose ``default`` overload takes dimensions."""


@kernel_features(*_REDUCTIONS)
def _reduction(op: Op) -> KernelDescription | None:
    spec, *others = op.args
    if others and isinstance(others[0], TensorSpec) and op.packet != "aten.equal":
        return elementwise(op)  # max(a, b)
    has_dims = op.packet in _DIMENSIONS_FIRST or not op.name.endswith(
        (".default", ".ScalarOpt_dim")
    )
    index = 2 if op.packet == "aten.linalg_vector_norm" else 1
    dims = ints(argument(op, index if has_dims else len(op.args), "dim", ()))
    name = _REDUCTIONS[op.packet]
    # A variance of all has a kernel of its own.
    return _rows("var_all" if name == "var" and not dims else name, tensor(spec), dims)


@kernel_features(
    "aten.sort",
    "aten.argsort",
    "aten.topk",
    "aten.kthvalue",
    "aten.median",
    "aten.nanmedian",
    "aten.mode",
)
def _ordering(op: Op) -> KernelDescription:
    """Sorting: n log2 n along a dimension; picking the largest: n."""
    name = op.packet.removeprefix("aten.")
    spec = tensor(op.args[0])
    # For these two the dimension comes after a number of elements.
    dim = argument(op, 2 if name in ("topk", "kthvalue") else 1, "dim", -1)
    outer, length, inner = _split(spec, ints(dim) or (-1,))
    kernel = "sort" if name in ("sort", "argsort", "mode") else "topk"
    return described(
        ((kernel, "float32", "last" if inner == 1 else "first"), (kernel, "float32", "last")),
        (log2(outer * inner), log2(length)),
        (spec.numel, spec.numel * log2(length), outer * inner),
    )


@kernel_features(
    "aten.nll_loss_forward",
    "aten.nll_loss_backward",
    "aten.nll_loss2d_forward",
    "aten.nll_loss2d_backward",
)
def _nll(op: Op) -> KernelDescription:
    way, spec, _ = pass_of(op)
    classes = spec.shape[1] if len(spec.shape) > 1 else spec.numel
    rows = spec.numel // max(classes, 1)
    return described(
        ((f"nll{way}", "float32"),),
        (log2(rows), log2(classes)),
        (rows, spec.numel if way else 0.0),
    )


# -- moves: embeddings, joins, gathers -------------------------------------------------------------


_GATHERS = (
    "embedding",
    "embedding_dense_backward",
    "gather",
    "index_select",
    "index",
    "index_put",
    "index_add",
)
"""Gathers and scatters with a kernel model of their own."""
_LIKE_GATHERS = {
    "_index_put_impl_": "index_put",
    "index_put_": "index_put",
    "index_add_": "index_add",
    "index_copy": "index_add",
    "index_copy_": "index_add",
} | dict.fromkeys(
    ("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"),
    "gather",
)
"""Those that take another's."""
_FILLED = ("embedding_dense_backward", "index_put", "index_add", "index_copy")
"""Those that fill, or copy, the whole table first."""


@kernel_features(*(f"aten.{name}" for name in (*_GATHERS, *_LIKE_GATHERS)))
def _gather(op: Op) -> KernelDescription:
    packet = op.packet.removeprefix("aten.")
    name = _LIKE_GATHERS.get(packet, packet)
    given = tensor(op.args[0])
    width = given.shape[-1] if given.shape else 1
    if name == "embedding_dense_backward":
        moved, whole = given.numel, sum(ints(op.args[2])) * width
    else:
        indices = [spec.numel for spec in op.inputs if spec.dtype in ("int64", "int32")]
        moved = max(indices, default=1) * (1 if name == "gather" else width)
        whole = given.numel
    rows = moved // max(width, 1)
    similar = ("index_select",) if name in ("index", "index_put", "index_add") else ()
    return described(
        in_dtypes("float32", name, *similar),
        (log2(rows), log2(width), log2(whole / max(width, 1)) * 0.5),
        (rows, moved, whole if packet in _FILLED else 0.0),
    )


@kernel_features(
    "aten._embedding_bag", "aten._embedding_bag_forward_only", "aten._embedding_bag_backward"
)
def _embedding_bag(op: Op) -> KernelDescription:
    backward = op.packet.endswith("backward")
    first, tokens, offsets = (tensor(argument) for argument in op.args[:3])
    rows, width = tokens.numel, first.shape[-1]
    (table,) = ints(op.args[6]) if backward else first.shape[:1]
    (mode,) = ints(argument(op, 8 if backward else 4, "mode", 0))
    is_filled = backward and not op.args[9]
    name = f"embedding_bag{'_backward' if backward else ''}"
    return described(
        ((name, form) for form in (("sum", "mean", "max")[mode], "mean", "sum")),
        (log2(rows), log2(width), log2(table) * 0.5),
        (rows, rows * width, table * width if is_filled else 0.0, offsets.numel * width),
    )


@kernel_features("aten.cat", "aten.stack")
def _join(op: Op) -> KernelDescription:
    specs = op.inputs
    (dim,) = ints(op.args[1]) if len(op.args) > 1 else (0,)
    numel = sum(spec.numel for spec in specs)
    n_dims = max(len(specs[0].shape), 1) + (op.packet == "aten.stack")
    run = math.prod(specs[0].shape[dim % n_dims :])
    return described(
        in_dtypes(specs[0].dtype, "join"),
        (log2(numel), log2(run)),
        (numel, numel / max(run, 1), len(specs)),
    )


@kernel_features(
    "aten.slice_backward",
    "aten.select_backward",
    "aten.slice_scatter",
    "aten.select_scatter",
    "aten.as_strided_scatter",
    "aten.diagonal_backward",
)
def _scatter_into_zeros(op: Op) -> KernelDescription:
    """The whole is filled, and runs of elements that lie side by side are copied into it."""
    name = op.packet.removeprefix("aten.")
    given = tensor(op.args[0])
    if op.outputs:
        sizes = op.outputs[0].shape
    else:
        sizes = ints(op.args[1]) if name.endswith("backward") else given.shape
    if name in ("slice_backward", "select_backward"):
        (dim,) = ints(op.args[2])
        moved, run = given.numel, math.prod(given.shape[dim % max(len(sizes), 1) :])
    else:  # a copy of the whole, then the source into a part of it
        moved = min((spec.numel for spec in op.inputs), default=1)
        run = given.shape[-1] if given.shape else 1
    is_selected = name in ("select_backward", "diagonal_backward")
    kernel = "select_backward" if is_selected else "slice_backward"
    return _filled(kernel, math.prod(sizes), moved, run)


def _filled(kernel: str, whole: int, moved: int, run: int) -> KernelDescription:
    return described(
        ((kernel, "float32"),), (log2(whole), log2(run)), (whole, moved, moved / max(run, 1))
    )


@kernel_features("aten.constant_pad_nd")
def _constant_padding(op: Op) -> KernelDescription | None:
    """As :func:`_scatter_into_zeros`; for a negative padding, a copy of what is left."""
    given, pads = tensor(op.args[0]), ints(op.args[1])
    sides = [
        (size, size + sum(pads[2 * axis : 2 * axis + 2]))
        for axis, size in enumerate(reversed(given.shape))
    ]  # before and after, the last first
    sizes = tuple(after for _, after in reversed(sides))
    if min(pads, default=0) < 0:
        return elementwise(contiguous_clone(TensorSpec(sizes, given.strides, given.dtype)))
    # Dimensions up to the first that changes its size lie side by side.
    changed = next(
        (axis for axis, (before, after) in enumerate(sides) if before != after), len(sides) - 1
    )
    run = math.prod(min(pair) for pair in sides[: changed + 1])
    return _filled("constant_pad_nd", math.prod(sizes), min(given.numel, math.prod(sizes)), run)
