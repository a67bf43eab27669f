"""Short names of GPU kernels: ``elementwise: mul``, ``gemm 128x128 tn``, ``softmax forward``.

The kernels of PyTorch are templates whose names take hundreds of characters; what they compute is
the name of a functor inside.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence

from dlperf.core.text import printable

_MOST = 60
_FUNCTORS = (
    r"CUDAFunctorOnSelf_(\w+)",
    r"CUDAFunctor_(\w+)",
    r"(\w+?)_kernel_cuda_impl\b",
    r"\b(?!gpu_kernel)(\w+?)_kernel_(?:cuda|impl)\b",
    r"\blaunch_(\w+?)_scalar\b",
    r"\b(\w+?)_cuda_out\b",
    r"\b(\w+?)CUDAKernelImpl\b",
    r"\b(?!Unary|BUnary|AUnary|Binary|TensorIterator|Compare)([A-Z]\w*?)(?:_f|F)unctor\b",
    r"\bCompare(\w*?)Functor\b",
    r"\b(\w+?)_functor\b",
    r"\b(\w+?)_kernel\b(?!<)",
    r"\b(\w+?)_cuda\b",
)
"""What an elementwise kernel computes, the surest first."""
_WORDS = {
    "clamp": "ReLU (clamp)",
    "threshold": "ReLU (threshold)",
    "direct_copy": "copy",
    "bfloat16_copy": "copy",
}
_REDUCTIONS = (r"(\w+?)_functor", r"\b(\w+?)NanFunctor", r"\b(\w+?)(?:Ops|Functor)\b")
_TILE = re.compile(r"_(\d+x\d+)(?:x\d+)?(?:_|$)|tilesize(\d+x\d+)")
_LAYOUT = re.compile(r"_([nt]{2})(?:_|$)")
_OPERATIONS = (
    (r"splitKreduce", "gemm split-K reduce"),
    (r"fmha|flash|attention", "attention"),
    (
        r"fprop|implicit_convolve|dgrad|wgrad|convolve|winograd|conv_depthwise|conv\d?d|s?cudnn_\d",
        "convolution",
    ),
    (r"gemm|gemv|nvjet|cutlass", "gemm"),
    (r"soft_?max", "softmax"),
    (r"layer_?norm|rms_?norm|group_?norm|GammaBeta", "layer norm"),
    (r"batch_?norm|bn_(?:fw|bw)", "batch norm"),
    (r"max_?pool|avg_?pool|pooling", "pooling"),
    (r"multi_tensor_apply", "multi-tensor"),
    (r"embedding", "embedding"),
    (r"CatArray", "cat"),
    (r"nll_loss|cross_entropy", "loss"),
    (r"transpose|permute|nchwToNhwc|nhwcToNchw", "transpose"),
)
"""What a kernel is by its function's name, the first that matches."""


def short_names(kernels: Sequence[str]) -> dict[str, str]:
    """A short name for each kernel; those that would have the same one get a number.

    Mangled names are demangled where the system has ``c++filt``: it knows every compiler's names,
    and no library of Python's index that does the same is kept up. Without it they stay.
    """
    readable = dict(zip(kernels, _demangled(kernels)))
    names = {k: printable(short_name(text)) or "(unnamed)" for k, text in readable.items()}
    counts, seen = Counter(names.values()), Counter[str]()
    for kernel, name in names.items():
        if counts[name] > 1:
            seen[name] += 1
            names[kernel] = f"{name} #{seen[name]}"
    return names


def short_name(kernel: str) -> str:
    """What a kernel computes, in a few words.

    >>> short_name("ampere_sgemm_128x128_tn")
    'gemm 128x128 tn'
    >>> short_name("void at::native::vectorized_elementwise_kernel<(int)4, "
    ...            "at::native::FillFunctor<float>>(int, T2, T3)")
    'elementwise: fill'
    """
    function = _function(kernel)
    if "distribution" in function:
        return f"random: {_first((r'(uniform|normal|bernoulli|exponential|random)_',), kernel)}"
    if "elementwise" in function:
        return f"elementwise: {_functor(kernel)}"
    if function == "reduce_kernel":
        what = _first(_REDUCTIONS, kernel.partition("ReduceOp")[2] or kernel)
        return f"reduce: {what.lower()}"
    text = kernel if function in ("Kernel", "Kernel2") else _qualified(kernel)
    operation = next((name for part, name in _OPERATIONS if re.search(part, text, re.I)), None)
    if operation is None or function.startswith("triton_"):
        return function[:_MOST]
    return " ".join([operation, *_details(operation, text, kernel)])


def _details(operation: str, text: str, kernel: str) -> list[str]:
    """What distinguishes kernels of an operation: direction, tile, layout."""
    found = []
    if operation == "multi-tensor":
        return [_functor(kernel).removesuffix("math")]
    if operation not in ("gemm", "gemm split-K reduce"):
        directions = {"forward": r"forward|fw|fprop|fwd", "backward": r"backward|bw|grad"}
        found += [word for word, part in directions.items() if re.search(part, text, re.I)][-1:]
        if operation == "convolution" and "winograd" in text.lower():
            found.append("winograd")
    tiles = [one or two for one, two in _TILE.findall(text)]
    layout = _LAYOUT.search(text)
    return [*found, *tiles[:1], *([layout[1]] if layout else [])]


def _functor(kernel: str) -> str:
    inside = kernel.partition("<")[2] or kernel
    name = _first(_FUNCTORS, inside).lower()
    return _WORDS.get(name, name)


def _first(patterns: Sequence[str], text: str) -> str:
    """What the first pattern finds that finds something; else "other"."""
    for pattern in patterns:
        if match := re.search(pattern, text):
            return match[1].strip("_") or "other"
    return "other"


def _function(kernel: str) -> str:
    """The name of the function alone, without namespace, template arguments and parameters.

    >>> _function("void at::native::<unnamed>::softmax<float, (int)5>(T2 *, int)")
    'softmax'
    """
    return _qualified(kernel).split("::")[-1] or kernel[:_MOST]


def _qualified(kernel: str) -> str:
    """The name of the function with its namespaces."""
    text = re.sub(r"<unnamed>::|\(anonymous namespace\)::|^std::enable_if<.*?>::type ", "", kernel)
    return re.split(r"[<(]", text, maxsplit=1)[0].strip().split(" ")[-1]


def _demangled(kernels: Sequence[str]) -> list[str]:
    if not any(kernel.startswith("_Z") for kernel in kernels) or shutil.which("c++filt") is None:
        return list(kernels)
    try:
        done = subprocess.run(
            ["c++filt"], input="\n".join(kernels), capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return list(kernels)
    found = done.stdout.splitlines()
    return found if len(found) == len(kernels) else list(kernels)
