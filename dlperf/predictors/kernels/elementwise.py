"""Descriptions of views, elementwise kernels and kernels over lists of tensors."""

from __future__ import annotations

import math

from dlperf.core.trace import Argument, Op, TensorSpec, tensors_in
from dlperf.ops.registry import aten
from dlperf.predictors.kernels.description import (
    KernelDescription,
    described,
    ints,
    kernel_features,
    log2,
    tensor,
)

# -- views: no kernel at all -----------------------------------------------------------------------

_VIEWS = """
    view t transpose expand permute unsqueeze select slice detach _unsafe_view squeeze alias
    as_strided _local_scalar_dense empty empty_like _reshape_alias unfold diagonal view_as_real
    view_as_complex lift_fresh new_empty empty_strided new_empty_strided _conj resolve_conj
    swapaxes movedim narrow expand_as view_as reshape flatten detach_ set_ resize_ is_same_size
    sym_size sym_numel item transpose_ t_ squeeze_ unsqueeze_ as_strided_ swapaxes_ _indices
    _values _sparse_coo_tensor_with_dims_and_tensors _linalg_check_errors is_coalesced real imag
    mT numpy_T requires_grad_ _has_compatible_shallow_copy_type result_type
"""
"""Operators that make a view or read a size: a call and no kernel."""


@kernel_features(*aten(_VIEWS))
def _view(op: Op) -> KernelDescription:
    return described((("view", op.packet.removeprefix("aten.")), ("view", "view")), (), ())


_PIECES = "unbind split split_with_sizes chunk unsafe_split unsafe_split_with_sizes unsafe_chunk"


@kernel_features(*aten(_PIECES))
def _views_of_pieces(op: Op) -> KernelDescription:
    """One call that makes a view of each piece."""
    spec, name = tensor(op.args[0]), op.packet.removeprefix("aten.").removeprefix("unsafe_")
    sizes, axes = (ints(op.args[at]) if len(op.args) > at else () for at in (1, 2))
    if name == "unbind":
        n_pieces = spec.shape[(*sizes, 0)[0]]
    elif name == "chunk":
        n_pieces = sizes[0]
    elif len(sizes) > 1:
        n_pieces = len(sizes)
    else:
        n_pieces = math.ceil(spec.shape[(*axes, 0)[0]] / max(1, *sizes, 1))
    return described(
        (("pieces", one) for one in (name, "split", "unbind")), (log2(n_pieces),), (n_pieces,)
    )


# -- elementwise -----------------------------------------------------------------------------------

_CHEAP = """
    relu hardtanh hardswish hardsigmoid leaky_relu neg abs sqrt rsqrt reciprocal clamp pow mul add
    sub div rsub clone fill zero bernoulli normal uniform zeros_like ones_like native_dropout gt
    maximum copy lerp threshold_backward hardtanh_backward hardswish_backward hardsigmoid_backward
    leaky_relu_backward native_dropout_backward masked_fill mse_loss mse_loss_backward addcmul
    addcdiv where _to_copy clamp_min clamp_max minimum ge lt le eq ne sign floor ceil round
    logical_not logical_and logical_or bitwise_not bitwise_and bitwise_or full_like full ones zeros
    new_zeros new_ones new_full arange square threshold tril triu dropout floor_divide remainder
    fmod smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward l1_loss fill_diagonal
    prelu _prelu_kernel _prelu_kernel_backward flip roll _fused_dropout scalar_tensor rand_like
    randn_like rand randn random exponential masked_scatter isnan isfinite isinf sgn trunc frac copy
    nan_to_num hardshrink softshrink pixel_shuffle pixel_unshuffle channel_shuffle
    native_channel_shuffle bernoulli_ contiguous to linspace triu_indices tril_indices randint
    randint_like randperm rot90 eye diag_embed copysign polar index_fill affine_grid_generator isin
    bucketize searchsorted softshrink_backward hardshrink_backward linalg_cross addr
    rrelu_with_noise rrelu_with_noise_backward log_sigmoid_backward complex conj_physical
    embedding_renorm renorm heaviside _pack_padded_sequence
""".split()
_DEAR = """
    sigmoid tanh exp log gelu silu elu softplus mish sin cos tan erf tanh_backward sigmoid_backward
    gelu_backward silu_backward elu_backward softplus_backward mish_backward
    binary_cross_entropy_with_logits binary_cross_entropy binary_cross_entropy_backward log1p expm1
    exp2 log2 log10 atan atan2 sinh cosh asin acos erfc erfinv celu selu log_sigmoid_forward kl_div
    logit xlogy logaddexp lgamma digamma softplus_ logsigmoid poisson_nll_loss glu glu_backward
    soft_margin_loss soft_margin_loss_backward logit_backward sinc acosh asinh atanh polygamma hypot
""".split()
_FOREACH = """
    add_ mul_ lerp_ addcmul_ addcdiv_ sqrt div_ sub_ neg_ neg zero_ sqrt_ add mul div sub maximum_
    maximum reciprocal reciprocal_ abs copy_ sign sign_ pow pow_ addcdiv addcmul clamp_min_
    clamp_max_ norm
"""


_LONG_RUN, _SHORT_RUN = 1024, 16
"""Elements that lie side by side in all operands: from so many on gaps between runs cost next to
nothing, below so few every element costs a step.
"""


def _run(full: list[TensorSpec]) -> int:
    """Elements that lie side by side in every operand, as TensorIterator joins inner dimensions
    into one loop.
    """
    run = 1
    for axis in reversed(range(len(full[0].shape))):
        if any(spec.shape[axis] != 1 and spec.strides[axis] != run for spec in full):
            break
        run *= full[0].shape[axis]
    return run


def _gaps(full: list[TensorSpec]) -> str:
    """The pattern of operands that are not all of one order without gaps: by how many elements lie
    side by side.
    """
    run = _run(full) if len({spec.shape for spec in full}) == 1 else 1
    return "flat" if run >= _LONG_RUN else "runs" if run >= _SHORT_RUN else "strided"


def _pattern(full: list[TensorSpec], others: list[TensorSpec], shape: tuple[int, ...]) -> str:
    vector = next((spec for spec in others if spec.numel > 1), None)
    if vector is not None:
        last = vector.shape[-1] if vector.shape else 1
        return "row" if last == shape[-1] and vector.numel == last else "column"
    orders = {spec.strides for spec in full if not spec.is_contiguous}
    if not orders or (
        len({spec.strides for spec in full}) == 1 and all(spec.is_dense for spec in full)
    ):
        return "flat"
    return "broadcast" if all(_repeats_inside(spec) for spec in full) else _gaps(full)


def _repeats_inside(spec: TensorSpec) -> bool:
    """Whether neighbours are one element repeated. Rows that are repeated as wholes are runs like
    others.
    """
    return next(
        (
            stride == 0
            for size, stride in zip(reversed(spec.shape), reversed(spec.strides))
            if size != 1
        ),
        False,
    )


_OTHERWISE = {0.0: "fill", 0.5: "sqrt", -0.5: "rsqrt", 1.0: "clone"}
"""Powers that are computed as another operator (aten/src/ATen/native/Pow.cpp, cpu/PowKernel.cpp).
"""
_PROXIES = {"0": "zeros_like", "1": "relu", "2": "add", "3": "addcmul"}
"""Cheap kernels that stand for others, by the number of full-sized operands."""
_DRAWS = ("bernoulli", "bernoulli_", "native_dropout")
_COMPARISONS = ("eq", "ne", "gt", "ge", "lt", "le")


def _rare_frac(op: Op) -> float:
    """Frequency of the rarer outcome of a random choice: a branch is predicted wrongly as often."""
    p = next((arg for arg in op.args[1:2] if isinstance(arg, float)), 0.5)
    return min(p, 1.0 - p)


def _powers(exponent: Argument) -> tuple[str, ...]:
    """Curves of a power, the nearest first: squares and cubes are products, powers of other numbers
    are not.
    """
    return (
        (f"pow {int(exponent)}", "pow 3", "pow fraction")
        if exponent in (2, 3)
        else ("pow fraction", "pow 3")
    )  # type: ignore[arg-type]


@kernel_features(
    *dict.fromkeys(
        f"aten.{name}{mark}"
        for name in (*_CHEAP, *_DEAR)
        for mark in ("", "_")
        if not (name.endswith("_") and mark)
    )
)
def elementwise(op: Op) -> KernelDescription:
    """Kernels that pass once over their operands: by operator, number of full-sized operands, dtype
    and access pattern; feature is log2 of the elements.
    """
    name = op.packet.removeprefix("aten.")
    tensors = op.inputs
    largest = max((*tensors, *op.outputs[:1]), key=lambda spec: spec.numel, default=None)
    if largest is None:  # zeros((n,)) without its record
        largest = TensorSpec.contiguous(math.prod(ints(op.args[0])) if op.args else 1)
    numel, shape, dtype = largest.numel, largest.shape, largest.dtype
    whole = [spec for spec in tensors if spec.numel == numel and spec.dtype != "bool"]
    # Without those that repeat one element, as the gradient of a sum does.
    full = [spec for spec in whole if spec.numel <= 1 or any(spec.strides)]
    # A column that was expanded is read like one that was not.
    apart = [spec for spec in full if not _repeats_inside(spec)]
    is_column = 0 < len(apart) < len(full)
    full = apart if is_column else full
    others = [spec for spec in tensors if spec.numel != numel]
    memory_format = dict(op.kwargs).get("memory_format")
    if not full:
        pattern = "flat"
    elif memory_format is not None and not full[0].is_contiguous:
        pattern = _gaps(full)
    else:
        pattern = "column" if is_column else _pattern(full, others, shape)
    amounts: tuple[tuple[float, ...], tuple[float, ...]] = (log2(numel),), (numel,)
    if name in _DRAWS:
        rare_frac = _rare_frac(op)
        amounts = (log2(numel), rare_frac), (numel, rare_frac * numel)
    if name in ("pow", "pow_") and len(op.args) > 1 and not isinstance(op.args[1], TensorSpec):
        exponent = op.args[1]
        if exponent not in _OTHERWISE:
            powers = [
                (kernel, "1", precision, p)
                for kernel in _powers(exponent)
                for precision in (dtype, "float32")
                for p in (pattern, "flat")
            ]
            return described(powers, *amounts)
        name = _OTHERWISE[exponent]  # type: ignore[index]
    kind = f"cast {tensors[0].dtype}" if name == "_to_copy" and tensors else dtype
    arity = str(len(full))
    twin = name.rstrip("_") if name.endswith("_") else name + "_"
    # Of gelu: falls back to the error function's.
    is_tanh = dict(op.kwargs).get("approximate") == "tanh"
    names = (f"{name} tanh", name) if is_tanh else (name,)
    own = [(one, arity, kind, p) for one in names for p in (pattern, "flat")]
    nearest: list[tuple[str, ...]] = []
    if pattern == "runs":
        # The loop over a run is the kernel's own: gaps are felt only where it waits for memory.
        gapped = (("add", "2"),) * (len(full) > 1) + (("clone", "1"),)
        nearest = [(*one, dtype, pattern) for one in gapped if name.rstrip("_") in _CHEAP]
    elif pattern in ("strided", "broadcast"):
        nearest = [("clone", "1", dtype, pattern)]
    elif pattern in ("row", "column"):
        nearest = [("add", arity, dtype, pattern), ("mul", arity, dtype, pattern)]
    compared = [("eq", n, dtype, "flat") for n in (arity, "1") if name in _COMPARISONS]
    if name.rstrip("_") in _CHEAP:
        proxy = (_PROXIES.get(arity, "addcmul"), arity)
    else:
        proxy = ("sigmoid", "1") if len(full) < 2 else ("sigmoid_backward", "2")
    flat = ((name, arity), (twin, arity), proxy, (proxy[0], "1"))
    return described(
        (
            own[0],
            *nearest,
            *own[1:],
            (twin, arity, kind, pattern),
            (twin, arity, kind, "flat"),
            (name, str(len(whole)), kind, "flat"),
            *compared,
            *((*one, precision, "flat") for precision in (dtype, "float32") for one in flat),
            ("add", "2", "float32", "flat"),
            ("clone", "1", "float32", "flat"),
        ),
        *amounts,
    )


@kernel_features("aten.repeat")
def _repeat(op: Op) -> KernelDescription:
    spec = tensor(op.args[0])
    numel = spec.numel * math.prod(ints(op.args[1]))
    clones = (("clone", "1", dtype, "flat") for dtype in (spec.dtype, "float32"))
    return described((("repeat", "float32"), *clones), (log2(numel),), (numel,))


@kernel_features(
    *aten("_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_"), *aten(_FOREACH, "_foreach_")
)
def _many_tensors(op: Op) -> KernelDescription:
    name = op.packet.removeprefix("aten.")
    specs = list(tensors_in(op.args[0]))
    numel = sum(spec.numel for spec in specs)
    lists = sum(1 for a in op.args if isinstance(a, tuple) and a and isinstance(a[0], TensorSpec))
    dtype = specs[0].dtype if specs else "float32"
    return described(
        (
            (name, str(lists), dtype),
            (name, str(lists), "float32"),
            ("_foreach_add_", "2", "float32"),
            ("_foreach_mul_", "1", "float32"),
        ),
        (log2(numel),),
        (numel,),
    )
