"""Batches and states drawn from a seed, such that a step is well defined: labels in range, second moments positive."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from gopt.analysis.graph_walks import GraphIndex
from gopt.analysis.operators import LAYOUT
from gopt.analysis.training import State, StateKind, TrainingGraph
from gopt.ir.types import FLOATS, TensorType, numpy_dtype

DEFAULT_BOUND = 2
HYPER = 0.01
"""Default of a floating hyper-parameter, such as a learning rate."""
IGNORED = 1 / 8
"""Share of labels that are drawn as ones to ignore, where there are such."""
PASSING = ("Cast", "Where", "Concat", "Clip", "Max", "Min", "ScatterND", "ScatterElements")
"""Operators besides layout operators through which an id is followed; a scatter, where the ids are what it writes."""
INTEGERS = ("int32", "int64", "uint8", "int16", "int8")


@dataclass(frozen=True, slots=True)
class Range:
    """Range of an integer input: at least 0 and below ``bound``, without ``masked``.

    ``masked``: values that the forward compares the input with (padding). ``ignored``: drawn now and then (a label's
    ``ignore_index``, which is not a class).
    """

    bound: int = DEFAULT_BOUND
    masked: frozenset[int] = frozenset()
    ignored: int | None = None

    def draw(self, dims: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
        allowed = [each for each in sorted(self.masked) if 0 <= each < self.bound]
        free = self.bound - len(allowed)
        if free < 1:
            allowed, free = [], max(self.bound, 1)
        values: np.ndarray = generator.integers(0, free, dims)
        for each in allowed:  # in ascending order: step over what is masked
            values = np.asarray(values + (values >= each))
        if self.ignored is not None and dims:
            hidden = generator.random(dims) < IGNORED
            hidden[..., 0] = False
            values = np.where(hidden, self.ignored, values)
        return np.asarray(values)


def integer_ranges(training: TrainingGraph) -> dict[str, Range]:
    """For each integer batch input what it may be: as much as the shortest axis that it indexes."""
    index = GraphIndex(training.graph)
    types = training.graph.types
    return {name: _range(index, name) for name in training.batch if types[name].dtype in INTEGERS}


def index_bounds(training: TrainingGraph) -> dict[str, int]:
    """For each integer batch input the number of things it can point at: the shortest axis it indexes."""
    return {name: each.bound for name, each in integer_ranges(training).items()}


def _range(index: GraphIndex, start: str) -> Range:
    types = index.graph.types
    bounds: list[int] = []
    special: set[int] = set()
    bare = False  # something is looked up that no Where has replaced: -1 would be the last row, and is none to ignore
    queue, seen = deque([(start, False)]), {(start, False)}
    while queue:
        name, replaced = queue.popleft()
        for node in index.users.get(name, ()):
            data = types.get(node.inputs[0]) if node.inputs else None
            axis = int(node.attributes.get("axis", 0))
            if node.is_a("Gather", "GatherElements", "ScatterElements") and node.inputs[1] == name:
                bare |= not replaced
                if data is not None and data.static:
                    bounds.append(data.dims[axis])
            elif node.is_a("GatherND", "ScatterND") and node.inputs[1] == name:
                bare |= not replaced
                if data is not None and data.static:
                    bounds.append(data.dims[0])
            elif node.is_a("OneHot") and node.inputs[0] == name:
                depth = constant(index, node.inputs[1])
                if depth is not None:
                    bounds.append(int(depth))
            elif node.is_a("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss") and data is not None and data.static:
                bounds.append(data.dims[1])
                if "ignore_index" in node.attributes:
                    special.add(int(node.attributes["ignore_index"]))
            elif node.is_a("Equal"):
                other = constant(index, next((each for each in node.inputs if each != name), ""))
                if other is not None and float(other).is_integer():
                    special.add(int(other))
            elif node.is_a(*LAYOUT, *PASSING):
                following = {(output, replaced or node.is_a("Where")) for output in node.outputs}
                queue.extend(sorted(following - seen))
                seen |= following
    bound = min(bounds, default=DEFAULT_BOUND)
    masked = frozenset(each for each in special if 0 <= each < bound)
    return Range(bound, masked, min(special - masked, default=None) if bounds and not bare else None)


def constant(index: GraphIndex, name: str) -> float | None:
    """A one-element constant's number, or None."""
    return index.constants.number(name)


def without_ignored(ranges: dict[str, Range]) -> dict[str, Range]:
    """The same, with no label to ignore."""
    return {name: replace(each, ignored=None) for name, each in ranges.items()}


def draw(type: TensorType, generator: np.random.Generator, range: Range | None = None) -> np.ndarray:
    """A batch tensor: normal floats, integers in their range, fair booleans."""
    dims = type.dims if type.static else tuple(size if isinstance(size, int) else 2 for size in type.shape or ())
    if type.dtype == "bool":
        return generator.random(dims) < 0.5
    if type.dtype in FLOATS:
        return generator.standard_normal(dims).astype(numpy_dtype(type.dtype))
    return (range or Range()).draw(dims, generator).astype(numpy_dtype(type.dtype))


def draw_batch(
    training: TrainingGraph, generator: np.random.Generator, bounds: dict[str, int]
) -> dict[str, np.ndarray]:
    """One rank's batch; ``bounds``: see ``index_bounds``."""
    types = training.graph.types
    return {name: draw(types[name], generator, Range(bounds.get(name, DEFAULT_BOUND))) for name in training.batch}


def initial_state(training: TrainingGraph, state: State, generator: np.random.Generator) -> np.ndarray:
    """The stored value of a state, or one drawn for its kind: optimizer states small and positive."""
    type = training.graph.types[state.tensor]
    stored = training.graph.initializers.get(state.tensor)
    drawn = _draw_state(type, state.kind, generator)
    return drawn if stored is None else stored.copied().reshape(type.dims)


def _draw_state(type: TensorType, kind: StateKind, generator: np.random.Generator) -> np.ndarray:
    dtype = numpy_dtype(type.dtype)
    if type.dtype not in FLOATS:
        return np.ones(type.dims, dtype) if type.dtype != "bool" else np.zeros(type.dims, dtype)
    if kind is StateKind.PARAMETER:
        return (0.2 * generator.standard_normal(type.dims)).astype(dtype)
    if kind is StateKind.SCALAR:
        return np.full(type.dims, 0.5, dtype)
    low, high = (0.5, 1.5) if kind is StateKind.STATISTIC else (1e-3, 1e-2)
    return generator.uniform(low, high, type.dims).astype(dtype)


def hyper(type: TensorType) -> np.ndarray:
    """Return the default of a hyper-parameter."""
    return filled(type, HYPER if type.dtype in FLOATS else 1)


def filled(type: TensorType, value: float) -> np.ndarray:
    """An array of one value; an open dimension, which only inputs that nothing computes with have, has one element."""
    dims = [size if isinstance(size, int) else 1 for size in type.shape or ()]
    return np.full(dims, value, numpy_dtype(type.dtype))
