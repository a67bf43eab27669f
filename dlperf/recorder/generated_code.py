"""Work of the C++ kernels that Inductor generates, from their source.

A kernel is a sequence of loop nests over a few simple statements. Its work is the number of
instructions: each statement of a loop counts once per iteration, whether it works on one element or
on a vector of them, and a function as many as its implementation has. Constants, conversions and
index arithmetic are free: they are hoisted or run beside the rest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_KERNEL = re.compile(
    r"^(\w+) = async_compile\.cpp_pybinding\(\[.*?\], r?'''(.*?)'''", re.DOTALL | re.MULTILINE
)
_SIGNATURE = re.compile(r"\bkernel\((.*?)\)\s*\{(.*)", re.DOTALL)
_TOKEN = re.compile(r"#pragma[^\n]*|(?:for|if) ?\([^{}]*?\)(?=\n)|[{};]|[^{};\n]+")
_LOOP = re.compile(r"for ?\(\w+ \w+ ?= ?(.+?); ?\w+ ?< ?(.+?); ?\w+ ?(?:\+\+|\+= ?(.+?))\)$")
_FREE = re.compile(
    r"auto \w+ = (?:static_cast<\w+>\(-?[\w.+-]+\)|at::vec::Vectorized<\w+>\(\w+\)|-?\d+L*"
    r"|c10::convert<\w+>\(\w+\)|\w+)$"
)
_INSTRUCTIONS = {
    r"\bexp\(|exp_u20\(": 27,
    r"\berf\(": 40,
    r"\btanh\(": 94,
    r"\blog\w*\(|\b(?:sin|cos)\(": 40,
    r"\bpow\(": 80,
    r"sqrt\(": 5,
    r" / ": 4,
    r"welford_combine\(": 12,
    r"\btranspose_mxn": 16,
    r"rand\w*_cpu\(": 320,
    r"out_ptr\d+\[.*\btmp\d.*\] \+?=": 50,
    r"atomic_add\(": 150,
    r"atomic_add_vec": 1200,
}
_MASK_STORE = 450
"""A vector of truth values becomes bytes one by one."""
"""Instructions of the functions in a statement: medians over the kernels of eight networks on AMD
Zen 3 with AVX2, torch 2.13, at the rate of sums alone. Sums and products are one each.
"""


@dataclass(frozen=True, slots=True)
class GeneratedKernel:
    """A kernel's parameters, (name, is written), the body of its function, and whether a team of
    threads runs it.
    """

    parameters: tuple[tuple[str, bool], ...]
    body: str
    is_parallel: bool

    def instructions(self, sizes: Mapping[str, int]) -> int:
        """Instructions of one call; `sizes`: values of its parameters that are integers."""
        total, pending, counts, has_likely = 0, 1, [1], set()
        masks: set[str] = set()
        for token in map(str.strip, _TOKEN.findall(re.sub(r"\n\s+", "\n", self.body))):
            loop = _LOOP.match(token)
            if loop is not None:
                first, end, step = (_value(text or "1", sizes) for text in loop.groups())
                pending *= max(0, math.ceil((end - first) / max(step, 1)))
            elif "C10_UNLIKELY" in token:  # the rest after whole vectors
                pending *= len(counts) not in has_likely
            elif "C10_LIKELY" in token:
                has_likely.add(len(counts))
            elif token == "{":
                counts.append(counts[-1] * pending)
                has_likely.discard(len(counts))
                pending = 1
            elif token == "}":
                counts = counts[:-1] or [1]
            elif token not in ("", ";") and not token.startswith("#") and not _FREE.match(token):
                name = token.removeprefix("auto ").split(" = ")[0].split(".store(")[0]
                if token.startswith("auto "):
                    masks = masks | {name} if " = at::vec::VecMask<" in token else masks - {name}
                is_mask = name in masks and ".store(" in token
                total += counts[-1] * (_MASK_STORE if is_mask else _instructions(token))
        return total


def _instructions(statement: str) -> int:
    found = (n * len(re.findall(name, statement)) for name, n in _INSTRUCTIONS.items())
    return sum(found) or 1


def _value(text: str, sizes: Mapping[str, int]) -> int:
    """A loop's bound: a product of numbers and sizes; 1 where it is something else."""
    plain = re.sub(r"static_cast<\w+>|(?<=\d)L+|[() ]", "", text)
    factors = [sizes.get(one, one) for one in plain.split("*")]
    if all(isinstance(one, int) or one.isdecimal() for one in factors):
        return math.prod(map(int, factors))
    return 1


def generated_kernels(source: str) -> Iterator[tuple[str, GeneratedKernel]]:
    """The kernels of a module that Inductor generated, by name."""
    for name, code in _KERNEL.findall(source):
        signature = _SIGNATURE.search(code)
        if signature is None:
            continue
        parameters = [text.strip() for text in signature[1].split(",")]
        yield (
            name,
            GeneratedKernel(
                tuple(
                    (text.split()[-1].strip("*"), "*" in text and not text.startswith("const"))
                    for text in parameters
                ),
                signature[2],
                "#pragma omp parallel" in signature[2],
            ),
        )
