"""One variant of a verification: source and ranks step by step, and the judgements of each step.

A value is held to contract section 7 first. A failing value is checked again from the ranks' own states, without
rounding of earlier steps: local gradients must be the source's on each batch, up to a multiple of measured rounding,
and new states must be the source's update of the mean of these very gradients, within contract section 7. So a gradient
of noise alone raises no alarm, however large the optimizer's steps, and an error in the reduction or update is seen all
the same. Where the ranks' terms of an element cancel, the result of any order of summation is as right."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gopt.analysis.training import StateKind
from gopt.artifact.manifest_entries import LocalState
from gopt.artifact.pieces import cut
from gopt.errors import UnsupportedError
from gopt.ir.types import LOW_PRECISION
from gopt.system.progress import ProgressCallback, no_progress
from gopt.text.sanitize import listed
from gopt.verification.all_ranks import AllRanks, RankResults, Tamper
from gopt.verification.compare import (
    StepComparisons,
    Values,
    allowance,
    became_not_finite,
    distance,
    finite,
    floating,
    ratio,
    same_bits,
)
from gopt.verification.observations import Observations
from gopt.verification.reference_step import Batches, LocalResults, ReferenceProgram, ReferenceStep, as_shown
from gopt.verification.result import Doubt, Verification
from gopt.verification.sensitivity import MOST, MULTIPLE, UNITS, Measurement, Sensitivity, apart, largest, norm
from gopt.verification.variants import PLAIN, Variant

OWN_DATA = "; --data FILE gives batches that fit the model"


@dataclass(slots=True)
class VariantRunner:
    """Runs variants, and keeps their shared state.

    ``noise``: gradients of rounding only, found by the plain variant."""

    result: Verification
    all_ranks: AllRanks
    reference: ReferenceProgram
    kinds: Mapping[str, str]
    units: Mapping[str, float]
    observed: Observations
    seed: int
    noise: set[str] = field(default_factory=set)
    measured: tuple[ReferenceStep, Measurement] | None = None
    """The first plain step, and how far rounding moves it."""
    silent: set[str] = field(default_factory=set)
    """Gradients that were zero when noise was looked for: they are noise or not once they are no longer zero."""
    cancelled: dict[str, int] = field(default_factory=dict)
    """State -> number of elements decided by the order of summation of gradients, at most in any step."""
    halves: dict[str, float] = field(default_factory=dict)
    """State -> the share of its change that halves inside its update make, where no small one."""
    left: list[Doubt] = field(default_factory=list)
    """The values that left the numbers in the source in the last run."""
    last: Values = field(default_factory=dict)
    """The source's states behind the last step."""

    def run(
        self, variant: Variant, steps: int, start: Values, settings: Values, batches: Callable[[int], Batches],
        tamper: Tamper | None, advance: ProgressCallback = no_progress,
    ) -> bool:  # fmt: skip
        """Compare ``steps`` steps; False where the reference left the numbers, which ends the variant."""
        begin, states, rank_states = start, start, self.all_ranks.held(start)
        self.left = []
        for number in range(1, steps + 1):
            advance(f"steps of {variant.name!r}", number - 1, steps)
            states = self._step(variant, number, begin, states, rank_states, settings, batches(number), tamper)
            if self.left:
                return False
            if variant is not PLAIN:
                # Blown-up gradients make training chaotic: each step is judged on its own, from equal states.
                begin, rank_states = states, self.all_ranks.held(states)
        return True

    def _step(
        self, variant: Variant, number: int, begin: Values, states: Values, rank_states: list[Values], settings: Values,
        drawn: Batches, tamper: Tamper | None,
    ) -> Values:  # fmt: skip
        """Compare one step; returns the source's new states, and ``rank_states`` get the ranks'. Nothing else is held
        beyond it."""
        self.reference.apart = self.all_ranks.apart(rank_states)
        local = self.reference.kept(variant, states, settings, drawn)
        step = self.reference.finish(states, settings, local)
        self._find_noise(variant, number, states, settings, drawn, step)
        inputs = self.all_ranks.joined("input", rank_states)
        results = self.all_ranks.step(self.reference, variant, rank_states, settings, drawn, tamper)
        not_finite = _not_finite_states(self.reference, step, states)
        self._tell(variant, number, not_finite)
        comparison = _StepComparison(self, variant, number, drawn, settings, {**states, **inputs}, results, not_finite)
        comparison.judge(step, begin)
        self.observed.enter(states, step, settings)
        self.last = step.states
        return step.states

    def leaves(
        self, variant: Variant, steps: int, start: Values, settings: Values, batches: Callable[[int], Batches]
    ) -> bool:
        """Return whether the reference alone leaves the numbers in any of ``steps`` steps."""
        states = start
        for number in range(1, steps + 1):
            local = self.reference.kept(variant, states, settings, batches(number), again=True)
            step = self.reference.finish(states, settings, local)
            if _not_finite_states(self.reference, step, states):
                return True
            states = step.states
        return False

    def _find_noise(
        self, variant: Variant, number: int, states: Values, settings: Values, batches: Batches, step: ReferenceStep
    ) -> None:
        """Measure the gradients of noise, once."""
        if variant is PLAIN and number == 1:
            measurement = Measurement(self.reference, variant, states, settings, batches, step, self.units, self.seed)
            self.measured = step, measurement
            self.noise.update(measurement.noise())
            self.silent.update(name for name, mean in step.means.items() if not norm(mean))

    def heard(self, step: ReferenceStep) -> set[str]:
        """Gradients that were silent at the search for noise, and are not in this step."""
        return {name for name in self.silent if norm(step.means[name])}

    def settle(self, sensitivity: Sensitivity, step: ReferenceStep) -> None:
        """Take a formerly silent gradient as noise, if measured so."""
        heard = self.heard(step)
        self.noise |= heard.intersection(sensitivity.noise(step))
        self.silent -= heard

    def _tell(self, variant: Variant, number: int, not_finite: Sequence[str]) -> None:
        """Keep the states and losses that left the numbers in the reference; a note, if caused by the variant."""
        where = f"not finite in the source in step {number} of {variant.name!r}"
        why = f"{where}: nothing can be compared with it{OWN_DATA}"
        self.left = [Doubt(name, why) for name in not_finite]
        if not_finite and variant.extra:
            self.result.say(f"{listed(not_finite, 1)}: {where}: not judged there")


def _not_finite_states(reference: ReferenceProgram, step: ReferenceStep, before: Values) -> list[str]:
    """States that are no longer finite, and losses, first to leave the numbers first."""
    _refuse_other_shape(step.states, before)
    ranks = [rank for turn in step.local.outputs for rank in turn]
    losses = [name for name in reference.training.losses if not all(finite(rank[name]) for rank in ranks)]
    states = [name for name, value in step.states.items() if became_not_finite(value, before[name])]
    return [*losses, *states]


def _refuse_other_shape(states: Values, before: Values) -> None:
    """Raise UnsupportedError where a step of a batch of another size than was meant changes the shape of a state."""
    for name, value in states.items():
        if np.shape(value) != np.shape(before[name]):
            was, new = (list(np.shape(value)) for value in (before[name], value))
            raise UnsupportedError(
                f"{name!r} is {was}, and its new value {new} for the batch that verify drew: the source fits batches "
                "of one size alone",
                "write the size of the batch into the source, or give batches of that size: --data FILE",
            )


def _floor(noise: float, size: float) -> float:
    """Return what rounding may change, by a measured change of a value, or change, of a size."""
    return min(MULTIPLE * noise, MOST * size) if noise < size else MULTIPLE * noise


_KnownErrors = dict[str, tuple[np.ndarray, float]]
"""State -> a rank's value that was compared already, and its error: replicas are mostly equal bit by bit."""


@dataclass(slots=True)
class _StepComparison:
    """A step of a variant. ``own``: the ranks' values before the step; ``lost``: values that are not finite in the
    reference."""

    runner: VariantRunner
    variant: Variant
    number: int
    batches: Batches
    settings: Values
    own: Values
    made: RankResults
    not_finite: Sequence[str]

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
        speaks = self.variant is PLAIN and runner.heard(base)
        # What is equal without an allowance for rounding is so with one, which takes RUNS more steps to measure.
        second = None if speaks else self._second(names, base, sent, update, None)
        if second is None or second.failing():
            moved = Measurement(
                reference, self.variant, self.own, self.settings, self.batches, base, runner.units,
                runner.seed + self.number,
            ).measured()  # fmt: skip
            if self.variant is PLAIN:
                runner.settle(moved, base)
                if runner.measured is not None:  # one run may have said too little
                    runner.noise.update(runner.measured[1].measured().noise(runner.measured[0]))
            second = self._second(names, base, sent, update, moved)
        merged = comparisons.without(names)
        merged.entries += second.entries
        return merged

    def _second(
        self, names: Collection[str], base: ReferenceStep, sent: LocalResults, update: ReferenceStep,
        moved: Sensitivity | None,
    ) -> StepComparisons:  # fmt: skip
        """Comparisons from the ranks' own states: gradients with ``sent``, states with ``update``."""
        reference = self.runner.reference
        statistics = {state.tensor for state in reference.statistics}
        comparisons = self._comparisons({} if moved is None else self._floors(base, moved, statistics))
        ends = [update]
        if moved is not None:
            self._allow_halves(comparisons.floors, names, update)
            ends = self._ends(sent, update)
            comparisons.spans.update(self._spans(names, ends))
            comparisons.floors.update(self._metric_floors(base, moved))
        self._outputs(comparisons, base.local, names, moved)
        self._metrics(comparisons, update, names, ends)
        self._gradients(comparisons, base.local, sent, moved)
        self._states(
            comparisons, {**update.states, **{name: base.states[name] for name in statistics}}, self.own, names
        )
        return comparisons

    def _floors(self, base: ReferenceStep, moved: Sensitivity, statistics: Collection[str]) -> dict[str, float]:
        """Return the changes of states by rounding."""
        floors = {
            name: min(MULTIPLE * moved.states[name], MOST * apart(base.states[name], self.own[name]))
            for name in statistics
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

    def _allow_halves(self, floors: dict[str, float], names: Collection[str], update: ReferenceStep) -> None:
        """Allow what halves inside the update make of a wide state: ranks that share its sums round elsewhere."""
        by_halves = self.runner.reference.by_halves(self.own, self.settings, update)
        for name in by_halves.keys() & names - floors.keys():
            size = apart(update.states[name], self.own[name])
            floors[name] = MULTIPLE * by_halves[name]
            if floors[name] > MOST * size:
                self.runner.halves[name] = max(by_halves[name] / size, self.runner.halves.get(name, 0.0))

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
