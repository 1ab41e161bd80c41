"""The gradient of a table as sums of rows: rows with ids, added into zeros.

An exporter writes the backward of a lookup as a scatter with addition, or as a product with a one-hot matrix. Of
several lookups the sums are added, or scattered one into the other. In front, rows of a padding id may be masked;
behind stand operators on single rows: a cast, a loss scale, a count of micro-steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gopt.analysis.row_masks import masked_ids
from gopt.analysis.row_reads import keeps_rows, repeated_ids
from gopt.analysis.row_values import RowValues
from gopt.analysis.training import Phase
from gopt.ir.graph import Node
from gopt.ir.node_kinds import chosen_by, in_proportion, order_of, record_of
from gopt.operators.kinds import CASTS, COPIES, MATRIX_PRODUCTS, RESHAPES, SCALES, SCATTERS
from gopt.operators.operator import Indices

_PASSED = SCALES | CASTS | {"Neg"}


@dataclass(frozen=True, slots=True)
class SparseGradient:
    """A term of a table's gradient: ``rows`` added into zeros at ``ids``, then ``scaling``.

    ``ids``: value whose elements, flattened, are row numbers, in the order of ``rows``, which flattens to (number of
    ids) x (elements of a row); a negative id counts from the end, and an id may occur any number of times. ``dense``:
    the sum, as large as the table. ``onto``: the term is added, row by row, onto the sum of the terms before.
    ``scaling``: the nodes between the sum and the gradient, the nearest to the sum first. Each acts on single rows and
    keeps a row of zeros; an operand that is no row of the gradient has one element, or is a constant with one element
    for each row of the table. ``nodes``: the nodes from ids and rows to the dense sum, scaling included. ``padding``:
    ids with all rows zero."""

    ids: str
    rows: str
    dense: str
    onto: bool
    scaling: tuple[Node, ...]
    nodes: tuple[Node, ...]
    padding: tuple[int, ...] = ()


class NoRowSum(Exception):
    """Raised when a gradient is not a sum of rows; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a gradient still to be decomposed; ``behind``: the nodes from the part to the gradient, nearest
    first."""

    value: str
    behind: tuple[Node, ...] = ()


@dataclass
class RowSums:
    """Takes the gradient of a table with ``rows`` rows apart."""

    values: RowValues
    rows: int
    numbers: frozenset[int]
    """Numbers of the ids that the forward looks up."""
    terms: list[SparseGradient] = field(default_factory=list)
    joins: list[Node] = field(default_factory=list)
    """The additions that join the terms."""

    def read(self, gradient: str) -> None:
        """Fill ``terms``, in the order of addition. Raises NoRowSum."""
        parts: list[_Part | SparseGradient] = [_Part(gradient)]
        while parts:
            part = parts.pop()
            if isinstance(part, SparseGradient):
                self.terms.append(part)
                continue
            for value in self.values.way_to_root(part.value):
                self._refuse_readers(value, gradient)
            part = replace(part, value=self.values.root(part.value))
            node = self.values.index.producers.get(part.value)
            if node is None:
                raise NoRowSum(f"{part.value} is not a sum of rows")
            parts += self._taken_apart(part, node)[::-1]
        if not self.terms:
            raise NoRowSum(f"{gradient} is not a sum of rows")

    def _refuse_readers(self, value: str, gradient: str) -> None:
        """The dense sum must be of no further use."""
        if value in self.values.graph.outputs:
            raise NoRowSum(f"output {value} contains all of its gradient")
        readers = self.values.index.users.get(value, ())
        if value != gradient and len(readers) > 1:
            raise NoRowSum(f"{value}, a part of its gradient, has {len(readers)} readers")
        foreign = next((node for node in readers if node.phase is not Phase.UPDATE), None)
        if value == gradient and foreign is not None:
            raise NoRowSum(f"{foreign.op_type} {foreign.label} of the backward reads its gradient")

    def _taken_apart(self, part: _Part, node: Node) -> list[_Part | SparseGradient]:
        """Decompose the result of ``node`` into terms, and parts still to be decomposed."""
        if record_of(node).adds:
            summands = [name for name in node.inputs if not self.values.zero(name)]
            if any(self.values.shape(name) != self.values.shape(part.value) for name in summands):
                raise NoRowSum(f"{node.op_type} {node.label} adds something that is not of its shape")
            self.joins.append(node)
            return [replace(part, value=name) for name in summands]
        if node.is_in(SCATTERS):
            return self._scatter(part, node)
        if node.is_in(MATRIX_PRODUCTS):
            return [self._product(part, node)]
        return [_Part(self._passed(node), (*part.behind, node))]

    def _passed(self, node: Node) -> str:
        """The gradient as operand of a node that acts on single rows, and keeps a row of zeros."""
        if keeps_rows(self.values, node):
            return node.inputs[0]
        branches = chosen_by(node)
        if not node.is_in(_PASSED) and not branches:
            raise NoRowSum(f"{node.op_type} {node.label} makes a part of it that is not a sum of rows")
        out = self.values.shape(node.outputs[0])
        type_of = self.values.graph.type_of
        big = [name for name in node.inputs if type_of(name).elements != 1 and not self._by_row(name, out)]
        passes = len(big) == 1 and self.values.shape(big[0]) == out
        passes = passes and (not node.is_in(SCALES) or in_proportion(node, big[0]))
        zeros = all(name == big[0] or self.values.zero(name) for name in branches)
        if not passes or not zeros or not out or out[0] != self.rows:
            raise NoRowSum(f"{node.op_type} {node.label} mixes it with something else")
        return big[0]

    def _by_row(self, name: str, out: tuple[int, ...] | None) -> bool:
        """Return whether a value is a constant with one element for each row of a value shaped ``out``."""
        column = out is not None and self.values.shape(name) == (self.rows, *(1 for _ in out[1:]))
        return column and self.values.constant(name) is not None

    # --- sums ---------------------------------------------------------------------------------------------------------

    def _scatter(self, part: _Part, node: Node) -> list[_Part | SparseGradient]:
        into, indices, rows = node.inputs
        if node.attributes.get("reduction", "none") != "add":
            raise NoRowSum(f"{node.op_type} {node.label} writes rows over each other and does not add them")
        shape, index_shape, row_shape = (self.values.shape(name) for name in (into, indices, rows))
        if not shape or shape[0] != self.rows or not index_shape or row_shape is None:
            raise NoRowSum(f"{node.op_type} {node.label} adds to something that is not of its shape")
        if record_of(node).indices is Indices.TUPLE:
            ids = indices if index_shape[-1] == 1 and row_shape == (*index_shape[:-1], *shape[1:]) else ""
        else:
            along = int(node.attributes.get("axis", 0)) in (0, -len(shape))
            ids = repeated_ids(self.values, indices, shape) if along and row_shape == index_shape else ""
        if not ids:
            raise NoRowSum(f"{node.op_type} {node.label} adds elements and not whole rows")
        if self.values.zero(into):
            return [self._term(part, node, ids, rows)]
        return [replace(part, value=into), replace(self._term(part, node, ids, rows), onto=True)]

    def _product(self, part: _Part, node: Node) -> SparseGradient:
        """A product of a one-hot matrix, transposed, with rows."""
        attributes = node.attributes
        one_hot, right = node.inputs[:2]
        plain = attributes.get("alpha", 1.0) == 1 and not attributes.get("transB", 0)
        offset = len(node.inputs) > 2 and node.inputs[2] and not self.values.zero(node.inputs[2])
        ids = "" if offset or not plain else self._hot(one_hot, not attributes.get("transA", 0))
        shape = self.values.shape(right)
        if not ids or not shape or len(shape) > 2:
            raise NoRowSum(f"{node.op_type} {node.label} makes a part of it that is not a sum of rows")
        return self._term(part, node, ids, right)

    def _hot(self, name: str, ids_last: bool) -> str:
        """The ids of a 0/1 matrix, (rows, ids) where ``ids_last``, else (ids, rows); '' for any other."""
        while True:
            node = self.values.producer(name)
            if node is None:
                return ""
            shape = self.values.shape(node.outputs[0])
            if shape and len(shape) == 2 and order_of(node, 2) == (1, 0):
                ids_last = not ids_last
            elif node.is_in(RESHAPES):
                before = self.values.shape(node.inputs[0])
                if ids_last or not shape or not before or shape[-1] != self.rows or before[-1] != self.rows:
                    return ""
            elif node.is_a("OneHot"):
                return self._one_hot(node, ids_last)
            elif not node.is_in(COPIES):
                return ""
            name = node.inputs[0]

    def _one_hot(self, node: Node, ids_last: bool) -> str:
        ids, depth, pair = node.inputs
        shape, values = self.values.shape(ids), self.values.constant(pair)
        if shape is None or values is None or values.tolist() != [0, 1] or self.values.number(depth) != self.rows:
            return ""
        axis = int(node.attributes.get("axis", -1)) % (len(shape) + 1)
        return ids if axis == (0 if ids_last else len(shape)) and (not ids_last or len(shape) == 1) else ""

    def _term(self, part: _Part, node: Node, indices: str, rows: str) -> SparseGradient:
        if not self.values.within(indices, self.rows, self.numbers):
            raise NoRowSum(f"{node.op_type} {node.label} adds to other rows than those that are looked up")
        ids = self.values.in_order(indices, self.rows, self.numbers)
        scaling = part.behind[::-1]
        padding = masked_ids(self.values, ids, rows, self.rows, self.numbers)
        return SparseGradient(ids, rows, part.value, False, scaling, (node, *scaling), padding)
