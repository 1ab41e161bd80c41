"""Which variants a verification runs: gradients of all sizes, gates both ways, what moves a state that stood still."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gopt.analysis.training import StateKind
from gopt.runtime.proof.batches import Batches
from gopt.runtime.proof.compare import Values, floating
from gopt.runtime.proof.disturb import units
from gopt.runtime.proof.gates import Coverage
from gopt.runtime.proof.result import Verification
from gopt.runtime.proof.schedule import Schedule, Start
from gopt.runtime.proof.seen import Seen
from gopt.runtime.proof.team import Tamper
from gopt.runtime.proof.trial import Trial
from gopt.runtime.proof.variants import (
    ASLEEP,
    AWAKE,
    FAST_ASLEEP,
    INFINITE,
    LESS_AWAKE,
    PLAIN,
    WIDE_AWAKE,
    Variant,
    has_finite_check,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from gopt.runtime.proof.verify import Verifier

LOW = 2.0**-10
"""By how much optimizer states are made smaller where a state never changed otherwise."""


class Repetitions:
    """One run of a Verifier."""

    def __init__(
        self, verifier: Verifier, result: Verification, steps: int, seed: int, start: Values, settings: Values,
        batches: Batches, tamper: Tamper | None, advance: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.verifier, self.result, self.steps, self.tamper, self.advance = verifier, result, steps, tamper, advance
        self.start, self.settings, self.batches = start, settings, batches
        training = verifier.training
        self.coverage = Coverage(verifier.gates)
        shared = frozenset(verifier.expected.shared.points)
        self.seen = Seen(training, self.coverage, result.tolerance, verifier.parts, shared)
        self.trial = Trial(
            result, verifier.team, verifier.expected, verifier.kinds, units(training), self.seen, seed
        )  # fmt: skip

    def one(self, variant: Variant, start: Start | None = None, steps: int = 0) -> bool:
        """Run a variant; ``start``: what begins elsewhere, for one step. False: it left the numbers."""
        self.advance(variant.name)
        states, settings = dict(self.start), dict(self.settings)
        if start is not None:
            for name, value in start.values.items():
                (states if name in states else settings)[name] = value
        steps = steps or (1 if start is not None else self.steps)
        return self.trial.run(variant, steps, states, settings, self._given, self.tamper)

    def _given(self, number: int) -> list[list[Values]]:
        """Batches of a step by micro-step and data rank."""
        times = max(self.verifier.phases.values())
        turns = range((number - 1) * times, number * times)
        return [[self.batches.batch(turn, part) for part in range(self.verifier.parts)] for turn in turns]

    def all_variants(self, fixed: Iterable[str]) -> None:
        """Everything that is to be seen once: gradients of all sizes, an infinite one, gates both ways."""
        sound = self.one(PLAIN)
        self._tell_noise()
        if sound:
            if self.verifier.mesh.data_ranks > 1:  # else no call takes a gradient that could be changed on its way
                self._sizes()
            starts = self._schedule(set(fixed))
            self._still(starts)
            self.seen.doubt(self.result)
            self._tell_gates()

    def _sizes(self) -> None:
        self.one(ASLEEP)
        if not self.one(AWAKE):
            self.one(LESS_AWAKE)
        if has_finite_check(self.verifier.training):
            self.one(INFINITE)
        for variant in (WIDE_AWAKE, FAST_ASLEEP):
            if self.coverage.one_sided(scheduled=False):
                self.one(variant)

    def _schedule(self, fixed: set[str]) -> list[Start]:
        schedule = Schedule(self.verifier.training, self.coverage, self.verifier.cache)
        starts = schedule.starts(self.start, self.settings, self.steps, fixed)
        for start in starts:
            self.one(replace(PLAIN, name=f"{start}", extra=True), start)
        return starts

    def _still(self, starts: Sequence[Start]) -> None:
        """Let states change that never did: a maximum that starts high stays, a sign that differs holds a step back.

        Optimizer states begin near zero, for as many steps as asked, with gates as they are and the other way.
        """
        states = [state.tensor for state in self.verifier.training.states if state.kind is StateKind.OPTIMIZER_STATE]
        low = {
            name: (self.start[name] * LOW).astype(self.start[name].dtype)
            for name in states
            if floating(self.start[name])
        }
        for start in (Start(low), *(Start({**low, **start.values}) for start in starts)):
            if low and self.seen.still(self.result):
                self.one(replace(PLAIN, name="small states", extra=True), start, self.steps)

    def _tell_gates(self) -> None:
        gates = [gate.label for scheduled in (True, False) for gate in self.coverage.one_sided(scheduled)]
        if gates:
            shown = ", ".join(gates[:4]) + (", …" if len(gates) > 4 else "")
            self.result.say(f"{len(gates)} comparisons and clips of the update went one way in every step: {shown}")

    def _tell_noise(self) -> None:
        """Name the states that no comparison of values can judge."""
        owners = {p for p, gradient in self.verifier.training.gradients.items() if gradient in self.trial.noise}
        states = [s.tensor for s in self.verifier.training.states if s.tensor in owners or s.of in owners]
        self.result.noise = states
        if states:
            shown = ", ".join(sorted(owners)[:4]) + (", …" if len(owners) > 4 else "")
            self.result.say(
                f"rounding noise is the whole gradient of {shown} (zero but for rounding): {len(states)} states judged "
                "by the gradients that the ranks had, not by value"
            )
