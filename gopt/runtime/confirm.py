"""Confirm gradients by value: each must be proportional to the change of the loss along random directions.

For a parameter p with the value g that is called its gradient and a random direction d,
⟨g, d⟩ = c · (L(p + εd) − L(p − εd)) / 2ε with one constant c (a loss scale) for every d. All in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gopt.analysis.training import Training
from gopt.graph.types import HALVES
from gopt.runtime.reference import local_graph, to_float64
from gopt.runtime.session import evaluator

EPSILON = 1e-5
TOLERANCE = 2e-2
DIRECTIONS = 3


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


def confirm_gradients(training: Training, feeds: dict[str, np.ndarray], seed: int) -> list[Confirmation]:
    """Check every gradient at the given inputs; the work is 2·DIRECTIONS runs of the forward a parameter."""
    graph = to_float64(local_graph(training))
    wide = {
        name: np.asarray(value, np.float64) if training.graph.types[name].dtype in ("float32", *HALVES) else value
        for name, value in feeds.items()
        if name in graph.inputs
    }
    gradients = dict.fromkeys(training.gradients.values())
    base = evaluator(graph, [training.loss, *gradients])(wide)
    loss = evaluator(graph, [training.loss])
    generator = np.random.default_rng(seed + 3)
    found = []
    for parameter, gradient in training.gradients.items():
        if parameter not in wide:
            continue
        ratios, holds = [], True
        scale = float(np.linalg.norm(base[gradient]))
        for _ in range(DIRECTIONS):
            direction = generator.standard_normal(wide[parameter].shape)
            direction *= 1 / max(float(np.linalg.norm(direction)), 1e-30)
            ends = [
                float(loss({**wide, parameter: wide[parameter] + sign * EPSILON * direction})[training.loss].reshape(()))
                for sign in (1, -1)
            ]
            slope = (ends[0] - ends[1]) / (2 * EPSILON)
            along = float(np.vdot(base[gradient], direction))
            ratios.append((along, slope))
        holds, shown = _proportional(ratios, scale)
        found.append(Confirmation(parameter, gradient, shown, holds))
    return found


def _proportional(pairs: list[tuple[float, float]], scale: float) -> tuple[bool, tuple[float, ...]]:
    """Whether ⟨g, d⟩ = c · slope with one c for all directions, up to rounding of the difference quotient."""
    along = np.array([pair[0] for pair in pairs])
    slope = np.array([pair[1] for pair in pairs])
    if not np.isfinite(along).all() or not np.isfinite(slope).all():
        return False, ()
    noise = 1e-9
    if np.linalg.norm(slope) < noise:
        return bool(np.linalg.norm(along) <= max(scale, 1.0) * 1e-6), ()
    factor = float(np.dot(along, slope) / np.dot(slope, slope))
    rest = float(np.linalg.norm(along - factor * slope))
    shown = tuple(round(float(a / s), 6) for a, s in pairs if abs(s) > noise)
    return bool(factor != 0 and rest <= TOLERANCE * float(np.linalg.norm(along)) + abs(factor) * noise), shown
