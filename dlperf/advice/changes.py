"""Which changes would pay: each candidate is recorded anew, predicted, and set beside the step as
it is.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dlperf.advice.allocators import malloc_of, predict_under
from dlperf.advice.candidates import Candidate, activations, batch_sizes, candidates
from dlperf.advice.parameters import NotApplicable
from dlperf.advice.transformations import edit_built
from dlperf.advice.variants import (
    BASELINE,
    DOES_NOT_APPLY,
    DOES_NOT_PAY,
    LEAST_GAIN_FRAC,
    PAYS,
    UNSURE,
    Edit,
    Suggestion,
    Variant,
)
from dlperf.advice.widths import BLOCK, rounded
from dlperf.core.errors import DlperfError
from dlperf.core.prediction import Item
from dlperf.core.trace import Trace
from dlperf.core.units import format_bytes, format_percent
from dlperf.forecast.prediction import Prediction
from dlperf.predictors.page_faults import BOUND as PAGE_FAULTS
from dlperf.recorder import recording
from dlperf.recorder.targets import Built, Target

MOST_UNSURE_FRAC = 0.25
"""More of a variant's time than this on extrapolated or unpriced ops, beyond what the baseline has
on such, and nothing is concluded from it.
"""
MOST_MEMORY_FRAC = 0.8
"""Share of the machine's memory that a suggested batch size may take."""
KNEE_FRAC = 0.95
"""The knee is the least batch size with this share of the best throughput seen."""
MOST_WIDTHS = 8
"""Layers whose width alone is looked at, the dearest first: each is a recording."""
FREE_FRAC = 0.01
"""A wider layer that costs less than this of the step counts as free."""


@dataclass(frozen=True)
class Width:
    """One layer made wider: from `width` to `wider` outputs, and what the whole step then takes
    more (negative: less); `reason` where it cannot be.
    """

    layer: str
    width: int
    wider: int
    cost_frac: float | None
    reason: str = ""

    @property
    def is_free(self) -> bool:
        """Whether the outputs that come on top cost nothing to speak of."""
        return self.cost_frac is not None and self.cost_frac <= FREE_FRAC


@dataclass(frozen=True)
class BatchPoint:
    """Throughput at one batch size: predicted seconds a step, how many of them go into page faults,
    peak memory.
    """

    batch_size: int
    step_s: float
    peak_memory_bytes: int | None
    page_faults_s: float = 0.0

    @classmethod
    def of(cls, prediction: Prediction) -> BatchPoint:
        """The point of a predicted whole step."""
        assert prediction.step.total_s is not None
        faults_s = math.fsum(
            item.seconds for item in prediction.prices.items if item.bound == PAGE_FAULTS
        )
        return cls(
            prediction.trace.batch_size,
            prediction.step.total_s,
            prediction.step.peak_memory_bytes,
            faults_s,
        )

    @property
    def samples_per_s(self) -> float:
        """Predicted throughput."""
        return self.batch_size / self.step_s

    @property
    def faultless_samples_per_s(self) -> float:
        """Predicted throughput if malloc kept its memory, so that no page were new."""
        return self.batch_size / max(self.step_s - self.page_faults_s, 1e-12)


@dataclass(frozen=True)
class Advice:
    """What was considered: the suggestions, the dearest layers' widths, throughput over batch size,
    and what could not be looked at.
    """

    suggestions: tuple[Suggestion, ...]
    widths: tuple[Width, ...] = ()
    sweep: tuple[BatchPoint, ...] = ()
    notes: tuple[str, ...] = ()

    def with_verdict(self, verdict: str) -> list[Suggestion]:
        """The suggestions with this verdict, the largest gain first."""
        chosen = [s for s in self.suggestions if s.verdict == verdict]
        return sorted(
            chosen, key=lambda s: -(s.gain_frac if s.gain_frac is not None else -math.inf)
        )

    @property
    def knee(self) -> BatchPoint | None:
        """The least batch size that reaches :data:`KNEE_FRAC` of the best throughput seen; None
        without a sweep.
        """
        return _knee(self.sweep, lambda point: point.samples_per_s)

    @property
    def knee_line(self) -> str:
        """That page faults decide where the knee is, and what would end them; empty where they do
        not.
        """
        here, without = self.knee, _knee(self.sweep, lambda point: point.faultless_samples_per_s)
        if here is None or without is None or here.batch_size == without.batch_size:
            return ""
        jump = max(self.sweep, key=lambda point: point.page_faults_s / point.step_s)
        return (
            "page faults decide where the knee is: malloc gets memory anew from the system in each"
            f" step ({format_percent(jump.page_faults_s / jump.step_s)} of the step at batch size"
            f" {jump.batch_size}); without them it would be at {without.batch_size}"
            f" ({malloc_of('tuned').settings} keeps the memory)"
        )


def _knee(sweep: Sequence[BatchPoint], rate: Callable[[BatchPoint], float]) -> BatchPoint | None:
    best = max(map(rate, sweep), default=0.0)
    return next((point for point in sweep if rate(point) >= KNEE_FRAC * best), None)


def advise(
    base: Prediction, target: Target | None, log: Callable[[str], None] = lambda line: None
) -> Advice:
    """What could be changed about a predicted step, and what each change is predicted to bring.

    `target` is what the step was recorded from; None where there is only its trace, and then
    threads and malloc are all that can be changed. Every change is recorded anew under fake
    tensors. Nothing is measured.
    """
    return _Adviser(base, target, log).advise()


class _Adviser:
    def __init__(self, base: Prediction, target: Target | None, log: Callable[[str], None]) -> None:
        if base.step.total_s is None:
            raise DlperfError(
                f"predictor {base.predictor!r} does not speak of the whole step; explain with"
                " calibrated"
            )
        self.base, self.target, self.log = base, target, log
        self.base_sample_s = base.step.total_s / base.trace.batch_size
        self.base_unsure_frac = unsure_frac(base.prices.items)
        self.notes: list[str] = []
        self._built: weakref.WeakSet[object] = weakref.WeakSet()
        self._keep: object = None
        self._traces: dict[tuple[tuple[Edit, ...], int | None], Trace | DlperfError] = {}

    def advise(self) -> Advice:
        base, trace = self.base, self.base.trace
        considered = candidates(trace, base.machine, base.threads, self.target is not None)
        if self.target is not None:
            considered += self._activations()
        exact = {candidate.variant.name: candidate.is_exact for candidate in considered}
        found = [self._judge(candidate) for candidate in considered]
        widths: tuple[Width, ...] = ()
        sweep: tuple[BatchPoint, ...] = ()
        if self.target is None:
            self.notes.append(
                "a trace file has no code to change: threads and malloc alone are considered; name"
                " the target it was recorded from for the rest"
            )
        else:
            sweep, judged = self._batch_sizes()
            found += judged
            widths, judged = self._widths()
            found += judged
            if trace.inference:
                found.append(
                    self._judge(
                        Candidate(
                            Variant("inference_mode", (Edit("inference-mode"),)),
                            "with torch.inference_mode(): around the forward",
                        )
                    )
                )
            elif not any(op.phase == "zero_grad" for op in trace.ops):
                found.append(
                    Suggestion(
                        Variant("gradients to None"),
                        "",
                        DOES_NOT_APPLY,
                        "zero_grad sets gradients to None already",
                    )
                )
        together = self._together(
            [s for s in found if s.verdict == PAYS and exact.get(s.variant.name, False)]
        )
        if together is not None:
            found.append(together)
        return Advice(tuple(found), widths, sweep, tuple(dict.fromkeys(self.notes)))

    # -- one candidate -----------------------------------------------------------------------------

    def record(self, variant: Variant) -> Trace:
        """The variant's step. Raises DlperfError where it cannot be made."""
        if not variant.needs_code:
            return self.base.trace
        key = variant.edits, variant.batch_size
        if key not in self._traces:
            assert self.target is not None
            target = (
                self.target if variant.batch_size is None else self.target.at(variant.batch_size)
            )
            try:
                self._traces[key] = recording.record_target(
                    target.changed(lambda built: edit_built(self._fresh(built), variant.edits))
                )
            except DlperfError as error:  # WorkFailed included: the changed model raises
                self._traces[key] = error
        recorded = self._traces[key]
        if isinstance(recorded, DlperfError):
            raise recorded
        return recorded

    def _fresh(self, built: Built) -> Built:
        """Refuse to change a model that the builder returns twice: the change would stay in it."""
        if any(module in self._built for module in built.model.modules()):
            raise NotApplicable(
                "the target hands out the same modules every time; name a function that builds new"
                " ones"
            )
        if not len(self._built):
            self._built.update(built.model.modules())
            self._keep = built.model
        return built

    def predict(self, variant: Variant) -> Prediction:
        """The variant predicted. Raises DlperfError where it cannot be recorded."""
        found = predict_under(
            self.record(variant),
            self.base.machine,
            variant.threads or self.base.threads,
            variant.malloc,
        )
        return found.cross_machine() if self.base.is_cross_machine else found

    def _judge(self, candidate: Candidate) -> Suggestion:
        variant = candidate.variant
        self.log(f"considering {variant.name}")
        try:
            return self._judged(candidate, self.predict(variant))
        except DlperfError as error:
            return Suggestion(
                variant, candidate.how, DOES_NOT_APPLY, _reason(error), candidate.caveat
            )

    def _judged(self, candidate: Candidate, prediction: Prediction) -> Suggestion:
        step_s = prediction.step.total_s
        assert step_s is not None
        batch_size = prediction.trace.batch_size
        sample_s = step_s / batch_size
        gain = self.base_sample_s / sample_s - 1.0 if step_s else 0.0
        unsure = unsure_frac(prediction.prices.items)
        # What is as unsure before as after cancels, whether the rest of the step shrank beside it
        # or all of the step grew.
        more_unsure_s = unsure * sample_s - self.base_unsure_frac * self.base_sample_s
        newly_unsure_frac = min(
            more_unsure_s / sample_s if sample_s else 0.0, unsure - self.base_unsure_frac
        )
        verdict, reason = (PAYS, "") if gain >= LEAST_GAIN_FRAC else (DOES_NOT_PAY, _why_not(gain))
        if newly_unsure_frac > MOST_UNSURE_FRAC:
            verdict, reason = (
                UNSURE,
                (
                    f"{format_percent(unsure)} of its time stands on extrapolated or unpriced ops;"
                    f" {self._missing(prediction)}"
                ),
            )
        return Suggestion(
            candidate.variant,
            candidate.how,
            verdict,
            reason,
            candidate.caveat,
            batch_size,
            prediction.threads,
            step_s,
            gain,
            unsure,
            prediction.step.peak_memory_bytes,
        )

    def _missing(self, prediction: Prediction) -> str:
        """The ops that a calibration of this variant would have to measure."""
        seconds: dict[str, float] = {}
        for item in prediction.prices.items:
            if item.op >= 0 and item.source in ("extrapolated", "unpriced"):
                op = prediction.trace.ops[item.op]
                name = f"{op.packet} in {op.inputs[0].dtype}" if op.inputs else op.packet
                seconds[name] = seconds.get(name, 0.0) + item.seconds
        names = sorted(seconds, key=lambda name: -seconds[name])[:3]
        return (
            f"the machine file says too little of {', '.join(names)}"
            if names
            else "the machine file says too little of its setting"
        )

    # -- groups of candidates ----------------------------------------------------------------------

    def _activations(self) -> list[Candidate]:
        """Activations in place: all that autograd allows, found by recording them."""
        safe = activations(self.base.trace)
        flags = self._types_with_flag(safe)
        chosen = tuple(name for kind, names in safe.items() if kind in flags for name in names)
        if not chosen:
            return []
        n_all, chosen = len(chosen), self._allowed(chosen)
        if len(chosen) < n_all:
            self.notes.append(
                f"{n_all - len(chosen)} activation(s) cannot work in place: autograd needs what"
                " they would overwrite"
            )
        if not chosen:
            return []
        how = (
            "inplace=True for"
            f" {', '.join(chosen[:4])}{f' and {len(chosen) - 4} more' if len(chosen) > 4 else ''}"
        )
        return [Candidate(Variant("in-place activations", (Edit("in-place", chosen),)), how)]

    def _types_with_flag(self, by_type: dict[str, list[str]]) -> set[str]:
        """The types whose modules can work in place and do not yet: asked of the model itself while
        it is built anew.
        """
        found: set[str] = set()

        def look(built: Built) -> Built:
            for kind, names in by_type.items():
                if all(
                    getattr(built.model.get_submodule(name), "inplace", None) is False
                    for name in names
                    if _has(built, name)
                ):
                    found.update([kind] if all(_has(built, name) for name in names) else [])
            return self._fresh(built)

        assert self.target is not None
        try:
            recording.record_target(self.target.changed(look))
        except DlperfError:
            return set()
        return found

    def _allowed(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the named activations that can work in place, by halving until what fails is
        alone.
        """
        if self._records("in-place", names):
            return names
        half = len(names) // 2
        return (*self._allowed(names[:half]), *self._allowed(names[half:])) if half else ()

    def _records(self, kind: str, layers: Sequence[str]) -> bool:
        try:
            self.record(Variant(kind, (Edit(kind, tuple(layers)),)))
        except DlperfError:
            return False
        return True

    def _batch_sizes(self) -> tuple[tuple[BatchPoint, ...], list[Suggestion]]:
        """Throughput over batch size, and the knee as a suggestion where it is another size than
        the step's.
        """
        base = self.base
        assert base.step.total_s is not None
        own = BatchPoint.of(base)
        points: list[BatchPoint] = []
        predictions: dict[int, Prediction] = {}
        most_bytes = MOST_MEMORY_FRAC * (base.machine.cpu.memory_bytes or math.inf)
        for size in sorted([own.batch_size, *batch_sizes(own.batch_size)]):
            if size == own.batch_size:
                points.append(own)
                continue
            self.log(f"considering batch size {size}")
            try:
                prediction = self.predict(Variant(f"batch size {size}", batch_size=size))
            except DlperfError as error:
                self.notes.append(f"batch size {size}: {_reason(error)}")
                continue
            if [op.signature for op in prediction.trace.ops] == [
                op.signature for op in base.trace.ops
            ]:
                self.notes.append(
                    "the target builds the same step at every batch size: it ignores its argument"
                )
                return (), []
            if (prediction.step.peak_memory_bytes or 0) > most_bytes:
                self.notes.append(
                    f"batch size {size} would take more than {format_percent(MOST_MEMORY_FRAC)} of"
                    " the machine's memory"
                )
                break
            points.append(BatchPoint.of(prediction))
            predictions[size] = prediction
            if size > own.batch_size and len(points) > 2 and _grows_no_more(*points[-2:]):
                break  # past the knee
        swept = Advice((), sweep=tuple(points))
        knee = swept.knee
        if swept.knee_line:
            self.notes.append(swept.knee_line)
        caveat = "another batch size trains differently (learning rate, generalisation)"
        if knee is None or knee.batch_size == own.batch_size:
            reason = f"the knee of {points[0].batch_size}..{points[-1].batch_size} is here"
            return tuple(points), (
                [Suggestion(Variant("batch size"), "", DOES_NOT_PAY, reason, caveat)]
                if len(points) > 1
                else []
            )
        size = knee.batch_size
        judged = self._judged(
            Candidate(
                Variant(f"batch size {size}", batch_size=size),
                f"a batch of {size}",
                caveat,
                is_exact=False,
            ),
            predictions[size],
        )
        if (
            judged.verdict == DOES_NOT_PAY
        ):  # a smaller one, with the same throughput for less memory
            share = knee.samples_per_s / max(point.samples_per_s for point in points)
            judged = replace(
                judged,
                reason=(
                    f"already has {format_percent(share)} of the best throughput, in"
                    f" {format_bytes(knee.peak_memory_bytes)}"
                ),
            )
        return tuple(points), [judged]

    def _widths(self) -> tuple[tuple[Width, ...], list[Suggestion]]:
        """The dearest layers whose width is no multiple of the block, one by one, and all that can
        be widened at once.
        """
        odd = self._odd_widths()
        found = []
        possible = []
        for name, width in list(odd.items())[:MOST_WIDTHS]:
            self.log(f"considering {rounded(width)} instead of {width} outputs of {name}")
            try:
                step_s = self.predict(Variant(name, (Edit("widen", (name,)),))).step.total_s
            except DlperfError as error:
                found.append(Width(name, width, rounded(width), None, _reason(error)))
                continue
            assert step_s is not None
            assert self.base.step.total_s is not None
            possible.append(name)
            found.append(Width(name, width, rounded(width), step_s / self.base.step.total_s - 1.0))
        caveat = "more parameters: another network, trained anew"
        if not odd:
            return (), [
                Suggestion(
                    Variant("wider layers"),
                    "",
                    DOES_NOT_APPLY,
                    f"every width is a multiple of {BLOCK}",
                )
            ]
        # The ends of skip connections can only be widened together.
        for names in (tuple(odd)[:-1] if len(odd) > 1 else (), tuple(possible)):
            if names and self._records("widen", names):
                text = ", ".join(
                    f"{name} {odd[name]} -> {rounded(odd[name])}" for name in names[:6]
                ) + (" ..." if len(names) > 6 else "")
                variant = Variant("wider layers", (Edit("widen", names),))
                return tuple(found), [self._judge(Candidate(variant, text, caveat, is_exact=False))]
        reason = "; ".join(dict.fromkeys(f"{width.layer}: {width.reason}" for width in found[:2]))
        return tuple(found), [
            Suggestion(Variant("wider layers"), "", DOES_NOT_APPLY, reason, caveat)
        ]

    def _odd_widths(self) -> dict[str, int]:
        """Convolutions and linear layers whose output width is no multiple of the block, the
        dearest first (the last to run at the very end).
        """
        seconds: dict[str, float] = {}
        for item in self.base.prices.items:
            seconds[item.layer] = seconds.get(item.layer, 0.0) + item.seconds
        odd: dict[str, int] = {}
        for layer in self.base.trace.layers:
            weights = dict(layer.parameters)
            if (
                layer.is_leaf
                and layer.type.startswith(("Conv", "Linear"))
                and "weight" in weights
                and layer.outputs
            ):
                place = (
                    -1 if layer.type.startswith("Linear") else -(len(weights["weight"].shape) - 1)
                )
                width = (
                    layer.outputs[0].shape[place] if len(layer.outputs[0].shape) >= -place else 0
                )
                if width and width % BLOCK:
                    odd[layer.name] = width
        last = list(odd)[-1:]
        return {
            name: odd[name]
            for name in sorted(odd, key=lambda name: (name in last, -seconds.get(name, 0.0)))
        }

    def _together(self, paying: Sequence[Suggestion]) -> Suggestion | None:
        """Everything that pays and leaves the training as it is, at once; of optimizers, threads
        and allocators the best.
        """
        ranked = sorted(paying, key=lambda s: -(s.gain_frac or 0.0))
        edits: list[Edit] = []
        threads = malloc = None
        names = []
        for suggestion in ranked:
            variant = suggestion.variant
            if any(edit.kind in ("fused", "foreach") for edit in variant.edits) and any(
                edit.kind in ("fused", "foreach") for edit in edits
            ):
                continue
            if (variant.threads and threads) or (variant.malloc and malloc):
                continue
            edits += variant.edits
            threads, malloc = threads or variant.threads, malloc or variant.malloc
            names.append(variant.name)
        if len(names) < 2:
            return None
        edits.sort(
            key=lambda edit: edit.kind in ("fused", "foreach")
        )  # an optimizer is made anew once its parameters stand
        return self._judge(
            Candidate(
                Variant("together", tuple(edits), threads=threads, malloc=malloc), " + ".join(names)
            )
        )


def _grows_no_more(before: BatchPoint, after: BatchPoint) -> bool:
    """Whether throughput grows no more, page faults or not: those come and go with malloc's
    thresholds, and a jump of theirs is no knee.
    """
    least = 1.0 + LEAST_GAIN_FRAC
    return (
        after.samples_per_s < least * before.samples_per_s
        and after.faultless_samples_per_s < least * before.faultless_samples_per_s
    )


def unsure_frac(items: Sequence[Item]) -> float:
    """The share of the time that stands on extrapolated or unpriced items."""
    total = math.fsum(item.seconds for item in items)
    return (
        math.fsum(item.seconds for item in items if item.source in ("extrapolated", "unpriced"))
        / total
        if total
        else 0.0
    )


def baseline_of(base: Prediction) -> Suggestion:
    """The step as it is, in the form of a suggestion."""
    return Suggestion(
        replace(BASELINE),
        "",
        DOES_NOT_PAY,
        batch_size=base.trace.batch_size,
        threads=base.threads,
        step_s=base.step.total_s,
        gain_frac=0.0,
        unsure_frac=unsure_frac(base.prices.items),
        peak_memory_bytes=base.step.peak_memory_bytes,
    )


def _why_not(gain_frac: float) -> str:
    if gain_frac < -LEAST_GAIN_FRAC:
        return "predicted to be slower"
    return f"less than {format_percent(LEAST_GAIN_FRAC)}"


def _reason(error: DlperfError) -> str:
    """The error without the target's name in front."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:197] + "..."


def _has(built: Built, name: str) -> bool:
    try:
        built.model.get_submodule(name)
    except AttributeError:
        return False
    return True
