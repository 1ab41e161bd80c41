"""The graph and the marks so far, as rules read them in one sweep."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import numpy as np

from gopt.analysis.coupling.marks import Coupling, CouplingKind, Mark, Relation, Untraceable
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex
from gopt.ir.node_kinds import elementwise, value_reads
from gopt.ir.opset import opset_of

Shape = tuple[int | str | None, ...]


@dataclass(slots=True)
class CouplingContext:
    """The graph, the marks so far, and the number of samples of a batch (0 where it is not a number)."""

    index: GraphIndex
    batch: int
    marks: dict[str, Mark] = field(default_factory=dict)
    found: list[Coupling] = field(default_factory=list)
    origins: dict[str, Node] = field(default_factory=dict)
    """Value in which samples were reduced -> the node that did."""
    fed: dict[str, Node] = field(default_factory=dict)
    """Reduced value -> the first node of single samples that reads it."""
    shared: set[str] = field(default_factory=set)
    """Reduced values that are alike on all ranks, since they are averaged: no mark."""
    walked: set[str] = field(default_factory=set)
    """Reduced values whose origins are known to be read by values of single samples."""
    _alike: dict[tuple[str, int, int, int], bool] = field(default_factory=dict)

    @property
    def opset(self) -> int:
        """Version of the standard operators."""
        return opset_of(self.index.graph.header)

    def shape(self, name: str) -> Shape:
        """The shape of a value; raises Untraceable where not even its rank is known."""
        type = self.index.graph.types.get(name)
        if type is None or type.shape is None:
            raise Untraceable(f"the rank of {name!r} is not known")
        return type.shape

    def rank(self, name: str) -> int:
        return len(self.shape(name))

    def constant(self, name: str) -> np.ndarray | None:
        """The value of a constant; None for inputs, states and computed values."""
        return self.index.constants.value(name)

    def ints(self, name: str) -> list[int] | None:
        """A small constant list of integers."""
        return self.index.constants.integers(name)

    def scalar(self, name: str) -> float:
        """A constant of one element; 0 for anything else."""
        value = self.constant(name)
        return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else 0.0

    def samples(self, name: str) -> Mark | None:
        """The mark of a value of single samples, None for any other."""
        mark = self.marks.get(name)
        return mark if mark is not None and mark.kind is Relation.SAMPLES else None

    def extent(self, mark: Mark) -> int:
        """Elements of the dimension that holds the samples; 0 where that is not a number."""
        return mark.outer * self.batch * mark.inner

    def couple(self, kind: CouplingKind, node: Node, what: str, exact: str = "", value: str = "") -> None:
        """Record a coupling of a node, once for each value."""
        name = value or next(each for each in node.outputs if each)
        if all((each.kind, each.value) != (kind, name) for each in self.found[-32:]):
            self.found.append(Coupling(kind, name, node.op_type, what, exact))

    def alike(self, name: str, axis: int, mark: Mark) -> bool:
        """Return whether a batch-independent value is equal for every sample of its dimension ``axis``."""
        key = (name, axis, mark.outer, mark.inner)
        if key not in self._alike:
            self._alike[key] = self._is_alike(name, axis, mark)
        return self._alike[key]

    def _is_alike(self, name: str, axis: int, mark: Mark) -> bool:
        shape = self.shape(name)
        if not 0 <= axis < len(shape) or (shape[axis] == 1 and self.extent(mark) != 1):
            return True
        value = self.constant(name)
        if value is not None and value.size and (value == value.flat[0]).all():
            return True
        if value is not None:
            if not self.batch or value.shape[axis] != self.extent(mark):
                return False
            split = value.reshape(*value.shape[:axis], mark.outer, self.batch, mark.inner, *value.shape[axis + 1 :])
            return bool((split == split.take([0], axis + 1)).all())
        node = self.index.producers.get(name)
        if node is None:
            return False
        if node.is_a("ConstantOfShape"):
            return True
        if node.is_a("Expand") or elementwise(node):
            operands = [each for each in value_reads(node) if each] if elementwise(node) else node.inputs[:1]
            return all(self.alike(each, axis - len(shape) + self.rank(each), mark) for each in operands)
        if node.is_a("Split") and axis_of(node, len(shape), 0) != axis:
            return self.alike(node.inputs[0], axis, mark)
        if node.is_a("Gather") and not self._of_data(node, axis):
            start = axis_of(node, self.rank(node.inputs[0]), 0)
            return self.alike(node.inputs[1], axis - start, mark)
        if node.is_a("Gemm", "MatMul"):
            return self._alike_product(node, axis, mark)
        if node.is_a("Reshape"):
            return self._alike_before(node.inputs[0], axis, shape, mark)
        if node.is_a("Unsqueeze"):
            axes = self.axes(node, len(shape)) or []
            return axis in axes or self.alike(node.inputs[0], axis - sum(each < axis for each in axes), mark)
        if node.is_a("Transpose"):
            order = [int(each) for each in node.attributes.get("perm", range(len(shape))[::-1])]
            return self.alike(node.inputs[0], order[axis], mark)
        return False

    def _alike_product(self, node: Node, axis: int, mark: Mark) -> bool:
        """Return whether a product is equal for every sample of the rows: the rows on the left are."""
        rows, columns, *rest = [each for each in node.inputs if each]
        rank = self.rank(node.outputs[0])
        if axis != rank - 2 or self.rank(rows) < 2 or self.rank(columns) < 2 or node.attributes.get("transA", 0):
            return False
        return all(self.alike(name, axis - rank + self.rank(name), mark) for name in (rows, *rest))

    def _alike_before(self, name: str, axis: int, shape: Shape, mark: Mark) -> bool:
        """Return whether the value that a Reshape gives ``shape`` is equal for every sample of a kept ``axis``."""
        before = self.shape(name)
        if before[: axis + 1] == shape[: axis + 1]:
            return self.alike(name, axis, mark)
        if any(not isinstance(size, int) for size in (*before, *shape)):
            return False
        front = prod(shape[:axis])  # type: ignore[arg-type]
        fits = [at for at, size in enumerate(before) if size == shape[axis] and prod(before[:at]) == front]  # type: ignore[arg-type]
        return len(fits) == 1 and self.alike(name, fits[0], mark)

    def _of_data(self, node: Node, axis: int) -> bool:
        """Return whether dimension ``axis`` of what a Gather makes is one of its data, not of its indices."""
        start = axis_of(node, self.rank(node.inputs[0]), 0)
        return not start <= axis < start + self.rank(node.inputs[1])

    def axes(self, node: Node, rank: int, slot: int = 1) -> list[int] | None:
        """Axes given as an attribute or as input ``slot``, counted from the front; None where none are given.

        Raises Untraceable where they are computed.
        """
        axes = self.index.constants.axes(node, slot)
        if axes is None and len(node.inputs) > slot and node.inputs[slot]:
            raise Untraceable(f"the axes of {node.label!r} are computed")
        return None if axes is None else sorted(axis % max(rank, 1) for axis in axes)


def axis_of(node: Node, rank: int, default: int) -> int:
    """The attribute ``axis``, counted from the front."""
    return int(node.attributes.get("axis", default)) % max(rank, 1)
