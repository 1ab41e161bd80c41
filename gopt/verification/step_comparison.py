"""The judgements of one step of source and ranks.

A value is held to contract section 7 first. A failing value is checked again from the ranks' own states, without
rounding of earlier steps: local gradients must be the source's on each batch, up to a multiple of measured rounding,
and new states must be the source's update of the mean of these very gradients, within contract section 7. So a gradient
of noise alone raises no alarm, however large the optimizer's steps, and an error in the reduction or update is seen all
the same. Where the ranks' terms of an element cancel, the result of any order of summation is as right. What rounding
inside the source's own step may be all of is compared in float64 too."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from gopt.artifact.manifest_entries import LocalState
from gopt.artifact.pieces import cut
from gopt.errors import RunError, UnsupportedError
from gopt.verification.all_ranks import RankResults, Tamper
from gopt.verification.compare import (
    StepComparisons,
    Values,
    distance,
    finite,
    ratio,
    same_bits,
)
from gopt.verification.floors import OwnStep, span, summation_orders
from gopt.verification.in_float64 import local_rounding, rounds_inside, update_rounding, wide
from gopt.verification.reference_step import Batches, LocalResults, ReferenceProgram, ReferenceStep, as_shown
from gopt.verification.sensitivity import Measurement
from gopt.verification.variants import PLAIN, Variant

if TYPE_CHECKING:
    from gopt.verification.variant_runner import VariantRunner


_KnownErrors = dict[str, tuple[np.ndarray, float]]
"""State -> a rank's value that was compared already, and its error: replicas are mostly equal bit by bit."""


@dataclass(slots=True)
class StepComparison:
    """A step of a variant. ``own``: the ranks' values before the step; ``lost``: values that are not finite in the
    reference; ``tamper``: as for the ranks' step."""

    runner: VariantRunner
    variant: Variant
    number: int
    batches: Batches
    settings: Values
    own: Values
    made: RankResults
    not_finite: Sequence[str]
    tamper: Tamper | None

    def judge(self, step: ReferenceStep, begin: Values) -> None:
        """Compare with ``step`` of the source; ``begin``: the states from which changes are counted."""
        comparisons = self._comparisons({})
        self._outputs(comparisons, step.local, self.runner.reference.outputs)
        self._metrics(comparisons, step, self.runner.reference.training.metrics, [])
        self._states(comparisons, step.states, begin, None)
        self._copies(comparisons)
        again = comparisons.failing() & {*self.runner.kinds, *self.runner.reference.training.shown}
        if self.variant is PLAIN:
            again |= self._noisy()
        if again:
            comparisons = self._compare_from_own_states(comparisons, again)
        comparisons.write(self.runner.result)

    def _noisy(self) -> set[str]:
        training, noise = self.runner.reference.training, self.runner.noise
        owners = {name for name, gradient in training.gradients.items() if gradient in noise}
        return {s.tensor for s in training.states if s.tensor in owners or s.of in owners} - set(self.not_finite)

    def _compare_from_own_states(self, comparisons: StepComparisons, names: Collection[str]) -> StepComparisons:
        """Judge some values again from the ranks' own states and gradients."""
        runner, reference = self.runner, self.runner.reference
        local = reference.kept(self.variant, self.own, self.settings, self.batches)
        base = reference.finish(self.own, self.settings, local)
        sent = self._sent(base.local)
        update = reference.finish(self.own, self.settings, sent)
        step = OwnStep(reference.training, self.own, runner.noise, names, base, sent, update)
        speaks = self.variant is PLAIN and runner.heard(base)
        # What is equal without an allowance for rounding is so with one, which takes RUNS more steps to measure.
        second = None if speaks else self._second(step)
        if second is None or second.failing():
            moved = Measurement(
                reference, self.variant, self.own, self.settings, self.batches, base, runner.units,
                runner.seed + self.number,
            ).measured()  # fmt: skip
            if self.variant is PLAIN:
                runner.settle(moved, base)
                if runner.measured is not None:  # one run may have said too little
                    runner.noise.update(runner.measured[1].measured().noise(runner.measured[0]))
            ends = summation_orders(reference, self.own, self.settings, sent, update, runner.wire)
            step = replace(step, moved=moved, ends=ends)
            second = self._without_rounding(step, self._second(step))
        merged = comparisons.without(names)
        merged.entries += second.entries
        return merged

    def _second(self, step: OwnStep) -> StepComparisons:
        """Comparisons from the ranks' own states: gradients with those sent, states with their update."""
        names, base = step.names, step.base
        comparisons = self._comparisons(step.floors())
        comparisons.spans, counts = step.spans(self.runner.result.tolerance)
        for name, moves in counts.items():
            self.runner.cancelled[name] = max(moves, self.runner.cancelled.get(name, 0))
        self._outputs(comparisons, base.local, names, step)
        self._metrics(comparisons, step.update, names, step.ends)
        self._gradients(comparisons, base.local, step.sent, step)
        statistics = {state.tensor: base.states[state.tensor] for state in self.runner.reference.statistics}
        self._states(comparisons, step.update.states | statistics, self.own, names)
        return comparisons

    def _without_rounding(self, step: OwnStep, second: StepComparisons) -> StepComparisons:
        """Judge failing results in float64, where rounding inside the source's own step may be all that is apart."""
        runner, reference = self.runner, self.runner.reference
        names = second.failing() - runner.refuted
        if not names or not rounds_inside(reference):
            return second
        try:
            step = replace(step, rounding=self._rounding(step))
        except (RunError, UnsupportedError):
            return second
        allowed = self._second(step)
        names &= step.rounding.keys() - allowed.failing()
        if not names:
            return second
        try:
            exact = self._in_float64(names)
        except (RunError, UnsupportedError) as error:
            exact = self._comparisons({})
            for name in names:
                why = f"rounding inside the source's own step makes {step.share(name):.2g} of what is compared"
                runner.result.doubt(name, f"{why}; ranks are compared in float64, but {error.message}")
        wrong = exact.failing()
        runner.refuted |= wrong
        for name in names - wrong:
            runner.rounded[name] = max(step.share(name), runner.rounded.get(name, 0.0))
        judged = second.without(names - wrong)
        judged.entries += [entry for entry in allowed.entries if entry.name in names - wrong]
        judged.entries += exact.entries
        return judged

    def _rounding(self, step: OwnStep) -> dict[str, float]:
        """Return how far rounding inside the source's step moves each value, at most, for several orders of
        summation."""
        exact, reference = self.runner.in_float64().reference, self.runner.reference
        moved: dict[str, float] = {}
        for end in step.ends:
            for name, size in update_rounding(exact, self.own, self.settings, end).items():
                moved[name] = max(size, moved.get(name, 0.0))
        exact.apart = [wide(values) for values in reference.apart]
        wanted = self._wide_step(exact, self.variant)
        return moved | local_rounding(step.base, wanted, [state.tensor for state in reference.statistics])

    def _wide_step(self, exact: ReferenceProgram, variant: Variant) -> ReferenceStep:
        """The source's step from the ranks' own states in float64."""
        own, settings = wide(self.own), wide(self.settings)
        return exact.finish(own, settings, exact.kept(variant, own, settings, self._wide_batches()))

    def _wide_batches(self) -> Batches:
        return [[wide(batch) for batch in turn] for turn in self.batches]

    def _in_float64(self, names: Collection[str]) -> StepComparisons:
        """Compare the same step of source and ranks in float64."""
        runner, apart_states = self.runner.in_float64(), [wide(values) for values in self.runner.reference.apart]
        own, settings, batches = wide(self.own), wide(self.settings), self._wide_batches()
        variant = replace(self.variant, name=f"{self.variant.name}, in float64", extra=True)
        states = runner.all_ranks.held(own, apart_states)
        runner.reference.apart = apart_states
        made = runner.all_ranks.step(runner.reference, variant, states, settings, batches, self.tamper)
        step = self._wide_step(runner.reference, variant)
        exact = StepComparison(
            runner, variant, self.number, batches, settings, own, made, self.not_finite, self.tamper
        )  # fmt: skip
        comparisons = exact.compare(step, own, names)
        runner.reference.forget()
        return comparisons

    def compare(self, step: ReferenceStep, begin: Values, names: Collection[str]) -> StepComparisons:
        """Compare some values with a step of the source."""
        comparisons = self._comparisons({})
        self._outputs(comparisons, step.local, names)
        self._metrics(comparisons, step, names, [])
        self._gradients(comparisons, step.local, self._sent(step.local), names=names)
        self._states(comparisons, step.states, begin, names)
        again = comparisons.failing()
        return self._compare_from_own_states(comparisons, again) if again else comparisons

    def _sent(self, local: LocalResults) -> LocalResults:
        """The ranks' gradients, if visible; else the reference's."""
        pairs = zip(local.gradients, self.made.gradients)
        gradients = [[{**mine, **observed} for mine, observed in zip(*turn)] for turn in pairs]
        return replace(local, gradients=gradients)

    def _gradients(
        self, comparisons: StepComparisons, local: LocalResults, sent: LocalResults, step: OwnStep | None = None,
        names: Collection[str] | None = None,
    ) -> None:  # fmt: skip
        for turn, (wanted, had) in enumerate(zip(local.gradients, sent.gradients)):
            for r, (mine, theirs) in enumerate(zip(wanted, had)):
                for name, value in mine.items():
                    if names is not None and name not in names:
                        continue
                    if step is not None:
                        comparisons.floors[name] = step.gradient(turn, r, name)
                    rank = self.runner.all_ranks.which.index(r)
                    comparisons.whole(rank, name, "gradient", theirs[name], value, np.zeros_like(value))

    def _comparisons(self, floors: dict[str, float]) -> StepComparisons:
        return StepComparisons(self.runner.result.tolerance, self.variant.name, self.number, floors)

    def _outputs(
        self, comparisons: StepComparisons, local: LocalResults, names: Collection[str], step: OwnStep | None = None
    ) -> None:  # fmt: skip
        """Compare the losses, and metrics of the forward, among ``names``."""
        for turn, rank, name, value in self.made.shown:
            if name not in names:
                continue
            which = self.runner.all_ranks.which[rank]
            wanted = local.outputs[turn][which][name]
            if step is not None:
                comparisons.floors[name] = step.output(turn, which, name)
            self._shown(comparisons, rank, name, value, wanted)

    def _metrics(
        self, comparisons: StepComparisons, step: ReferenceStep, names: Collection[str], ends: Sequence[ReferenceStep]
    ) -> None:
        """Compare the metrics of the update among ``names``; ``ends``: the update for orders of summation."""
        for rank, outputs in enumerate(self.made.outputs):
            which = self.runner.all_ranks.which[rank]
            for name, wanted in step.shown(which).items():
                if name not in names or name not in outputs:
                    continue
                value = as_shown(outputs[name])
                if ends and value.shape == wanted.shape:
                    shown = [end.shown(which)[name] for end in ends]
                    low, high, _ = span(shown, np.zeros_like(wanted), self.runner.result.tolerance)
                    wanted = np.clip(value, low, high).astype(wanted.dtype)
                self._shown(comparisons, rank, name, value, wanted)

    def _shown(self, comparisons: StepComparisons, rank: int, name: str, value: np.ndarray, wanted: np.ndarray) -> None:
        """Compare a loss or metric; a metric that is no number equals no number."""
        loss = name in self.runner.reference.training.losses
        kind = "loss" if loss else "metric"
        if not (name in self.not_finite if loss else np.isnan(wanted).any()):
            comparisons.whole(rank, name, kind, value, wanted, np.zeros_like(value))
        elif finite(value) and not finite(wanted):
            comparisons.enter(rank, name, kind, float("inf"))

    def _states(
        self, comparisons: StepComparisons, wanted: Values, start: Values, names: Collection[str] | None
    ) -> None:
        """Compare every rank's part of the states, or of the named states."""
        errors: _KnownErrors = {}
        for rank, rank_programs in enumerate(self.runner.all_ranks.ranks):
            for state in rank_programs.states:
                if not state.copy and not state.local:
                    value = np.asarray(self.made.outputs[rank][state.output]).reshape(-1)
                    self._pieces(comparisons, rank, state, value, wanted, start, names, errors)
        comparisons.close(wanted, start)

    def _pieces(
        self, comparisons: StepComparisons, rank: int, state: LocalState, flat: np.ndarray, wanted: Values,
        start: Values, names: Collection[str] | None, errors: _KnownErrors,
    ) -> None:  # fmt: skip
        """Compare the pieces of one rank's state: a whole tensor at once, a part as a share of the tensor."""
        offset = 0
        for piece in state.pieces:
            name = piece.tensor
            value = flat[offset : offset + piece.elements]
            offset += piece.elements
            kind = self.runner.kinds[name]
            if names is not None and name not in names:
                continue
            reference = cut(piece, wanted[name])
            if name in comparisons.spans and value.shape == reference.shape:
                low, high = (cut(piece, end) for end in comparisons.spans[name])
                reference = np.clip(value, low, high).astype(reference.dtype)
            if name in self.not_finite:
                if finite(value) and not finite(reference):
                    comparisons.enter(rank, name, kind, float("inf"))
            elif piece.place == (None, None) and value.size == wanted[name].size:
                before = errors.get(name)
                if before is None or not same_bits(value, before[0]):
                    before = value, comparisons.error(name, value, reference, start[name].reshape(-1))
                    errors[name] = before
                comparisons.enter(rank, name, kind, before[1])
            else:
                comparisons.part(rank, name, kind, distance(value, reference))
        if offset != flat.size:
            comparisons.enter(rank, state.input, "size", float("inf"))

    def _copies(self, comparisons: StepComparisons) -> None:
        """A narrow copy must be exactly the cast of the ranks' present wide state."""
        copies = [
            (r, state) for r, rank in enumerate(self.runner.all_ranks.ranks) for state in rank.states if state.copy
        ]
        wide = self.runner.all_ranks.joined("output", self.made.outputs) if copies else {}
        for rank, state in copies:
            name = state.pieces[0].tensor
            value = np.asarray(self.made.outputs[rank][state.output]).reshape(-1)
            if name not in self.not_finite:
                with np.errstate(over="ignore"):
                    wanted = cut(state.pieces[0], wide[name]).astype(value.dtype)
                comparisons.enter(rank, state.input, "copy", ratio(distance(value, wanted), 0.0))
