"""Which changes would pay: each candidate is recorded anew, predicted, and compared with the step
as it is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from dlperf.advice.batch_sizes import BatchPoint, batch_sizes, grows_no_more, knee_line, knee_of
from dlperf.advice.breakdown import step_s_of, sums_by_name
from dlperf.advice.transformations import edit_built
from dlperf.advice.variants import (
    DOES_NOT_APPLY,
    DOES_NOT_PAY,
    LEAST_GAIN_FRAC,
    PAYS,
    UNSURE,
    Edit,
    NotApplicable,
    Suggestion,
    Variant,
    activations,
    candidates,
)
from dlperf.advice.widths import BLOCK, rounded
from dlperf.core.errors import DlperfError
from dlperf.core.prediction import Item
from dlperf.core.text import counted
from dlperf.core.trace import Trace
from dlperf.core.units import format_bytes, format_percent
from dlperf.forecast.prediction import Prediction, predict
from dlperf.recorder import recording
from dlperf.recorder.targets import Built, Target

MOST_UNSURE_FRAC = 0.25
"""More of a variant's time than this on extrapolated or unpriced ops, beyond what the baseline has
on such, and nothing is concluded from it.
"""
MOST_MEMORY_FRAC = 0.8
"""Share of the machine's memory that a suggested batch size may take."""
MOST_WIDTHS = 8
"""Layers whose width alone is considered, the most expensive first: each is a recording."""
FREE_FRAC = 0.01
"""A wider layer that costs less than this of the step counts as free."""
_WITHOUT_PRICE = ("extrapolated", "unpriced")


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
        """Whether the additional outputs cost next to nothing."""
        return self.cost_frac is not None and self.cost_frac <= FREE_FRAC


@dataclass(frozen=True)
class Advice:
    """What was considered: the suggestions, the most expensive layers' widths, throughput over
    batch size, and what could not be considered.
    """

    suggestions: tuple[Suggestion, ...]
    widths: tuple[Width, ...] = ()
    sweep: tuple[BatchPoint, ...] = ()
    notes: tuple[str, ...] = ()

    def with_verdict(self, verdict: str) -> list[Suggestion]:
        """The suggestions with this verdict, the largest gain first."""
        return sorted(
            (s for s in self.suggestions if s.verdict == verdict),
            key=lambda s: -(s.gain_frac if s.gain_frac is not None else -math.inf),
        )


def advise(
    base: Prediction, target: Target | None, log: Callable[[str], None] = lambda line: None
) -> Advice:
    """What could be changed about a predicted step, and what each change is predicted to bring.

    `target` is what the step was recorded from; None where there is only its trace, and then
    threads and malloc are all that can be changed. Every change is recorded anew under fake
    tensors. Nothing is measured. Raises DlperfError for a predictor without whole steps.
    """
    return _Adviser(base, target, log).advise()


class _Adviser:
    def __init__(self, base: Prediction, target: Target | None, log: Callable[[str], None]) -> None:
        self.base, self.target, self.log = base, target, log
        self.base_s = step_s_of(base)
        self.notes: list[str] = []
        self._first_modules: set[nn.Module] = set()
        self._record = functools.cache(self._record_anew)

    def advise(self) -> Advice:
        base, trace = self.base, self.base.trace
        widths: tuple[Width, ...] = ()
        sweep: tuple[BatchPoint, ...] = ()
        considered = candidates(trace, base.machine, base.threads, self.target is not None)
        if self.target is not None:
            considered += self._activations()
        found = [self._judge(variant) for variant in considered]
        if self.target is None:
            self.notes.append(
                "a trace file has no code to change: threads and malloc alone are considered; name"
                " the target it was recorded from for the rest"
            )
        else:
            sweep, judged = self._batch_sizes()
            found += judged
            widths, suggestion = self._widths()
            found.append(suggestion)
            if trace.inference:
                how = "with torch.inference_mode(): around the forward"
                edits = (Edit("inference-mode"),)
                found.append(self._judge(Variant("inference_mode", edits, how=how, is_exact=False)))
            elif not any(op.phase == "zero_grad" for op in trace.ops):
                reason = "zero_grad sets gradients to None already"
                found.append(Suggestion(Variant("gradients to None"), DOES_NOT_APPLY, reason))
        found += self._together([s for s in found if s.verdict == PAYS and s.variant.is_exact])
        return Advice(tuple(found), widths, sweep, tuple(dict.fromkeys(self.notes)))

    # -- one variant -------------------------------------------------------------------------------

    def _record_anew(self, edits: tuple[Edit, ...], batch_size: int | None = None) -> Trace:
        """The step with changes. Raises DlperfError where it cannot be made."""
        assert self.target is not None
        target = self.target if batch_size is None else self.target.at(batch_size)
        if edits:
            target = target.changed(lambda built: edit_built(self._fresh(built), edits))
        return recording.record_target(target)

    def _fresh(self, built: Built) -> Built:
        """Refuse to change a model that the builder returns twice: the change would stay in it."""
        modules = set(built.model.modules())
        if modules & self._first_modules:
            raise NotApplicable(
                "the target hands out the same modules every time; name a function that builds new"
                " ones"
            )
        self._first_modules = self._first_modules or modules
        return built

    def predict(self, variant: Variant) -> Prediction:
        """The variant predicted. Raises DlperfError where it cannot be recorded."""
        base, trace = self.base, self.base.trace
        if variant.needs_code:
            trace = self._record(variant.edits, variant.batch_size)
        threads, malloc = variant.threads or base.threads, variant.malloc or "default"
        return predict(trace, base.machine, threads, malloc=malloc)

    def _judge(self, variant: Variant) -> Suggestion:
        self.log(f"considering {variant.name}")
        try:
            return self._judged(variant, self.predict(variant))
        except DlperfError as error:  # WorkFailed included: the changed model raises
            return Suggestion(variant, DOES_NOT_APPLY, _reason(error))

    def _judged(self, variant: Variant, prediction: Prediction) -> Suggestion:
        base_sample_s = self.base_s / self.base.trace.batch_size
        base_unsure = unsure_frac(self.base.prices.items)
        step_s, batch_size = step_s_of(prediction), prediction.trace.batch_size
        sample_s = step_s / batch_size
        gain = base_sample_s / sample_s - 1.0 if step_s else 0.0
        unsure = unsure_frac(prediction.prices.items)
        # What is as unsure before as after cancels, whether the rest of the step shrank or all of
        # the step grew.
        more_unsure_s = unsure * sample_s - base_unsure * base_sample_s
        newly_unsure = min(more_unsure_s / sample_s if sample_s else 0.0, unsure - base_unsure)
        verdict, reason = PAYS, ""
        if newly_unsure > MOST_UNSURE_FRAC:
            verdict = UNSURE
            reason = (
                f"{format_percent(unsure)} of its time stands on extrapolated or unpriced ops;"
                f" {_missing(prediction)}"
            )
        elif gain < LEAST_GAIN_FRAC:
            is_slower = gain < -LEAST_GAIN_FRAC
            verdict = DOES_NOT_PAY
            reason = (
                "predicted to be slower"
                if is_slower
                else f"less than {format_percent(LEAST_GAIN_FRAC)}"
            )
        return Suggestion(
            variant,
            verdict,
            reason,
            batch_size,
            prediction.threads,
            step_s,
            gain,
            unsure,
            prediction.step.peak_memory_bytes,
        )

    # -- groups of variants ------------------------------------------------------------------------

    def _activations(self) -> list[Variant]:
        """Activations in place: all that autograd allows, found by recording them."""
        possible = self._not_in_place(activations(self.base.trace))
        chosen = self._allowed(possible)
        if len(chosen) < len(possible):
            self.notes.append(
                f"{counted(len(possible) - len(chosen), 'activation')} cannot work in place:"
                " autograd needs what they would overwrite"
            )
        if not chosen:
            return []
        more = f" and {len(chosen) - 4} more" if len(chosen) > 4 else ""
        how = f"inplace=True for {', '.join(chosen[:4])}{more}"
        return [Variant("in-place activations", (Edit("in-place", chosen),), how=how)]

    def _not_in_place(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of the named modules that can work in place and do not yet, which the model itself
        shows while it is built anew.
        """
        found: list[str] = []

        def look(built: Built) -> Built:
            modules = dict(built.model.named_modules())
            found[:] = [n for n in names if getattr(modules.get(n), "inplace", None) is False]
            return self._fresh(built)

        assert self.target is not None
        try:
            recording.record_target(self.target.changed(look))
        except DlperfError:
            return ()
        return tuple(found)

    def _allowed(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the named activations that can work in place, by halving until what fails is
        alone.
        """
        if not names or self._records(Edit("in-place", names)):
            return names
        half = len(names) // 2
        return (*self._allowed(names[:half]), *self._allowed(names[half:])) if half else ()

    def _records(self, edit: Edit) -> bool:
        try:
            self._record((edit,), None)
        except DlperfError:
            return False
        return True

    def _batch_sizes(self) -> tuple[tuple[BatchPoint, ...], list[Suggestion]]:
        """Throughput over batch size, and the knee as a suggestion where it is another size than
        the step's.
        """
        base, own = self.base, self.base.trace.batch_size
        points: list[BatchPoint] = []
        predictions: dict[int, Prediction] = {}
        most_bytes = MOST_MEMORY_FRAC * (base.machine.cpu.memory_bytes or math.inf)
        for size in batch_sizes(own):
            if size == own:
                points.append(BatchPoint.of(base))
                continue
            self.log(f"considering batch size {size}")
            try:
                prediction = self.predict(Variant(f"batch size {size}", batch_size=size))
            except DlperfError as error:
                self.notes.append(f"batch size {size}: {_reason(error)}")
                continue
            own_ops = [op.signature for op in base.trace.ops]
            if [op.signature for op in prediction.trace.ops] == own_ops:
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
            if size > own and len(points) > 2 and grows_no_more(*points[-2:]):
                break  # past the knee
        if line := knee_line(points):
            self.notes.append(line)
        knee = knee_of(points)
        if knee is None or len(points) < 2:
            return tuple(points), []
        caveat = "another batch size trains differently (learning rate, generalisation)"
        size = knee.batch_size
        if size == own:
            reason = f"the knee of {points[0].batch_size}..{points[-1].batch_size} is here"
            here = Variant("batch size", caveat=caveat)
            return tuple(points), [Suggestion(here, DOES_NOT_PAY, reason)]
        variant = Variant(
            f"batch size {size}",
            batch_size=size,
            how=f"a batch of {size}",
            caveat=caveat,
            is_exact=False,
        )
        judged = self._judged(variant, predictions[size])
        if judged.verdict == DOES_NOT_PAY:  # a smaller one, with the same throughput, less memory
            share = knee.samples_per_s / max(point.samples_per_s for point in points)
            reason = (
                f"already has {format_percent(share)} of the best throughput, in"
                f" {format_bytes(knee.peak_memory_bytes)}"
            )
            judged = replace(judged, reason=reason)
        return tuple(points), [judged]

    def _widths(self) -> tuple[tuple[Width, ...], Suggestion]:
        """The most expensive layers whose width is no multiple of the block, one by one, and all
        that can be widened at once.
        """
        odd = self._odd_widths()
        variant = Variant("wider layers")
        if not odd:
            reason = f"every width is a multiple of {BLOCK}"
            return (), Suggestion(variant, DOES_NOT_APPLY, reason)
        found = []
        for name, width in list(odd.items())[:MOST_WIDTHS]:
            wider = rounded(width)
            self.log(f"considering {wider} instead of {width} outputs of {name}")
            try:
                step_s = step_s_of(self.predict(Variant(name, (Edit("widen", (name,)),))))
            except DlperfError as error:
                found.append(Width(name, width, wider, None, _reason(error)))
            else:
                found.append(Width(name, width, wider, step_s / self.base_s - 1.0))
        caveat = "more parameters: another network, trained anew"
        # The ends of skip connections can only be widened together.
        possible = tuple(width.layer for width in found if width.cost_frac is not None)
        for names in (tuple(odd)[:-1], possible):
            if names and self._records(Edit("widen", names)):
                texts = [f"{name} {odd[name]} -> {rounded(odd[name])}" for name in names[:6]]
                whole = replace(
                    variant,
                    edits=(Edit("widen", names),),
                    how=", ".join(texts) + (" ..." if len(names) > 6 else ""),
                    caveat=caveat,
                    is_exact=False,
                )
                return tuple(found), self._judge(whole)
        reason = "; ".join(dict.fromkeys(f"{width.layer}: {width.reason}" for width in found[:2]))
        return tuple(found), Suggestion(replace(variant, caveat=caveat), DOES_NOT_APPLY, reason)

    def _odd_widths(self) -> dict[str, int]:
        """Convolutions and linear layers whose output width is no multiple of the block, the most
        expensive first (the last to run at the very end).
        """
        seconds = sums_by_name((item.layer, item.seconds) for item in self.base.prices.items)
        odd: dict[str, int] = {}
        for layer in self.base.trace.layers:
            weights = dict(layer.parameters)
            is_linear = layer.type.startswith("Linear")
            if (
                layer.is_leaf
                and (is_linear or layer.type.startswith("Conv"))
                and "weight" in weights
                and layer.outputs
            ):
                shape = layer.outputs[0].shape
                axis = -1 if is_linear else 1 - len(weights["weight"].shape)
                if len(shape) >= -axis and shape[axis] % BLOCK:
                    odd[layer.name] = shape[axis]
        last = list(odd)[-1:]
        order = sorted(odd, key=lambda name: (name in last, -seconds.get(name, 0.0)))
        return {name: odd[name] for name in order}

    def _together(self, paying: Iterable[Suggestion]) -> list[Suggestion]:
        """Everything that pays and leaves the training as it is, at once; of optimizers, threads
        and allocators the best.
        """
        edits: list[Edit] = []
        threads = malloc = None
        names = []
        for suggestion in sorted(paying, key=lambda s: -(s.gain_frac or 0.0)):
            variant = suggestion.variant
            if (
                (any(map(_makes_optimizer, variant.edits)) and any(map(_makes_optimizer, edits)))
                or (variant.threads and threads)
                or (variant.malloc and malloc)
            ):
                continue
            edits += variant.edits
            threads, malloc = threads or variant.threads, malloc or variant.malloc
            names.append(variant.name)
        if len(names) < 2:
            return []
        edits.sort(key=_makes_optimizer)  # an optimizer is made once its parameters stand
        how = " + ".join(names)
        variant = Variant("together", tuple(edits), threads=threads, malloc=malloc, how=how)
        return [self._judge(variant)]


def _makes_optimizer(edit: Edit) -> bool:
    return edit.kind in ("fused", "foreach")


def _missing(prediction: Prediction) -> str:
    """The ops that a calibration of this variant would have to measure."""
    ops = prediction.trace.ops
    named = (
        (f"{ops[item.op].packet} in {ops[item.op].inputs[0].dtype}", item.seconds)
        if ops[item.op].inputs
        else (ops[item.op].packet, item.seconds)
        for item in prediction.prices.items
        if item.op >= 0 and item.source in _WITHOUT_PRICE
    )
    seconds = sums_by_name(named)
    names = sorted(seconds, key=lambda name: -seconds[name])[:3]
    return f"the machine file lacks {', '.join(names) or 'its setting'}"


def unsure_frac(items: Sequence[Item]) -> float:
    """The share of the time that stands on extrapolated or unpriced items."""
    total = math.fsum(item.seconds for item in items)
    unsure = math.fsum(item.seconds for item in items if item.source in _WITHOUT_PRICE)
    return unsure / total if total else 0.0


def _reason(error: DlperfError) -> str:
    """The error without the target's name in front."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:197] + "..."
