"""Numbers for the leaves of expressions, drawn from a seed, for counter-examples."""

from __future__ import annotations

import warnings

import numpy as np

from gopt.analysis.training import TrainingGraph
from gopt.collectives.messages import ROUND_INPUT
from gopt.records.mesh import Mesh
from gopt.verification import sampling
from gopt.verification.batches import SampledBatches
from gopt.verification.compare import Values
from gopt.verification.proof.constants import ConstantTable
from gopt.verification.proof.evaluation import MOST, ExpressionValues, Member, Unevaluable
from gopt.verification.proof.expected import MICRO
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.forms import INITIAL, STATE, Expression
from gopt.verification.proof.result import CounterExample
from gopt.verification.random_inputs import RandomInputs

SEEDS = (0, 1, 2)
LARGE = {2: 4.0}
"""Seed -> a factor of states: a clip acts on large gradients alone."""
APART = 1e-9
"""The distance of two values, relative to the largest element, from which they differ: both are of float64."""
ROUNDED = {"float32": 1e-6, "float16": 1e-2, "bfloat16": 1e-1}
"""Type of rounded gradients -> the distance: about ten last places."""
NOISE = 1e-13
"""The largest distance of two values that may be rounding alone, as of a difference of equal numbers."""


class SampledLeaves:
    """Values of the inputs of a step, of each member and micro-step."""

    def __init__(self, training: TrainingGraph, mesh: Mesh, table: ConstantTable, seed: int) -> None:
        self.training, self.mesh, self.table, self.seed = training, mesh, table, seed
        self._order = {state.tensor: at for at, state in enumerate(training.states)}
        self._states: dict[str, np.ndarray] = {}
        self.settings = {name: sampling.hyper(training, name) for name in training.hyper}
        self.settings[ROUND_INPUT] = np.asarray(seed)
        ranges = sampling.integer_ranges(training)
        self.batches = SampledBatches(training, RandomInputs({}), seed, ranges).plain()
        self._drawn: dict[tuple[int, int], Values] = {}

    def state(self, name: str) -> np.ndarray:
        """A state that an expression reads: a step may have more numbers than fit into memory."""
        if name not in self._states:
            at = self._order[name]
            generator = np.random.default_rng([self.seed, at])
            value = sampling.initial_state(self.training, self.training.states[at], generator)
            self._states[name] = self._moved(value, generator)
        return self._states[name]

    def _moved(self, value: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Different numbers in a state of equal elements: each element counts; large ones by some seeds."""
        if value.dtype.kind in "iub" or value.size < 2:
            return value
        if (value == value.reshape(-1)[0]).all():
            value = value + 0.1 + generator.random(value.shape).astype(value.dtype)
        return np.asarray(value * LARGE.get(self.seed, 1.0))

    def leaf(self, expression: Expression, coordinates: Member) -> np.ndarray | None:
        """The value of a leaf on a member, floats in float64."""
        value = self._stored(expression, coordinates)
        return value if value is None or value.dtype.kind in "iub" else value.astype(np.float64)

    def _stored(self, expression: Expression, coordinates: Member) -> np.ndarray | None:
        name = expression.attributes
        if expression.op in (STATE, INITIAL):
            return self.state(str(name))
        if expression.op == "input":
            return np.asarray(self.settings[str(name)])
        if expression.op == "batch":
            return np.asarray(self.batch(coordinates)[str(name)])
        return self.table.meant(expression)

    def batch(self, coordinates: Member) -> Values:
        part = 0
        for axis in self.mesh.data_axes:
            part = part * self.mesh.size(axis) + coordinates.get(axis, 0)
        key = coordinates.get(MICRO, 0), part
        types = [self.training.graph.types[name] for name in self.training.batch]
        if sum(type.elements for type in types) > MOST:
            raise Unevaluable("large batches")
        if key not in self._drawn:
            self._drawn[key] = self.batches.batch(*key)
        return self._drawn[key]


class CounterExamples:
    """Looks for elements in which expressions differ; values are computed once for all."""

    def __init__(
        self, expressions: Expressions, training: TrainingGraph, mesh: Mesh, table: ConstantTable, narrow: str = ""
    ) -> None:
        """``narrow``: the type of gradients rounded by ranks alone, or ''."""
        self._expressions, self._training, self._mesh, self._table = expressions, training, mesh, table
        self._apart = ROUNDED.get(narrow, APART)
        self._values: dict[int, ExpressionValues] = {}

    def find(self, actual: int, expected: int, coordinates: Member) -> CounterExample | None:
        """An element in which two expressions differ on a member, or None. Raises Unevaluable."""
        for seed in SEEDS:
            if seed not in self._values:
                leaves = SampledLeaves(self._training, self._mesh, self._table, seed)
                self._values[seed] = ExpressionValues(self._expressions, leaves.leaf, self._table.origins)
            with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # as of the mean of nothing
                example = _difference(self._apart, *self._values[seed].values((actual, expected), coordinates))
            if example is not None:
                return example
        return None


def _difference(distance: float, actual: np.ndarray, expected: np.ndarray) -> CounterExample | None:
    """The element with the largest difference; None for equal values, by a distance relative to the largest."""
    one, two = (np.asarray(value, np.float64).reshape(-1) for value in (actual, expected))
    if one.shape != two.shape:
        raise Unevaluable("shapes differ")
    with np.errstate(all="ignore"):
        apart = np.abs(one - two)
    apart[np.isnan(one) & np.isnan(two) | (one == two)] = 0
    apart[np.isnan(apart)] = np.inf
    largest = np.abs(two[np.isfinite(two)]).max(initial=np.finfo(np.float64).tiny)
    if not apart.size or apart.max() <= max(distance * largest, NOISE):
        return None
    element = int(apart.argmax())
    return CounterExample(element, float(one[element]), float(two[element]))
