"""Judges one value that slopes of the loss do not confirm together with others: turned, a sum over samples, of a
computed weight, in slices, with readings held as constants, zero, or wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from gopt.analysis.coupling.gradient_reductions import Readings
from gopt.analysis.coupling.marks import Relation
from gopt.analysis.coupling.reduced import guarded
from gopt.analysis.coupling.step_couplings import analyse_couplings
from gopt.analysis.training import TrainingGraph
from gopt.ir.graph_index import GraphIndex, made_of
from gopt.verification.gradient_check import verdict as said
from gopt.verification.gradient_check.additivity import Additivity, SampleExchange, sample_exchanges
from gopt.verification.gradient_check.alternatives import QUICK, SlopeMeter, along_computed_weight, behind, in_slices
from gopt.verification.gradient_check.difference_quotients import Candidate, Losses, QuotientFit
from gopt.verification.gradient_check.forward import Values
from gopt.verification.gradient_check.held_forward import Stop
from gopt.verification.gradient_check.layout import turned
from gopt.verification.gradient_check.points import beside
from gopt.verification.gradient_check.stops import StopFinder
from gopt.verification.gradient_check.verdict import GradientCheck, Verdict

COARSE = 0.05
"""Times the tolerance: the same, where what is rounded are constants of the source (1/5 in float32)."""
PATIENCE = 8
"""Wrong gradients that are looked into with all means."""
FAR = 0.3
"""Move of the states, relative to their size, to where what is zero may differ."""


@dataclass
class SingleValues:
    """The verdicts on single values of a step; ``points``: where samples are exchanged; ``whole``: as of the check."""

    training: TrainingGraph
    slope_meter: SlopeMeter
    points: list[Values]
    whole: bool
    found: dict[str, GradientCheck] = field(default_factory=dict)
    exchanges: list[SampleExchange] = field(default_factory=list)
    """Of samples, as far as needed."""

    def say(
        self, name: str, verdict: Verdict, why: str, fit: QuotientFit | None = None, stops: tuple[str, ...] = ()
    ) -> None:  # fmt: skip
        ratios = fit.ratios if fit is not None else ()
        self.found[name] = GradientCheck(name, self.training.gradients[name], ratios, verdict, why, stops)

    def proportional(self, parts: Sequence[Candidate], fit: QuotientFit) -> None:
        for part in parts:
            if fit.replaces and (part.origin.size > 1 or part.is_near):  # of one number any offset is a multiple
                self.say(part.parameter, Verdict.REFUTED, said.REPLACEMENT, fit)
            else:
                self.say(part.parameter, Verdict.CONFIRMED, said.PROPORTIONAL, fit)

    def check(self, part: Candidate, fit: QuotientFit, points: list[Values]) -> None:
        """A value that is not proportional: turned, a sum over samples, of a computed weight, in slices, or wrong."""
        name = part.parameter
        flat = not fit.measured and self.still([part], [], points)
        if flat and part.share <= COARSE * self.slope_meter.forward.precision.tolerance:
            self.say(name, Verdict.CONFIRMED, said.ZERO)
            return
        for candidate in () if self.whole else turned(part):
            again = self.slope_meter.measure([candidate], points, QUICK)
            if again.holds:
                self.proportional([candidate], again)
                return
        image = (
            None
            if self._hopeless
            else behind(self.slope_meter, self.training, part, points, self.training.gradients[name])
        )
        additive = self.additive(name)
        if image is not None and image[2]:
            self.say(name, Verdict.CONFIRMED, said.IMAGE.format(image[0]), image[1])
        elif image is not None:
            self.say(name, Verdict.REFUTED, said.NOT_LINEAR.format(image[0]), fit)
        elif additive is Additivity.YES and (self._sum_is_due or not part.is_near):
            self.say(name, Verdict.CONFIRMED, self._as_sum(name), fit)
        elif additive is Additivity.NO:
            self.say(name, Verdict.REFUTED, said.NOT_ADDITIVE, fit)
        elif self._hopeless or not (
            self.is_computed_weight(name, points, part.at) or self.sliced(part, points) or self.stopped(part, points)
        ):
            said_so = said.WRONG if fit.measured else said.FLAT if flat else said.FAINT
            reason = self._of_another_loss(name)
            verdict = Verdict.UNCONFIRMED if said_so == said.FAINT or reason else Verdict.REFUTED
            self.say(name, verdict, reason or said_so, fit)

    def _of_another_loss(self, name: str) -> str:
        """The reason why the shown loss says nothing of a gradient; '' without a reason."""
        reading = self._readings.get(name)
        if reading is None or reading.bent:
            return said.BENT.format(reading.cause) if reading else ""
        if reading.relation is Relation.JOINT and not reading.cause:
            return said.MIXED
        unshown = self._unshown.intersection(made_of(self._index, [reading.by]))
        return said.UNSHOWN.format(min(unshown)) if unshown else ""

    @cached_property
    def _unshown(self) -> set[str]:
        """The batch's inputs without influence on the losses."""
        return set(self.training.batch).difference(made_of(self._index, self.training.losses))

    @property
    def _hopeless(self) -> bool:
        """Whether so many values are wrong that further explanations are not worth a search."""
        return sum(check.why == said.WRONG for check in self.found.values()) >= PATIENCE

    def elsewhere(self, name: str, points: list[Values], at: tuple[np.ndarray, ...]) -> None:
        """A parameter unread by the loss, or with a gradient of another size."""
        if all(np.array_equal(array, at[0]) for array in at):
            self.say(name, Verdict.UNCONFIRMED, said.EQUAL)
        elif not self.is_computed_weight(name, points, at):
            additive = self.additive(name)
            if additive is Additivity.YES:
                self.say(name, Verdict.CONFIRMED, self._as_sum(name))
            elif additive is Additivity.NO:
                self.say(name, Verdict.REFUTED, said.NOT_ADDITIVE)
            else:
                self.say(name, Verdict.UNCONFIRMED, said.UNREAD)

    def additive(self, name: str) -> Additivity:
        exact = 100 * self.slope_meter.forward.precision.rounding
        answers = set()
        for square in self._squares():
            answers.add(square.judge(self.training.gradients[name], exact))
            if Additivity.NO in answers:
                return Additivity.NO if self._sum_is_due else Additivity.OPEN
        return Additivity.YES if Additivity.YES in answers else Additivity.OPEN

    def _squares(self) -> Iterator[SampleExchange]:
        """The exchanges of samples: the first mostly tells."""
        yield from self.exchanges
        for square in self._sample_exchanges:
            self.exchanges.append(square)
            yield square

    @cached_property
    def _sample_exchanges(self) -> Iterator[SampleExchange]:
        meter = self.slope_meter
        return sample_exchanges(meter.forward, self.points, self.training.batch, meter.generator, self._counts)

    @property
    def _sum_is_due(self) -> bool:
        """Whether the loss is a sum over samples, as all gradients then are."""
        return all(exchange.due for exchange in self.exchanges)

    @cached_property
    def _readings(self) -> Readings:
        return analyse_couplings(self.training).readings

    @cached_property
    def _index(self) -> GraphIndex:
        return GraphIndex(self.training.graph)

    @cached_property
    def _counts(self) -> dict[str, str]:
        """Gradient -> the dividing count of a rank's own batch, as far as the data flow tells; none of a value that
        holds a term without samples, such as a new parameter."""
        levels = analyse_couplings(self.training).unlike.levels
        return {
            self.training.gradients[name]: guarded(self._index, reading.by)
            for name, reading in self._readings.items()
            if reading.relation is Relation.WEIGHTED and reading.by and name not in levels
        }

    def _as_sum(self, name: str) -> str:
        if self.training.gradients[name] in self._counts:
            return said.COUNTED
        return said.ADDITIVE if self._sum_is_due else said.APART_FROM_SHOWN

    def is_computed_weight(self, name: str, points: list[Values], at: tuple[np.ndarray, ...]) -> bool:
        """Return whether the value is the gradient of something made of the states alone; says so."""
        explanation = along_computed_weight(self.slope_meter, self.training, name, points, at)
        if explanation is None:
            return False
        self.say(name, Verdict.CONFIRMED, said.ALONG.format(explanation[0]), explanation[1])
        return True

    def sliced(self, part: Candidate, points: list[Values]) -> bool:
        """Return whether each slice is proportional with a separate factor: a constant rate per row; notes the
        finding."""
        fit = in_slices(self.slope_meter, part, points)
        if fit is not None:
            self.say(part.parameter, Verdict.CONFIRMED, said.SLICES, fit)
        return fit is not None

    @cached_property
    def stops(self) -> StopFinder:
        return StopFinder(self.slope_meter.forward, self.slope_meter.generator)

    def stopped(self, part: Candidate, points: list[Values]) -> bool:
        """Return whether the value is the derivative with some values taken for constants; notes the finding."""
        if self.whole:
            return False
        explanation = self.stops.explain(part, points)
        if explanation is None:
            return False
        self.say_stopped(part, *explanation)
        return True

    def say_stopped(self, part: Candidate, stops: Sequence[Stop], fit: QuotientFit | None = None) -> None:
        names = tuple(map(str, stops))
        self.say(part.parameter, Verdict.CONFIRMED, said.STOPPED.format("; ".join(names)), fit, names)

    def silenced(self, part: Candidate, points: list[Values]) -> bool:
        """Return whether the loss does not depend on a parameter but by one reading of it, taken for a constant as an
        averaged teacher's is; notes the finding."""
        for stop, held_forward in () if self.whole else self.stops.own_readings(part.name):
            if self.still([part], [], held_forward.on(held_forward.points(points), [stop]), held_forward.losses):
                self.say_stopped(part, [stop])
                return True
        return False

    def still(
        self, parts: Sequence[Candidate], companions: Sequence[Candidate], points: Sequence[Values],
        losses: Losses | None = None,
    ) -> bool:  # fmt: skip
        """Return whether large steps along all ``parts`` leave all losses unchanged, relative to such steps along
        ``companions``. ``losses``: those with some readings held.
        """
        forward, generator = self.slope_meter.forward, self.slope_meter.generator
        losses = losses or forward.losses
        names, rest = [part.name for part in parts], [part.name for part in companions]
        for point in points:
            base = losses(point)
            reach = np.abs(losses(beside(point, rest, FAR, generator)) - base) if rest else np.zeros_like(base)
            bound = 64 * forward.precision.rounding * np.abs(base) + 1e-9 * np.where(np.isfinite(reach), reach, 0.0)
            if not (np.abs(losses(beside(point, names, FAR, generator)) - base) <= bound).all():
                return False
        return True
