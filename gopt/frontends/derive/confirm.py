"""Confirms the gradients of a derived step by finite differences, or refuses the step.

Differences between batches come first, many gradients at once: what ``gopt verify`` does for any step. A derived
gradient is all of the derivative, so that one which no batch changes, or whose loss has jumps, is held against
differences of the loss itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from gopt.analysis.role_map import RoleMap
from gopt.analysis.training import TrainingGraph
from gopt.api import read_roles, with_stored_roles
from gopt.errors import RunError, UnsupportedError
from gopt.frontends.derive.options import BATCHES, DYNAMIC, DeriveOptions
from gopt.frontends.derive.same_forward import check_same_forward
from gopt.frontends.derive.step import Step
from gopt.frontends.derive.update import FIRST_SCALE
from gopt.sanitize import show
from gopt.verification import sampling
from gopt.verification.gradient_check import GradientCheck, check_gradients
from gopt.verification.gradient_check.forward import Forward, Values
from gopt.verification.gradient_check.verdict import PROPORTIONAL, UNSTEADY, ZERO
from gopt.verification.gradient_sample import sample_gradients
from gopt.verification.reference_graphs import refuse_call

NEAR = 0.05
"""How far a ratio of a gradient and its finite difference may be from one: in half precision it is."""
ALONE = 16
"""Gradients that are held against differences of the loss itself."""


def confirm(step: Step, options: DeriveOptions) -> tuple[int, list[str]]:
    """The number of gradients that were checked, and a remark on those that no batch changes; raises UnsupportedError
    where one is not confirmed, or the step's forward is not the model's."""
    copy, seed = step.graph.twin(), options.seed
    training = read_roles(copy, with_stored_roles(copy, RoleMap(), "the step"))
    sample, points = sample_gradients(training, seed), _points(training, seed)
    stored = {name: np.asarray(each.numpy()) for name, each in step.source.initializers.items()}
    check_same_forward(step.source, copy, {**stored, **points[0]})
    scale = FIRST_SCALE if options.loss_scale == DYNAMIC else float(options.loss_scale or 1)
    try:
        checks = check_gradients(training, points, seed, names=sample.parameters if sample else None)
        wrong = [each for each in checks if not _is_gradient(each, scale)]
        if wrong and len(wrong) <= ALONE and all(each.why != UNSTEADY for each in wrong):
            right = _slopes(training, [each.parameter for each in wrong], points, scale, seed)
            wrong = [each for each in wrong if each.parameter not in right]
    except RunError as error:
        raise UnsupportedError(
            f"gradients cannot be confirmed by finite differences: {error.message}", *error.hints,
            "replace that operator in the model",
        ) from None  # fmt: skip
    if wrong:
        names = ", ".join(show(each.parameter) for each in wrong[:4])
        raise UnsupportedError(
            f"the gradient of {names} is not confirmed: {wrong[0].why}",
            "make its random numbers an input of the model" if wrong[0].why == UNSTEADY else
            "--freeze what is not a parameter, or derive from a model whose inputs have the sizes of real data",
        )  # fmt: skip
    apart = [name for name in step.parameters if name not in training.gradients]
    more = f", and {len(apart) - 4} more" if len(apart) > 4 else ""
    names = ", ".join(map(show, apart[:4])) + more
    return len(checks), [f"not confirmed, for no batch changes their gradients: {names}"] if apart else []


def _is_gradient(check: GradientCheck, scale: float) -> bool:
    """Return whether a value is ``scale`` times the gradient. ``gopt verify`` also accepts an average over ranks."""
    right = all(abs(ratio / scale - 1) < NEAR for ratio in check.ratios)
    return check.holds and (check.why == ZERO or (check.why == PROPORTIONAL and right))


def _slopes(
    training: TrainingGraph, names: Sequence[str], points: Sequence[Values], scale: float, seed: int
) -> set[str]:
    """The members of ``names`` whose gradients are ``scale`` times the slope of the loss at every point, along
    themselves and along a random direction."""
    forward = Forward(training, refuse_call)
    given, generator = forward.points(points), np.random.default_rng(seed + 5)
    gradients = [forward.loss_and_gradients(point)[1] for point in given]

    def agrees(name: str) -> bool:
        pairs = [(point, found[training.gradients[name]] / scale) for point, found in zip(given, gradients)]
        noise = generator.standard_normal(given[0][name].shape)
        return all(
            _is_slope(forward, point, name, slope, direction)
            for point, slope in pairs
            for direction in (slope, slope + float(np.linalg.norm(slope) / np.linalg.norm(noise)) * noise)
        )

    return {name for name in names if agrees(name)}


def _is_slope(forward: Forward, point: Values, name: str, gradient: np.ndarray, direction: np.ndarray) -> bool:
    """Return whether ⟨gradient, direction⟩ is a central difference of the loss, for one length of a step; a zero is
    none."""
    wanted, size = float((gradient * direction).sum()), float(np.linalg.norm(direction))
    if not wanted or not np.isfinite(wanted):
        return False
    quotients = _quotients(forward, point, name, direction / size)
    return any(abs(each * size / wanted - 1) < 10 * forward.precision.tolerance for each in quotients)


def _quotients(forward: Forward, point: Values, name: str, direction: np.ndarray) -> Iterator[float]:
    value = point[name]
    usual = max(float(np.linalg.norm(value)), 1e-3)
    for length in forward.precision.ladder:
        ends = [
            forward.loss({**point, name: (value + sign * length * usual * direction).astype(value.dtype)})
            for sign in (1, -1)
        ]
        yield (ends[0] - ends[1]) / (2 * length * usual)


def _points(training: TrainingGraph, seed: int) -> list[Values]:
    """The stored states with random batches."""
    graph, ranges = training.graph, sampling.without_ignored(sampling.integer_ranges(training))
    states = {name: np.array(graph.initializers[name].numpy()) for name in graph.inputs if name in graph.initializers}
    hyper = {name: sampling.hyper(graph.types[name]) for name in training.hyper}
    made = []
    for number in range(BATCHES):
        generator = np.random.default_rng([seed, number])
        batch = {name: sampling.draw(graph.types[name], generator, ranges.get(name)) for name in training.batch}
        made.append({**states, **hyper, **batch})
    return made
