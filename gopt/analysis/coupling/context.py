"""The graph and the marks so far, as rules read them in one sweep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from gopt.analysis.coupling.marks import Coupling, CouplingKind, Mark, Relation, Untraceable
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex
from gopt.ir.node_kinds import draws, record_of
from gopt.ir.operator_use import use_of
from gopt.ir.opset import opset_of
from gopt.ir.types import TensorType
from gopt.operators.dims.link import OLDEST, DimFactor, ValueType
from gopt.operators.kinds import RESHAPES

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
        if self.index.constants.uniform(name) is not None:
            return True
        value = self.constant(name)
        if value is not None:
            if not self.batch or value.shape[axis] != self.extent(mark):
                return False
            split = value.reshape(*value.shape[:axis], mark.outer, self.batch, mark.inner, *value.shape[axis + 1 :])
            return bool((split == split.take([0], axis + 1)).all())
        node = self.index.producers.get(name)
        if node is None or draws(node):
            return False
        if node.is_in(RESHAPES):
            return self._alike_before(node, axis, shape, mark)
        for factor in self.factors(node):
            if factor.results[node.outputs.index(name)] == axis and not (factor.reduce or factor.masked):
                places = [(each, place) for each, place in zip(node.inputs, factor.operands) if place is not None]
                return all(isinstance(place, int) and self.alike(each, place, mark) for each, place in places)
        return False

    def factors(self, node: Node) -> list[DimFactor]:
        """The dimensions along which a node is split; none where the dimensions follow open sizes."""
        rule = record_of(node).dims
        for name in filter(None, (*node.inputs, *node.outputs)):
            self.shape(name)
        use = use_of(node, self.index.graph, self.index.constants)
        use = replace(use, operands=_open(use.operands), results=_open(use.results))
        try:
            return list(rule(use)) if rule is not None and self.opset >= OLDEST else []
        except TypeError:
            return []

    def _alike_before(self, node: Node, axis: int, shape: Shape, mark: Mark) -> bool:
        """Return whether the result of a node, of ``shape``, is equal for every sample of a kept ``axis``."""
        name = node.inputs[0]
        before = self.shape(name)
        if before[: axis + 1] == shape[: axis + 1]:
            return self.alike(name, axis, mark)
        if node.is_a("Unsqueeze"):
            axes = self.axes(node, len(shape)) or []
            return axis in axes or self.alike(name, axis - sum(each < axis for each in axes), mark)
        if any(not isinstance(size, int) for size in (*before, *shape)):
            return False
        front = prod(shape[:axis])  # type: ignore[arg-type]
        fits = [at for at, size in enumerate(before) if size == shape[axis] and prod(before[:at]) == front]  # type: ignore[arg-type]
        return len(fits) == 1 and self.alike(name, fits[0], mark)

    def axes(self, node: Node, rank: int, slot: int = 1) -> list[int] | None:
        """Axes given as an attribute or as input ``slot``, counted from the front; None where none are given.

        Raises Untraceable where they are computed.
        """
        axes = self.index.constants.axes(node, slot)
        if axes is None and len(node.inputs) > slot and node.inputs[slot]:
            raise Untraceable(f"the axes of {node.label!r} are computed")
        return None if axes is None else sorted(axis % max(rank, 1) for axis in axes)


@dataclass(frozen=True, slots=True)
class _OpenType:
    """A type whose dimensions may be names."""

    dtype: str
    dims: tuple[Any, ...]
    static: bool = False


def _open(types: Iterable[ValueType | None]) -> tuple[ValueType | None, ...]:
    """The types, readable in rank and dimensions where a size is open."""
    return tuple(_OpenType(each.dtype, each.shape or ()) if isinstance(each, TensorType) else each for each in types)


def axis_of(node: Node, rank: int, default: int) -> int:
    """The attribute ``axis``, counted from the front."""
    return int(node.attributes.get("axis", default)) % max(rank, 1)
