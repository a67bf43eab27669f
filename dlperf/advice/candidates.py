"""Which changes a step could take, read off its trace: what would be tried, before anybody knows
whether it pays.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from dlperf.advice.allocators import ALLOCATORS
from dlperf.advice.variants import Edit, Variant
from dlperf.core.machine import Machine
from dlperf.core.trace import Layer, Trace

BATCH_FACTORS = (0.25, 0.5, 2.0, 4.0, 8.0, 16.0, 32.0)
_ROUNDING = "results differ by rounding"
_BF16 = "8 bits of mantissa instead of 24: results change, accuracy has to be checked"


@dataclass(frozen=True)
class Candidate:
    """A variant with what a user writes for it and how results differ. `is_exact`: the training
    goes on as before, to rounding.
    """

    variant: Variant
    how: str
    caveat: str = ""
    is_exact: bool = True


def candidates(trace: Trace, machine: Machine, threads: int, has_code: bool) -> list[Candidate]:
    """Everything that could be changed about a step but batch size, layers' widths and activations,
    which need a look at the model.

    Without code (`has_code`), only what the process is started with: threads and malloc.
    """
    found = [
        Candidate(
            Variant(f"threads {count}", threads=count),
            f"OMP_NUM_THREADS={count} (torch.set_num_threads({count}))",
            "",
        )
        for count in machine.threads
        if count != threads
    ]
    found += [
        Candidate(
            Variant(f"malloc {malloc.name}", malloc=malloc.name), malloc.settings, malloc.caveat
        )
        for malloc in ALLOCATORS
    ]
    if not has_code:
        return found
    if not trace.inference:
        kind = trace.optimizer.type if trace.optimizer is not None else "the optimizer"
        found += [
            Candidate(
                Variant("fused optimizer", (Edit("fused"),)), f"{kind}(..., fused=True)", _ROUNDING
            ),
            Candidate(
                Variant("foreach optimizer", (Edit("foreach"),)),
                f"{kind}(..., foreach=True)",
                f"{_ROUNDING}; takes more memory for a moment",
            ),
        ]
        if any(op.phase == "zero_grad" for op in trace.ops):
            found.append(
                Candidate(
                    Variant("gradients to None", (Edit("set-to-none"),)),
                    "optimizer.zero_grad(set_to_none=True)",
                )
            )
    how = "model.to(memory_format=torch.channels_last), the same for the inputs"
    found.append(Candidate(Variant("channels_last", (Edit("channels-last"),)), how, _ROUNDING))
    found.append(
        Candidate(
            Variant("bf16 autocast", (Edit("autocast"),)),
            'with torch.autocast("cpu", torch.bfloat16) around forward and loss',
            _BF16,
            is_exact=False,
        )
    )
    how = "model.bfloat16(), inputs.bfloat16(), loss on output.float()"
    found.append(
        Candidate(
            Variant("pure bf16", (Edit("bfloat16"),)),
            how,
            f"{_BF16}; parameters and optimizer state too",
            is_exact=False,
        )
    )
    found += [
        Candidate(
            Variant(f"merge {', '.join(group)}", (Edit("merge", group),)),
            f"one nn.Linear for {', '.join(group)}, whose output is split",
            _ROUNDING,
        )
        for group in linears_of_one_input(trace)
    ]
    return found


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
            spec = layer.inputs[0]
            groups[spec, tuple(name for name, _ in layer.parameters)].append(layer.name)
    return [tuple(names) for names in groups.values() if len(names) > 1]


def activations(trace: Trace) -> dict[str, list[str]]:
    """Leaves whose only input nobody reads after them in the forward, by their type: in place they
    would not change another's input.

    Whether the type has an ``inplace`` flag, and whether autograd allows it, has to be tried.
    """
    readers: dict[int, int] = {}
    for place, op in enumerate(trace.ops):
        if op.phase == "forward":
            for spec in op.inputs:
                readers[spec.storage] = place
    last_own: dict[str, int] = {
        op.layer: place for place, op in enumerate(trace.ops) if op.phase == "forward"
    }
    kept = {spec.storage for spec in trace.layers[0].outputs} if trace.layers else set()
    found: dict[str, list[str]] = defaultdict(list)
    for layer in trace.layers:
        if (
            not layer.is_leaf
            or layer.name not in last_own
            or layer.parameters
            or len(layer.inputs) != 1
        ):
            continue
        if (
            _may_change(trace, layer, kept)
            and readers.get(layer.inputs[0].storage, -1) <= last_own[layer.name]
        ):
            found[layer.type].append(layer.name)
    return dict(found)


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


def batch_sizes(batch_size: int) -> list[int]:
    """The batch sizes beside `batch_size` that a sweep looks at.

    >>> batch_sizes(32), batch_sizes(1)
    ([8, 16, 64, 128, 256, 512, 1024], [2, 4, 8, 16, 32])
    """
    return sorted(
        {int(factor * batch_size) for factor in BATCH_FACTORS if factor * batch_size >= 1}
        - {batch_size}
    )
