"""Descriptions of normalisation, pooling, softmax, reductions, losses, gathers and joins."""

from __future__ import annotations

import math

from dlperf.core.trace import Op, TensorSpec
from dlperf.ops.registry import argument
from dlperf.predictors.kernels.description import (
    KernelDescription,
    ints,
    kernel_features,
    log2,
    tensor,
)
from dlperf.predictors.kernels.elementwise import elementwise
from dlperf.predictors.kernels.sub_kernels import contiguous_clone

LANES = 16
"""Numbers of float32 in a vector of 512 bits."""


def _tails(rows: int, width: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Terms and coordinates of rows that are no whole number of vectors: numbers left over of one
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
    backward = "backward" in op.packet
    image = tensor(op.args[1 if backward else 0])
    flags = [a for a in op.args if isinstance(a, bool)]
    training = flags[0] if flags else True
    n, c = image.shape[0], image.shape[1] if len(image.shape) > 1 else 1
    inner = math.prod(image.shape[2:])
    kind = "batch_norm_backward" if backward else "batch_norm"
    terms = (1.0, float(n * c * inner), float(n * c), float(c))
    variant = (kind, image.dtype, "training" if training else "evaluation")
    return KernelDescription(
        variant,
        (log2(n), log2(c), log2(inner)),
        terms,
        (
            (kind, image.dtype, "training"),
            (kind, "float32", variant[2]),
            (kind, "float32", "training"),
        ),
    )


@kernel_features(
    "aten.native_layer_norm",
    "aten.native_layer_norm_backward",
    "aten._fused_rms_norm",
    "aten._fused_rms_norm_backward",
)
def _layer_norm(op: Op) -> KernelDescription:
    backward = "backward" in op.packet
    spec = tensor(op.args[1 if backward else 0])
    width = math.prod(ints(op.args[2 if backward else 1]))
    rows = spec.numel // max(width, 1)
    kind = "layer_norm_backward" if backward else "layer_norm"
    tails, tail_features = _tails(rows, width)
    return KernelDescription(
        (kind, spec.dtype),
        (log2(rows), log2(width), *tail_features),
        (1.0, float(spec.numel), float(rows), float(width), *tails),
        ((kind, "float32"),),
    )


@kernel_features("aten.native_group_norm", "aten.native_group_norm_backward")
def _group_norm(op: Op) -> KernelDescription:
    backward = "backward" in op.packet
    spec = tensor(op.args[1 if backward else 0])
    n, c, inner = (int(a) for a in (op.args[5:8] if backward else op.args[3:6]))  # type: ignore[arg-type]
    kind = "group_norm_backward" if backward else "group_norm"
    return KernelDescription(
        (kind, spec.dtype),
        (log2(n), log2(c), log2(inner)),
        (1.0, float(n * c * inner), float(n * c)),
        ((kind, "float32"),),
    )


@kernel_features(
    "aten.max_pool2d_with_indices",
    "aten.max_pool2d_with_indices_backward",
    "aten.avg_pool2d",
    "aten.avg_pool2d_backward",
    "aten.max_pool3d_with_indices",
    "aten.max_pool3d_with_indices_backward",
    "aten.avg_pool3d",
    "aten.avg_pool3d_backward",
)
def _pool(op: Op) -> KernelDescription:
    backward = op.packet.endswith("backward")
    image = tensor(op.args[1 if backward else 0])
    window_at = 2 if backward else 1
    window = ints(op.args[window_at])
    d = 3 if "3d" in op.packet else 2
    window = window * d if len(window) == 1 else window
    stride = ints(op.args[window_at + 1]) if len(op.args) > window_at + 1 else window
    stride = (stride or window) * d if len(stride or window) == 1 else (stride or window)
    if backward:
        out = tensor(op.args[0]).numel
    elif op.outputs:
        out = op.outputs[0].numel
    else:
        padding = ints(op.args[window_at + 2]) if len(op.args) > window_at + 2 else (0,)
        padding = padding * d if len(padding) == 1 else padding
        out = math.prod(image.shape[:-d])
        for size, side, step, pad in zip(image.shape[-d:], window, stride, padding):
            out *= (size + 2 * pad - side) // step + 1
    planes = math.prod(image.shape[:-d])
    area = math.prod(window)
    name = op.packet.removeprefix("aten.").replace("3d", "2d")
    terms = (1.0, float(out), float(out * area), float(image.numel), float(planes))
    variant = (name, image.dtype)
    return KernelDescription(
        variant, (log2(planes), log2(out / max(planes, 1)), log2(area)), terms, ((name, "float32"),)
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
    backward = op.packet.endswith("backward")
    image = tensor(op.args[1 if backward else 0])
    d = 3 if "3d" in op.packet else 2
    planes = math.prod(image.shape[:-d])
    out = tensor(op.args[0]).numel if backward else planes * math.prod(ints(op.args[1]))
    name = op.packet.removeprefix("aten.").replace("3d", "2d")
    features = (log2(planes), log2(image.numel / max(planes, 1)), log2(out / max(planes, 1)))
    return KernelDescription(
        (name, image.dtype),
        features,
        (1.0, float(image.numel), float(out), float(planes)),
        ((name, "float32"),),
    )


# -- rows: softmax, reductions, losses -------------------------------------------------------------


def _split(spec: TensorSpec, dims: tuple[int, ...]) -> tuple[int, int, int]:
    """(outer, reduced, inner) sizes of a reduction over `dims`; all dims if none."""
    rank = len(spec.shape)
    axes = sorted({d % rank for d in dims}) if dims and rank else list(range(rank))
    if not axes:
        return 1, 1, 1
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


def _rows(name: str, spec: TensorSpec, outer: int, reduced: int, inner: int) -> KernelDescription:
    side = "last" if inner == 1 else "first"
    tails, tail_features = _tails(outer if inner == 1 else 0, reduced)
    terms = (1.0, float(outer * reduced * inner), float(outer * inner), float(outer), *tails)
    variant = (name, spec.dtype, side)
    similar = (
        [(_SIMILAR_ROWS[name], dtype, side) for dtype in (spec.dtype, "float32")]
        if name in _SIMILAR_ROWS
        else []
    )
    others = (
        *similar,
        (name, spec.dtype, "last"),
        (name, "float32", side),
        (name, "float32", "last"),
    )
    return KernelDescription(
        variant, (log2(outer), log2(reduced), log2(inner), *tail_features), terms, others
    )


@kernel_features(
    "aten._log_softmax",
    "aten._softmax",
    "aten._log_softmax_backward_data",
    "aten._softmax_backward_data",
    "aten._safe_softmax",
)
def _softmax(op: Op) -> KernelDescription:
    backward = op.packet.endswith("backward_data")
    spec = tensor(op.args[0])
    dims = ints(op.args[2 if backward else 1])
    return _rows(op.packet.removeprefix("aten."), spec, *_split(spec, dims))


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


@kernel_features(*_REDUCTIONS)
def _reduction(op: Op) -> KernelDescription:
    spec = tensor(op.args[0])
    if (
        len(op.args) > 1 and isinstance(op.args[1], TensorSpec) and op.packet != "aten.equal"
    ):  # max(a, b): elementwise
        return elementwise(op)
    dims: tuple[int, ...] = ()
    named = dict(op.kwargs).get("dim")
    if (len(op.args) > 1 and not op.name.endswith((".default", ".ScalarOpt_dim"))) or op.packet in (
        "aten.amax",
        "aten.amin",
        "aten.argmax",
        "aten.cumsum",
        "aten.cumprod",
        "aten.cummax",
        "aten.cummin",
        "aten.logcumsumexp",
        "aten.any",
        "aten.all",
    ):
        dims = ints(op.args[1]) if len(op.args) > 1 else ()
    if op.packet == "aten.linalg_vector_norm" and len(op.args) > 2:
        dims = ints(op.args[2])
    if named is not None:
        dims = ints(named)
    name = _REDUCTIONS[op.packet]
    return _rows(
        "var_all" if name == "var" and not dims else name, spec, *_split(spec, dims)
    )  # a variance of all has a kernel of its own


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
    dim = argument(
        op, 2 if name in ("topk", "kthvalue") else 1, "dim", -1
    )  # theirs comes after a number of elements
    outer, length, inner = _split(spec, ints(dim) or (-1,)) if spec.shape else (1, 1, 1)
    kernel = "sort" if name in ("sort", "argsort", "mode") else "topk"
    terms = (1.0, float(spec.numel), spec.numel * log2(length), float(outer * inner))
    side = "last" if inner == 1 else "first"
    return KernelDescription(
        (kernel, "float32", side),
        (log2(outer * inner), log2(length)),
        terms,
        ((kernel, "float32", "last"),),
    )


@kernel_features(
    "aten.nll_loss_forward",
    "aten.nll_loss_backward",
    "aten.nll_loss2d_forward",
    "aten.nll_loss2d_backward",
)
def _nll(op: Op) -> KernelDescription:
    backward = "backward" in op.packet
    spec = tensor(op.args[1 if backward else 0])
    classes = spec.shape[1] if len(spec.shape) > 1 else spec.numel
    rows = spec.numel // max(classes, 1)
    return KernelDescription(
        ("nll_backward" if backward else "nll", "float32"),
        (log2(rows), log2(classes)),
        (1.0, float(rows), float(spec.numel) if backward else 0.0),
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


@kernel_features(*(f"aten.{name}" for name in (*_GATHERS, *_LIKE_GATHERS)))
def _gather(op: Op) -> KernelDescription:
    packet = op.packet.removeprefix("aten.")
    name = _LIKE_GATHERS.get(packet, packet)
    if name == "embedding_dense_backward":
        gradient, table = tensor(op.args[0]), int(op.args[2])  # type: ignore[arg-type]
        width = gradient.shape[-1]
        moved, whole = gradient.numel, table * width
    else:
        source = tensor(op.args[0])
        width = source.shape[-1] if source.shape else 1
        whole = source.numel
        indices = [spec for spec in op.inputs if spec.dtype in ("int64", "int32")]
        picked = max((spec.numel for spec in indices), default=1)
        moved = picked if name == "gather" else picked * width
    rows = moved // max(width, 1)
    features = (log2(rows), log2(width), log2(whole / max(width, 1)) * 0.5)
    filled = name == "embedding_dense_backward" or packet in (
        "index_put",
        "index_add",
        "index_copy",
    )  # out-of-place: a copy of all first
    terms = (1.0, float(rows), float(moved), float(whole) if filled else 0.0)
    return KernelDescription(
        (name, "float32"),
        features,
        terms,
        (("index_select", "float32"),) if name in ("index", "index_put", "index_add") else (),
    )


@kernel_features(
    "aten._embedding_bag", "aten._embedding_bag_forward_only", "aten._embedding_bag_backward"
)
def _embedding_bag(op: Op) -> KernelDescription:
    backward = op.packet.endswith("backward")
    first, tokens, offsets = (tensor(argument) for argument in op.args[:3])
    width = first.shape[-1]
    table = int(op.args[6]) if backward else first.shape[0]  # type: ignore[arg-type]
    mode, sparse = (
        (op.args[8], op.args[9]) if backward else (op.args[4] if len(op.args) > 4 else 0, False)
    )
    rows = tokens.numel
    form = ("sum", "mean", "max")[int(mode)]  # type: ignore[arg-type]
    features = (log2(rows), log2(width), log2(table) * 0.5)
    terms = (
        1.0,
        float(rows),
        float(rows * width),
        float(table * width) if backward and not sparse else 0.0,
        float(offsets.numel * width),
    )
    name = f"embedding_bag{'_backward' if backward else ''}"
    return KernelDescription((name, form), features, terms, ((name, "mean"), (name, "sum")))


@kernel_features("aten.cat", "aten.stack")
def _join(op: Op) -> KernelDescription:
    parts = op.args[0]
    assert isinstance(parts, tuple)
    specs = [tensor(part) for part in parts]
    dim = int(op.args[1]) if len(op.args) > 1 else 0  # type: ignore[arg-type]
    numel = sum(spec.numel for spec in specs)
    rank = max(len(specs[0].shape), 1)
    run = (
        math.prod(specs[0].shape[(dim % rank) :])
        if op.packet == "aten.cat"
        else math.prod(specs[0].shape[dim if dim >= 0 else rank + 1 + dim :])
    )
    runs = numel / max(run, 1)
    return KernelDescription(
        ("join", specs[0].dtype),
        (log2(numel), log2(run)),
        (1.0, float(numel), runs, float(len(specs))),
        (("join", "float32"),),
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
    sizes = (
        op.outputs[0].shape
        if op.outputs
        else ints(op.args[1])
        if name.endswith("backward")
        else given.shape
    )
    if name == "slice_backward":
        moved, run = given.numel, math.prod(given.shape[int(op.args[2]) % max(len(sizes), 1) :])  # type: ignore[arg-type]
    elif name == "select_backward":
        moved, run = given.numel, math.prod(sizes[int(op.args[2]) % max(len(sizes), 1) + 1 :])  # type: ignore[arg-type]
    else:  # a copy of the whole, then the source into a part of it
        moved, run = (
            min((spec.numel for spec in op.inputs), default=1),
            given.shape[-1] if given.shape else 1,
        )
    kernel = (
        "select_backward" if name in ("select_backward", "diagonal_backward") else "slice_backward"
    )
    return _filled(kernel, math.prod(sizes), moved, run)


def _filled(kernel: str, whole: int, moved: int, run: int) -> KernelDescription:
    return KernelDescription(
        (kernel, "float32"),
        (log2(whole), log2(run)),
        (1.0, float(whole), float(moved), moved / max(run, 1)),
    )


@kernel_features("aten.constant_pad_nd")
def _constant_padding(op: Op) -> KernelDescription:
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
