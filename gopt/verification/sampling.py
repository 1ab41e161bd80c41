"""Batches and states drawn from a seed, such that a step is well defined: labels in range, second moments positive."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from gopt.analysis.training import State, StateKind, TrainingGraph
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex
from gopt.ir.node_kinds import chosen_by, record_of
from gopt.ir.types import FLOATS, TensorType, numpy_dtype
from gopt.operators.kinds import CASTS, CLASS_LOSSES, EXTREMES, GATHERS, RELAYS, SCALES, SCATTERS, SUMS, TERMS
from gopt.operators.operator import Indices, Operator
from gopt.runtime.training.draws import drawn
from gopt.runtime.training.schedules import default_schedule

DEFAULT_BOUND = 2
WEIGHT = 0.2
"""Spread of drawn parameters, at most."""
HYPER = 0.01
"""Least default of a floating hyper-parameter, such as a learning rate."""
IGNORED = 1 / 8
"""Share of labels that are drawn as ones to ignore, where there are such."""
PASSING = CASTS | EXTREMES | SCATTERS | TERMS - SUMS - {"Mean"} | {"Clip"}
"""Operators besides layout operators through which an id is followed; a scatter, where the ids are what it writes."""
INTEGERS = ("int32", "int64", "uint8", "int16", "int8")


@dataclass(frozen=True, slots=True)
class Range:
    """Range of an integer input: at least ``low`` and below ``bound``, without ``masked``.

    ``masked``: values compared with the input by the forward (padding). ``ignored``: drawn now and then (a label's
    ``ignore_index``, which is not a class)."""

    bound: int = DEFAULT_BOUND
    masked: frozenset[int] = frozenset()
    ignored: int | None = None
    low: int = 0

    def draw(self, dims: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
        allowed = [number for number in sorted(self.masked) if self.low <= number < self.bound]
        free = self.bound - self.low - len(allowed)
        if free < 1:
            allowed, free = [], max(self.bound - self.low, 1)
        values: np.ndarray = generator.integers(self.low, self.low + free, dims)
        for masked in allowed:  # in ascending order: step over what is masked
            values = np.asarray(values + (values >= masked))
        if self.ignored is not None and dims:
            hidden = generator.random(dims) < IGNORED
            hidden[..., 0] = False
            values = np.where(hidden, self.ignored, values)
        return np.asarray(values)


@dataclass(frozen=True, slots=True)
class _Line:
    """An index computed from an id: ``factor`` times the id, and from ``least`` to ``most`` more."""

    factor: int = 1
    least: int = 0
    most: int = 0

    def through(self, record: Operator, constant: np.ndarray, slot: int) -> _Line | None:
        """The line behind a sum or product of integers; ``slot``: the operand that is the line."""
        low, high = int(constant.min()), int(constant.max())
        if record.signs and record.sign(slot) > 0:
            low, high = sorted(record.sign(1 - slot) * end for end in (low, high))
            return _Line(self.factor, self.least + low, self.most + high)
        if record.exponent(0) == record.exponent(1) and low == high > 0:
            return _Line(self.factor * low, self.least * low, self.most * low)
        return None

    def ids(self, length: int) -> tuple[int, int]:
        """The least id and the bound of ids with an index on an axis of this length."""
        return -(self.least // self.factor), (length - 1 - self.most) // self.factor + 1


_PLAIN = _Line()
_MOST = 10_000
"""Values that an id is followed through."""


def integer_ranges(training: TrainingGraph) -> dict[str, Range]:
    """For each integer batch input the allowed range: the shortest indexed axis."""
    index = GraphIndex(training.graph)
    types = training.graph.types
    return {name: _range(index, name) for name in training.batch if types[name].dtype in INTEGERS}


def _range(index: GraphIndex, start: str) -> Range:
    bounds: list[tuple[int, int]] = []
    special: set[int] = set()
    bare = False  # something is looked up that no Where has replaced: -1 would be the last row, and no label to ignore
    queue: deque[tuple[str, bool, _Line]] = deque([(start, False, _PLAIN)])
    visited = {*queue}
    while queue:
        name, replaced, line = queue.popleft()
        for node in index.users.get(name, ()):
            looked_up = node.is_in(_BY_SECOND) and node.inputs[1] == name
            bare |= looked_up and not replaced
            length = _indexed(index, node, name)
            if length is not None:
                bounds.append(line.ids(length))
                if "ignore_index" in node.attributes:
                    special.add(int(node.attributes["ignore_index"]))
            elif record_of(node).relation == "==" and line == _PLAIN:
                number = index.constants.number(next((operand for operand in node.inputs if operand != name), ""))
                if number is not None and float(number).is_integer():
                    special.add(int(number))
            elif not looked_up:
                behind = _behind(index, node, name, line)
                if behind is not None and len(visited) < _MOST:
                    new = {(output, replaced or bool(chosen_by(node)), behind) for output in node.outputs} - visited
                    queue.extend(sorted(new, key=lambda entry: entry[0]))
                    visited |= new
    low, bound = max((low for low, _ in bounds), default=0), min((bound for _, bound in bounds), default=DEFAULT_BOUND)
    low = max(low, 0)
    if bounds and bound <= low:  # no id is right for all: paths that no batch takes
        low, bound = 0, max(bound, 1)
    masked = frozenset(number for number in special if low <= number < bound)
    return Range(bound, masked, min(special - masked, default=None) if bounds and not bare else None, low)


_BY_SECOND = GATHERS | SCATTERS
"""Operators whose second operand has indices."""


def _indexed(index: GraphIndex, node: Node, name: str) -> int | None:
    """The length of the axis that a node indexes by a value; None for other nodes, or an open length."""
    data = index.graph.types.get(node.inputs[0]) if node.inputs else None
    fixed = data is not None and data.static
    if node.is_in(_BY_SECOND) and node.inputs[1] == name and data is not None and fixed:
        return int(data.dims[0 if record_of(node).indices is Indices.TUPLE else int(node.attributes.get("axis", 0))])
    if node.is_a("OneHot") and node.inputs[0] == name:
        depth = index.constants.number(node.inputs[1])
        return None if depth is None else int(depth)
    if node.is_in(CLASS_LOSSES) and data is not None and fixed:
        return int(data.dims[1])
    return None


def _behind(index: GraphIndex, node: Node, name: str, line: _Line) -> _Line | None:
    """The line behind a node, as far as ids are followed: arithmetic with constants, layout, casts, and for plain ids
    operators that replace some ids."""
    if node.is_in(SUMS | SCALES) and len(node.inputs) == 2:
        slot = node.inputs.index(name)
        constant = index.constants.value(node.inputs[1 - slot])
        if constant is None or constant.dtype.kind not in "iu" or not constant.size:
            return None
        return line.through(record_of(node), constant, slot)
    return line if node.is_in(RELAYS) or (line == _PLAIN and node.is_in(PASSING)) else None


def without_ignored(ranges: dict[str, Range]) -> dict[str, Range]:
    """The same, with no label to ignore."""
    return {name: replace(interval, ignored=None) for name, interval in ranges.items()}


def draw(type: TensorType, generator: np.random.Generator, range: Range | None = None) -> np.ndarray:
    """A batch tensor: normal floats, integers in range, fair booleans."""
    dims = type.dims if type.static else tuple(size if isinstance(size, int) else 2 for size in type.shape or ())
    if type.dtype == "bool":
        return generator.random(dims) < 0.5
    if type.dtype in FLOATS:
        return generator.standard_normal(dims).astype(numpy_dtype(type.dtype))
    return (range or Range()).draw(dims, generator).astype(numpy_dtype(type.dtype))


def draw_inputs(
    training: TrainingGraph, names: Iterable[str], generator: np.random.Generator, ranges: Mapping[str, Range]
) -> dict[str, np.ndarray]:
    """Batch inputs: random numbers from the step's own description, others as ``draw``."""
    types, draws = training.graph.types, training.draws
    return {
        name: drawn(draws[name], types[name], generator)
        if name in draws
        else draw(types[name], generator, ranges.get(name))
        for name in names
    }


def initial_state(training: TrainingGraph, state: State, generator: np.random.Generator) -> np.ndarray:
    """The stored value of a state, or a value drawn for the kind: optimizer states small and positive."""
    type = training.graph.types[state.tensor]
    stored = training.graph.initializers.get(state.tensor)
    drawn = _draw_state(type, state.kind, generator)
    return drawn if stored is None else stored.copied().reshape(type.dims)


def _draw_state(type: TensorType, kind: StateKind, generator: np.random.Generator) -> np.ndarray:
    dtype = numpy_dtype(type.dtype)
    if type.dtype not in FLOATS:
        return np.ones(type.dims, dtype) if type.dtype != "bool" else np.zeros(type.dims, dtype)
    if kind is StateKind.PARAMETER:
        return (_spread(type.dims) * generator.standard_normal(type.dims)).astype(dtype)
    if kind is StateKind.SCALAR:
        return np.full(type.dims, 0.5, dtype)
    low, high = (0.5, 1.5) if kind is StateKind.STATISTIC else (1e-3, 1e-2)
    return generator.uniform(low, high, type.dims).astype(dtype)


def _spread(dims: tuple[int, ...]) -> float:
    """The spread of a drawn parameter: smaller for a matrix or a kernel of a wide layer, with sums that would leave the
    numbers (He's rule; of a matrix, with sides in unknown order, the longer side counts)."""
    if len(dims) < 2:
        return WEIGHT
    return min(WEIGHT, math.sqrt(2 / max(1, max(dims) if len(dims) == 2 else math.prod(dims[1:]))))


def hyper(training: TrainingGraph, name: str) -> np.ndarray:
    """Return the value of a hyper-parameter: the step's own at first, where that is not small (a warm-up begins at a
    rate that moves nothing)."""
    type, default = training.graph.types[name], training.defaults.get(name)
    least = HYPER if type.dtype in FLOATS else 1
    return filled(type, max(least, default_schedule(name, default).at(0)) if default is not None else least)


def filled(type: TensorType, value: float) -> np.ndarray:
    """An array of one value; an open dimension, found only in unused inputs, has one element."""
    dims = [size if isinstance(size, int) else 1 for size in type.shape or ()]
    return np.full(dims, value, numpy_dtype(type.dtype))
