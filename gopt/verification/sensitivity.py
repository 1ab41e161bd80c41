"""Measures rounding in a step: the reference runs again from states disturbed by one unit in the last place.

Only forward and backward read the disturbed states; the update works on the true states, so that the measure is the
effect of rounding on gradients and through them, and not the disturbance itself. The mean of the gradients is disturbed
too, by a unit of the mean of their magnitudes, or a half's smallest number: ranks add gradients in another order than
the reference. The batch is not: source and ranks read the same bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from gopt.analysis.training import TrainingGraph
from gopt.ir.graph_index import GraphIndex, walk
from gopt.ir.types import FLOATS, LOW_PRECISION
from gopt.operators.kinds import CASTS, LAYOUT
from gopt.verification.compare import Values, distance_of, floating, length
from gopt.verification.piecewise import pieces
from gopt.verification.reference_step import Batches, LocalResults, ReferenceProgram, ReferenceStep
from gopt.verification.variants import Variant

UNITS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133}
"""The smallest magnitude of a half: a unit in the last place of all below its normal numbers."""
MOST = 0.1
"""Of a gradient that is not noise, the share that may be allowed: from equal states, a rank's bits are the source's."""
RUNS = 3
MULTIPLE = 8.0
"""How many times the measured difference is allowed: two draws of noise are rarely further apart."""
CLEAR, FEW = (1e-3, 0.1), 32
"""Shares of a gradient of up to FEW elements, and of more: where rounding moves less in one run, none of RUNS moves all
of it."""
NOISE = 0.5
"""A gradient moved by rounding to this share is nothing but rounding: two draws of noise are √2 of it apart."""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The largest distance of any disturbed run from the reference.

    ``outputs`` and ``gradients``: by micro-step and data rank; ``means``: of mean gradients; ``states``: of new states;
    ``metrics``: of the update's metrics, by data rank, or of all.
    """

    outputs: list[list[dict[str, float]]]
    gradients: list[list[dict[str, float]]]
    means: dict[str, float]
    states: dict[str, float]
    metrics: list[dict[str, float]]

    def noise(self, step: ReferenceStep) -> list[str]:
        """Mean gradients that are not zero, but smaller than their rounding."""
        sizes = {name: norm(mean) for name, mean in step.means.items()}
        return [name for name, size in sizes.items() if size > 0 and size * NOISE <= self.means[name]]


def units(training: TrainingGraph) -> dict[str, float]:
    """The relative disturbance of each floating state: a unit of the narrowest type of the first casts."""
    index = GraphIndex(training.graph)
    by_state = {}
    for state in training.states:
        dtype = training.graph.types[state.tensor].dtype
        if dtype in FLOATS:
            by_state[state.tensor] = max(UNITS[kind] for kind in (dtype, *_narrow(index, state.tensor)))
    return by_state


def _narrow(index: GraphIndex, name: str) -> set[str]:
    """Halves among a value's casts, direct or behind layout operators."""
    values = walk([name], lambda value: index.results(value, lambda node: node.is_in(LAYOUT)))
    casts = (node for value in values for node in index.users.get(value, ()) if node.is_in(CASTS))
    return {index.graph.type_of(node.outputs[0]).dtype for node in casts} & LOW_PRECISION


@dataclass(slots=True)
class Measurement:
    """Disturbed runs of ``step``, the reference's step of these very states; ``by``: see ``units``. Each run costs a
    step, and is made at the first request."""

    reference: ReferenceProgram
    variant: Variant
    states: Values
    settings: Values
    batches: Batches
    step: ReferenceStep
    by: Mapping[str, float]
    seed: int
    runs: int = 0
    _largest: Sensitivity = field(init=False)
    _generator: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._generator = np.random.default_rng([self.seed, 5])
        self._largest = Sensitivity(
            [[dict.fromkeys(names, 0.0) for names in turn] for turn in self.step.local.outputs],
            [[dict.fromkeys(values, 0.0) for values in turn] for turn in self.step.local.gradients],
            dict.fromkeys(self.step.means, 0.0),
            dict.fromkeys(self.step.states, 0.0),
            [dict.fromkeys(names, 0.0) for names in self.step.metrics],
        )

    def measured(self, runs: int = RUNS) -> Sensitivity:
        """The largest distances of ``runs`` runs, or of more if already made."""
        reference, generator = self.reference, self._generator
        while self.runs < runs:
            self.runs += 1
            read = [name for name in self.states if name in reference.local_inputs]
            moved = self.states | {
                name: perturbed(self.states[name], self.by.get(name, 0.0), generator) for name in read
            }
            local = reference.local(self.variant, moved, self.settings, self.batches)
            means = _rounded(reference, local, generator)
            _widen(self._largest, self.step, reference.finish(self.states, self.settings, local, means))
        return self._largest

    def noise(self) -> list[str]:
        """Mean gradients of rounding alone; one run tells if no gradient is near this."""
        once = self.measured(1)
        shares = ((name, CLEAR[mean.size > FEW] * norm(mean)) for name, mean in self.step.means.items())
        near = any(0 < share <= once.means[name] for name, share in shares)
        return (self.measured() if near else once).noise(self.step)


def perturbed(value: np.ndarray, unit: float, generator: np.random.Generator) -> np.ndarray:
    """Every element times 1 ± ``unit``, the signs drawn; zeros and integers stay."""
    if not unit or not floating(value):
        return value
    result = np.empty(value.shape, value.dtype)
    with np.errstate(all="ignore"):
        for mine, theirs in pieces(result, value):
            signs = np.where(generator.random(mine.size, np.float32) < 0.5, -unit, unit)
            mine[:] = np.asarray(theirs, np.float64) * (1 + signs)
    return result


def _rounded(reference: ReferenceProgram, local: LocalResults, generator: np.random.Generator) -> Values:
    """Mean gradients as under another order of addition."""
    every = [values for turn in local.gradients for values in turn]
    rounded = {}
    for name, mean in reference.means(local).items():
        result = rounded[name] = np.empty(mean.shape, mean.dtype)
        unit, least = UNITS[str(mean.dtype)], SMALLEST.get(str(mean.dtype), 0.0)
        with np.errstate(all="ignore"):
            for mine, whole, *arrays in pieces(result, mean, *(values[name] for values in every)):
                wide = np.asarray(whole, np.float64)
                size = np.mean([np.abs(np.asarray(one, np.float64)) for one in arrays], axis=0)
                step = np.where(size > 0, np.maximum(size * unit, least), 0.0)
                moved = wide + np.where(generator.random(mine.size, np.float32) < 0.5, -step, step)
                mine[:] = np.where(np.isfinite(moved), moved, wide)
    return rounded


def _widen(sensitivity: Sensitivity, step: ReferenceStep, again: ReferenceStep) -> None:
    """Take in one disturbed run."""
    for turn, (ours, theirs) in enumerate(zip(step.local.outputs, again.local.outputs)):
        for r, (mine, twin) in enumerate(zip(ours, theirs)):
            _most(sensitivity.outputs[turn][r], mine, twin)
    for turn, (turn_gradients, again_turn) in enumerate(zip(step.local.gradients, again.local.gradients)):
        for r, (gradients, their) in enumerate(zip(turn_gradients, again_turn)):
            _most(sensitivity.gradients[turn][r], gradients, their)
    _most(sensitivity.means, step.means, again.means)
    _most(sensitivity.states, step.states, again.states)
    for distances, mine, twin in zip(sensitivity.metrics, step.metrics, again.metrics):
        _most(distances, mine, twin)


def _most(distances: dict[str, float], ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> None:
    for name in distances:
        distances[name] = max(distances[name], apart(ours[name], theirs[name]))


def apart(one: np.ndarray, twin: np.ndarray) -> float:
    """The distance of two values where both are finite; 0 for integers."""
    if not floating(one):
        return 0.0
    size = distance_of(one, twin)
    if math.isfinite(size):
        return size
    with np.errstate(all="ignore"):
        return norm(np.asarray(one, np.float64) - np.asarray(twin, np.float64))


def norm(value: np.ndarray) -> float:
    """Return the norm of the finite part, in float64."""
    size = length(value)
    if math.isfinite(size):
        return size
    wide = np.asarray(value, np.float64)
    return float(np.linalg.norm(wide[np.isfinite(wide)]))


def largest(value: np.ndarray) -> float:
    """Return the largest magnitude of a finite element; 0 without one."""
    wide = np.abs(np.asarray(value, np.float64))
    return float(wide[np.isfinite(wide)].max(initial=0.0))
