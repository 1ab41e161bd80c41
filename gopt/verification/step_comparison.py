"""The judgements of one step of source and ranks.

A value is held to contract section 7 first. A failing value is checked again from the ranks' own states, without
rounding of earlier steps: local gradients must be the source's on each batch, up to a multiple of measured rounding,
and new states must be the source's update of the mean of these very gradients, within contract section 7. So a gradient
of noise alone raises no alarm, however large the optimizer's steps, and an error in the reduction or update is seen all
the same. Where the ranks' terms of an element cancel, the result of any order of summation is as right. What rounding
inside the source's own update may be all of is compared in float64 too."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from gopt.analysis.training import StateKind
from gopt.artifact.manifest_entries import LocalState
from gopt.artifact.pieces import cut
from gopt.errors import RunError, UnsupportedError
from gopt.ir.types import LOW_PRECISION
from gopt.verification.all_ranks import RankResults, Tamper
from gopt.verification.compare import (
    StepComparisons,
    Values,
    allowance,
    distance,
    finite,
    floating,
    ratio,
    same_bits,
)
from gopt.verification.in_float64 import rounds_inside, update_rounding, wide
from gopt.verification.reference_step import Batches, LocalResults, ReferenceStep, as_shown
from gopt.verification.sensitivity import MOST, MULTIPLE, NOISE, UNITS, Measurement, Sensitivity, apart, largest, norm
from gopt.verification.variants import PLAIN, Variant

if TYPE_CHECKING:
    from gopt.verification.variant_runner import VariantRunner


def _floor(noise: float, size: float, share: float = 1.0) -> float:
    """Return what rounding may change, by a measured change of a value, or change, of a size; moved by ``share`` of the
    size, a value is nothing but rounding."""
    return min(MULTIPLE * noise, MOST * size) if noise < share * size else MULTIPLE * noise


@dataclass(frozen=True, slots=True)
class _OwnStep:
    """A step from the ranks' own states, to judge the values in ``names``: ``base`` of the source, and its ``update``
    of the mean of the gradients that ranks ``sent``.

    ``ends``: the update for several orders of summation. ``rounding``: what rounding inside the update makes of a
    value."""

    names: Collection[str]
    base: ReferenceStep
    sent: LocalResults
    update: ReferenceStep
    moved: Sensitivity | None = None
    ends: Sequence[ReferenceStep] = ()
    rounding: Mapping[str, float] = field(default_factory=dict)

    def share(self, name: str, own: Values) -> float:
        """Return rounding as a share of a state's change, or of a metric."""
        if name in self.update.states:
            size = apart(self.update.states[name], own[name])
        else:
            size = max(norm(values[name]) for values in self.update.metrics)
        return self.rounding[name] / size if size else math.inf


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
        step = _OwnStep(names, base, sent, reference.finish(self.own, self.settings, sent))
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
            step = replace(step, moved=moved, ends=self._ends(sent, step.update))
            second = self._without_rounding(step, self._second(step))
        merged = comparisons.without(names)
        merged.entries += second.entries
        return merged

    def _second(self, step: _OwnStep) -> StepComparisons:
        """Comparisons from the ranks' own states: gradients with those sent, states with their update."""
        names, base, moved = step.names, step.base, step.moved
        statistics = {state.tensor for state in self.runner.reference.statistics}
        comparisons = self._comparisons({} if moved is None else self._floors(base, moved, statistics))
        if moved is not None:
            comparisons.spans.update(self._spans(names, step.ends))
            comparisons.floors.update(self._metric_floors(base, moved))
        for name, rounding in step.rounding.items():
            comparisons.floors[name] = comparisons.floors.get(name, 0.0) + MULTIPLE * rounding
        self._outputs(comparisons, base.local, names, moved)
        self._metrics(comparisons, step.update, names, step.ends)
        self._gradients(comparisons, base.local, step.sent, moved)
        new = step.update.states | {name: base.states[name] for name in statistics}
        self._states(comparisons, new, self.own, names)
        return comparisons

    def _floors(self, base: ReferenceStep, moved: Sensitivity, statistics: Collection[str]) -> dict[str, float]:
        """Return the changes of states by rounding."""
        floors = {
            name: _floor(moved.states[name], apart(base.states[name], self.own[name]), NOISE) for name in statistics
        }
        for name in self._of_halves(base):
            # A unit vector hardly turns by a gradient along it: its change is smaller than what rounding makes of it.
            floors[name] = _floor(moved.states[name], apart(base.states[name], self.own[name]))
        for name, value in base.states.items():
            # A sum in another order turns the last place of a half: at most a unit of it is rounding. Of one element it
            # may be, whether the few measured runs turned it or not.
            if value.dtype.name in LOW_PRECISION and name not in statistics:
                unit = UNITS[value.dtype.name]
                one = min(unit * largest(value), MOST * apart(value, self.own[name]))
                floors[name] = max(one, min(MULTIPLE * moved.states[name], unit * norm(value)))
        return floors

    def _without_rounding(self, step: _OwnStep, second: StepComparisons) -> StepComparisons:
        """Judge failing results of the update in float64, where rounding inside the source's own update may be all that
        is apart."""
        runner, reference = self.runner, self.runner.reference
        made = {*step.update.states, *reference.training.metrics} - {*reference.outputs}
        names = second.failing() & made - runner.refuted
        if not names or not rounds_inside(reference):
            return second
        try:
            step = replace(step, rounding=self._rounding(names, step.ends))
        except (RunError, UnsupportedError):
            return second
        allowed = self._second(step)
        names -= allowed.failing()
        if not names:
            return second
        try:
            exact = self._in_float64(names)
        except (RunError, UnsupportedError) as error:
            exact = self._comparisons({})
            for name in names:
                why = f"rounding inside the source's own update makes {step.share(name, self.own):.2g} of its change"
                runner.result.doubt(name, f"{why}; ranks are compared in float64, but {error.message}")
        wrong = exact.failing()
        runner.refuted |= wrong
        for name in names - wrong:
            runner.rounded[name] = max(step.share(name, self.own), runner.rounded.get(name, 0.0))
        judged = second.without(names - wrong)
        judged.entries += [entry for entry in allowed.entries if entry.name in names - wrong]
        judged.entries += exact.entries
        return judged

    def _rounding(self, names: Collection[str], ends: Sequence[ReferenceStep]) -> dict[str, float]:
        """Return how far rounding inside the update moves each value, at most, for several orders of summation."""
        exact, reference = self.runner.in_float64().reference, self.runner.reference
        every = [update_rounding(exact, self.own, self.settings, end) for end in ends]
        moved = {name: max(moved[name] for moved in every) for name in names}
        statistics = [state.tensor for state in reference.statistics if state.tensor in names]
        if statistics:
            exact.apart = [wide(values) for values in reference.apart]
            batches = [[wide(batch) for batch in turn] for turn in self.batches]
            wanted = exact.step(self.variant, wide(self.own), wide(self.settings), batches).states
            local = reference.kept(self.variant, self.own, self.settings, self.batches)
            base = reference.finish(self.own, self.settings, local).states
            moved |= {name: apart(base[name], wanted[name]) for name in statistics}
        return moved

    def _in_float64(self, names: Collection[str]) -> StepComparisons:
        """Compare the same step of source and ranks in float64."""
        runner, apart_states = self.runner.in_float64(), [wide(values) for values in self.runner.reference.apart]
        own, settings = wide(self.own), wide(self.settings)
        batches = [[wide(batch) for batch in turn] for turn in self.batches]
        variant = replace(self.variant, name=f"{self.variant.name}, in float64", extra=True)
        states = runner.all_ranks.held(own, apart_states)
        runner.reference.apart = apart_states
        made = runner.all_ranks.step(runner.reference, variant, states, settings, batches, self.tamper)
        local = runner.reference.kept(variant, own, settings, batches)
        step = runner.reference.finish(own, settings, local)
        exact = StepComparison(
            runner, variant, self.number, batches, settings, own, made, self.not_finite, self.tamper
        )  # fmt: skip
        comparisons = exact.compare(step, own, names)
        runner.reference.forget()
        return comparisons

    def compare(self, step: ReferenceStep, begin: Values, names: Collection[str]) -> StepComparisons:
        """Compare states and metrics of the update with a step of the source."""
        comparisons = self._comparisons({})
        self._metrics(comparisons, step, names, [])
        self._states(comparisons, step.states, begin, names)
        again = comparisons.failing()
        return self._compare_from_own_states(comparisons, again) if again else comparisons

    def _metric_floors(self, base: ReferenceStep, moved: Sensitivity) -> dict[str, float]:
        """Return the changes of metrics of the update by rounding, where it reads halves, or values of the forward."""
        halves = any(mean.dtype.name in LOW_PRECISION for mean in base.means.values())
        floors: dict[str, float] = {}
        for values, changes in zip(base.metrics, moved.metrics) if halves or base.local.read != [{}] else ():
            for name, value in values.items():
                floors[name] = max(_floor(changes[name], norm(value)), floors.get(name, 0.0))
        return floors

    def _ends(self, sent: LocalResults, update: ReferenceStep) -> list[ReferenceStep]:
        """Return the update for several orders of summation of the gradients."""
        reference, ends = self.runner.reference, [update]
        rounding = reference.rounding(sent)
        for times in (-MULTIPLE, -1, 1, MULTIPLE):
            means = {name: (update.means[name] + times * moved).astype(moved.dtype) for name, moved in rounding.items()}
            ends.append(reference.finish(self.own, self.settings, sent, update.means | means))
        return ends

    def _spans(self, names: Collection[str], ends: Sequence[ReferenceStep]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return the least and greatest new states of orders of summation, where these move any element."""
        runner, spans = self.runner, {}
        for name in ends[0].states.keys() & names:
            low, high, moves = self._span([end.states[name] for end in ends], self.own[name])
            if moves:
                spans[name] = low, high
                runner.cancelled[name] = max(moves, runner.cancelled.get(name, 0))
        return spans

    def _span(self, values: Sequence[np.ndarray], start: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Return the least and greatest results at elements moved beyond a share of the tolerance, where terms of a
        gradient may cancel, and how many there are."""
        wanted = values[0]
        if not floating(wanted) or wanted.dtype.name in LOW_PRECISION or not wanted.size:
            return wanted, wanted, 0
        values = [np.where(np.isfinite(value), value, wanted) for value in values]
        low, high = np.min(values, axis=0), np.max(values, axis=0)
        with np.errstate(invalid="ignore"):
            moves = high - low > allowance(wanted, start, self.runner.result.tolerance) / math.sqrt(wanted.size)
        return np.where(moves, low, wanted), np.where(moves, high, wanted), int(moves.sum())

    def _of_halves(self, base: ReferenceStep) -> list[str]:
        """Return the states, of any type, updated by gradients in halves: the mean is rounded too.

        States without a parameter are among them if any gradient is in halves."""
        training = self.runner.reference.training
        halves = {name for name, mean in base.means.items() if mean.dtype.name in LOW_PRECISION}
        owned = {name for name, gradient in training.gradients.items() if gradient in halves}
        loose = (StateKind.OPTIMIZER_STATE, StateKind.SCALAR) if halves else ()
        return [
            state.tensor for state in training.states
            if (state.of or state.tensor) in owned or (state.of is None and state.kind in loose)
        ]  # fmt: skip

    def _sent(self, local: LocalResults) -> LocalResults:
        """The ranks' gradients, if visible; else the reference's."""
        pairs = zip(local.gradients, self.made.gradients)
        gradients = [[{**mine, **observed} for mine, observed in zip(*turn)] for turn in pairs]
        return replace(local, gradients=gradients)

    def _gradients(
        self, comparisons: StepComparisons, local: LocalResults, sent: LocalResults, moved: Sensitivity | None
    ) -> None:
        for turn, (wanted, had) in enumerate(zip(local.gradients, sent.gradients)):
            for r, (mine, theirs) in enumerate(zip(wanted, had)):
                for name, value in mine.items():
                    share = MULTIPLE * moved.gradients[turn][r][name] if moved is not None else 0.0
                    comparisons.floors[name] = share if name in self.runner.noise else min(share, MOST * norm(value))
                    rank = self.runner.all_ranks.which.index(r)
                    comparisons.whole(rank, name, "gradient", theirs[name], value, np.zeros_like(value))

    def _comparisons(self, floors: dict[str, float]) -> StepComparisons:
        return StepComparisons(self.runner.result.tolerance, self.variant.name, self.number, floors)

    def _outputs(
        self, comparisons: StepComparisons, local: LocalResults, names: Collection[str],
        moved: Sensitivity | None = None,
    ) -> None:  # fmt: skip
        """Compare the losses, and metrics of the forward, among ``names``."""
        for turn, rank, name, value in self.made.shown:
            if name not in names:
                continue
            which = self.runner.all_ranks.which[rank]
            wanted = local.outputs[turn][which][name]
            if moved is not None:
                comparisons.floors[name] = min(MULTIPLE * moved.outputs[turn][which][name], MOST * norm(wanted))
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
                    low, high, _ = self._span([end.shown(which)[name] for end in ends], np.zeros_like(wanted))
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
