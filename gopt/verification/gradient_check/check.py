"""Checks every gradient: all together; where these disagree, the wrong ones are searched, and looked at alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle, islice

import numpy as np

from gopt.analysis.training import TrainingGraph
from gopt.runtime.bound_calls import CollectiveCallback
from gopt.system.progress import ProgressCallback, no_progress
from gopt.verification.gradient_check import verdict as said
from gopt.verification.gradient_check.alternatives import (
    QUICK,
    SlopeMeter,
    where_taken,
)
from gopt.verification.gradient_check.computed_weights import shifted
from gopt.verification.gradient_check.difference_quotients import Candidate, Losses, QuotientFit
from gopt.verification.gradient_check.forward import CheckedForward, Values
from gopt.verification.gradient_check.layout import Layouts
from gopt.verification.gradient_check.points import all_beside, with_a_third
from gopt.verification.gradient_check.single_values import FAR, PATIENCE, SingleValues
from gopt.verification.gradient_check.slopes import SlopeCheck
from gopt.verification.gradient_check.verdict import GradientCheck, Verdict
from gopt.verification.reference_graphs import refuse_call
from gopt.verification.side_by_side import side_by_side

TOGETHER = 256
"""Gradients in one measurement: a wrong one shows as a sixteenth of it, far above the tolerance."""
SPREAD = 1e4
"""Largest over smallest change of gradients that are measured together."""
FAINT = 1e-9
"""Below this share of the largest gradient, a value may be rounding."""
EFFORT = 60.0
"""Seconds of all runs, as estimated from the sizes of the step, after which a single refuted value is enough."""
SEARCHES = 4
"""Wrong values to search among all; where more are wrong, halves of halves are measured."""
LOOKS = 3
"""Directions along which gradients are held against slopes, each at the next batch."""
SMALL = 1e-4
"""Share of the largest loss below which rounding may hide what a batch says: others are looked at first."""
MOVING = 1e-2
"""Least share of a value by which it differs between batches, to be held against slopes."""
POINTS = 3
"""Batches that are compared at a time."""
NEAR = 1e-3
"""Move of the states, relative to their size, off a kink."""
PHASE = "confirming gradients by finite differences"
Results = tuple[np.ndarray, Values]
"""Losses and gradients at a point."""


def check_gradients(
    training: TrainingGraph, batches: Sequence[Values], seed: int, call: CollectiveCallback = refuse_call,
    advance: ProgressCallback = no_progress, names: Sequence[str] | None = None, whole: bool = False,
) -> list[GradientCheck]:  # fmt: skip
    """Check every gradient between two batches or more; each is a full set of inputs, with equal states.

    More than three batches are used only where the first three cannot tell.

    Only *differences* between batches are compared: terms independent of the batch (a penalty on the weights in the
    loss, perhaps added by the update after the reduction) are the same on all ranks and cannot be wrong. Together,
    gradients take about 20 runs of the forward; the first wrong gradient in a failing group is searched by halves, and
    takes about 100 more, a few times that if samples are coupled. After EFFORT seconds, as estimated, and one refuted
    gradient, no further gradients are looked at alone. ``advance`` is called with the progress.

    ``names``: parameters with checked gradients; after one unconfirmed gradient, all others are checked as well.
    ``whole``: gradients are all of the derivative, so that an element that is always zero is not a masked one, and no
    others than ``names`` are checked."""
    forward = CheckedForward(training, call)
    generator = np.random.default_rng(seed + 3)
    ordered, losses = _with_numbers_first(forward, forward.points(batches))
    points = with_a_third(ordered[:POINTS], training.batch, generator)
    checker = _GradientChecker(
        training, SlopeMeter(forward, generator), points, ordered[POINTS:], advance, whole, losses
    )
    return checker.all(names)


@dataclass
class _GradientChecker:
    """One gradient check; ``single`` collects the results."""

    training: TrainingGraph
    slope_meter: SlopeMeter
    points: list[Values]
    spare: list[Values]
    advance: ProgressCallback
    whole: bool
    losses: np.ndarray
    """At the first point."""
    single: SingleValues = field(init=False)
    due: list[str] = field(default_factory=list)
    """Parameters that are looked at."""
    certain: str = ""
    """A parameter with a value refuted twice, after long measurements: no further values are looked at alone."""
    twice: list[str] = field(default_factory=list)
    """Parameters with refuted values, looked at again."""
    factors: dict[int, float] = field(default_factory=dict)
    """Index of a loss -> the last factor between gradients and its slopes: the next group's first guess."""

    def __post_init__(self) -> None:
        self.single = SingleValues(self.training, self.slope_meter, self.points, self.whole)

    @property
    def found(self) -> dict[str, GradientCheck]:
        return self.single.found

    def all(self, names: Sequence[str] | None) -> list[GradientCheck]:
        parameters = list(self.training.gradients)
        requested = set(parameters if names is None else names)
        self.due = [name for name in parameters if name in requested]
        if self._unsteady():
            for name in self.due:
                self.single.say(name, Verdict.UNCONFIRMED, said.UNSTEADY)
        else:
            self.check(self.due)
            if (
                not self.whole
                and any(not self.found[name].holds for name in self.due)
                and len(self.due) < len(parameters)
            ):
                rest = [name for name in parameters if name not in requested]
                self.due = parameters
                self.check(rest)
        return [self.found[name] for name in parameters if name in self.found]

    def _tell(self) -> None:
        """Report the number of verdicts; after each measurement, because many are reached at once."""
        self.advance(PHASE, len(self.found), len(self.due))

    def _results(self, points: Sequence[Values]) -> list[Results]:
        return side_by_side(self.slope_meter.forward.loss_and_gradients, points, self.slope_meter.forward.abreast)

    def _unsteady(self) -> bool:
        again = self.slope_meter.forward.losses(self.points[0])
        return bool((self.losses != again).any() and np.isfinite([self.losses, again]).all())

    # --- one set of points after the other --------------------------------------------------------------------------

    def check(self, names: list[str]) -> None:
        """Judge at the given states, near them, and for other batches, until there is a verdict."""
        # At the states themselves a tie (a ReLU of exactly zero) has no derivative. Nothing else changes so near.
        near = self._moved(NEAR)
        results = self._results(near)
        finite = all(np.isfinite(losses).all() for losses, _ in results)
        for points in (near if finite else self.points, self._moved(FAR), *self._spare()):
            open = [name for name in names if name not in self.found or (self._open(name) and not self.certain)]
            before = {name: self.found.pop(name) for name in open if name in self.found}
            self.judge(open, points, results if points is near else None) if open else None
            self.found.update({name: check for name, check in before.items() if self._open(name)})
        self._doubt()

    def _doubt(self) -> None:
        """Check refuted values once more, at other points: a refutation needs both."""
        names = [n for n, check in self.found.items() if check.verdict is Verdict.REFUTED and n not in self.twice]
        self.twice += names
        for part in (names[:PATIENCE], names[PATIENCE:]):
            before = {name: self.found.pop(name) for name in part}
            if part:
                self.judge(part, self._moved(NEAR))
            right = {name for name in part if self.found[name].holds}
            self.found.update({name: check for name, check in before.items() if name not in right})
            if not right:
                return

    def _open(self, name: str) -> bool:
        return self.found[name].verdict is Verdict.UNCONFIRMED

    def _moved(self, amount: float) -> list[Values]:
        states = [state.tensor for state in self.training.parameters]
        seed = int(self.slope_meter.generator.integers(1 << 30))
        return all_beside(self.points, states, amount, seed)

    def _spare(self) -> Iterator[list[Values]]:
        """The batches beyond the first three, three by three: between two, every change of one number is a multiple."""
        for start in range(0, len(self.spare) - 1, POINTS):
            yield [*self.spare[start : start + POINTS], *self.points][:POINTS]

    def judge(self, names: list[str], points: list[Values], results: list[Results] | None = None) -> None:
        """Reach a verdict for each parameter, from these points alone; ``results``: losses and gradients there, if
        known."""
        results = results or self._results(points)
        usable = [index for index, (losses, _) in enumerate(results) if np.isfinite(losses).all()]
        points, values = [points[index] for index in usable], [results[index][1] for index in usable]
        largest = max((_peak(values_at[name]) for values_at in values for name in values_at), default=0.0)
        parts, faint = [], []
        for name in names:
            at = tuple(values_at[self.training.gradients[name]] for values_at in values)
            if len(at) < 2 or not all(np.isfinite(array).all() for array in at):
                self.single.say(name, Verdict.UNCONFIRMED, said.NOT_FINITE)
            elif name not in points[0] or at[0].size != points[0][name].size:
                self.single.elsewhere(name, points, at)
            else:
                like = points[0][name]
                share = max(map(_peak, at)) / max(largest, 1e-300)
                at = tuple(self._layouts.of(name, array, like) for array in at)
                part = Candidate(name, name, like, at, share, whole=self.whole)
                if share <= FAINT:
                    faint.append(part)
                elif part.size == 0:
                    self.single.say(name, Verdict.UNCONFIRMED, said.EQUAL)
                else:
                    parts.append(part)
        levels = [results[index][0] for index in usable]
        for group in self._of_one_source(parts):
            self.check_together(group, points, levels)
            self._tell()
        self.zeros(faint, parts, points, levels)
        self._tell()

    def _of_one_source(self, parts: Sequence[Candidate]) -> Iterator[list[Candidate]]:
        """Groups of about one size with gradients from the same losses."""
        by_losses: dict[frozenset[str], list[Candidate]] = {}
        for part in parts:
            gradient = self.training.gradients[part.parameter]
            by_losses.setdefault(self.training.sources.get(gradient, frozenset()), []).append(part)
        for alike in by_losses.values():
            for group in _groups(alike):
                yield sorted(group, key=lambda part: self._places[self.training.gradients[part.parameter]])

    @cached_property
    def _places(self) -> dict[str, int]:
        """Value -> the place of the maker among all nodes."""
        return {name: place for place, node in enumerate(self.training.graph.nodes) for name in node.outputs}

    # --- proportional -----------------------------------------------------------------------------------------------

    def check_together(self, parts: list[Candidate], points: list[Values], levels: Sequence[np.ndarray]) -> None:
        """Measure parts with one factor for all, along slopes of the loss, then otherwise."""
        disagreeing = self._disagreeing(parts, points, levels)
        if self.certain:
            for part in disagreeing:
                self.single.say(part.parameter, Verdict.UNCONFIRMED, said.UNSEEN.format(self.certain))
        elif disagreeing:
            self._otherwise(disagreeing, points, levels)

    def _disagreeing(
        self, parts: list[Candidate], points: list[Values], levels: Sequence[np.ndarray]
    ) -> list[Candidate]:
        """Settle parts in agreement with slopes, also with readings held as constants; return the others."""
        return self._not_stopped(self._unlike_slopes(parts, points, levels), points, levels)

    def _otherwise(self, parts: list[Candidate], points: list[Values], levels: Sequence[np.ndarray]) -> None:
        """Measure parts in disagreement with slopes along differences between batches; search after a failure."""
        check_alone = len(parts) == 1
        fit = self.slope_meter.measure(parts, points, None if check_alone else QUICK)
        if fit.holds and (check_alone or not fit.replaces):
            self.single.proportional(parts, fit)
            return
        remaining = self._not_shifted(parts, points)
        if len(remaining) < len(parts):
            if remaining:
                self.check_together(remaining, points, levels)
        elif check_alone:
            self.single.check(parts[0], fit, points)
            self._tell()
        else:
            self._search(parts, points, levels)

    def _search(self, parts: list[Candidate], points: list[Values], levels: Sequence[np.ndarray]) -> None:
        """Look alone at parts of a disagreeing group, by halves; all others are measured together again.

        What the backward computes first comes first: an error there spoils what follows."""
        for _ in range(SEARCHES):
            index = self._suspect(parts, points, levels)
            ahead, suspect = parts[:index], parts[index]
            self.check_together([suspect], points, levels)
            self._settle(suspect.parameter)
            parts = self._disagreeing([*ahead, *parts[index + 1 :]], points, levels)
            if parts and ahead:
                self._disagreeing([part for part in ahead if part.parameter not in self.found], points, levels)
                parts = [part for part in parts if part.parameter not in self.found]
            if not parts or self.certain:
                break
        due = [parts] if parts else []
        while due and not self.certain:
            failing = self._disagreeing(due.pop(), points, levels)
            if len(failing) > 1:
                middle = len(failing) // 2
                due += [failing[middle:], failing[:middle]]
            elif failing:
                self._otherwise(failing, points, levels)
                self._settle(failing[0].parameter)
        if due:
            self.check_together([part for some in reversed(due) for part in some], points, levels)

    def _suspect(self, parts: list[Candidate], points: list[Values], levels: Sequence[np.ndarray]) -> int:
        """The index of the first wrong part in a disagreeing group: where a half agrees at a look, the rest does
        not."""
        start, end = 0, len(parts)
        while end - start > 1:
            middle = (start + end) // 2
            half = parts[start:middle]
            agreeing = sum(len(some) for some, _ in self._agreeing(half, points, levels, quick=True))
            start, end = (middle, end) if agreeing == len(half) else (start, middle)
        return start

    def _settle(self, name: str) -> None:
        """Doubt all refuted values after long measurements: there a single certain refutation ends the search."""
        forward = self.slope_meter.forward
        if name not in self.twice and forward.runs * forward.seconds > EFFORT:
            self._doubt()
            self.certain = next((n for n in self.twice if self.found[n].verdict is Verdict.REFUTED), "")

    def _unlike_slopes(
        self, parts: list[Candidate], points: list[Values], levels: Sequence[np.ndarray]
    ) -> list[Candidate]:
        """Settle the parts that agree with slopes of the loss; return the others."""
        for agreeing, fit in self._agreeing(parts, points, levels):
            self.single.proportional(agreeing, fit)
        return [part for part in parts if part.parameter not in self.found]

    def _not_stopped(
        self, parts: list[Candidate], points: list[Values], levels: Sequence[np.ndarray]
    ) -> list[Candidate]:
        """Settle the parts that agree with slopes of the loss under the held readings of other values."""
        for stops, held_forward in self.single.stops.known_forwards():
            if parts:
                placed = held_forward.on(held_forward.points(points), stops)
                for agreeing, fit in self._agreeing(parts, placed, levels, held_forward.losses):
                    for part in agreeing:
                        self.single.say_stopped(part, stops, fit)
                parts = [part for part in parts if part.parameter not in self.found]
        return parts

    def _agreeing(
        self, parts: list[Candidate], points: list[Values], levels: Sequence[np.ndarray],
        losses: Losses | None = None, quick: bool = False,
    ) -> Iterator[tuple[list[Candidate], QuotientFit]]:  # fmt: skip
        """The parts that agree with slopes of some losses, together with others. ``quick``: no verdict, but a look at
        as few points as may tell, with the factor of earlier groups.

        Nearly equal gradients in all batches would say little about changes."""
        by_name = {part.name: part for part in parts if part.size >= MOVING * max(map(_length, part.at))}
        forward, loss_index = self.slope_meter.forward, self._only_loss(parts)
        if loss_index is None:
            return
        guess = self.factors.get(loss_index)
        check = SlopeCheck(
            lambda point: float((losses or forward.losses)(point)[loss_index]), forward.moved, forward.precision,
            self.slope_meter.generator, guess if quick else None,
            masks={name: part.moved for name, part in by_name.items() if not part.moved.all()},
            level=max(abs(float(level[loss_index])) for level in levels), guess=guess,
            abreast=forward.abreast, most=2 if quick else None,
        )  # fmt: skip
        heard = [k for k, level in enumerate(levels) if abs(float(level[loss_index])) >= SMALL * check.level]
        count = LOOKS if not quick else 2 if guess is None else 1  # the first look may learn the factor
        turns = islice(cycle(heard if len(heard) > 1 else range(len(points))), count)
        looks = (
            (points[k], float(levels[k][loss_index]), {name: part.at[k] for name, part in by_name.items()})
            for k in turns
        )
        for names, ratios, factor in check.agreeing(looks, list(by_name)):
            if len(names) > 1 or guess is None:  # a single gradient may have a factor of its own
                self.factors[loss_index] = factor
            yield [by_name[name] for name in names], QuotientFit(True, True, ratios[0], 0.0, tuple(ratios))

    def _only_loss(self, parts: Sequence[Candidate]) -> int | None:
        """The index of the only loss behind the gradients of all parts; None for several losses."""
        losses = self.training.losses
        of = {self.training.sources.get(self.training.gradients[part.parameter], frozenset()) for part in parts}
        of_parts = [index for index, loss in enumerate(losses) if of == {frozenset([loss])}]
        return 0 if len(losses) == 1 else next(iter(of_parts), None)

    def _not_shifted(self, parts: list[Candidate], points: list[Values]) -> list[Candidate]:
        """Settle gradients taken at a point other than the parameters; return the remaining candidates."""
        moved = [part for part in parts if part.parameter in self._shifts]
        if not moved:
            return parts
        fit = where_taken(self.slope_meter, self.training, moved, points, self._shifts)
        if not fit.holds:
            return parts
        for part in moved:
            self.single.say(part.parameter, Verdict.CONFIRMED, said.SHIFTED, fit)
        return [part for part in parts if part not in moved]

    @cached_property
    def _layouts(self) -> Layouts:
        return Layouts(self.training)

    @cached_property
    def _shifts(self) -> dict[str, str]:
        read = {name: gradient for name, gradient in self.training.gradients.items() if name in self.points[0]}
        return shifted(self.slope_meter.forward.graph, read, set(self.training.batch))

    # --- zero -------------------------------------------------------------------------------------------------------

    def zeros(
        self, faint: list[Candidate], rest: list[Candidate], points: list[Values], levels: Sequence[np.ndarray]
    ) -> None:
        """Values near zero: rounding where the loss does not depend on the parameter, however far moved."""
        if not faint:
            return
        if self.single.still(faint, rest, points):
            for part in faint:
                if part.moved.any():
                    self.single.say(part.parameter, Verdict.CONFIRMED, said.ZERO)
                else:
                    self.single.say(part.parameter, Verdict.UNCONFIRMED, said.SILENT)
        elif len(faint) > 1:
            middle = len(faint) // 2
            self.zeros(faint[:middle], rest, points, levels)
            self.zeros(faint[middle:], rest, points, levels)
        elif faint[0].moved.any():
            if not self.single.silenced(faint[0], points):
                self.check_together(faint, points, levels)
        else:
            self.single.say(faint[0].parameter, Verdict.UNCONFIRMED, said.SILENT)


def _with_numbers_first(forward: CheckedForward, points: list[Values]) -> tuple[list[Values], np.ndarray]:
    """The points in order, with points of a non-finite loss last if any is among the first; and the first's losses."""
    known = [forward.losses(point) for point in points[:POINTS]]
    if not np.isfinite(known).all():
        known += [forward.losses(point) for point in points[POINTS:]]
    order = sorted(range(len(points)), key=lambda k: k < len(known) and not np.isfinite(known[k]).all())
    return [points[k] for k in order], known[order[0]]


def _peak(array: np.ndarray) -> float:
    return float(np.abs(array).max(initial=0.0))


def _length(array: np.ndarray) -> float:
    return float(np.linalg.norm(array))


def _groups(parts: Sequence[Candidate]) -> Iterator[list[Candidate]]:
    """Parts of about one size, so that no part drowns in another."""
    group: list[Candidate] = []
    for part in sorted(parts, key=lambda part: part.size):
        if group and (len(group) == TOGETHER or part.size > SPREAD * group[0].size):
            yield group
            group = []
        group.append(part)
    if group:
        yield group
