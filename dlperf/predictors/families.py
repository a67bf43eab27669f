"""What decides an op's time: its family, the key of its curve, and the numbers that the curve runs over.

One registered function a family turns an op into a :class:`Description`. The kernels of a machine file and the ops of
a trace pass through the same functions, so a new op costs one function here (and, if it has a kernel of its own, one
micro-benchmark).
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dlperf.predictors.onednn import BLOCK, takes_onednn
from dlperf.trace import Argument, Op, TensorSpec


@dataclass(frozen=True, slots=True)
class Description:
    """Where an op lies in its family.

    `key` names the curve (operator, dtype, regime); `place` are its coordinates, logarithms to base 2; `terms` are
    non-negative amounts of work of which the time is a weighted sum in first approximation (1 for the call itself,
    multiply-adds, elements moved, ...). `fallbacks` are keys to try, in order, where the machine file lacks `key`.
    """

    key: tuple[str, ...]
    place: tuple[float, ...]
    terms: tuple[float, ...]
    fallbacks: tuple[tuple[str, ...], ...] = ()


Describe = Callable[[Op], "Description | None"]
_REGISTRY: dict[str, Describe] = {}


def family(*packets: str) -> Callable[[Describe], Describe]:
    """Register the description of operators. An operator described twice is an error."""

    def register(function: Describe) -> Describe:
        for packet in packets:
            if packet in _REGISTRY:
                raise ValueError(f"{packet} is described twice")
            _REGISTRY[packet] = function
        return function

    return register


def describe(op: Op) -> Description | None:
    """The op's description; None for an operator that no family knows."""
    function = _REGISTRY.get(op.packet)
    return None if function is None else function(op)


def known() -> tuple[str, ...]:
    """The operators that some family knows."""
    return tuple(sorted(_REGISTRY))


def _log(value: float) -> float:
    return math.log2(max(value, 1.0))


def _spec(argument: Argument) -> TensorSpec:
    assert isinstance(argument, TensorSpec)
    return argument


def _ints(argument: Argument) -> tuple[int, ...]:
    """An int or a tuple of ints as a tuple."""
    if isinstance(argument, int):
        return (int(argument),)
    return tuple(int(a) for a in argument) if isinstance(argument, tuple) else ()  # type: ignore[arg-type]


# -- matrix products ----------------------------------------------------------------------------------------------


def orientation(a: TensorSpec, b: TensorSpec) -> str:
    """Memory order of two matrix operands: N for row-major, T for transposed."""

    def one(spec: TensorSpec) -> str:
        rows, columns = spec.strides[-2:]
        return "T" if columns != 1 and rows == 1 and spec.shape[-1] > 1 else "N"

    return one(a) + one(b)


def _matrix(a: TensorSpec, b: TensorSpec, kind: str) -> Description:
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    batch = math.prod(a.shape[:-2])
    order = orientation(a, b)
    terms = (1.0, float(batch), float(batch * m * n * k), float(batch * m * n), float(batch * m * k), float(batch * n * k))
    if kind == "bmm":
        return Description(("bmm", a.dtype, order), (_log(batch), _log(m), _log(n), _log(k)), terms, tuple(("bmm", a.dtype, o) for o in ("NN", "NT")))
    other = "addmm" if kind == "mm" else "mm"
    fallbacks = [(other, a.dtype, order), *(("mm", a.dtype, o) for o in ("NN", "NT", "TN")), ("addmm", a.dtype, "NT")]
    return Description((kind, a.dtype, order), (_log(m), _log(n), _log(k)), terms, tuple(fallbacks))


@family("aten.mm")
def _mm(op: Op) -> Description:
    return _matrix(_spec(op.args[0]), _spec(op.args[1]), "mm")


@family("aten.addmm", "aten._addmm_activation")
def _addmm(op: Op) -> Description:
    return _matrix(_spec(op.args[1]), _spec(op.args[2]), "addmm")


@family("aten.bmm")
def _bmm(op: Op) -> Description:
    return _matrix(_spec(op.args[0]), _spec(op.args[1]), "bmm")


@family("aten.baddbmm")
def _baddbmm(op: Op) -> Description:
    return _matrix(_spec(op.args[1]), _spec(op.args[2]), "bmm")


@family("aten.mv", "aten.addmv", "aten.dot", "aten.vdot")
def _mv(op: Op) -> Description:
    operands = [spec for spec in op.inputs][-2:]
    a, v = operands
    if len(a.shape) == 1:
        a = TensorSpec((1, *a.shape), (a.numel, *a.strides), a.dtype)
    return _matrix(a, TensorSpec((*v.shape, 1), (*v.strides, 1), v.dtype), "mm")


# -- convolutions ---------------------------------------------------------------------------------------------------


def _convolution(image: TensorSpec, weight: TensorSpec, args: tuple[Argument, ...], output: tuple[int, ...], what: str) -> Description:
    stride, _, dilation, transposed, _, groups_ = args
    groups = int(groups_)  # type: ignore[arg-type]
    n, c_in = image.shape[:2]
    c_out = weight.shape[1] * groups if transposed else weight.shape[0]
    kernel, out = math.prod(weight.shape[2:]), math.prod(output)
    in_size = math.prod(image.shape[2:])
    c_in_g, c_out_g = c_in // groups, c_out // groups
    positions = n * (in_size if transposed else out)
    multiply_adds = float(positions * groups * c_in_g * c_out_g * kernel)
    d = len(weight.shape) - 2
    if transposed:
        kind = f"transposed{d}d"
    elif groups > 1:
        kind = f"depthwise{d}d" if c_in_g == 1 else f"grouped{d}d"
    else:
        kind = f"1x1 {d}d" if kernel == 1 else f"dense{d}d"
    regime = "onednn" if takes_onednn(image, weight, _ints(stride), _ints(dilation), groups) else "native"
    # oneDNN computes on blocks of channels; up to 4 input channels have kernels of their own.
    padded_in = c_in_g if c_in_g <= 4 else BLOCK * math.ceil(c_in_g / BLOCK)
    padded_out = BLOCK * math.ceil(c_out_g / BLOCK)
    if groups > 1:
        padded_in, padded_out = c_in_g, c_out_g
    padded = float(positions * groups * padded_in * padded_out * kernel)
    place = (
        _log(n), _log(c_in_g), _log(c_out_g), _log(kernel), _log(out), 2.0 * (max(_ints(stride)) > 1), _log(groups) * 0.5,
        1.5 * (c_in_g % BLOCK != 0 and c_in_g > 4), 1.5 * (c_out_g % BLOCK != 0),
    )  # fmt: skip
    terms = (1.0, multiply_adds, padded, float(n * c_in * in_size), float(n * c_out * out), float(weight.numel), float(positions * c_in * kernel))
    dtype = image.dtype
    keys = [(what, dtype, kind, regime), (what, dtype, kind, "onednn"), (what, dtype, kind, "native")]
    similar = {"grouped": f"depthwise{d}d", "1x1 ": f"dense{d}d", "depthwise": f"grouped{d}d"}
    for start, alternative in similar.items():
        if kind.startswith(start):
            keys += [(what, dtype, alternative, regime), (what, dtype, alternative, "onednn")]
    keys += [(what, dtype, "dense2d", "onednn"), (what, "float32", kind, regime), (what, "float32", kind, "onednn"), (what, "float32", "dense2d", "onednn")]
    return Description(keys[0], place, terms, tuple(keys[1:]))


@family("aten.convolution", "aten._convolution", "aten.mkldnn_convolution", "aten.thnn_conv2d", "aten._slow_conv2d_forward")
def _conv_forward(op: Op) -> Description | None:
    if op.packet != "aten.convolution":
        return None
    image, weight = _spec(op.args[0]), _spec(op.args[1])
    return _convolution(image, weight, op.args[3:9], output_shape(op)[2:], "conv")


def output_shape(op: Op) -> tuple[int, ...]:
    """Shape of the output of ``aten.convolution``: that of its record, or computed where the op has none."""
    if op.outputs:
        return op.outputs[0].shape
    image, weight = _spec(op.args[0]), _spec(op.args[1])
    stride, padding, dilation = (_ints(op.args[place]) for place in (3, 4, 5))
    transposed, extra, groups = bool(op.args[6]), _ints(op.args[7]), int(op.args[8])  # type: ignore[arg-type]
    d = len(weight.shape) - 2
    stride, padding, dilation, extra = (values * d if len(values) == 1 else values for values in (stride, padding, dilation, extra))
    sizes = []
    for axis in range(d):
        size, kernel = image.shape[2 + axis], weight.shape[2 + axis]
        reach = dilation[axis] * (kernel - 1)
        if transposed:
            sizes.append((size - 1) * stride[axis] - 2 * padding[axis] + reach + extra[axis] + 1)
        else:
            sizes.append((size + 2 * padding[axis] - reach - 1) // stride[axis] + 1)
    return (image.shape[0], weight.shape[1] * groups if transposed else weight.shape[0], *sizes)


@family("aten.convolution_backward")
def _conv_backward(op: Op) -> Description:
    gradient, image, weight = (_spec(a) for a in op.args[:3])
    mask = op.args[10]
    assert isinstance(mask, tuple)
    what = "conv_backward" if mask[0] else "conv_backward weight"
    found = _convolution(image, weight, op.args[4:10], gradient.shape[2:], what)
    if mask[0]:
        return found
    return Description(found.key, found.place, found.terms, (*found.fallbacks, *((("conv_backward"), *key[1:]) for key in (found.key, *found.fallbacks))))


# -- normalisation, pooling -----------------------------------------------------------------------------------------


@family("aten.native_batch_norm", "aten.native_batch_norm_backward", "aten._native_batch_norm_legit", "aten._batch_norm_with_update", "aten.batch_norm_backward")
def _batch_norm(op: Op) -> Description:
    backward = "backward" in op.packet
    image = _spec(op.args[1 if backward else 0])
    flags = [a for a in op.args if isinstance(a, bool)]
    training = flags[0] if flags else True
    n, c = image.shape[0], image.shape[1] if len(image.shape) > 1 else 1
    inner = math.prod(image.shape[2:])
    kind = "batch_norm_backward" if backward else "batch_norm"
    terms = (1.0, float(n * c * inner), float(n * c), float(c))
    key = (kind, image.dtype, "training" if training else "evaluation")
    return Description(key, (_log(n), _log(c), _log(inner)), terms, ((kind, image.dtype, "training"), (kind, "float32", key[2]), (kind, "float32", "training")))


@family("aten.native_layer_norm", "aten.native_layer_norm_backward", "aten._fused_rms_norm", "aten._fused_rms_norm_backward")
def _layer_norm(op: Op) -> Description:
    backward = "backward" in op.packet
    spec = _spec(op.args[1 if backward else 0])
    width = math.prod(_ints(op.args[2 if backward else 1]))
    rows = spec.numel // max(width, 1)
    kind = "layer_norm_backward" if backward else "layer_norm"
    return Description((kind, spec.dtype), (_log(rows), _log(width)), (1.0, float(spec.numel), float(rows), float(width)), ((kind, "float32"),))


@family("aten.native_group_norm", "aten.native_group_norm_backward")
def _group_norm(op: Op) -> Description:
    backward = "backward" in op.packet
    spec = _spec(op.args[1 if backward else 0])
    n, c, inner = (int(a) for a in (op.args[5:8] if backward else op.args[3:6]))  # type: ignore[arg-type]
    kind = "group_norm_backward" if backward else "group_norm"
    return Description((kind, spec.dtype), (_log(n), _log(c), _log(inner)), (1.0, float(n * c * inner), float(n * c)), ((kind, "float32"),))


@family(
    "aten.max_pool2d_with_indices", "aten.max_pool2d_with_indices_backward", "aten.avg_pool2d", "aten.avg_pool2d_backward", "aten.max_pool3d_with_indices",
    "aten.max_pool3d_with_indices_backward", "aten.avg_pool3d", "aten.avg_pool3d_backward",
)  # fmt: skip
def _pool(op: Op) -> Description:
    backward = op.packet.endswith("backward")
    image = _spec(op.args[1 if backward else 0])
    place = 2 if backward else 1
    window = _ints(op.args[place])
    d = 3 if "3d" in op.packet else 2
    window = window * d if len(window) == 1 else window
    stride = _ints(op.args[place + 1]) if len(op.args) > place + 1 else window
    stride = (stride or window) * d if len(stride or window) == 1 else (stride or window)
    if backward:
        out = _spec(op.args[0]).numel
    elif op.outputs:
        out = op.outputs[0].numel
    else:
        padding = _ints(op.args[place + 2]) if len(op.args) > place + 2 else (0,)
        padding = padding * d if len(padding) == 1 else padding
        out = math.prod(image.shape[:-d])
        for size, side, step, pad in zip(image.shape[-d:], window, stride, padding):
            out *= (size + 2 * pad - side) // step + 1
    planes = math.prod(image.shape[:-d])
    area = math.prod(window)
    name = op.packet.removeprefix("aten.").replace("3d", "2d")
    terms = (1.0, float(out), float(out * area), float(image.numel), float(planes))
    key = (name, image.dtype)
    return Description(key, (_log(planes), _log(out / max(planes, 1)), _log(area)), terms, ((name, "float32"),))


@family("aten._adaptive_avg_pool2d", "aten._adaptive_avg_pool2d_backward")
def _adaptive_pool(op: Op) -> Description:
    backward = op.packet.endswith("backward")
    image = _spec(op.args[1 if backward else 0])
    out = _spec(op.args[0]).numel if backward else math.prod(image.shape[:-2]) * math.prod(_ints(op.args[1]))
    planes = math.prod(image.shape[:-2])
    name = op.packet.removeprefix("aten.")
    return Description((name, image.dtype), (_log(planes), _log(image.numel / max(planes, 1))), (1.0, float(image.numel), float(out), float(planes)), ((name, "float32"),))


# -- rows: softmax, reductions, losses ------------------------------------------------------------------------------


def _split(spec: TensorSpec, dims: tuple[int, ...]) -> tuple[int, int, int]:
    """(outer, reduced, inner) sizes of a reduction over `dims`; all dims if none."""
    rank = len(spec.shape)
    axes = sorted({d % rank for d in dims}) if dims and rank else list(range(rank))
    if not axes:
        return 1, 1, 1
    reduced = math.prod(spec.shape[a] for a in axes)
    inner = math.prod(spec.shape[axes[-1] + 1 :])
    return spec.numel // max(reduced * inner, 1), reduced, inner


def _rows(name: str, spec: TensorSpec, outer: int, reduced: int, inner: int) -> Description:
    side = "last" if inner == 1 else "first"
    terms = (1.0, float(outer * reduced * inner), float(outer * inner), float(outer))
    key = (name, spec.dtype, side)
    return Description(key, (_log(outer), _log(reduced), _log(inner)), terms, ((name, spec.dtype, "last"), (name, "float32", side), (name, "float32", "last")))


@family("aten._log_softmax", "aten._softmax", "aten._log_softmax_backward_data", "aten._softmax_backward_data", "aten._safe_softmax")
def _softmax(op: Op) -> Description:
    backward = op.packet.endswith("backward_data")
    spec = _spec(op.args[0])
    dims = _ints(op.args[2 if backward else 1])
    return _rows(op.packet.removeprefix("aten.").replace("_safe", ""), spec, *_split(spec, dims))


_REDUCTIONS = {
    "aten.sum": "sum", "aten.mean": "mean", "aten.max": "max", "aten.min": "max", "aten.amax": "amax", "aten.amin": "amax", "aten.argmax": "argmax", "aten.argmin": "argmax",
    "aten.var": "var", "aten.std": "var", "aten.var_mean": "var", "aten.std_mean": "var", "aten.cumsum": "cumsum", "aten.cumprod": "cumsum", "aten.prod": "sum",
    "aten.linalg_vector_norm": "norm", "aten.norm": "norm", "aten.any": "amax", "aten.all": "amax", "aten.logsumexp": "var", "aten.nansum": "sum", "aten.count_nonzero": "sum",
}  # fmt: skip


@family(*_REDUCTIONS)
def _reduction(op: Op) -> Description:
    spec = _spec(op.args[0])
    if len(op.args) > 1 and isinstance(op.args[1], TensorSpec):  # max(a, b): elementwise
        return _elementwise(op)
    dims: tuple[int, ...] = ()
    named = dict(op.kwargs).get("dim")
    if len(op.args) > 1 and not op.name.endswith((".default", ".ScalarOpt_dim")) or op.packet in ("aten.amax", "aten.amin", "aten.argmax", "aten.cumsum", "aten.cumprod", "aten.any", "aten.all"):
        dims = _ints(op.args[1]) if len(op.args) > 1 else ()
    if op.packet == "aten.linalg_vector_norm" and len(op.args) > 2:
        dims = _ints(op.args[2])
    if named is not None:
        dims = _ints(named)
    return _rows(_REDUCTIONS[op.packet], spec, *_split(spec, dims))


@family("aten.nll_loss_forward", "aten.nll_loss_backward", "aten.nll_loss2d_forward", "aten.nll_loss2d_backward")
def _nll(op: Op) -> Description:
    backward = "backward" in op.packet
    spec = _spec(op.args[1 if backward else 0])
    classes = spec.shape[1] if len(spec.shape) > 1 else spec.numel
    rows = spec.numel // max(classes, 1)
    return Description(("nll_backward" if backward else "nll", "float32"), (_log(rows), _log(classes)), (1.0, float(rows), float(spec.numel) if backward else 0.0))


# -- moves: embeddings, joins, gathers ------------------------------------------------------------------------------


@family("aten.embedding", "aten.index_select", "aten.gather", "aten.embedding_dense_backward", "aten.scatter", "aten.scatter_add", "aten.index", "aten.index_add", "aten.scatter_add_", "aten.index_put", "aten.index_put_", "aten.index_add_", "aten._index_put_impl_")
def _gather(op: Op) -> Description:
    names = {"embedding": "embedding", "embedding_dense_backward": "embedding_dense_backward", "gather": "gather", "index_select": "index_select", "index": "index_select"}
    name = names.get(op.packet.removeprefix("aten."), "gather")
    if name == "embedding_dense_backward":
        gradient, table = _spec(op.args[0]), int(op.args[2])  # type: ignore[arg-type]
        width = gradient.shape[-1]
        moved, whole = gradient.numel, table * width
    else:
        source = _spec(op.args[0])
        width = source.shape[-1] if source.shape else 1
        whole = source.numel
        indices = [spec for spec in op.inputs if spec.dtype in ("int64", "int32")]
        picked = max((spec.numel for spec in indices), default=1)
        moved = picked if name == "gather" else picked * width
    rows = moved // max(width, 1)
    place = (_log(rows), _log(width), _log(whole / max(width, 1)) * 0.5)
    terms = (1.0, float(rows), float(moved), float(whole) if name == "embedding_dense_backward" else 0.0)
    return Description((name, "float32"), place, terms)


@family("aten.cat", "aten.stack")
def _join(op: Op) -> Description:
    parts = op.args[0]
    assert isinstance(parts, tuple)
    specs = [_spec(part) for part in parts]
    dim = int(op.args[1]) if len(op.args) > 1 else 0  # type: ignore[arg-type]
    numel = sum(spec.numel for spec in specs)
    rank = max(len(specs[0].shape), 1)
    run = math.prod(specs[0].shape[(dim % rank) :]) if op.packet == "aten.cat" else math.prod(specs[0].shape[dim if dim >= 0 else rank + 1 + dim :])
    runs = numel / max(run, 1)
    return Description(("join", specs[0].dtype), (_log(numel), _log(run)), (1.0, float(numel), runs, float(len(specs))), (("join", "float32"),))


@family("aten.slice_backward", "aten.select_backward", "aten.constant_pad_nd", "aten.slice_scatter", "aten.select_scatter", "aten.as_strided_scatter")
def _scatter_into_zeros(op: Op) -> Description:
    name = op.packet.removeprefix("aten.")
    gradient = _spec(op.args[0])
    whole = op.outputs[0].numel if op.outputs else (math.prod(_ints(op.args[1])) if name.endswith("backward") else gradient.numel)
    name = "slice_backward" if name.endswith("scatter") else name
    return Description((name, "float32"), (_log(whole),), (1.0, float(whole), float(gradient.numel)))


@family("aten.upsample_nearest2d", "aten.upsample_bilinear2d")
def _upsample(op: Op) -> Description:
    spec = _spec(op.args[0])
    name = op.packet.removeprefix("aten.")
    return Description((name, "float32"), (_log(spec.numel),), (1.0, float(spec.numel)))


# -- attention, recurrent layers ------------------------------------------------------------------------------------


@family("aten._scaled_dot_product_flash_attention_for_cpu", "aten._scaled_dot_product_flash_attention_for_cpu_backward")
def _attention(op: Op) -> Description:
    backward = op.packet.endswith("backward")
    query, key = (_spec(a) for a in (op.args[1:3] if backward else op.args[:2]))
    b, h, t, d = query.shape
    s = key.shape[2]
    flags = [a for a in op.args if isinstance(a, bool)]
    causal = "causal" if flags and flags[0] else "full"
    name = "attention_backward" if backward else "attention"
    half = 0.5 if causal == "causal" else 1.0
    terms = (1.0, half * b * h * t * s * d, float(b * h * t * d), half * b * h * t * s, float(b * h))
    place = (_log(b * h), _log(t), _log(s), _log(d))
    return Description((name, query.dtype, causal), place, terms, ((name, query.dtype, "full"), (name, "float32", causal), (name, "float32", "full")))


@family("aten.mkldnn_rnn_layer", "aten.mkldnn_rnn_layer_backward")
def _recurrent(op: Op) -> Description:
    backward = op.packet.endswith("backward")
    x, w_input = _spec(op.args[0]), _spec(op.args[1])
    hidden = _spec(op.args[2]).shape[1]
    gates = w_input.shape[0] // max(hidden, 1)
    t, b = x.shape[0], x.shape[1]
    inputs = x.shape[2]
    name = "rnn_backward" if backward else "rnn"
    weights = gates * hidden * (inputs + hidden)
    terms = (1.0, float(t), float(t * b) * weights, float(weights), float(t * gates * hidden * hidden), float(t * b * (gates * hidden + inputs)))
    return Description((name, x.dtype, str(gates)), (_log(t), _log(b), _log(inputs), _log(hidden)), terms, ((name, x.dtype, "4"), (name, "float32", "4")))


# -- views: no kernel at all ----------------------------------------------------------------------------------------

VIEWS = tuple(
    f"aten.{name}"
    for name in (
        "view t transpose expand permute unsqueeze select slice detach _unsafe_view squeeze split alias as_strided _local_scalar_dense empty empty_like "
        "_reshape_alias unbind split_with_sizes chunk unfold diagonal view_as_real view_as_complex lift_fresh new_empty empty_strided new_empty_strided "
        "_conj resolve_conj swapaxes movedim narrow expand_as view_as reshape flatten detach_ set_ resize_ is_same_size sym_size sym_numel item unsafe_split "
        "real imag mT numpy_T unsafe_chunk requires_grad_ _has_compatible_shallow_copy_type result_type"
    ).split()
)


@family(*VIEWS)
def _view(op: Op) -> Description:
    name = op.packet.removeprefix("aten.")
    return Description(("view", name), (), (1.0,), (("view", "view"),))


# -- elementwise ----------------------------------------------------------------------------------------------------

_CHEAP = (
    "relu hardtanh hardswish hardsigmoid leaky_relu neg abs sqrt rsqrt reciprocal clamp pow mul add sub div rsub clone fill zero bernoulli normal uniform "
    "zeros_like ones_like native_dropout gt maximum copy lerp threshold_backward hardtanh_backward hardswish_backward hardsigmoid_backward leaky_relu_backward "
    "native_dropout_backward masked_fill mse_loss mse_loss_backward addcmul addcdiv where _to_copy clamp_min clamp_max minimum ge lt le eq ne sign floor ceil round "
    "logical_not logical_and logical_or bitwise_not bitwise_and bitwise_or full_like full ones zeros new_zeros new_ones new_full arange square threshold tril triu dropout "
    "floor_divide remainder fmod smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward l1_loss fill_diagonal prelu _prelu_kernel _prelu_kernel_backward flip roll "
    "repeat _fused_dropout scalar_tensor rand_like randn_like rand randn random exponential masked_scatter isnan isfinite isinf sgn trunc frac copy "
    "nan_to_num hardshrink softshrink pixel_shuffle pixel_unshuffle channel_shuffle bernoulli_ contiguous to linspace triu_indices tril_indices "
    "randint randint_like randperm"
).split()  # fmt: skip
_DEAR = (
    "sigmoid tanh exp log gelu silu elu softplus mish sin cos tan erf tanh_backward sigmoid_backward gelu_backward silu_backward elu_backward softplus_backward mish_backward "
    "binary_cross_entropy_with_logits binary_cross_entropy binary_cross_entropy_backward log1p expm1 exp2 log2 log10 atan atan2 sinh cosh asin acos erfc erfinv celu selu log_sigmoid_forward "
    "log_sigmoid_backward kl_div logit xlogy logaddexp lgamma digamma softplus_ logsigmoid poisson_nll_loss"
).split()  # fmt: skip
_FUSED = "_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_".split()
_FOREACH = (
    "add_ mul_ lerp_ addcmul_ addcdiv_ sqrt div_ sub_ neg_ neg zero_ sqrt_ add mul div sub maximum_ maximum reciprocal reciprocal_ abs copy_ sign sign_ pow pow_ addcdiv addcmul clamp_min_ clamp_max_ norm"
).split()  # fmt: skip


_ELEMENTWISE = tuple(dict.fromkeys(f"aten.{name}{mark}" for name in (*_CHEAP, *_DEAR) for mark in ("", "_") if not (name.endswith("_") and mark)))
_REDUCING = {"aten.mse_loss", "aten.smooth_l1_loss", "aten.huber_loss", "aten.l1_loss", "aten.binary_cross_entropy_with_logits", "aten.binary_cross_entropy", "aten.kl_div"}


def _pattern(full: list[TensorSpec], others: list[TensorSpec], shape: tuple[int, ...]) -> str:
    orders = {spec.is_contiguous for spec in full}
    if others and any(spec.numel > 1 for spec in others):
        vector = next(spec for spec in others if spec.numel > 1)
        last = vector.shape[-1] if vector.shape else 1
        return "row" if last == shape[-1] and vector.numel == last else "column"
    if orders == {True} or (len({spec.strides for spec in full}) == 1 and all(spec.is_dense for spec in full)):
        return "flat"
    if all(0 in spec.strides for spec in full):
        return "broadcast"
    return "strided"


def _elementwise(op: Op) -> Description:
    name = op.packet.removeprefix("aten.")
    tensors = [spec for spec in op.inputs]
    created = op.outputs[0] if op.outputs else None
    largest = max(tensors, key=lambda spec: spec.numel, default=None)
    if created is not None and (largest is None or created.numel > largest.numel):
        largest = created
    if largest is None:  # zeros((n,)) without its record
        numel, shape, dtype = math.prod(_ints(op.args[0])) if op.args else 1, (1,), "float32"
    else:
        numel, shape, dtype = largest.numel, largest.shape, largest.dtype
    full = [spec for spec in tensors if spec.numel == numel and spec.dtype != "bool"]
    others = [spec for spec in tensors if spec.numel != numel]
    memory_format = dict(op.kwargs).get("memory_format")
    reordered = memory_format is not None and bool(full) and not full[0].is_contiguous
    pattern = "flat" if not full else "strided" if reordered else _pattern(full, others, shape)
    if name in ("pow", "pow_") and len(op.args) > 1 and not isinstance(op.args[1], TensorSpec):
        arguments = f"pow {op.args[1]}"  # squares and cubes are products, other powers are not
        return Description((arguments, "1", dtype, pattern), (_log(numel),), (1.0, float(numel)), (("pow 3", "1", dtype, "flat"), ("pow 3", "1", "float32", "flat")))
    kind = f"cast {tensors[0].dtype}" if name == "_to_copy" and tensors else dtype
    arity = str(len(full))
    keys = [(name, arity, kind, pattern), (name, arity, kind, "flat")]
    twin = name.rstrip("_") if name.endswith("_") else name + "_"
    keys += [(twin, arity, kind, pattern), (twin, arity, kind, "flat")]
    if pattern in ("strided", "broadcast"):
        keys.insert(1, ("clone", "1", dtype, pattern))
    if pattern in ("row", "column"):
        keys[1:1] = [("add", arity, dtype, pattern), ("mul", arity, dtype, pattern)]
    base = name.rstrip("_")
    proxy = {"0": "zeros_like", "1": "relu", "2": "add", "3": "addcmul"}.get(arity, "addcmul") if base in _CHEAP else ("sigmoid" if arity in ("0", "1") else "sigmoid_backward")
    arity = arity if proxy not in ("sigmoid_backward", "sigmoid") else ("1" if proxy == "sigmoid" else "2")
    for precision in dict.fromkeys((dtype, "float32")):
        keys += [(name, str(len(full)), precision, "flat"), (twin, str(len(full)), precision, "flat"), (proxy, arity, precision, "flat"), (proxy, "1", precision, "flat")]
    keys += [("add", "2", "float32", "flat"), ("clone", "1", "float32", "flat")]
    return Description(keys[0], (_log(numel),), (1.0, float(numel)), tuple(dict.fromkeys(keys[1:])))


family(*_ELEMENTWISE)(_elementwise)


@family(*(f"aten.{name}" for name in _FUSED), *(f"aten._foreach_{name}" for name in _FOREACH))
def _many_tensors(op: Op) -> Description:
    name = op.packet.removeprefix("aten.")
    first = op.args[0]
    specs = [spec for spec in (first if isinstance(first, tuple) else (first,)) if isinstance(spec, TensorSpec)]
    numel = sum(spec.numel for spec in specs)
    lists = sum(1 for a in op.args if isinstance(a, tuple) and a and isinstance(a[0], TensorSpec))
    dtype = specs[0].dtype if specs else "float32"
    fallbacks = ((name, str(lists), "float32"), ("_foreach_add_", "2", "float32"), ("_foreach_mul_", "1", "float32"))
    return Description((name, str(lists), dtype), (_log(numel),), (1.0, float(numel)), fallbacks)
