"""What becomes of every gradient: measured together, then alone, then held against what else would be right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations

import numpy as np

from gopt.analysis.training import Training
from gopt.runtime.program import CallBack
from gopt.runtime.proof.confirm import verdict as said
from gopt.runtime.proof.confirm.forward import Forward, Values
from gopt.runtime.proof.confirm.points import beside, with_a_third
from gopt.runtime.proof.confirm.samples import Additive, Square, squares
from gopt.runtime.proof.confirm.seams import seams
from gopt.runtime.proof.confirm.slopes import Fit, Part, measure
from gopt.runtime.proof.confirm.verdict import Confirmation, Verdict
from gopt.runtime.proof.reference import no_call

TOGETHER = 64
"""Gradients in one measurement: a wrong one shows as an eighth of it, far above the tolerance."""
SPREAD = 1e4
"""Largest over smallest change of gradients that are measured together."""
FAINT = 1e-9
"""Below this share of the largest gradient, a value may be rounding."""
SLICED = 64
"""Slices along one axis that are measured one by one."""
Tell = Callable[[str], None]


def confirm_gradients(
    training: Training, batches: Sequence[Values], seed: int, call: CallBack = no_call,
    advance: Tell = lambda _: None,
) -> list[Confirmation]:  # fmt: skip
    """Check every gradient between two batches or more; each batch is a full set of inputs, states included.

    Only *differences* between batches are compared: what does not depend on the batch (a penalty on the weights in
    the loss, which an update may add after the gradient was reduced) is the same on all ranks and cannot be wrong.
    Together, up to 64 gradients take 18 runs of the forward; what does not agree is halved, and one alone that is
    wrong takes about 130. ``advance`` hears how far it is.
    """
    return _Confirming(training, batches, seed, call, advance).all()


@dataclass
class _Confirming:
    """The state of one confirmation."""

    training: Training
    batches: Sequence[Values]
    seed: int
    call: CallBack
    advance: Tell
    found: dict[str, Confirmation] = field(default_factory=dict)
    _squares: list[Square] | None = None

    def all(self) -> list[Confirmation]:
        self.forward = Forward(self.training, self.call)
        self.generator = np.random.default_rng(self.seed + 3)
        given = [self.forward.point(batch) for batch in self.batches]
        self.points = with_a_third(given, self.training.batch, self.generator)
        self.settle(list(self.training.gradients))
        return [self.found[name] for name in self.training.gradients]

    # --- one point after the other ----------------------------------------------------------------------------------

    def settle(self, names: list[str]) -> None:
        """Judge at the given states; what is zero there, or lies on a kink, beside them."""
        self.judge(names, self.points)
        silent = [name for name in names if self.found[name].why in (said.SILENT, said.FAINT)]
        if silent:
            self._again(silent, 0.3, (Verdict.CONFIRMED, Verdict.REFUTED))
        wrong = [name for name in names if self.found[name].why == said.WRONG]
        if wrong:
            # Ties (a ReLU of exactly zero) have no derivative. Far less than what would open a clip.
            self._again(wrong, 1e-3, (Verdict.CONFIRMED,))

    def _again(self, names: list[str], amount: float, telling: tuple[Verdict, ...]) -> None:
        states = [state.tensor for state in self.training.parameters]
        seed = int(self.generator.integers(1 << 30))
        moved = [beside(point, states, amount, np.random.default_rng(seed)) for point in self.points]
        before = {name: self.found.pop(name) for name in names}
        self.judge(names, moved)
        for name, first in before.items():
            if self.found[name].verdict not in telling:
                self.found[name] = first

    def judge(self, names: list[str], points: list[Values]) -> None:
        """Say something of each parameter, at these points alone."""
        results = [self.forward.everything(point) for point in points]
        usable = [place for place, (loss, _) in enumerate(results) if math.isfinite(loss)]
        points, values = [points[place] for place in usable], [results[place][1] for place in usable]
        parts, faint = [], []
        largest = max((float(np.abs(each[name]).max(initial=0)) for each in values for name in each), default=0.0)
        for name in names:
            gradient = self.training.gradients[name]
            at = tuple(each[gradient] for each in values)
            if len(at) < 2 or not all(np.isfinite(each).all() for each in at):
                self.say(name, Verdict.UNCONFIRMED, said.NOT_FINITE)
            elif name not in points[0] or at[0].size != points[0][name].size:
                self.elsewhere(name, points, at)
            elif max(float(np.abs(each).max(initial=0)) for each in at) <= FAINT * largest:
                faint.append(Part(name, name, points[0][name], tuple(_laid(each, points[0][name]) for each in at)))
            elif all(np.array_equal(each, at[0]) for each in at):
                self.say(name, Verdict.UNCONFIRMED, said.EQUAL)
            else:
                parts.append(Part(name, name, points[0][name], tuple(_laid(each, points[0][name]) for each in at)))
        for group in _groups(parts):
            self.together(group, points)
        self.zeros(faint, parts, points)

    def say(self, name: str, verdict: Verdict, why: str, fit: Fit | None = None) -> None:
        ratios = fit.ratios if fit is not None else ()
        self.found[name] = Confirmation(name, self.training.gradients[name], ratios, verdict, why)
        done, all = len(self.found), len(self.training.gradients)
        self.advance(f"confirming gradients by finite differences: {done} of {all}, {self.forward.runs} runs")

    def measured(self, parts: Sequence[Part], points: Sequence[Values], rungs: int | None = None) -> Fit:
        fixed = [part.name for part in parts if part.name != part.parameter]
        loss = (lambda point: self.forward.loss(point, fixed)) if fixed else self.forward.loss
        return measure(parts, points, loss, self.forward.precision, self.generator, rungs)

    # --- proportional -----------------------------------------------------------------------------------------------

    def together(self, parts: list[Part], points: list[Values]) -> None:
        """Measure parts with one factor for all; halve them where that does not hold."""
        if len(parts) == 1:
            self.alone(parts[0], points)
            return
        fit = self.measured(parts, points, rungs=2)
        if fit.holds and not _replaces(fit):
            for part in parts:
                self.say(part.parameter, Verdict.CONFIRMED, said.PROPORTIONAL, fit)
            return
        middle = len(parts) // 2
        self.together(parts[:middle], points)
        self.together(parts[middle:], points)

    def alone(self, part: Part, points: list[Values]) -> None:
        fit = self.measured([part], points)
        if fit.holds:
            self._proportional(part, fit)
            return
        for other in _turned(part):
            turned = self.measured([other], points, rungs=2)
            if turned.holds:
                self._proportional(other, turned)
                return
        self.otherwise(part, fit, points)

    def _proportional(self, part: Part, fit: Fit) -> None:
        if _replaces(fit):
            self.say(part.parameter, Verdict.REFUTED, said.REPLACEMENT, fit)
        else:
            self.say(part.parameter, Verdict.CONFIRMED, said.PROPORTIONAL, fit)

    # --- not proportional, but right to average ---------------------------------------------------------------------

    def otherwise(self, part: Part, fit: Fit, points: list[Values]) -> None:
        """A value that is not proportional: linear in the samples, the gradient of a computed weight, or wrong."""
        name, gradient = part.parameter, self.training.gradients[part.parameter]
        additive = self.additive(gradient)
        if additive is Additive.YES:
            self.say(name, Verdict.CONFIRMED, said.ADDITIVE, fit)
        elif additive is Additive.NO:
            self.say(name, Verdict.REFUTED, said.NOT_ADDITIVE, fit)
        elif not self.seam(name, points, part.at) and not self.sliced(part, points):
            self.say(name, Verdict.REFUTED, said.WRONG if fit.measured else said.FLAT, fit)

    def additive(self, gradient: str) -> Additive:
        if self._squares is None:
            self._squares = squares(self.forward, self.points, self.training.batch, self.generator)
        exact = 1e2 * self.forward.precision.rounding
        answers = {square.judge(gradient, exact) for square in self._squares}
        if Additive.NO in answers:
            return Additive.NO
        return Additive.YES if answers == {Additive.YES} else Additive.OPEN

    def elsewhere(self, name: str, points: list[Values], at: tuple[np.ndarray, ...]) -> None:
        """A parameter that the loss does not read, or whose gradient has another size."""
        if all(np.array_equal(each, at[0]) for each in at):
            self.say(name, Verdict.UNCONFIRMED, said.EQUAL)
        elif not self.seam(name, points, at):
            additive = self.additive(self.training.gradients[name])
            if additive is Additive.OPEN:
                self.say(name, Verdict.UNCONFIRMED, said.UNREAD)
            elif additive is Additive.YES:
                self.say(name, Verdict.CONFIRMED, said.ADDITIVE)
            else:
                self.say(name, Verdict.REFUTED, said.NOT_ADDITIVE)

    def seam(self, name: str, points: list[Values], at: tuple[np.ndarray, ...]) -> bool:
        """Whether the value is the gradient of something made of the states alone."""
        graph, batch = self.forward.graph, set(self.training.batch)
        for seam in seams(graph, self.training.loss, batch, name, at[0].shape):
            held = self.forward.values([seam], points[0])[seam] if seam not in points[0] else points[0][seam]
            part = Part(name, seam, held, tuple(_laid(each, held) for each in at))
            moved = [{**point, seam: held} for point in points]
            for each in (part, *_turned(part)):
                fit = self.measured([each], moved)
                if fit.holds:
                    why = f"proportional to the change of the loss along {seam!r}, which is made of the states alone"
                    self.say(name, Verdict.CONFIRMED, why, fit)
                    return True
        return False

    def sliced(self, part: Part, points: list[Values]) -> bool:
        """Whether each slice along some axis is proportional with a factor of its own: a constant rate per row."""
        for mask in _masks(part):
            fits = []
            for inside in mask:
                slice = Part(part.parameter, part.name, part.origin, part.at, inside)
                if slice.moved.any():
                    fits.append(self.measured([slice], points))
                    if not fits[-1].holds:
                        break
            else:
                ratios = tuple(ratio for fit in fits for ratio in fit.ratios[:1])
                self.say(part.parameter, Verdict.CONFIRMED, said.SLICES, Fit(True, True, 1.0, 0.0, ratios))
                return True
        return False

    # --- zero -------------------------------------------------------------------------------------------------------

    def zeros(self, faint: list[Part], others: list[Part], points: list[Values]) -> None:
        """Values of next to nothing: rounding where the loss does not depend on the parameter, however far it moves."""
        if not faint:
            return
        if self.still(faint, others, points):
            for part in faint:
                nothing = all(not each.any() for each in part.at)
                if nothing:
                    self.say(part.parameter, Verdict.UNCONFIRMED, said.SILENT)
                else:
                    self.say(part.parameter, Verdict.CONFIRMED, said.ZERO)
        elif len(faint) > 1:
            middle = len(faint) // 2
            self.zeros(faint[:middle], others, points)
            self.zeros(faint[middle:], others, points)
        else:
            self._tiny(faint[0], points)

    def _tiny(self, part: Part, points: list[Values]) -> None:
        if not part.moved.any():
            self.say(part.parameter, Verdict.UNCONFIRMED, said.SILENT)
            return
        fit = self.measured([part], points)
        if fit.holds:
            self._proportional(part, fit)
        elif fit.measured:
            self.otherwise(part, fit, points)
        else:
            self.say(part.parameter, Verdict.UNCONFIRMED, said.FAINT)

    def still(self, parts: Sequence[Part], others: Sequence[Part], points: Sequence[Values]) -> bool:
        """Whether large steps along all ``parts`` leave the loss as it is, seen against such steps along ``others``."""
        names, rest = [part.name for part in parts], [part.name for part in others]
        for point in points:
            base = self.forward.loss(point)
            moved = self.forward.loss(beside(point, names, 0.3, self.generator))
            reach = abs(self.forward.loss(beside(point, rest, 0.3, self.generator)) - base) if rest else 0.0
            bound = 64 * self.forward.precision.rounding * abs(base) + 1e-9 * (reach if math.isfinite(reach) else 0.0)
            if not abs(moved - base) <= bound:
                return False
        return True


def _replaces(fit: Fit) -> bool:
    """Whether g = p − rate · gradient: what a descent puts in the parameter's place."""
    return fit.factor < 0 and 0.5 < fit.offset < 1.5


def _groups(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Parts of about one size, so that none drowns in another."""
    group: list[Part] = []
    for part in sorted(parts, key=lambda part: part.size):
        if group and (len(group) == TOGETHER or part.size > SPREAD * group[0].size):
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def _laid(gradient: np.ndarray, like: np.ndarray) -> np.ndarray:
    """A gradient in the parameter's layout: reshaped, or turned where that alone fits."""
    if gradient.shape == like.shape:
        return gradient
    fits = [turned for turned in _permutations(gradient) if turned.shape == like.shape]
    return fits[0] if fits else gradient.reshape(like.shape)


def _turned(part: Part) -> Iterator[Part]:
    """The same value with axes exchanged that have equal lengths."""
    for order in permutations(range(part.origin.ndim)) if 1 < part.origin.ndim <= 4 else ():
        at = tuple(each.transpose(order) for each in part.at)
        if at[0].shape == part.origin.shape and order != tuple(sorted(order)):
            yield Part(part.parameter, part.name, part.origin, at)


def _permutations(array: np.ndarray) -> Iterator[np.ndarray]:
    if 1 < array.ndim <= 4:
        yield from (array.transpose(order) for order in permutations(range(array.ndim)))


def _masks(part: Part) -> Iterator[Iterator[np.ndarray]]:
    """For each axis of few slices, the slices; last, all entries one by one if they are few."""
    dims = part.origin.shape
    for axis, size in enumerate(dims):
        if 1 < size <= SLICED and size < part.origin.size:
            line = np.arange(size).reshape(-1, *(1,) * (len(dims) - axis - 1))
            yield (np.broadcast_to(line == place, dims) for place in range(size))
    if 1 < part.origin.size <= SLICED:
        numbers = np.arange(part.origin.size).reshape(dims)
        yield (numbers == place for place in range(part.origin.size))
