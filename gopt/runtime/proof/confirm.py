"""Confirm gradients by value: each must be proportional to the change of the loss along random directions.

For a parameter p with the value g that is called its gradient and a random direction d,
⟨g, d⟩ = c · (L(p + εd) − L(p − εd)) / 2ε with one constant c (a loss scale) for every d.
In float64 where onnxruntime has the kernels, else in float32 with a longer step and a wider allowance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gopt.analysis.training import Training
from gopt.errors import RunError, UnsupportedError
from gopt.graph.model import Graph
from gopt.graph.types import HALVES
from gopt.runtime.program import CallBack, Program
from gopt.runtime.proof.reference import local_graph, no_call, widened
from gopt.runtime.session import SessionCache

Values = dict[str, np.ndarray]
DIRECTIONS = 3


@dataclass(frozen=True, slots=True)
class Precision:
    """How finely a difference quotient can be taken: step length, relative allowance, noise of the quotient."""

    dtype: str
    epsilon: float
    tolerance: float
    noise: float


DOUBLE = Precision("float64", 1e-5, 2e-2, 1e-9)
SINGLE = Precision("float32", 1e-2, 8e-2, 2e-4)


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Ratios ⟨g, d⟩ / finite difference of one parameter along each direction."""

    parameter: str
    gradient: str
    ratios: tuple[float, ...]
    holds: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "parameter": self.parameter, "gradient": self.gradient, "ratios": list(self.ratios), "holds": self.holds,
        }  # fmt: skip


def confirm_gradients(
    training: Training, batches: Sequence[Values], seed: int, call: CallBack = no_call
) -> list[Confirmation]:
    """Check every gradient between two batches; the work is 4·DIRECTIONS runs of the forward a parameter.

    Only the *difference* of the batches is compared: what does not depend on the batch (a penalty on the weights in
    the loss, which an update may add after the gradient was reduced) is the same on all ranks and cannot be wrong.
    """
    graph, precision = _runnable(local_graph(training))
    types = training.graph.types
    given = [
        {
            name: np.asarray(value, precision.dtype) if types[name].dtype in ("float32", *HALVES) else value
            for name, value in batch.items()
            if name in graph.inputs
        }
        for batch in batches
    ]
    gradients = dict.fromkeys(training.gradients.values())
    evaluate = _evaluator(graph, [training.loss, *gradients], call)
    base = [evaluate(wide) for wide in given]
    loss = _evaluator(graph, [training.loss], call)
    generator = np.random.default_rng(seed + 3)

    def slope(wide: Values, parameter: str, direction: np.ndarray) -> float:
        move = (precision.epsilon * direction).astype(wide[parameter].dtype)
        ends = [
            float(loss({**wide, parameter: wide[parameter] + sign * move})[training.loss].reshape(()))
            for sign in (1, -1)
        ]
        return (ends[0] - ends[1]) / (2 * precision.epsilon)

    found = []
    for parameter, gradient in training.gradients.items():
        if parameter not in given[0]:
            continue
        difference = np.asarray(base[0][gradient], np.float64) - np.asarray(base[1][gradient], np.float64)
        pairs: list[tuple[float, float]] = []
        for _ in range(DIRECTIONS):
            direction = generator.standard_normal(given[0][parameter].shape)
            # An entry whose gradient is always zero may be masked (a padding row): it says nothing of the rest.
            direction[difference == 0] = 0
            direction *= 1 / max(float(np.linalg.norm(direction)), 1e-30)
            rise = slope(given[0], parameter, direction) - slope(given[1], parameter, direction)
            pairs.append((float(np.vdot(difference, direction)), rise))
        holds, shown = _proportional(pairs, float(np.linalg.norm(difference)), precision)
        found.append(Confirmation(parameter, gradient, shown, holds))
    return found


def _evaluator(graph: Graph, outputs: Sequence[str], call: CallBack) -> Callable[[Values], Values]:
    """A function from inputs to some of the values of a graph; ``call`` answers its collectives."""
    cut = replace(graph, outputs={name: graph.types[name] for name in outputs})
    program = Program(cut, SessionCache())

    def run(feeds: Values) -> Values:
        return program.run({name: feeds[name] for name in graph.inputs if name in feeds}, call)

    return run


def _runnable(graph: Graph) -> tuple[Graph, Precision]:
    """The graph in the finest precision that onnxruntime can run."""
    for precision in (DOUBLE, SINGLE):
        wide = widened(graph, precision.dtype)
        try:
            Program(wide, SessionCache())
        except (UnsupportedError, RunError):
            if precision is SINGLE:
                raise
        else:
            return wide, precision
    raise AssertionError("one of the two returns or raises")


def _proportional(
    pairs: list[tuple[float, float]], scale: float, precision: Precision
) -> tuple[bool, tuple[float, ...]]:
    """Whether ⟨g, d⟩ = c · slope with one c for all directions, up to rounding of the difference quotient."""
    along = np.array([pair[0] for pair in pairs])
    slope = np.array([pair[1] for pair in pairs])
    if not np.isfinite(along).all() or not np.isfinite(slope).all():
        return False, ()
    noise = precision.noise
    if np.linalg.norm(slope) < noise:
        return bool(np.linalg.norm(along) <= max(scale, 1.0) * 10 * noise), ()
    factor = float(np.dot(along, slope) / np.dot(slope, slope))
    rest = float(np.linalg.norm(along - factor * slope))
    shown = tuple(round(float(a / s), 6) for a, s in pairs if abs(s) > noise)
    return bool(factor != 0 and rest <= precision.tolerance * float(np.linalg.norm(along)) + abs(factor) * noise), shown
