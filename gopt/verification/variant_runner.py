"""One variant of a verification: source and ranks, step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gopt.errors import UnsupportedError
from gopt.runtime.session import SessionCache
from gopt.system.progress import ProgressCallback, no_progress
from gopt.text.sanitize import listed
from gopt.verification.all_ranks import AllRanks, Tamper
from gopt.verification.compare import TOLERANCE, Values, became_not_finite, finite
from gopt.verification.in_float64 import ranks_in_float64, reference_in_float64
from gopt.verification.observations import Observations
from gopt.verification.reference_step import Batches, LocalResults, ReferenceProgram, ReferenceStep
from gopt.verification.result import Doubt, Verification
from gopt.verification.sensitivity import UNITS, Measurement, Sensitivity, largest, norm
from gopt.verification.step_comparison import StepComparison
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
    rounded: dict[str, float] = field(default_factory=dict)
    """Value -> the share of its change, or of a gradient, a loss or a metric, that rounding inside the source's step
    makes, where ranks are out of tolerance by this alone."""
    refuted: set[str] = field(default_factory=set)
    """Values that differ in float64 too."""
    left: list[Doubt] = field(default_factory=list)
    """The values that left the numbers in the source in the last run."""
    last: Values = field(default_factory=dict)
    """The source's states behind the last step."""
    wire: str = ""
    """The halves to which gradients are rounded on their way alone."""
    _in_float64: VariantRunner | None = None

    def run(
        self, variant: Variant, steps: int, start: Values, settings: Values, batches: Callable[[int], Batches],
        tamper: Tamper | None, advance: ProgressCallback = no_progress,
    ) -> bool:  # fmt: skip
        """Compare ``steps`` steps; False where the reference left the numbers, or enlarged gradients the range of the
        wire, which ends the variant."""
        begin, states, rank_states = start, start, self.all_ranks.held(start)
        self.left = []
        for number in range(1, steps + 1):
            advance(f"steps of {variant.name!r}", number - 1, steps)
            new = self._step(variant, number, begin, states, rank_states, settings, batches(number), tamper)
            if new is None or self.left:
                return False
            states = new
            if variant is not PLAIN:
                # Blown-up gradients make training chaotic: each step is judged on its own, from equal states.
                begin, rank_states = states, self.all_ranks.held(states)
        return True

    def _step(
        self, variant: Variant, number: int, begin: Values, states: Values, rank_states: list[Values], settings: Values,
        drawn: Batches, tamper: Tamper | None,
    ) -> Values | None:  # fmt: skip
        """Compare one step; returns the source's new states, and ``rank_states`` get the ranks'; None beyond the range
        of the wire. Nothing else is held on."""
        self.reference.apart = self.all_ranks.apart(rank_states)
        local = self.reference.kept(variant, states, settings, drawn)
        if self._overflows(variant, local):
            return None
        step = self.reference.finish(states, settings, local)
        self._find_noise(variant, number, states, settings, drawn, step)
        inputs = self.all_ranks.joined("input", rank_states)
        results = self.all_ranks.step(self.reference, variant, rank_states, settings, drawn, tamper)
        not_finite = _not_finite_states(self.reference, step, states)
        self._tell(variant, number, not_finite)
        comparison = StepComparison(
            self, variant, number, drawn, settings, {**states, **inputs}, results, not_finite, tamper
        )  # fmt: skip
        comparison.judge(step, begin)
        self.observed.enter(states, step, settings)
        self.last = step.states
        return step.states

    def _overflows(self, variant: Variant, local: LocalResults) -> bool:
        """Return whether enlarged gradients are too large for halves of the wire alone."""
        if variant.scale <= 1 or self.wire != "float16":
            return False
        batches = [values for turn in local.gradients for values in turn]
        most = max((largest(value) for values in batches for value in values.values()), default=0.0)
        return most * len(batches) > float(np.finfo(np.float16).max)

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

    def in_float64(self) -> VariantRunner:
        """The same in float64, for single steps. Raises RunError or UnsupportedError where nothing runs them.

        Rounding is small there beside any error, also in a gradient of noise: all of it is allowed."""
        if self._in_float64 is None:
            cache = SessionCache(self.reference.cache.deadline)
            self._in_float64 = VariantRunner(
                Verification(TOLERANCE, 1, self.result.ranks), ranks_in_float64(self.all_ranks, cache),
                reference_in_float64(self.reference, cache), self.kinds, dict.fromkeys(self.units, UNITS["float64"]),
                self.observed, self.seed, {*self.reference.gradients},
            )  # fmt: skip
            self._in_float64._in_float64 = self._in_float64
        return self._in_float64

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
