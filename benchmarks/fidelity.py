"""How true the micro-benchmarks are: STREAM through torch against a compiled C triad, and the GEMM
peak against a direct BLAS call, in one run.

    python benchmarks/fidelity.py [--threads 1]

The C triad is compiled here with OpenMP, as -O2 and as -O3 -march=native (the better counts: which
one it is differs between machines), and runs on the very arrays that torch uses, because where
arrays lie to each other moves the rate by some percent. The BLAS is the one that torch itself
carries, called through ctypes without torch. Both pairs are timed in turn, so that drift meets them
alike; the best of each is compared. Prints ratios, asserts nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

TRIAD_C = r"""
#include <stddef.h>
void triad(float *restrict c, const float *restrict a, const float *restrict b, float s, size_t n) {
#pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) c[i] = a[i] + s * b[i];
}
"""


def best_of(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Least seconds of each call, taken in turn."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def compile_triads(folder: Path) -> dict[str, ctypes.CDLL]:
    """The C triad as a library, by compiler flags; empty without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return {}
    source = folder / "triad.c"
    source.write_text(TRIAD_C)
    libraries = {}
    for flags in ("-O2", "-O3 -march=native"):
        library = folder / f"triad{len(libraries)}.so"
        subprocess.run(
            [
                compiler,
                *flags.split(),
                "-fopenmp",
                "-shared",
                "-fPIC",
                "-o",
                str(library),
                str(source),
            ],
            check=True,
        )
        libraries[f"C {flags}"] = ctypes.CDLL(str(library))
    return libraries


def pointer(tensor: object) -> ctypes.c_void_p:
    """The address of a tensor's data."""
    return ctypes.c_void_p(tensor.data_ptr())  # type: ignore[attr-defined]


def compare_triad(rounds: int) -> None:
    """STREAM triad as dlperf.microbench.stream times it against the same loop in C."""
    from dlperf.core import host
    from dlperf.microbench import stream

    n_arrays, item = 3, 4
    working_set = stream.working_sets("full", host.this_cpu().caches_bytes[2])[-1]
    n = working_set // (n_arrays * item)
    with tempfile.TemporaryDirectory() as folder:
        libraries = compile_triads(Path(folder))
        if not libraries:
            print("triad: no C compiler here; not compared")
            return
        a, b, c = stream.arrays(n)
        calls: dict[str, Callable[[], object]] = {"through torch": lambda: stream.triad(a, b, c)}
        for flags, library in libraries.items():
            calls[flags] = lambda library=library: library.triad(
                pointer(c), pointer(a), pointer(b), ctypes.c_float(3.0), ctypes.c_size_t(n)
            )  # type: ignore[misc]
        best_of(calls, 2)
        best = best_of(calls, rounds)
    rate = {name: n_arrays * item * n / seconds / 1e9 for name, seconds in best.items()}
    ratio = rate["through torch"] / max(
        value for name, value in rate.items() if name != "through torch"
    )
    print(
        f"STREAM triad, {working_set / 2**20:.0f} MiB:"
        f" {', '.join(f'{name} {value:.2f} GB/s' for name, value in rate.items())}, ratio"
        f" {ratio:.3f}"
    )


def compare_gemm(rounds: int) -> None:
    """The GEMM peak as dlperf.microbench.gemm times it against sgemm of the same BLAS called
    directly.
    """
    import torch

    from dlperf.microbench import gemm, operator_benchmark

    library = ctypes.CDLL(
        str(
            Path(torch.__file__).parent
            / "lib"
            / ("libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so")
        )
    )
    try:
        sgemm = library.sgemm_
    except AttributeError:
        print("GEMM: this torch exports no sgemm_; not compared")
        return
    n = 1280
    a, b, c = torch.rand(n, n), torch.rand(n, n), torch.empty(n, n)
    size, one, zero = ctypes.c_int(n), ctypes.c_float(1.0), ctypes.c_float(0.0)
    ref = ctypes.byref

    def direct() -> None:
        # Column-major BLAS sees row-major operands transposed: (B^T A^T) = (A B)^T.
        plain = ctypes.c_char(b"N")
        sizes = ref(size), ref(size), ref(size)
        sgemm(
            ref(plain),
            ref(plain),
            *sizes,
            ref(one),
            pointer(b),
            ref(size),
            pointer(a),
            ref(size),
            ref(zero),
            pointer(c),
            ref(size),
        )

    direct()
    if not torch.allclose(c, a @ b, rtol=1e-3):
        raise SystemExit("the direct BLAS call computes something else")
    calls: dict[str, Callable[[], object]] = {
        "torch": operator_benchmark.build(gemm.product(n, n, n)),
        "BLAS": direct,
    }
    best_of(calls, 2)
    best = best_of(calls, rounds)
    rate = {name: 2.0 * n**3 / seconds / 1e9 for name, seconds in best.items()}
    ratio = rate["torch"] / rate["BLAS"]
    print(
        f"SGEMM {n}^3: through torch {rate['torch']:.1f} GFLOP/s, direct BLAS call"
        f" {rate['BLAS']:.1f} GFLOP/s, ratio {ratio:.3f}"
    )


def main() -> None:
    """Compare both pairs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    import torch

    from dlperf.core import host

    torch.set_num_threads(options.threads)
    versions = host.versions()
    print(
        f"{host.this_cpu().model}, {options.threads} thread(s), torch {versions.get('torch')},"
        f" python {versions['python']}; best of {options.rounds}"
    )
    compare_triad(options.rounds)
    compare_gemm(options.rounds)


if __name__ == "__main__":
    main()
