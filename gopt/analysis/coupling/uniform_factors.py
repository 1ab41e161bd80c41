"""Factors that no sample enters: constants, sizes of the batch, and products of these."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gopt.analysis.coupling.context import CouplingContext, axis_of
from gopt.analysis.coupling.marks import Relation
from gopt.ir.graph import Node

DEPTH = 64
"""Nodes behind one another that are looked at."""
_COPIES = (
    *("Neg", "Cast", "CastLike", "Identity", "Reshape", "Expand", "Unsqueeze", "Squeeze", "Flatten", "Transpose"),
    *("Tile", "Slice"),
)


@dataclass(frozen=True, slots=True)
class UniformFactor:
    """A value of equal elements: ``number`` (its magnitude, as far as constants tell) times the batch size to the
    power of ``batches``.

    ``number`` is 1 for what is no constant, such as a hyper-parameter; ``uniform`` is False where elements differ.
    """

    number: float = 1.0
    batches: int = 0
    uniform: bool = True

    def times(self, other: UniformFactor, power: int = 1) -> UniformFactor:
        if not other.number or not np.isfinite(other.number):
            return UniformFactor(1.0, self.batches, False)
        number = self.number * other.number**power
        return UniformFactor(number, self.batches + power * other.batches, self.uniform and other.uniform)


UNKNOWN_FACTOR = UniformFactor()
UNEQUAL = UniformFactor(uniform=False)


@dataclass(slots=True)
class UniformFactors:
    """Finds the factor that a value without a mark is; results are kept."""

    context: CouplingContext
    _known: dict[str, UniformFactor] = field(default_factory=dict)

    def of(self, name: str, depth: int = 0) -> UniformFactor:
        if name not in self._known:
            self._known[name] = self._find(name, depth) if depth < DEPTH else UNEQUAL
        return self._known[name]

    def _find(self, name: str, depth: int) -> UniformFactor:
        context = self.context
        value = context.constant(name)
        if value is not None:
            return _of_array(value)
        node = context.index.producers.get(name)
        if node is None or any(each in context.marks for each in node.inputs):
            sized = self._size(node) if node is not None else None
            one = context.index.graph.type_of(name).elements == 1
            return sized or (UNKNOWN_FACTOR if one else UNEQUAL)
        if node.is_a("Gather", "GatherElements", "ReduceProd") and (sized := self._size(node)):
            return sized
        if node.is_a(*_COPIES):
            return self.of(node.inputs[0], depth + 1)
        if node.is_a("Reciprocal"):
            return UniformFactor().times(self.of(node.inputs[0], depth + 1), -1)
        if node.is_a("Mul", "Div"):
            left, right = (self.of(each, depth + 1) for each in node.inputs)
            return left.times(right, -1 if node.is_a("Div") else 1)
        one = context.index.graph.type_of(name).elements == 1
        return UNKNOWN_FACTOR if one else UNEQUAL

    def _size(self, node: Node) -> UniformFactor | None:
        """A number of elements, read from the shape of a value of samples; None of any other value."""
        producers, marks = self.context.index.producers, self.context.marks
        if node.is_a("Size"):
            return self._counted(node.inputs[0], None)
        given = producers.get(node.inputs[0]) if node.inputs else None
        if given is None or not given.is_a("Shape"):
            return None
        mark = marks.get(given.inputs[0])
        if mark is None or mark.kind is not Relation.SAMPLES or given.attributes.get("start", 0):
            return None
        if node.is_a("ReduceProd"):
            return self._counted(given.inputs[0], None)
        places = self.context.ints(node.inputs[1])
        if places is None or len(places) != 1 or axis_of(node, 1, 0):
            return None
        return self._counted(given.inputs[0], places[0] % self.context.rank(given.inputs[0]))

    def _counted(self, name: str, axis: int | None) -> UniformFactor | None:
        """The elements of a dimension, or of all dimensions, of a value."""
        mark = self.context.marks.get(name)
        shape = self.context.shape(name)
        if mark is None or mark.kind is not Relation.SAMPLES:
            return None
        sizes = [size for place, size in enumerate(shape) if axis in (None, place) and place != mark.axis]
        known = float(np.prod([size if isinstance(size, int) else 1 for size in sizes]))
        if axis not in (None, mark.axis):
            return UniformFactor(known)
        return UniformFactor(known * mark.outer * mark.inner, 1)


def _of_array(value: np.ndarray) -> UniformFactor:
    if value.dtype.kind not in "fiu" and value.dtype.name not in ("bfloat16", "float16"):
        return UNEQUAL
    if not value.size:
        return UNEQUAL
    flat = value.reshape(-1)
    first = abs(float(flat[0]))
    return UniformFactor(first) if first and bool((flat == flat[0]).all()) else UNEQUAL
