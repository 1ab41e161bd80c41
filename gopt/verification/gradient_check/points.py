"""Points for comparing gradients: the given batches, a derived batch, and states near the given ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gopt.verification.gradient_check.additivity import mixed
from gopt.verification.gradient_check.forward import Values
from gopt.verification.piecewise import dot, normal, pieces


def with_a_third(points: Sequence[Values], batch: Sequence[str], generator: np.random.Generator) -> list[Values]:
    """At least three points where there are two: a scalar's change between two is proportional to anything.

    The third has samples of both, or, for batches of one sample, floating values in between."""
    if len(points) != 2:
        return list(points)
    batch_a, batch_b = ({name: point[name] for name in batch if name in point} for point in points)
    if any(batch_a[name].shape != batch_b[name].shape for name in batch_a):
        return list(points)
    mixture = mixed(batch_a, batch_b, generator)
    if mixture is not None:
        return [*points, {**points[0], **mixture}]
    blend = {
        name: (0.6 * batch_a[name] + 0.8 * batch_b[name]).astype(batch_a[name].dtype)
        for name in batch_a
        if np.issubdtype(batch_a[name].dtype, np.floating)
    }
    return [*points, {**points[0], **blend}] if blend else list(points)


def beside(point: Values, names: Sequence[str], amount: float, generator: np.random.Generator) -> Values:
    """The point with floating values disturbed by ``amount`` of their usual size; an all-zero value counts as 1."""
    moved = dict(point)
    for name in names:
        value = point.get(name)
        if value is None or not np.issubdtype(value.dtype, np.floating):
            continue
        usual = math.sqrt(dot(value, value) / value.size) if value.size else 0.0
        dtype, size = np.float32 if value.dtype == np.float32 else np.float64, amount * (usual if usual > 1e-6 else 1.0)
        draws = np.empty(value.shape, dtype)
        for (mine, theirs), noise in zip(pieces(draws, value), normal(generator, value.size, dtype)):
            np.add(noise * dtype(size), theirs, out=mine)
        moved[name] = draws.astype(value.dtype, copy=False)
    return moved


def all_beside(points: Sequence[Values], names: Sequence[str], amount: float, seed: int) -> list[Values]:
    """``beside`` for points with equal values of these names: all move alike, to the same arrays."""
    moved = beside(points[0], names, amount, np.random.default_rng(seed))
    shared = {name: moved[name] for name in names if name in moved}
    return [{**point, **{name: value for name, value in shared.items() if name in point}} for point in points]
