"""Confirms the gradients of a derived step by finite differences, or refuses the step.

A derived gradient is the whole derivative, so slopes of the loss must agree: of all parameters together, and otherwise
of ever fewer. Cases beyond slopes, such as a gradient of zero, are checked as by ``gopt verify`` for any step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice

import numpy as np

from gopt.analysis.batch_checks import ReplacedBatchError
from gopt.analysis.coupling.samples_axis import samples_axis
from gopt.analysis.role_map import RoleMap
from gopt.analysis.training import TrainingGraph
from gopt.api import read_roles, with_stored_roles
from gopt.errors import RunError, UnsupportedError
from gopt.frontends.derive.options import BATCHES, DYNAMIC, DeriveOptions
from gopt.frontends.derive.same_forward import check_same_forward
from gopt.frontends.derive.step import Step
from gopt.frontends.derive.update import FIRST_SCALE
from gopt.ir.graph import Graph
from gopt.ir.node_kinds import random
from gopt.ir.tensor import Tensor
from gopt.runtime.training.array_source import MicroStep, SampleOrder
from gopt.runtime.training.data import open_data
from gopt.text.sanitize import listed, show
from gopt.verification import sampling
from gopt.verification.gradient_check import GradientCheck, Verdict, check_gradients
from gopt.verification.gradient_check.forward import CheckedForward, Precision, Values, sessions_for
from gopt.verification.gradient_check.points import beside
from gopt.verification.gradient_check.slopes import SlopeCheck
from gopt.verification.gradient_check.verdict import APART, PROPORTIONAL, UNSTEADY, ZERO
from gopt.verification.gradient_sample import sample_gradients
from gopt.verification.reference_graphs import refuse_call
from gopt.verification.second_engine import check_step

LOOKS = (1e-3, 1e-2)
"""Moves of the states, relative to their size, to the points at which all gradients are looked at."""
POINTS = 2
"""Batches of a look."""
FAINT = 1e-9
"""Below this share of the largest gradient, a value may be rounding."""
SMALL = 1e-4
"""Share of the largest loss below which rounding may hide what a batch says: others are looked at."""
DRAWN = 48
"""Batches that are drawn where the forward leaves the numbers on the first ones."""
MOST = 16
"""Wrong gradients after which no more are looked for."""


def confirm(step: Step, options: DeriveOptions) -> tuple[int, list[str]]:
    """The number of checked gradients, and a remark on gradients no batch changes; raises UnsupportedError for an
    unconfirmed gradient, or a step with another forward than the model's."""
    copy, seed = step.graph.twin(), options.seed
    training = _read(copy)
    sample, points = sample_gradients(training, seed), _points(training, options)
    point = next(points)
    notes = _compared(step, training, {**_states(training), **point})
    scale = FIRST_SCALE if options.loss_scale == DYNAMIC else float(options.loss_scale or 1)
    names = list(sample.parameters if sample else training.gradients)
    try:
        wrong = _unconfirmed(training, names, chain([point], points), scale, seed)
    except RunError as error:
        raise UnsupportedError(
            f"gradients cannot be confirmed by finite differences: {error.message}", *error.hints,
            "replace that operator in the model",
        ) from None  # fmt: skip
    if wrong:
        shown = ", ".join(show(check.parameter) for check in wrong[:4])
        raise UnsupportedError(
            f"the gradient of {shown} is not confirmed: {wrong[0].why}",
            "make its random numbers an input of the model" if wrong[0].why == UNSTEADY else
            "--freeze what is not a parameter, or give inputs as in real data (--data FILE.npz, sizes by --dim)",
        )  # fmt: skip
    apart = [name for name in step.parameters if name not in training.gradients]
    shown = listed([*map(show, apart)])
    return len(names), [*notes, *([f"not confirmed, for no batch changes their gradients: {shown}"] if apart else [])]


def _compared(step: Step, training: TrainingGraph, point: Values) -> list[str]:
    """Remarks on a second engine's results; raises UnsupportedError for different results, or another forward than the
    model's. ``point``: all inputs of the step."""
    source = step.source.initializers
    stored = {name: np.asarray(tensor.numpy()) for name, tensor in source.items() if name not in point}
    check_same_forward(step.source, training.graph, {**stored, **point})
    checks = check_step(training, point, sessions_for(training.graph), refuse_call)
    for _, why in (doubt for check in checks for doubt in check.doubts()):
        raise UnsupportedError(
            f"two engines make different steps of it: {why}",
            "replace that operator in the model, or freeze what is in front of it",
        )
    missing = dict.fromkeys(check.why for check in checks if not check.engine)
    return [f"one step is not confirmed by a second engine: {why}" for why in missing]


def _read(graph: Graph) -> TrainingGraph:
    try:
        return read_roles(graph, with_stored_roles(graph, RoleMap(), "the step"))
    except ReplacedBatchError as error:
        raise UnsupportedError(
            f"output {show(error.output)} is the next value of input {show(error.name)}, as of a cache: in a step such "
            "an input is a state, and no batch",
            f"take the output {show(error.output)} out of the model",
        ) from None


def _unconfirmed(
    training: TrainingGraph, names: Sequence[str], more: Iterator[Values], scale: float, seed: int
) -> list[GradientCheck]:
    """Verdicts on ``names`` with gradients other than ``scale`` times the derivative. ``more``: points without
    states."""
    points = list(islice(more, BATCHES))
    rest = list(names)
    if not any(map(random, training.graph.nodes)):
        slopes = _Slopes(training, points, scale, seed)
        for amount in LOOKS:
            rest = slopes.disagreeing(rest, amount)
            if not rest:
                return []
            if slopes.left_numbers:
                states = _states(training)
                sound = _with_numbers(slopes.forward, ({**states, **point} for point in islice(more, DRAWN)))
                slopes.given = points = [{n: array for n, array in point.items() if n not in states} for point in sound]
        precision = slopes.forward.precision
        rest = slopes.located(rest)
    else:
        precision = CheckedForward(training, refuse_call).precision
    if not rest:
        return []
    states = _states(training)
    points = [{**states, **point} for point in points]
    checks = {check.parameter: check for check in check_gradients(training, points, seed, names=rest, whole=True)}
    return [_told(checks[name]) for name in rest if not _is_gradient(checks[name], scale, precision)]


def _with_numbers(forward: CheckedForward, points: Iterable[Values]) -> list[Values]:
    """The first points with a finite loss; raises UnsupportedError without any."""
    wide_point, points_used = None, []
    for point in points:
        (wide,) = forward.points([point])
        wide_point = wide if wide_point is None else wide_point
        if np.isfinite(forward.losses(wide)).all():
            points_used.append(point)
        if len(points_used) == BATCHES:
            break
    if not points_used:
        node = forward.leaves_numbers(wide_point or {})
        raise UnsupportedError(
            f"the loss is not a number on any batch: {node or 'an input'} is the first to leave the numbers",
            "give inputs as in real data (--data FILE.npz)",
        )
    return points_used


def _is_gradient(check: GradientCheck, scale: float, precision: Precision) -> bool:
    """Return whether a value is ``scale`` times the gradient. ``gopt verify`` also accepts an average over ranks."""
    right = all(abs(ratio / scale - 1) < min(10 * precision.tolerance, 0.05) for ratio in check.ratios)
    return check.holds and (check.why == ZERO or (check.why == PROPORTIONAL and right))


def _told(check: GradientCheck) -> GradientCheck:
    """The verdict, without excuses accepted by ``gopt verify``: an excuse is no proof here."""
    return replace(check, verdict=Verdict.UNCONFIRMED, why=APART) if check.holds else check


@dataclass
class _Slopes:
    """The loss and the gradients of a step, at points near the given ones."""

    training: TrainingGraph
    given: Sequence[Values]
    scale: float
    seed: int
    forward: CheckedForward = field(init=False)
    _peaks: dict[str, float] = field(default_factory=dict)
    """The largest element of each gradient that was seen."""
    _level: float = 0.0
    """The largest loss that was seen."""
    left_numbers: bool = False
    """Whether the loss was not a number at a point that was looked at."""
    _looks: int = 0

    def __post_init__(self) -> None:
        self.forward = CheckedForward(self.training, refuse_call, sparing=True)

    def disagreeing(self, names: Sequence[str], amount: float) -> list[str]:
        """The members of ``names`` in groups disagreeing with slopes of the loss near the points."""
        self._looks += 1
        generator = np.random.default_rng([self.seed, 5, self._looks])
        check = SlopeCheck(
            self.forward.loss, self.forward.moved, self.forward.precision, generator, self.scale, level=self._level
        )
        looks = self._at(self._near(amount), names)
        right = {name for group, *_ in check.agreeing(looks, names) for name in group}
        return [name for name in names if name not in right]

    def _near(self, amount: float) -> Iterator[Values]:
        """The given points with states moved, differently each time."""
        parameters = {state.tensor for state in self.training.parameters}
        turn = self._looks % len(self.given)
        points = self.forward.points([*self.given[turn:], *self.given[:turn]])
        for around in range(POINTS):
            generator = np.random.default_rng(self.seed + self._looks + around * DRAWN)
            states: Values = {}
            for name, tensor in _stored(self.training):
                if name not in self.forward.graph.inputs:
                    continue
                value = np.asarray(tensor.numpy())
                states |= beside({name: value}, [name], amount, generator) if name in parameters else {name: value}
            (states,) = self.forward.points([states], parameters)
            for point in points:
                yield {**states, **point}

    def located(self, names: Sequence[str]) -> list[str]:
        """The members of ``names`` disagreeing alone; or as an undivided group, once many are known."""
        largest = max(self._peaks.values(), default=0.0)
        faint = [name for name in names if not self._peaks.get(name, 0.0) > FAINT * largest]
        located: list[str] = []
        stack = [[name for name in names if name not in set(faint)]]
        while stack:
            part = stack.pop()
            if len(located) < MOST:
                part = self.disagreeing(part, LOOKS[0]) if part else []
            if len(part) == 1 or len(located) >= MOST:
                located += part
            elif part:
                stack += [part[len(part) // 2 :], part[: len(part) // 2]]
        marked = {*located, *faint}
        return [name for name in names if name in marked]

    def _at(
        self, points: Iterable[Values], names: Sequence[str]
    ) -> Iterator[tuple[Values, float, dict[str, np.ndarray]]]:
        used = 0
        for point in points:
            levels, gradients = self.forward.loss_and_gradients(point)
            if not np.isfinite(levels).all():
                self.left_numbers = True
                continue
            self._level = max(self._level, abs(float(levels[0])))
            if abs(float(levels[0])) < SMALL * self._level:
                continue
            gradients_of = {name: gradients[self.training.gradients[name]].reshape(point[name].shape) for name in names}
            for name, gradient in gradients_of.items():
                peak = max(gradient.max(initial=0.0), -gradient.min(initial=0.0))
                self._peaks[name] = max(self._peaks.get(name, 0.0), float(peak))
            del gradients, gradient
            yield point, float(levels[0]), gradients_of
            used += 1
            if used == POINTS:
                return


def _points(training: TrainingGraph, options: DeriveOptions) -> Iterator[Values]:
    """Batches without an end: of the user's data, or random; with hyper-parameters."""
    hyper = {name: sampling.hyper(training, name) for name in training.hyper}
    return ({**hyper, **batch} for batch in _batches(training, options.data, options.seed))


def _stored(training: TrainingGraph) -> Iterator[tuple[str, Tensor]]:
    graph = training.graph
    return ((name, graph.initializers[name]) for name in graph.inputs if name in graph.initializers)


def _states(training: TrainingGraph) -> Values:
    return {name: np.asarray(tensor.numpy()) for name, tensor in _stored(training)}


def _batches(training: TrainingGraph, data: str, seed: int) -> Iterator[Values]:
    types = {name: training.graph.types[name] for name in training.batch}
    if data:
        source = open_data(data, types, SampleOrder(axis=samples_axis(training)))
        yield from (source.batch(MicroStep(number, 0, 1)) for number in count())
        return
    ranges = sampling.without_ignored(sampling.integer_ranges(training))
    for number in count():
        generator = np.random.default_rng([seed, number])
        yield sampling.draw_inputs(training, types, generator, ranges)
