"""Batches and states drawn from a seed, such that a step is well defined: labels in range, second moments positive."""

from __future__ import annotations

from collections import deque

import numpy as np

from gopt.analysis.operators import LAYOUT
from gopt.analysis.sweeps import Index
from gopt.analysis.training import Kind, State, Training
from gopt.graph.types import FLOATS, TensorType, numpy_dtype

DEFAULT_BOUND = 2
HYPER = 0.01
"""What a floating hyper-parameter (a learning rate) is when the user gives none."""


def index_bounds(training: Training) -> dict[str, int]:
    """For each integer batch input the number of things it can point at: the shortest axis it indexes."""
    index = Index(training.graph)
    return {
        name: _bound(index, name)
        for name in training.batch
        if training.graph.types[name].dtype in ("int32", "int64", "uint8", "int16", "int8")
    }


def _bound(index: Index, start: str) -> int:
    types = index.graph.types
    bounds: list[int] = []
    queue, seen = deque([start]), {start}
    while queue:
        name = queue.popleft()
        for node in index.readers.get(name, ()):
            data = types.get(node.inputs[0]) if node.inputs else None
            axis = int(node.attributes.get("axis", 0))
            if node.is_a("Gather", "GatherElements", "ScatterElements") and node.inputs[1] == name:
                if data is not None and data.static:
                    bounds.append(data.dims[axis])
            elif node.is_a("GatherND", "ScatterND") and node.inputs[1] == name and data is not None and data.static:
                bounds.append(data.dims[0])
            elif node.is_a("OneHot") and node.inputs[0] == name:
                depth = index.graph.initializers.get(node.inputs[1])
                if depth is not None:
                    bounds.append(int(np.asarray(depth.numpy()).reshape(-1)[0]))
            elif node.is_a("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss") and data is not None and data.static:
                bounds.append(data.dims[1])
            elif node.is_a(*LAYOUT, "Cast", "Where", "Concat", "Clip", "Max", "Min"):
                for output in node.outputs:
                    if output not in seen:
                        seen.add(output)
                        queue.append(output)
    return min(bounds, default=DEFAULT_BOUND)


def draw(type: TensorType, generator: np.random.Generator, bound: int = DEFAULT_BOUND) -> np.ndarray:
    """A batch tensor: normal floats, integers below ``bound``, fair booleans."""
    dims = type.dims if type.static else tuple(size if isinstance(size, int) else 2 for size in type.shape or ())
    if type.dtype == "bool":
        return generator.random(dims) < 0.5
    if type.dtype in FLOATS:
        return generator.standard_normal(dims).astype(numpy_dtype(type.dtype))
    return generator.integers(0, max(bound, 1), dims).astype(numpy_dtype(type.dtype))


def draw_batch(training: Training, generator: np.random.Generator, bounds: dict[str, int]) -> dict[str, np.ndarray]:
    """One rank's batch."""
    types = training.graph.types
    return {name: draw(types[name], generator, bounds.get(name, DEFAULT_BOUND)) for name in training.batch}


def initial_state(training: Training, state: State, generator: np.random.Generator) -> np.ndarray:
    """The stored value of a state, or one drawn for its kind: optimizer states small and positive."""
    type = training.graph.types[state.tensor]
    stored = training.graph.initializers.get(state.tensor)
    drawn = _draw_state(type, state.kind, generator)
    return drawn if stored is None else np.array(stored.numpy()).reshape(type.dims)


def _draw_state(type: TensorType, kind: Kind, generator: np.random.Generator) -> np.ndarray:
    dtype = numpy_dtype(type.dtype)
    if type.dtype not in FLOATS:
        return np.ones(type.dims, dtype) if type.dtype != "bool" else np.zeros(type.dims, dtype)
    if kind is Kind.PARAMETER:
        return (0.2 * generator.standard_normal(type.dims)).astype(dtype)
    if kind is Kind.SCALAR:
        return np.full(type.dims, 0.5, dtype)
    low, high = (0.5, 1.5) if kind is Kind.STATISTIC else (1e-3, 1e-2)
    return generator.uniform(low, high, type.dims).astype(dtype)


def hyper(type: TensorType) -> np.ndarray:
    """A hyper-parameter nobody set."""
    return np.full(type.dims, HYPER if type.dtype in FLOATS else 1, numpy_dtype(type.dtype))
