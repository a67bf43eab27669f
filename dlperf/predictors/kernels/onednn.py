"""Which convolutions go to oneDNN, and what they allocate on the way: PyTorch's and oneDNN's
conditions as functions of shapes.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from dlperf.core.trace import Op, TensorSpec
from dlperf.predictors.allocator.stages import Scratch, Stage
from dlperf.predictors.kernels.description import ints, tensor

BLOCK = 16
"""Channels of a block in oneDNN's layouts with 512-bit vectors of float32 (aBcd16b)."""
_HALF_BLOCK = 8
"""Channels of a block with vectors of 256 bits (aBcd8b)."""
_GROUP_CHANNELS = {BLOCK: 4, _HALF_BLOCK: 8}
"""By the channels of a block, those of a group whose multiples have kernels of their own."""
_PLAIN_WEIGHT_CHANNELS = {BLOCK: (1, 2, 3), _HALF_BLOCK: (3,)}
"""By the channels of a block, the input channels with which the gradient of the weight reads the
image as it is.
"""
_WIDEST_256 = 13
"""Longest row of a kernel for which vectors of 256 bits have a gradient of the weight."""
_DEPTHWISE_WEIGHT_SIDE = 3
"""The longest kernel for which the gradient of a depthwise convolution's weight has a kernel of its
own.
"""
_STRIDED_BLOCK = 32
"""Input channels of a block of the weight that a strided pass reads, above 16 (Bcda32b)."""
PACKED_BYTES = 74_176
"""What oneDNN's product of matrices (gemm:jit) allocates for the packed operands of a small one."""


def block_of(flags: Collection[str]) -> int:
    """Channels of a block in oneDNN's layouts on a processor with these flags.

    >>> block_of(("avx2", "fma")), block_of(("avx2", "fma", "avx512f"))
    (8, 16)
    """
    return _HALF_BLOCK if "avx2" in flags and "avx512f" not in flags else BLOCK


def padded(channels: int, block: int = BLOCK) -> int:
    """Channels rounded up to whole blocks.

    >>> padded(20), padded(20, 8)
    (32, 24)
    """
    return block * math.ceil(channels / block)


def remainders(size: int) -> int:
    """Into how many parts, of 8, 4, 2 and 1, kernels cut what is left of a size after whole blocks.

    >>> [remainders(size) for size in (32, 40, 47)]
    [0, 1, 4]
    """
    return (size % BLOCK).bit_count()


@dataclass(frozen=True)
class Window:
    """Kernel, stride, padding and dilation of a convolution and the image that it slides over, one
    number for each spatial axis.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    image: tuple[int, ...]

    @property
    def out(self) -> tuple[int, ...]:
        """Places that it takes (PyTorch's documented formula)."""
        return tuple(
            (size + 2 * pad - reach * (side - 1) - 1) // step + 1
            for size, side, step, pad, reach in zip(
                self.image, self.kernel, self.stride, self.padding, self.dilation
            )
        )

    @property
    def taps(self) -> int:
        """Taps that lie inside the image, summed over all positions: kernels skip the others.

        >>> Window((3,), (1,), (1,), (1,), (4,)).taps  # the first and the last miss one each
        10
        """
        return math.prod(
            sum(_positions_inside(tap * reach - pad, step, size, positions) for tap in range(side))
            for side, step, pad, reach, size, positions in zip(
                self.kernel, self.stride, self.padding, self.dilation, self.image, self.out
            )
        )

    @property
    def output_fits_256(self) -> bool:
        """Whether kernels of 256 bits compute the output: they hold three results of a row, or all,
        and padding is to lie beside one such group; longer kernels know stride or padding, not
        both.
        """
        is_short = self.kernel[-1] <= 7 or not (self.is_strided and max(self.padding) > 0)
        return is_short and self.padding[-1] <= min(3, self.out[-1])

    @property
    def input_fits_256(self) -> bool:
        """Whether kernels of 256 bits compute the gradient of the input: they hold up to seven
        results of a row, beyond which no tap may reach over an end.
        """
        reach = self.dilation[-1] * (self.kernel[-1] - 1) - self.padding[-1]
        return reach <= min(7, self.image[-1])

    @property
    def fits_stride(self) -> bool:
        """Whether the kernel is a multiple of the stride along every axis."""
        return all(side % step == 0 for side, step in zip(self.kernel, self.stride))

    @property
    def is_dilated(self) -> bool:
        """Whether any axis is."""
        return max(self.dilation) > 1

    @property
    def is_strided(self) -> bool:
        """Whether any axis is."""
        return max(self.stride) > 1

    @property
    def is_point(self) -> bool:
        """Whether its kernel has one tap and no stride: jit_1x1 computes those, with a stride they
        take what larger kernels do.
        """
        return math.prod(self.kernel) == 1 and not self.is_strided

    @property
    def is_padded_far(self) -> bool:
        """Whether there are outputs whose middle tap lies outside the image: more padding than half
        of the kernel's reach.
        """
        return any(
            pad > (step * (side - 1) + 1) // 2
            for side, pad, step in zip(self.kernel, self.padding, self.dilation)
        )


def _positions_inside(first: int, step: int, size: int, positions: int) -> int:
    """How many of `first`, `first` + `step`, ... (`positions` of them) lie in [0, `size`)."""
    return max(0, min(positions, (size - 1 - first) // step + 1) - max(0, -(first // step)))


def forward_implementation(
    c_in: int, c_out: int, groups: int, window: Window, block: int = BLOCK
) -> str:
    """Which kernels the forward takes, `c_in` and `c_out` counted in a group: ``first``,
    ``blocked`` or ``gemm``.

    ONEDNN_VERBOSE tells (v3.12): from fewer channels than a block it reads the plain image (wei
    Acdb16a), but in jit_1x1, which kernels of 256 bits take with a stride, too; groups need
    channels in fours (256 bits: eights) but for depthwise ones of one output each, and a padded
    kernel of one tap has no kernel of its own: those are computed image by image, by im2col and a
    product.

    >>> window = Window((3, 3), (1, 1), (1, 1), (1, 1), (14, 14))
    >>> sizes = (3, 32, 1), (32, 32, 1), (6, 6, 4)
    >>> [forward_implementation(*size, window) for size in sizes]
    ['first', 'blocked', 'gemm']
    >>> points = [Window((1, 1), (step, step), (0, 0), (1, 1), (14, 14)) for step in (1, 2)]
    >>> [forward_implementation(3, 32, 1, point) for point in points]
    ['blocked', 'first']
    """
    if groups > 1 and c_in == c_out == 1:
        return "gemm" if len(window.kernel) == 3 and window.is_dilated else "blocked"
    fits = block == BLOCK or window.output_fits_256
    if groups > 1:
        return "blocked" if fits and _are_whole(c_in, c_out, _GROUP_CHANNELS[block]) else "gemm"
    is_one_tap = math.prod(window.kernel) == 1
    if is_one_tap and window.is_padded_far:
        return "gemm"
    has_own = window.is_point or (is_one_tap and block < BLOCK)
    if not has_own and not fits:
        return "gemm"
    return "blocked" if c_in >= block or has_own else "first"


def _are_whole(c_in: int, c_out: int, channels: int) -> bool:
    return c_in % channels == 0 and c_out % channels == 0


def weight_implementation(
    c_in: int, c_out: int, groups: int, window: Window, block: int = BLOCK
) -> str:
    """Which kernels the gradient of the weight takes: ``first``, ``blocked``, ``half`` (blocks of 8
    channels, jit:avx2, where the block is larger) or ``gemm``.

    ONEDNN_VERBOSE tells (v3.12); the conditions are those of jit_uni_dw_conv_bwd_weights_kernel and
    of the dense kernels' init_conf. Only kernels of 512 bits know dilation (with a stride, only in
    1d), and none of them padding beyond half of the kernel in 2d, nor a kernel deeper than the
    image in 3d; those of 256 know no padding in 3d and no kernel longer than the image.

    >>> near = Window((3, 3), (1, 1), (1, 1), (1, 1), (14, 14))
    >>> far = Window((5, 5), (1, 1), (2, 2), (1, 1), (14, 14))
    >>> cases = (1, 1, 32, near), (1, 1, 32, far), (3, 32, 1, far), (12, 32, 1, near)
    >>> [weight_implementation(*case) for case in cases]
    ['blocked', 'gemm', 'first', 'half']
    """
    d = len(window.kernel)
    if groups > 1 and c_in == c_out == 1:
        shifted = any(
            pad > 1 and pad % stride for pad, stride in zip(window.padding, window.stride)
        )
        gaps = any(stride > side for stride, side in zip(window.stride, window.kernel))
        own = (
            d < 3
            and window.kernel[-1] <= _DEPTHWISE_WEIGHT_SIDE
            and not (window.is_dilated or window.is_padded_far or shifted or gaps)
        )
        return "blocked" if own else "gemm"
    if math.prod(window.kernel) == 1 and groups == 1 and window.is_padded_far:
        return "gemm"
    if groups == 1 and (window.is_point or (math.prod(window.kernel) == 1 and block < BLOCK)):
        return "blocked"
    whole = _are_whole(c_in, c_out, BLOCK) if groups > 1 else c_in >= BLOCK
    plain = groups == 1 and c_in in _PLAIN_WEIGHT_CHANNELS[block]
    far = d > 1 and window.is_padded_far
    dilated_far = window.is_dilated and (d == 3 or (d == 2 and window.is_strided))
    if d == 3 and window.image[0] < window.kernel[0]:
        return "gemm"
    if block == BLOCK and (whole or plain) and not far and not dilated_far:
        return "first" if plain else "blocked"
    halves = (groups == 1 or _are_whole(c_in, c_out, _HALF_BLOCK)) and all(
        size >= side for size, side in zip(window.image, window.kernel)
    )
    if not halves or window.is_dilated or (d == 3 and max(window.padding) > 0):
        return "gemm"
    if block < BLOCK and window.kernel[-1] > _WIDEST_256:
        return "gemm"
    if block == BLOCK:
        return "half"
    return "first" if plain else "blocked"


def input_implementation(
    c_in: int, c_out: int, groups: int, window: Window, block: int = BLOCK
) -> str:
    """Which kernels the gradient of the input takes: ``blocked``, ``strided`` (brgconv_strided, in
    channels_last) or ``gemm`` (ONEDNN_VERBOSE, v3.12). Of groups, those of 256 bits know no stride
    beyond the kernel.
    """
    if groups > 1 and c_in == c_out == 1:
        return "gemm" if len(window.kernel) == 3 or window.is_dilated else "blocked"
    if window.is_strided and window.is_dilated:
        return "gemm"
    fits = block == BLOCK or window.is_point or window.input_fits_256
    if groups == 1:
        return "strided" if window.is_strided else "blocked" if fits else "gemm"
    own = fits and _are_whole(c_in, c_out, _GROUP_CHANNELS[block])
    if window.is_strided and c_out > (block if own else _HALF_BLOCK):
        return "strided"
    gaps = any(step > side for step, side in zip(window.stride, window.kernel))
    return "gemm" if not own or (gaps and block < BLOCK) else "blocked"


def _blocked(spec: TensorSpec, block: int) -> int:
    """Bytes of an activation in blocked layout."""
    n, c = spec.shape[:2]
    return n * padded(c, block) * math.prod(spec.shape[2:]) * spec.item_bytes


def _blocked_weight(spec: TensorSpec, block: int) -> int:
    c_out, c_in = spec.shape[:2]
    return (
        padded(c_out, block)
        * (c_in if c_in < block else padded(c_in, block))
        * math.prod(spec.shape[2:])
        * spec.item_bytes
    )


@dataclass(frozen=True)
class Convolution:
    """A convolution that goes to oneDNN, by channels in and out of a group, number of groups and
    window.

    A transposed one is described as the convolution that it is the gradient of: its forward
    computes the gradient of that one's input, from an image that is that one's output (the
    definition of ``torch.nn.ConvTranspose2d``, and how oneDNN computes it: ``deconvolution``,
    ``conv:any+...``).
    """

    c_in: int
    c_out: int
    groups: int
    window: Window
    block: int = BLOCK  #: Channels of a block on the processor.

    def implementation(self, way: str) -> str:
        """Which kernels it takes to compute its output, the gradient of its input or that of its
        weight: `way` is ``output``, ``input`` or ``weight``.
        """
        return {
            "output": forward_implementation,
            "input": input_implementation,
            "weight": weight_implementation,
        }[way](self.c_in, self.c_out, self.groups, self.window, self.block)


def ways_of(transposed: bool, needs: tuple[bool, bool] | None) -> tuple[str, ...]:
    """Passes of a forward (`needs` is None), or of a backward for the gradients of input, weight or
    both, as :meth:`Convolution.implementation` names them.

    >>> ways_of(False, (True, True)), ways_of(True, (True, True)), ways_of(True, None)
    (('input', 'weight'), ('output', 'weight'), ('input',))
    """
    onwards, back = ("input", "output") if transposed else ("output", "input")
    if needs is None:
        return (onwards,)
    return tuple(way for way, needed in zip((back, "weight"), needs) if needed)


@dataclass(frozen=True)
class ConvolutionCall:
    """Operands and passes of ``aten.convolution`` or its backward: a `convolution` of `before` to
    `after` with a `weight`. Of a transposed one `before` is the result.
    """

    convolution: Convolution
    image: TensorSpec
    before: TensorSpec
    after: TensorSpec
    weight: TensorSpec
    transposed: bool
    ways: tuple[str, ...]

    def takes_onednn(self, threads: int = 1) -> bool:
        """Whether it goes to oneDNN (ConvParams::use_mkldnn, ATen/native/Convolution.cpp).

        In bfloat16 and float16 all do, where the processor has instructions for them (assumed); in
        float64 and complex numbers none. In float32 torch looks at the last two sides of the
        kernel, and at the first four of the image; a 1d convolution counts as a 2d one of height 1.

        >>> one = TensorSpec.contiguous(1, 16, 8, 8); small = TensorSpec.contiguous(8, 16, 1, 1)
        >>> settings = ((1, 1), (0, 0), (1, 1), False, (0, 0), 1)
        >>> call = convolution_call(Op("aten.convolution.default", (one, small, None, *settings)))
        >>> call.takes_onednn()
        False
        """
        image, window, groups = self.image, self.convolution.window, self.convolution.groups
        if image.dtype != "float32":
            return image.dtype in ("bfloat16", "float16")
        sides = (1, *self.weight.shape[2:])[-2:]
        size = image.numel if len(image.shape) < 5 else math.prod(image.shape[:4])
        moved = (
            window.is_strided
            or window.is_dilated
            or image.shape[0] >= 16
            or any(side != 1 for side in sides)
            or threads > 1
        )
        large = groups > 1 or all(side > 3 for side in sides) or image.shape[0] > 1 or size > 20480
        return moved and large


def convolution_call(op: Op, block: int = BLOCK) -> ConvolutionCall | None:
    """The convolution that an op is, or whose backward it is, on a processor with blocks of so many
    channels; None for other operators.
    """
    if op.packet not in ("aten.convolution", "aten.convolution_backward"):
        return None
    backward = op.packet.endswith("backward")
    image, weight, _, *settings = op.args[backward : 9 + backward]
    mask = op.args[10] if backward else None
    needs = (bool(mask[0]), bool(mask[1])) if isinstance(mask, tuple) else None
    image, weight = tensor(image), tensor(weight)
    d = len(weight.shape) - 2
    stride, padding, dilation, extra = (ints(settings[index], d) for index in (0, 1, 2, 4))
    transposed, groups = bool(settings[3]), math.prod(ints(settings[5]))
    kernel = weight.shape[2:]
    if backward or op.outputs:
        result = tensor(op.args[0]) if backward else op.outputs[0]
    else:
        sides = Window(kernel, stride, padding, dilation, image.shape[2:]).out
        if transposed:
            sides = tuple(
                (size - 1) * step - 2 * pad + reach * (side - 1) + more + 1
                for size, step, pad, reach, side, more in zip(
                    image.shape[2:], stride, padding, dilation, kernel, extra
                )
            )
        channels = weight.shape[1] * groups if transposed else weight.shape[0]
        result = TensorSpec.contiguous(image.shape[0], channels, *sides, dtype=image.dtype)
    before, after = (result, image) if transposed else (image, result)
    return ConvolutionCall(
        Convolution(
            before.shape[1] // groups,
            after.shape[1] // groups,
            groups,
            Window(kernel, stride, padding, dilation, before.shape[2:]),
            block,
        ),
        image,
        before,
        after,
        weight,
        transposed,
        ways_of(transposed, needs),
    )


def scratch(op: Op, block: int = BLOCK) -> Scratch:
    """The blocks that an op allocates and frees within itself. `block` are the channels of one in
    oneDNN's layouts.

    A convolution in oneDNN converts its NCHW operands to blocks of channels, computes there, and
    converts back; its backward does so once for the gradient of the input and once for that of the
    weight. Where a product does the work, it is on the columns of one image (im2col; in 3d of one
    depth), a group at a time. What a strided pass computes with channels last is copied twice.
    """
    call = convolution_call(op, block)
    if call is None or not call.takes_onednn():
        return ()
    return tuple(_stage(call, way) for way in call.ways)


def _stage(call: ConvolutionCall, way: str) -> Stage:
    """Memory of one of the passes of a convolution."""
    convolution, after, block = call.convolution, call.after, call.convolution.block
    implementation = convolution.implementation(way)
    kernel = math.prod(convolution.window.kernel)
    if implementation == "gemm":
        places = math.prod(after.shape[2:][-2:])
        columns = convolution.c_in * kernel * places * after.item_bytes
        packed = (PACKED_BYTES,) if convolution.groups == 1 else ()
        return Stage((columns, *packed))
    if implementation == "strided":
        c_out, c_in = call.weight.shape[:2]
        channels = padded(c_in, BLOCK if c_in <= BLOCK else _STRIDED_BLOCK)
        weight = c_out * channels * kernel * call.weight.item_bytes
        return Stage((), (after.nbytes, weight), (call.before.nbytes,) * 2)
    if implementation == "half":
        block = _HALF_BLOCK
    weight = _blocked_weight(call.weight, block)
    incoming = () if implementation == "first" else (_blocked(call.before, block),)
    outgoing = _blocked(after, block)
    return {
        "output": Stage((), (*incoming, weight), (outgoing,)),
        "input": Stage((), (outgoing, weight), incoming),
        "weight": Stage((), (outgoing, *incoming), (weight,)),
    }[way]
