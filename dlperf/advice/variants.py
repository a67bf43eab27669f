"""What may be changed about a step, as data, and what its trace says could be tried, before anybody
knows whether it pays.
"""

from __future__ import annotations

import ctypes.util
import os
import platform
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from dlperf.core.errors import DlperfError
from dlperf.core.machine import Machine
from dlperf.core.trace import Layer, Trace
from dlperf.predictors.allocator.policies import POLICIES

PAYS, DOES_NOT_PAY, UNSURE, DOES_NOT_APPLY = (
    "pays",
    "does not pay",
    "cannot be judged",
    "does not apply",
)
LEAST_GAIN_FRAC = 0.02
"""The least predicted gain that is worth a line: below it a repeated measurement of the same step
differs as much (1-3 % on a quiet machine).
"""
_ROUNDING = "results differ by rounding"
_BF16 = "8 bits of mantissa instead of 24: results change, accuracy has to be checked"


class NotApplicable(DlperfError):
    """A change that cannot be made to this target; its text gives the reason."""


@dataclass(frozen=True)
class Edit:
    """One change to what is built: the name of a transformation and the layers it is for (see
    :mod:`dlperf.advice.transformations`).
    """

    kind: str
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Variant:
    """A step with changes: `edits` of what is built, in that order, and the setting it runs in
    (None: as the baseline).

    `name` is unique within an explanation; the variant without changes is the baseline. `how` is
    what a user writes, `caveat` how results or training differ ("" if by rounding at most).
    `is_exact`: it can join others that leave the training as it is, to rounding.
    """

    name: str
    edits: tuple[Edit, ...] = ()
    batch_size: int | None = None
    threads: int | None = None
    malloc: str | None = None
    how: str = ""
    caveat: str = ""
    is_exact: bool = True

    @property
    def needs_code(self) -> bool:
        """Whether it changes model, inputs or optimizer, which needs the target's code."""
        return bool(self.edits) or self.batch_size is not None


BASELINE = Variant("baseline")


@dataclass(frozen=True)
class Suggestion:
    """A variant and its prediction.

    `verdict` is one of the four above, `reason` is why it does not pay. `sample_s` is the
    predicted time of one sample, `gain_frac` the gain in samples per second over the baseline
    (0.25: a quarter more). `unsure_frac` is the share of its time that stands on extrapolated or
    unpriced ops. Values are None where it does not apply.
    """

    variant: Variant
    verdict: str
    reason: str = ""
    batch_size: int | None = None
    threads: int | None = None
    step_s: float | None = None
    gain_frac: float | None = None
    unsure_frac: float | None = None
    peak_memory_bytes: int | None = None

    @property
    def sample_s(self) -> float | None:
        """Predicted seconds a sample."""
        return (
            None
            if self.step_s is None or self.batch_size is None
            else self.step_s / self.batch_size
        )


# -- settings of malloc, which a user puts into the environment ------------------------------------


@dataclass(frozen=True)
class AllocatorSetting:
    """A setting: its name, the environment variables that bring it about."""

    name: str
    settings: str

    @property
    def environment(self) -> dict[str, str]:
        """The variables; a library goes by its name, which the loader looks for."""
        return dict(word.split("=", 1) for word in self.settings.split())

    @property
    def missing(self) -> str:
        """Why this process could not be started under it here, "" if it could."""
        if platform.libc_ver()[0] != "glibc":
            return "takes Linux with glibc"
        library = re.search(r"LD_PRELOAD=lib(\w+)\.so", self.settings)
        return (
            f"takes lib{library.group(1)}, which is not installed"
            if library and ctypes.util.find_library(library.group(1)) is None
            else ""
        )


ALLOCATORS = tuple(
    AllocatorSetting(policy.name, policy.settings)
    for policy in POLICIES.values()
    if policy.name != "default"
)
_VARIABLES = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_ARENA_MAX",
    "MALLOC_CONF",
    "GLIBC_TUNABLES",
    "THP_MEM_ALLOC_ENABLE",
)


def malloc_of(name: str) -> AllocatorSetting:
    """The setting called `name`."""
    return next(malloc for malloc in ALLOCATORS if malloc.name == name)


def settings_in(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The variables of an environment that change how memory is had; a process under the default
    has none of them.
    """
    preloaded = ("LD_PRELOAD",) if "malloc" in environment.get("LD_PRELOAD", "") else ()
    return (*(name for name in _VARIABLES if name in environment), *preloaded)


def environment_under(malloc: str | None) -> dict[str, str]:
    """This process's environment, with the setting's variables (None: the default's, which are
    none).
    """
    ours = settings_in(os.environ)
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    return environment if malloc is None else {**environment, **malloc_of(malloc).environment}


# -- what a trace could try ------------------------------------------------------------------------

_CHANNELS_LAST = Variant(
    "channels_last",
    (Edit("channels-last"),),
    how="model.to(memory_format=torch.channels_last), the same for the inputs",
    caveat=_ROUNDING,
)
_AUTOCAST = Variant(
    "bf16 autocast",
    (Edit("autocast"),),
    how='with torch.autocast("cpu", torch.bfloat16) around forward and loss',
    caveat=_BF16,
    is_exact=False,
)
_PURE_BF16 = Variant(
    "pure bf16",
    (Edit("bfloat16"),),
    how="model.bfloat16(), inputs.bfloat16(), loss on output.float()",
    caveat=f"{_BF16}; parameters and optimizer state too",
    is_exact=False,
)
_NO_GRADIENTS = Variant(
    "gradients to None", (Edit("set-to-none"),), how="optimizer.zero_grad(set_to_none=True)"
)


def candidates(trace: Trace, machine: Machine, threads: int, has_code: bool) -> list[Variant]:
    """Everything that could be changed about a step but batch size, layers' widths and activations,
    which need a look at the model.

    Without code (`has_code`), only what the process is started with: threads and malloc.
    """
    found = [
        Variant(
            f"threads {count}",
            threads=count,
            how=f"OMP_NUM_THREADS={count} (torch.set_num_threads({count}))",
        )
        for count in machine.threads
        if count != threads
    ]
    found += [
        Variant(f"malloc {malloc.name}", malloc=malloc.name, how=malloc.settings)
        for malloc in ALLOCATORS
    ]
    if not has_code:
        return found
    if not trace.inference:
        kind = trace.optimizer.type if trace.optimizer is not None else "the optimizer"
        found += [
            Variant(
                f"{loop} optimizer", (Edit(loop),), how=f"{kind}(..., {loop}=True)", caveat=cost
            )
            for loop, cost in (
                ("fused", _ROUNDING),
                ("foreach", f"{_ROUNDING}; takes more memory for a moment"),
            )
        ]
        if any(op.phase == "zero_grad" for op in trace.ops):
            found.append(_NO_GRADIENTS)
    return [
        *found,
        _CHANNELS_LAST,
        _AUTOCAST,
        _PURE_BF16,
        *(
            Variant(
                f"merge {', '.join(group)}",
                (Edit("merge", group),),
                how=f"one nn.Linear for {', '.join(group)}, whose output is split",
                caveat=_ROUNDING,
            )
            for group in linears_of_one_input(trace)
        ),
    ]


def linears_of_one_input(trace: Trace) -> list[tuple[str, ...]]:
    """Linear layers that read the same tensor once each (such as q, k and v), in the order of their
    calls.
    """
    groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for layer in trace.layers:
        if (
            layer.type == "Linear"
            and layer.is_leaf
            and layer.n_calls == 1
            and len(layer.inputs) == 1
            and layer.inputs[0].storage >= 0
        ):
            groups[layer.inputs[0], tuple(name for name, _ in layer.parameters)].append(layer.name)
    return [tuple(names) for names in groups.values() if len(names) > 1]


def activations(trace: Trace) -> list[str]:
    """Leaves whose only input nobody reads after them in the forward, one type after the other: in
    place they would not change another's input.

    Whether the type has an ``inplace`` flag, and whether autograd allows it, has to be tried.
    """
    readers: dict[int, int] = {}
    last_own: dict[str, int] = {}
    for index, op in enumerate(trace.ops):
        if op.phase == "forward":
            readers.update((spec.storage, index) for spec in op.inputs)
            last_own[op.layer] = index
    kept = {spec.storage for spec in trace.layers[0].outputs} if trace.layers else set()
    found: dict[str, list[str]] = defaultdict(list)
    for layer in trace.layers:
        if (
            layer.is_leaf
            and layer.name in last_own
            and not layer.parameters
            and len(layer.inputs) == 1
            and _may_change(trace, layer, kept)
            and readers.get(layer.inputs[0].storage, -1) <= last_own[layer.name]
        ):
            found[layer.type].append(layer.name)
    return [name for names in found.values() for name in names]


def _may_change(trace: Trace, layer: Layer, kept: set[int]) -> bool:
    spec = layer.inputs[0]
    if spec.storage < 0 or spec.storage in kept or layer.n_calls != 1:
        return False
    storage = trace.storages[spec.storage]
    # A batch, a parameter, a buffer is not the layer's to change; nor what it already changes.
    return (
        storage.born >= 0
        and not storage.kind
        and all(output.storage != spec.storage for output in layer.outputs)
    )
