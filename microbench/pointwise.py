"""Elementwise and transcendental kernels, copies, fills, dropout masks, and the optimizers'
kernels: time against size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dlperf.core.trace import Argument, Op, Symbol, TensorSpec
from dlperf.microbench.plan import Group, Point, log_sizes, repeats

T = TensorSpec.contiguous
Make = Callable[[TensorSpec], Op]


def _unary(packet: str, *scalars: Argument) -> Make:
    return lambda t: Op(f"aten.{packet}", (t, *scalars))


def _binary(packet: str, *scalars: Argument) -> Make:
    return lambda t: Op(f"aten.{packet}", (t, t, *scalars))


UNARY: tuple[Make, ...] = (
    _unary("relu.default"),
    _unary("relu_.default"),
    _unary("sigmoid.default"),
    _unary("tanh.default"),
    _unary("exp.default"),
    _unary("log.default"),
    _unary("gelu.default"),
    _unary("silu.default"),
    _unary("hardtanh.default", 0.0, 6.0),
    _unary("hardswish.default"),
    _unary("hardsigmoid.default"),
    _unary("leaky_relu.default", 0.01),
    _unary("elu.default"),
    _unary("softplus.default"),
    _unary("mish.default"),
    _unary("sqrt.default"),
    _unary("rsqrt.default"),
    _unary("neg.default"),
    _unary("abs.default"),
    _unary("sin.default"),
    _unary("erf.default"),
    _unary("reciprocal.default"),
    _unary("clamp.default", -1.0, 1.0),
    _unary("pow.Tensor_Scalar", 2),
    _unary("pow.Tensor_Scalar", 3),
    _unary("mul.Tensor", 0.5),
    _unary("add.Tensor", 0.5),
    _unary("div.Tensor", 3.0),
    _unary("mul_.Tensor", 0.5),
    _unary("add_.Tensor", 0.5),
    _unary("div_.Scalar", 0.9),
    _unary("clone.default"),
    _unary("fill_.Scalar", 0.0),
    _unary("zero_.default"),
    _unary("bernoulli_.float", 0.9),
    _unary("bernoulli_.float", 0.5),
    _unary("normal_.default"),
    _unary("uniform_.default"),
    _unary("zeros_like.default"),
    _unary("ones_like.default"),
    lambda t: Op("aten.native_dropout.default", (t, 0.1, True)),
    lambda t: Op("aten.native_dropout.default", (t, 0.5, True)),
    _unary("gt.Scalar", 0.0),
)
BINARY: tuple[Make, ...] = (
    _binary("add.Tensor"),
    _binary("mul.Tensor"),
    _binary("sub.Tensor"),
    _binary("div.Tensor"),
    _binary("add_.Tensor"),
    _binary("mul_.Tensor"),
    _binary("div_.Tensor"),
    _binary("maximum.default"),
    _binary("copy_.default"),
    _binary("lerp_.Scalar", 0.1),
    _binary("threshold_backward.default", 0),
    _binary("tanh_backward.default"),
    _binary("sigmoid_backward.default"),
    _binary("gelu_backward.default"),
    _binary("silu_backward.default"),
    _binary("hardtanh_backward.default", 0.0, 6.0),
    _binary("hardswish_backward.default"),
    _binary("hardsigmoid_backward.default"),
    _binary("leaky_relu_backward.default", 0.01, False),
    lambda t: Op("aten.elu_backward.default", (t, 1.0, 1.0, 1.0, False, t)),
    _binary("softplus_backward.default", 1.0, 20.0),
    _binary("mish_backward.default"),
    lambda t: Op(
        "aten.native_dropout_backward.default", (t, TensorSpec(t.shape, t.strides, "bool"), 1.1)
    ),
    lambda t: Op("aten.masked_fill.Scalar", (t, TensorSpec(t.shape, t.strides, "bool"), 0.0)),
    _binary("mse_loss.default", 1),
    lambda t: Op("aten.mse_loss_backward.default", (T(), t, t, 1)),
    _binary("binary_cross_entropy_with_logits.default", None, None, 1),
    _binary("binary_cross_entropy.default", None, 1),
    lambda t: Op("aten.binary_cross_entropy_backward.default", (T(), t, t, None, 1)),
    lambda t: Op("aten.smooth_l1_loss_backward.default", (T(), t, t, 1, 1.0)),
    _binary("smooth_l1_loss.default", 1, 1.0),
)
TERNARY: tuple[Make, ...] = (
    lambda t: Op("aten.addcmul_.default", (t, t, t), (("value", 0.1),)),
    lambda t: Op("aten.addcdiv_.default", (t, t, t), (("value", -0.001),)),
    lambda t: Op("aten.addcmul.default", (t, t, t)),
    lambda t: Op("aten.addcdiv.default", (t, t, t)),
    lambda t: Op("aten.where.self", (TensorSpec(t.shape, t.strides, "bool"), t, t)),
    lambda t: Op("aten.add_.Tensor", (t, t), (("alpha", -0.01),)),
    lambda t: Op("aten._fused_adam_.default", ((t,), (t,), (t,), (t,), (), (T(),)), _adam()),
    lambda t: Op("aten._fused_adamw_.default", ((t,), (t,), (t,), (t,), (), (T(),)), _adam()),
    lambda t: Op(
        "aten._fused_sgd_.default",
        ((t,), (t,), (t,)),
        (
            ("weight_decay", 0.0),
            ("momentum", 0.9),
            ("lr", 0.01),
            ("dampening", 0.0),
            ("nesterov", False),
            ("maximize", False),
            ("is_first_step", False),
        ),
    ),
    lambda t: Op("aten._foreach_add_.List", ((t,), (t,)), (("alpha", -0.01),)),
    lambda t: Op("aten._foreach_mul_.Scalar", ((t,), 0.9)),
    lambda t: Op("aten._foreach_lerp_.Scalar", ((t,), (t,), 0.1)),
    lambda t: Op("aten._foreach_addcmul_.Scalar", ((t,), (t,), (t,), 0.1)),
    lambda t: Op("aten._foreach_addcdiv_.ScalarList", ((t,), (t,), (t,), (-0.001,))),
    lambda t: Op("aten._foreach_sqrt.default", ((t,),)),
    lambda t: Op("aten._foreach_div_.ScalarList", ((t,), (1.5,))),
    lambda t: Op("aten._foreach_add_.Scalar", ((t,), 1e-8)),
)


UNCOMMON: tuple[Make, ...] = (
    _unary("log1p.default"),
    _unary("cos.default"),
    _unary("celu.default"),
    _unary("log_sigmoid_forward.default"),
    _unary("pow.Tensor_Scalar", 0.75),
    _unary("eq.Scalar", 0.5),
    _unary("round.default"),
    lambda t: Op("aten.glu.default", (_lines(t), -1)),
    lambda t: Op("aten.gelu.default", (t,), (("approximate", "tanh"),)),
    lambda t: Op("aten.gelu_backward.default", (t, t), (("approximate", "tanh"),)),
    _unary("logical_not.default"),
    _binary("eq.Tensor"),
    _binary("pow.Tensor_Tensor"),
    _binary("xlogy.Tensor"),
    _binary("huber_loss.default", 1, 1.0),
    _binary("soft_margin_loss.default", 1),
    lambda t: Op("aten.soft_margin_loss_backward.default", (T(), t, t, 1)),
    lambda t: Op("aten.log_sigmoid_backward.default", (t, t, t)),
    lambda t: Op("aten.where.self", (TensorSpec(t.shape, t.strides, "bool"), t, T())),
    lambda t: Op("aten._prelu_kernel.default", (t, T(1))),
    lambda t: Op("aten._prelu_kernel.default", (_image(t), T(1, 16, 1, 1))),
    lambda t: Op("aten._prelu_kernel_backward.default", (t, t, T(1))),
    lambda t: Op("aten._prelu_kernel_backward.default", (_image(t), _image(t), T(1, 16, 1, 1))),
    lambda t: Op(
        "aten.glu_backward.default", (T(*_lines(t).shape[:-1], _WIDTH // 2), _lines(t), -1)
    ),
    lambda t: Op("aten.tril.default", (_lines(t),)),
    lambda t: Op("aten.repeat.default", (_lines(t), (2, 1))),
    lambda t: Op("aten.roll.default", (_lines(t), (1,), (0,))),
    lambda t: Op("aten.flip.default", (_lines(t), (0,))),
    lambda t: Op("aten.pixel_shuffle.default", (_image(t), 2)),
    lambda t: Op("aten.pixel_unshuffle.default", (_image(t), 2)),
    lambda t: Op("aten.native_channel_shuffle.default", (_image(t), 4)),
)
"""What few networks have: a few sizes of each."""
_WIDTH = 64


def _lines(t: TensorSpec) -> TensorSpec:
    return T(max(1, t.numel // _WIDTH), _WIDTH)


def _image(t: TensorSpec) -> TensorSpec:
    return T(max(1, t.numel // 4096), 16, 16, 16)


def _adam() -> tuple[tuple[str, Argument], ...]:
    return (
        ("lr", 1e-3),
        ("beta1", 0.9),
        ("beta2", 0.999),
        ("weight_decay", 0.0),
        ("eps", 1e-8),
        ("amsgrad", False),
        ("maximize", False),
    )


_IN_LOW_PRECISION = (
    "relu",
    "gelu",
    "silu",
    "sigmoid",
    "tanh",
    "threshold_backward",
    "gelu_backward",
    "silu_backward",
    "add.Tensor",
    "mul.Tensor",
    "copy_",
    "clone",
    "add_.Tensor",
    "native_dropout",
)


def _patterns(size: int) -> list[Op]:
    """Kernels of several streams: casts, transposed copies, broadcasts over axes."""
    side = max(2, round(size**0.5))
    side -= side // 40  # columns of a power of two evict one another, as few networks' do
    flat, square = T(size), T(side, side)
    transposed = TensorSpec((side, side), (1, side))
    image = T(max(1, size // 1024), 16, 8, 8)
    n_heads, n_tokens = (8, 16) if size >= 8192 else (2, max(2, size // 128))
    per_sample = n_heads * n_tokens * 64
    heads = TensorSpec(
        (max(1, size // per_sample), n_heads, n_tokens, 64), (per_sample, 64, n_heads * 64, 1)
    )
    return [
        Op("aten._to_copy.default", (flat,), (("dtype", Symbol("dtype", "bfloat16")),)),
        Op(
            "aten._to_copy.default",
            (T(size, dtype="bfloat16"),),
            (("dtype", Symbol("dtype", "float32")),),
        ),
        Op(
            "aten.clone.default",
            (transposed,),
            (("memory_format", Symbol("memory_format", "contiguous_format")),),
        ),
        Op(
            "aten.clone.default",
            (heads,),
            (("memory_format", Symbol("memory_format", "contiguous_format")),),
        ),
        Op("aten.copy_.default", (square, transposed)),
        Op("aten.add.Tensor", (square, T(side))),
        Op("aten.mul.Tensor", (square, T(side, 1))),
        Op("aten.mul.Tensor", (image, T(image.shape[0], 16, 1, 1))),
        Op("aten.add.Tensor", (square, transposed)),
        Op("aten.threshold_backward.default", (transposed, square, 0)),
        Op("aten.add.Tensor", (T(*heads.shape), heads)),
        Op("aten.div.Scalar", (TensorSpec((side, side), (1, 0)), 7)),
    ]


_MIDDLE, _LARGEST = 2**20, 2**22
_STANDING = ("relu", "add", "clone", "sigmoid", "sigmoid_backward", "addcmul", "zeros_like")
"""Operators whose kernels stand for those that were not measured: they come first of all."""


def _ranked(sizes: list[int]) -> list[tuple[int, int]]:
    """(size, rank): every fourth size first, then those half-way, then the others, so that a curve
    that is cut short still spans its range.

    What takes longest comes last: the few sizes above a million elements take as long as all below,
    and are limited by memory alone, whatever the kernel.

    >>> _ranked([64, 256, 1024, 4096, 16384, 2**20, 2**22, 2**24])
    [(64, 0), (256, 2), (1024, 1), (4096, 2), (16384, 0), (1048576, 0), (4194304, 2), (16777216, 3)]
    """
    middle = max((size for size in sizes if size <= _MIDDLE), default=0)

    def rank(number: int, size: int) -> int:
        if size > _MIDDLE:
            return 3 if size > _LARGEST else 2
        return 0 if size == middle else (0, 2, 1, 2)[number % 4]

    return [(size, rank(number, size)) for number, size in enumerate(sizes)]


def groups(mode: str, low_precision: bool) -> list[Group]:
    """Every kernel over sizes from 64 elements to beyond most caches; what comes after, the sweeps
    of bandwidths tell.
    """
    sizes = _ranked(
        {
            "quick": log_sizes(64, 2**20, 0.2),
            "full": [64, *(2**exponent for exponent in (12, 15, 18, 20, 21, 22))],
            "thorough": log_sizes(64, 2**24, 1.0),
        }[mode]
    )
    few = [(size, 0) for size in log_sizes(64, 2**20, 0.25 if mode == "full" else 0.5)]

    def over(
        makes: Iterable[Make], sizes: list[tuple[int, int]], dtype: str = "float32"
    ) -> list[tuple[Op, int]]:
        ops = ((make(T(size, dtype=dtype)), rank) for make in makes for size, rank in sizes)
        return [
            (op, -1 if rank == 0 and op.packet.removeprefix("aten.") in _STANDING else rank)
            for op, rank in ops
        ]

    parts = {
        "unary": over(UNARY, sizes),
        "binary": over(BINARY, sizes),
        "ternary and optimizer": over(TERNARY, sizes),
        "uncommon": over(UNCOMMON, few) if mode != "quick" else [],
        "patterns": [(op, rank) for size, rank in sizes for op in _patterns(size)],
    }
    if low_precision and mode != "quick":
        names = tuple(f"aten.{name}" for name in _IN_LOW_PRECISION)
        chosen = [make for make in (*UNARY, *BINARY) if make(T(1)).name.startswith(names)]
        parts["bfloat16"] = over(chosen, sizes[::2], "bfloat16")
    # Small sizes give some operations twice.
    points = {
        name: {op.signature: Point("pointwise", op, rank) for op, rank in ops}
        for name, ops in parts.items()
    }
    return [
        Group(f"pointwise {name}", tuple(distinct.values()), repeats(mode))
        for name, distinct in points.items()
        if distinct
    ]
