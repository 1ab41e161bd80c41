"""Chooses the variants of a verification: gradients of all scales, both outcomes of conditions, unchanged states."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from gopt.analysis.training import StateKind
from gopt.ir.graph_index import GraphIndex, descendants
from gopt.system.progress import ProgressCallback
from gopt.text.sanitize import listed
from gopt.verification.all_ranks import Tamper
from gopt.verification.batches import Batches, SampledBatches
from gopt.verification.compare import Values, finite, floating
from gopt.verification.conditions import Coverage
from gopt.verification.joined_step import MeasuredStep, check_large_batch
from gopt.verification.large_batch import LargeBatch
from gopt.verification.observations import Observations
from gopt.verification.reference_step import ReferenceStep
from gopt.verification.result import Verification
from gopt.verification.schedule import ScheduledPart, StartOverride
from gopt.verification.sensitivity import apart, norm, units
from gopt.verification.variant_runner import OWN_DATA, VariantRunner
from gopt.verification.variants import (
    CLIP_ACTIVE,
    CLIP_ACTIVE_LARGE,
    CLIP_ACTIVE_SMALL,
    CLIP_INACTIVE,
    CLIP_INACTIVE_LARGE,
    INFINITE,
    PLAIN,
    Variant,
    has_finite_check,
)

if TYPE_CHECKING:
    from gopt.verification.verify import Verifier

TURNS = 4
"""Starts that are tried where the source leaves the numbers with the given one."""
SLOW = 1e-2
"""Share of its size by which a parameter changes in a step, at most, where the source leaves the numbers otherwise."""
LOW = 2.0**-10
"""By how much optimizer states are made smaller where a state never changed otherwise; then by its square."""


class VerificationRun:
    """One run of a Verifier."""

    def __init__(
        self, verifier: Verifier, result: Verification, steps: int, seed: int, start: Values, settings: Values,
        batches: Batches, tamper: Tamper | None, advance: ProgressCallback, fixed: Collection[str] = (),
    ) -> None:  # fmt: skip
        """``fixed``: the user's settings."""
        self.verifier, self.result, self.steps, self.tamper, self.advance = verifier, result, steps, tamper, advance
        self.start, self.settings, self.batches, self.seed = start, settings, batches, seed
        self.fixed = set(fixed)
        self.skipped = 0
        """Steps whose batches are passed over."""
        self._begin()

    def _begin(self) -> None:
        """Observe from here on."""
        verifier = self.verifier
        self.coverage = Coverage(verifier.conditions)
        shared = frozenset(verifier.reference.shared.points)
        self.observed = Observations(verifier.training, self.coverage, self.result.tolerance, verifier.parts, shared)
        self.runner = VariantRunner(
            self.result, verifier.all_ranks, verifier.reference, verifier.kinds, units(verifier.training),
            self.observed, self.seed, wire=verifier.wire,
        )  # fmt: skip

    def one(self, variant: Variant, start: StartOverride | None = None, steps: int = 0) -> bool:
        """Run a variant; ``start``: other start values, for one step. False: the variant left the numbers, or the range
        of the wire."""
        sound = self._run(variant, start, steps)
        for doubt in self.runner.left if not variant.extra else ():
            self.result.doubt(doubt.name, doubt.why)
        return sound

    def _run(self, variant: Variant, start: StartOverride | None = None, steps: int = 0) -> bool:
        states, settings = dict(self.start), dict(self.settings)
        if start is not None:
            for name, value in start.values.items():
                (states if name in states else settings)[name] = value
        steps = steps or (1 if start is not None else self.steps)
        return self.runner.run(variant, steps, states, settings, self.given, self.tamper, self.advance)

    def given(self, number: int) -> list[list[Values]]:
        """Batches of a step by micro-step and data rank."""
        times, number = max(self.verifier.phases.values()), number + self.skipped
        turns = range((number - 1) * times, number * times)
        return [[self.batches.batch(turn, part) for part in range(self.verifier.parts)] for turn in turns]

    def all_variants(self) -> None:
        """Every observation once: gradients of all sizes, an infinite gradient, conditions both ways."""
        sound = self._plain()
        self._tell_noise()
        self._hold_large_batch()
        if sound:
            if self.verifier.mesh.data_ranks > 1:  # else no call takes a gradient that could be changed on its way
                self._sizes()
            starts = self._schedule()
            self._still(starts)
            self.observed.doubt(self.result)
            self._tell_conditions()
        self._tell_cancelled()
        self._tell_rounded()

    def _plain(self) -> bool:
        """Run the plain variant, from a start and batches that keep the source in the numbers. False: the source leaves
        them with all tries."""
        if self._run(PLAIN):
            return True
        passed, start, usual, measured = self.runner.left, self.start, self.settings, self.runner.measured
        for on, slower, turn in self._other_starts():
            self.start, self.settings, self.skipped = {**start, **on}, {**usual, **slower}, turn * self.steps
            if on or turn:  # else forward and backward of the first step are the same
                self.verifier.forget()
            if self.runner.leaves(PLAIN, self.steps, dict(self.start), dict(self.settings), self.given):
                continue
            self._begin()
            if slower and measured is not None:
                self.observed.enter(start, measured[0], usual)  # it was compared, and the smaller ones may move nothing
            if self._run(PLAIN):
                beside = [f"{listed([*on], 2)} moved on"] if on else []
                beside += [f"smaller {listed([*slower], 2)}"] if slower else []
                beside += ["other batches"] if turn else []
                who, why = listed([doubt.name for doubt in passed], 2), passed[0].why.removesuffix(OWN_DATA)
                self.result.say(f"passed over: {who}, {why}; it is compared with {' and '.join(beside)}")
                return True
        self.start, self.settings, self.skipped, self.runner.measured = start, usual, 0, measured
        for unproved in passed:
            self.result.doubt(unproved.name, unproved.why)
        return False

    def _other_starts(self) -> Iterator[tuple[Values, Values, int]]:
        """Other states and settings, and how many starts' worth of batches to skip; each tried in turn."""
        on, slower = self._counters_on(), self._slower()
        drawn = isinstance(self.batches, SampledBatches)  # the user's own batches are not left out
        if on:
            yield on, {}, 0
        if slower:
            yield on, slower, 0
        for turn in range(1, TURNS if drawn else 1):
            yield on, {}, turn

    def _slower(self) -> Values:
        """Settings read by the update alone, reduced until a parameter changes by SLOW of its size at most; empty where
        the first step changed no parameter by more, or left the numbers itself."""
        verifier, measured = self.verifier, self.runner.measured
        names = [state.tensor for state in verifier.training.parameters if floating(self.start[state.tensor])]
        if measured is None or not all(finite(measured[0].states[name]) for name in names):
            return {}
        sizes = ((norm(self.start[name]), apart(measured[0].states[name], self.start[name])) for name in names)
        most = max((change / size for size, change in sizes if size), default=0.0)
        read = {name for name in self.settings if name not in verifier.reference.local_inputs} - self.fixed
        return {
            name: (self.settings[name] * (SLOW / most)).astype(self.settings[name].dtype)
            for name in verifier.training.hyper
            if most > SLOW and name in read and floating(self.settings[name])
        }

    def _counters_on(self) -> Values:
        """The new values of states that follow neither batch nor gradients, such as a counter of steps."""
        training, last = self.verifier.training, self.runner.last
        follows = descendants(GraphIndex(training.graph), [*training.batch, *training.gradients.values()])
        counters = [state.tensor for state in training.states if state.updated not in follows]
        return {
            name: last[name]
            for name in counters
            if not np.array_equal(last[name], self.start[name]) and np.isfinite(last[name]).all()
        }

    def _hold_large_batch(self) -> None:
        """Compare the first step with the source's on all batches at once, without labels to ignore: with
        ignored labels, ranks average separate means."""
        verifier, measured, drawn = self.verifier, self.runner.measured, self.batches
        batches, why = self.given(1), ""
        if measured is None or len(batches) * len(batches[0]) == 1 or verifier.manifest.parameter_server is not None:
            return
        plain, moved = measured
        if isinstance(drawn, SampledBatches) and drawn.ignores:
            self.batches, why = (
                drawn.plain(),
                "on batches without labels to ignore: ranks that ignore some weigh them apart",
            )
            batches = self.given(1)
            self.batches = drawn

        @cache
        def step() -> ReferenceStep:
            return verifier.reference.step(PLAIN, self.start, self.settings, batches) if why else plain

        self.result.large_batch = check_large_batch(
            verifier.reference, MeasuredStep(step, moved, self.result.noise), self.start, self.settings, batches,
            self.result.tolerance, verifier.reductions,
        )  # fmt: skip
        if self.result.large_batch.outcome is LargeBatch.EQUAL:
            self.result.large_batch = replace(self.result.large_batch, why=why)

    def _sizes(self) -> None:
        """Gradients of other sizes; one step of each shows all of an update without a condition behind them."""
        looks = has_finite_check(self.verifier.training)
        steps = self.steps if looks or not all(condition.scheduled for condition in self.verifier.conditions) else 1
        self.one(CLIP_INACTIVE, steps=steps)
        if not self.one(CLIP_ACTIVE, steps=steps):
            self.one(CLIP_ACTIVE_SMALL, steps=steps)
        if looks:
            self.one(INFINITE)
        for variant in (CLIP_ACTIVE_LARGE, CLIP_INACTIVE_LARGE):
            if self.coverage.one_sided(scheduled=False):
                self.one(variant)

    def _schedule(self) -> list[StartOverride]:
        schedule = ScheduledPart(self.verifier.training, self.coverage, self.verifier.cache)
        starts = schedule.starts(self.start, self.settings, self.steps, self.fixed)
        for start in starts:
            self.one(replace(PLAIN, name=f"{start}", extra=True), start)
        return starts

    def _still(self, starts: Sequence[StartOverride]) -> None:
        """Let unchanged states change: a maximum that starts high stays, an opposite sign holds a step back.

        Optimizer states begin near zero, for as many steps as requested, with conditions unchanged and inverted."""
        states = [state.tensor for state in self.verifier.training.states if state.kind is StateKind.OPTIMIZER_STATE]
        low, lowest = (
            {name: (self.start[name] * factor).astype(self.start[name].dtype)
             for name in states if floating(self.start[name])}
            for factor in (LOW, LOW * LOW)
        )  # fmt: skip
        below = ({**low, **start.values} for start in starts)
        for start in map(StartOverride, (low, lowest, *below)):
            if low and self.observed.still(self.result):
                self.one(replace(PLAIN, name="small states", extra=True), start, self.steps)

    def _tell_conditions(self) -> None:
        names = [condition.label for scheduled in (True, False) for condition in self.coverage.one_sided(scheduled)]
        if names:
            self.result.say(
                f"conditions of the update with one outcome in all steps, so that the other branch is not tested: "
                f"{listed(names)}"
            )

    def _tell_cancelled(self) -> None:
        """Name the states with elements decided by the order of summation."""
        cancelled = self.runner.cancelled
        if cancelled:
            self.result.say(
                f"gradients of ranks cancel to rounding in elements of {listed(sorted(cancelled), 3)} "
                f"({sum(cancelled.values())} in all): these may be what any order of summation makes of them"
            )

    def _tell_rounded(self) -> None:
        """Name the values that rounding inside the source's step makes."""
        rounded, outputs = self.runner.rounded, {*self.verifier.reference.outputs}
        gradients = self.verifier.training.gradients
        local = {name: rounded[gradient] for name, gradient in gradients.items() if gradient in rounded}
        shown = {name: share for name, share in rounded.items() if name in outputs}
        stepped = {name: share for name, share in rounded.items() if name not in outputs.union(gradients.values())}
        for shares, what in (stepped, "a step of "), (local, "the local gradients of "), (shown, ""):
            if shares:
                self.result.say(
                    f"rounding inside the source's own step makes up to {max(shares.values()):.2g} of {what}"
                    f"{listed(sorted(shares), 3)}: allowed, and compared in float64 too"
                )

    def _tell_noise(self) -> None:
        """Name the states that no comparison of values can judge."""
        owners = {p for p, gradient in self.verifier.training.gradients.items() if gradient in self.runner.noise}
        states = [s.tensor for s in self.verifier.training.states if s.tensor in owners or s.of in owners]
        self.result.noise = states
        if states:
            shown = listed(sorted(owners))
            self.result.say(
                f"rounding noise is the whole gradient of {shown} (zero but for rounding): {len(states)} states judged "
                "by the gradients that the ranks had, not by value"
            )
