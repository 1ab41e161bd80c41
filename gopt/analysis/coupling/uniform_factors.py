"""Factors that no sample enters: constants, sizes of the batch, and products of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isclose, prod

import numpy as np

from gopt.analysis.coupling.context import CouplingContext
from gopt.analysis.coupling.marks import Relation
from gopt.analysis.coupling.sample_counts import OPEN, Multiplied
from gopt.ir.constant_folding import as_folded
from gopt.ir.graph import Node
from gopt.ir.graph_index import made_of
from gopt.ir.node_kinds import record_of, scale
from gopt.operators.kinds import AVERAGES, GATHERS, LAYOUT, PRODUCTS, QUOTIENTS, RELAYS, SCALES, SUMS

TIMES = (1, 2, 3)
"""Batches that are tried."""
DEPTH = 64
"""Nodes behind one another that are looked at."""
_COPIES = RELAYS | {"Neg"}


@dataclass(frozen=True, slots=True)
class UniformFactor:
    """A value of equal elements: ``number`` (its magnitude, as far as constants tell) times the batch size to the
    power of ``batches``.

    ``number`` is 1 for what is no constant, such as a hyper-parameter; ``uniform`` is False where elements differ;
    ``literal``: whether all that are not zero have that magnitude, but for weights of the model.
    """

    number: float = 1.0
    batches: int = 0
    uniform: bool = True
    literal: bool = True

    def weights(self) -> UniformFactor:
        """The factor that rows which are alike take of a matrix: the sizes in it, and no constant."""
        return UniformFactor(1.0, self.batches, False)

    def times(self, other: UniformFactor, power: int = 1) -> UniformFactor:
        if not other.number or not np.isfinite(other.number):
            return UniformFactor(1.0, self.batches, False, False)
        number = self.number * other.number**power
        batches, uniform = self.batches + power * other.batches, self.uniform and other.uniform
        return UniformFactor(number, batches, uniform, self.literal and other.literal)


UNKNOWN_FACTOR = UniformFactor()
UNEQUAL = UniformFactor(uniform=False, literal=False)


@dataclass(slots=True)
class UniformFactors:
    """Finds the factor that a value without a mark is; results are kept."""

    context: CouplingContext
    _known: dict[str, UniformFactor] = field(default_factory=dict)
    _multiplied: list[Multiplied] = field(init=False)

    def __post_init__(self) -> None:
        self._multiplied = [Multiplied(self.context, times) for times in TIMES]

    def of(self, name: str, depth: int = 0) -> UniformFactor:
        if name not in self._known:
            self._known[name] = self._find(name, depth) if depth < DEPTH else UNEQUAL
        return self._known[name]

    def written(self, name: str) -> UniformFactor:
        """Return the factor of a value as marks read a constant Size: by number alone."""
        return self.of(name) if (value := self.context.constant(name)) is None else _of_array(value)

    def sized(self, name: str) -> bool:
        """Return whether the number of samples enters a value without a mark, by a shape behind the value."""
        return any(map(self._moves, made_of(self.context.index, [name])))

    def _moves(self, name: str) -> bool:
        """Return whether a value of constants and shapes changes with the number of samples."""
        once, *grown = (constants.value(name) for constants in self._multiplied)
        return any(once is not None and value is not None and not np.array_equal(value, once) for value in grown)

    def _find(self, name: str, depth: int) -> UniformFactor:
        factor, value = self._made(name, depth), self.context.constant(name)  # a Size may be a constant, too
        if value is not None and not factor.batches:
            return _of_array(value)
        return factor if factor not in (UNKNOWN_FACTOR, UNEQUAL) else self._grown(name) or factor

    def _grown(self, name: str) -> UniformFactor | None:
        """A number made of sizes in any other way, such as a sum of 1 over samples: the number grows as samples do."""
        if self.context.index.graph.type_of(name).elements != 1 or name in self.context.marks:
            return None
        values = [constants.value(name) for constants in self._multiplied]
        numbers = [
            abs(float(value.reshape(-1)[0])) for value in values if value is not None and value.dtype.kind in "fiu"
        ]
        if len(numbers) < len(values) or not numbers[0]:
            return None
        grown = all(isclose(number, numbers[0] * by, rel_tol=1e-6) for number, by in zip(numbers, TIMES))
        return UniformFactor(numbers[0] / (self.context.batch or OPEN), 1) if grown else None

    def _made(self, name: str, depth: int) -> UniformFactor:
        context = self.context
        node = context.index.producers.get(name)
        if node is None or any(operand in context.marks for operand in node.inputs):
            sized = self._size(node) if node is not None else None
            one = context.index.graph.type_of(name).elements == 1
            return sized or (UNKNOWN_FACTOR if one else UNEQUAL)
        if sized := self._size(node):
            return sized
        if node.is_in(_COPIES):
            return self.of(node.inputs[0], depth + 1)
        if node.is_in(SCALES | QUOTIENTS):
            factor = UniformFactor()
            for slot, operand in enumerate(node.inputs):
                factor = factor.times(self.of(operand, depth + 1), record_of(node).exponent(slot))
            return factor
        if node.is_in(SUMS):
            terms = [self.of(name, depth + 1) for name in node.inputs]
            alike = len({(term.number, term.batches) for term in terms}) == 1
            return replace(terms[0], uniform=False, literal=False) if alike else UNEQUAL
        if node.is_in(AVERAGES):
            return replace(self.of(node.inputs[0], depth + 1), uniform=False, literal=False)
        if node.is_in(PRODUCTS) and len(node.inputs) == 2:
            left, right = (self.of(operand, depth + 1) for operand in node.inputs)
            number = left.number * abs(scale(node)) if left.literal else 1.0
            return UniformFactor(number, left.batches, False, left.literal).times(right.weights())
        one = context.index.graph.type_of(name).elements == 1
        return UNKNOWN_FACTOR if one else UNEQUAL

    def _size(self, node: Node) -> UniformFactor | None:
        """A number of elements, read from the shape of a value of samples; None of any other value."""
        producers, whole = self.context.index.producers, node.is_a("ReduceProd")
        if node.is_a("Size"):
            return self._counted(node.inputs[0])
        maker = producers.get(node.inputs[0]) if whole else node
        chosen = maker if maker is not None and maker.is_in(LAYOUT | GATHERS) else None
        shape = producers.get(chosen.inputs[0]) if chosen is not None else maker
        if shape is None or not shape.is_a("Shape"):
            return None
        name = shape.inputs[0]
        mark = self.context.marks.get(name)
        if mark is None or mark.kind is not Relation.SAMPLES:
            return None
        places = list(range(self.context.rank(name)))[shape.attributes.get("start", 0) : shape.attributes.get("end")]
        taken = self._taken(places, chosen) if chosen is not None else places
        return self._counted(name, taken) if taken and (whole or len(taken) == 1) else None

    def _taken(self, places: Sequence[int], node: Node) -> list[int]:
        """The dimensions that a node picks from the dimensions of a shape; empty where the choice is unknown."""
        operands = [value for each in node.inputs[1:] if (value := self.context.constant(each)) is not None]
        taken = as_folded(node, [np.array(places), *operands]) if len(operands) + 1 == len(node.inputs) else None
        return [] if taken is None else [int(place) for place in taken.reshape(-1)]

    def _counted(self, name: str, places: Sequence[int] | None = None) -> UniformFactor | None:
        """The product of some dimensions of a value, or the number of its elements."""
        mark = self.context.marks.get(name)
        shape = self.context.shape(name)
        if mark is None or mark.kind is not Relation.SAMPLES:
            return None
        places = range(len(shape)) if places is None else places
        sizes = [size for place in places if place != mark.axis and isinstance(size := shape[place], int)]
        known, batches = prod(sizes), sum(place == mark.axis for place in places)
        return UniformFactor(float(known * (mark.outer * mark.inner) ** batches), batches)


def _of_array(value: np.ndarray) -> UniformFactor:
    if value.dtype.kind not in "fiu" and value.dtype.name not in ("bfloat16", "float16"):
        return UNEQUAL
    if not value.size:
        return UNEQUAL
    flat = value.reshape(-1)
    sizes = np.abs(flat[flat != 0].astype(np.float64))
    if not sizes.size or (sizes != sizes[0]).any():
        return UNEQUAL
    return UniformFactor(float(sizes[0]), uniform=bool((flat == flat[0]).all()))
