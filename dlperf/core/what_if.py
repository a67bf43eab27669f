"""What-if factors on a machine's resources: a state whose slowdowns are given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TypeVar

from dlperf.core.clock import Samples
from dlperf.core.costs import KINDS, Cost
from dlperf.core.errors import DlperfError
from dlperf.core.machine import Machine
from dlperf.core.state import State

LOOP_COSTS = ("loader_", "loop_")
"""Prefixes of the costs of an epoch outside its steps."""
MOST = 1e9
"""Largest factor."""

Factors = TypeVar("Factors", bound="MachineFactors")


@dataclass(frozen=True, kw_only=True)
class MachineFactors:
    """Factors on a machine's resources; 1 leaves one as it is.

    `flops` multiplies the rate of arithmetic, with the core's own caches, which share its clock.
    `memory_bandwidth` and `l3_bandwidth` multiply bandwidths. `overhead` multiplies the cost of the
    framework and the interpreter, `page_faults` that of page faults: 2 is twice as slow there.
    """

    flops: float = 1.0
    memory_bandwidth: float = 1.0
    l3_bandwidth: float = 1.0
    overhead: float = 1.0
    page_faults: float = 1.0

    @classmethod
    def of_pairs(cls: type[Factors], pairs: Iterable[tuple[str, float]]) -> Factors:
        """The factors of names and values, as the command line has them.

        Raises DlperfError for a name that stands there twice, and as :meth:`of` does.
        """
        found: dict[str, float] = {}
        for name, factor in pairs:
            if name in found:
                raise DlperfError(f"--what-if {name}: stands there twice; give one factor")
            found[name] = factor
        return cls.of(found)

    @classmethod
    def of(cls: type[Factors], factors: Mapping[str, float]) -> Factors:
        """The factors by name.

        Raises DlperfError for an unknown name, and for a factor that is no finite, positive number.

        >>> MachineFactors.of({"flops": 2.0}).state.core
        0.5
        """
        if not isinstance(factors, Mapping):
            raise DlperfError(
                f"what_if is {factors!r:.60}; expected factors by name, such as {{'flops': 2}}"
            )
        known = [field.name for field in fields(cls)]
        for name, factor in factors.items():
            shown = f"{factor:g}" if isinstance(factor, float) else str(factor)
            if name not in known:
                raise DlperfError(
                    f"--what-if {name}={shown:.20}: {name!r} is unknown; known are"
                    f" {', '.join(known)}"
                )
            is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
            if not is_number or not 1.0 / MOST <= factor <= MOST:
                raise DlperfError(
                    f"--what-if {name}={shown:.20}: the factor must be finite and above 0"
                    f" ({1 / MOST:g} to {MOST:g}); 2 is twice as much"
                )
        return cls(**{name: float(factor) for name, factor in factors.items()})

    @property
    def changed(self) -> dict[str, float]:
        """The factors that are not 1, by name."""
        return {name: factor for name, factor in asdict(self).items() if factor != 1.0}

    @property
    def machine(self) -> MachineFactors:
        """The factors on the machine alone."""
        return MachineFactors(
            **{one.name: getattr(self, one.name) for one in fields(MachineFactors)}
        )

    @property
    def state(self) -> State:
        """The slowdowns that the factors make."""
        core = 1.0 / self.flops
        return State(
            core=core,
            interpreter=self.overhead,
            private_cache=core,
            shared_cache=1.0 / self.l3_bandwidth,
            dram=1.0 / self.memory_bandwidth,
            page_fault=self.page_faults,
        )

    def of_machine(self, machine: Machine) -> Machine:
        """The machine with other costs of a training loop and its loaders: bytes move with memory,
        all else with the interpreter.
        """
        if not self.changed:
            return machine

        def changed(cost: Cost) -> Cost:
            if not cost.key.kind.startswith(LOOP_COSTS):
                return cost
            by_byte = KINDS[cost.key.kind].unit == "s/byte"
            return scaled(cost, self.state.dram if by_byte else self.overhead)

        return replace(machine, costs=tuple(map(changed, machine.costs)))


def scaled(cost: Cost, factor: float) -> Cost:
    """The cost with every sample times a factor."""
    values = tuple(factor * value for value in cost.samples.values)
    return replace(cost, samples=Samples(values, cost.samples.n_disturbed))


def describe(factors: Mapping[str, float]) -> str:
    """Changed factors in words; empty without any.

    >>> describe({"flops": 2.0, "overhead": 0.5})
    'what if: flops x 2, overhead x 0.5'
    """
    words = ", ".join(f"{name} x {factor:g}" for name, factor in factors.items())
    return f"what if: {words}" if words else ""
