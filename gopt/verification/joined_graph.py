"""The source for the samples of several batches: the batches of all ranks as one.

The marks of the samples tell the dimension of the samples in each value. Shapes and spread constants written out for
one batch grow with the batch; values computed from shapes grow by themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isclose

import numpy as np

from gopt.analysis.coupling.context import CouplingContext
from gopt.analysis.coupling.loss_terms import loss_terms
from gopt.analysis.coupling.marks import REDUCED, Mark, Relation, Untraceable, products
from gopt.analysis.coupling.propagate import propagate
from gopt.analysis.coupling.sample_counts import Multiplied, SampleCounts, corrects_variance
from gopt.analysis.coupling.samples_axis import begun
from gopt.analysis.coupling.uniform_factors import UniformFactors
from gopt.analysis.training import TrainingGraph
from gopt.ir.graph import Graph, Node, clone
from gopt.ir.graph_index import ancestors, descendants
from gopt.ir.inference import infer_types
from gopt.ir.node_kinds import record_of
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType
from gopt.operators.kinds import COMPARISONS, EXTREMES, MATRIX_PRODUCTS, SCALES, SCATTERS, SIZES, SUMS
from gopt.operators.operator import Indices
from gopt.operators.table import operator
from gopt.verification.compare import Values
from gopt.verification.reference_graphs import subgraph

_PARTS = (1, 2)
"""Numerators of constants that divide by a number of samples: 2 of a square's derivative."""
_NO_FACTORS = SUMS | EXTREMES | COMPARISONS | {"Clip"}
"""Operators that read constants, and multiply by none."""
ASKED = ".asked"


class NotComparableError(Exception):
    """Raised where a step cannot be evaluated for more samples; the text gives the reason."""


@dataclass(slots=True)
class Dividers:
    """Constants of one number that may divide by the number of samples: as ``written``, and for the ``larger``
    batch."""

    written: Values = field(default_factory=dict)
    larger: Values = field(default_factory=dict)


@dataclass(slots=True)
class JoinedGraph:
    """The graph of ``times`` batches; ``values``: its outputs. Raises NotComparableError for a step with an unknown use
    of a fixed number of samples."""

    training: TrainingGraph
    times: int
    values: list[str]
    context: CouplingContext = field(init=False)
    graph: Graph = field(init=False)
    _larger: Multiplied = field(init=False)
    _repeated: dict[str, TensorType] = field(default_factory=dict)

    def __post_init__(self) -> None:
        source = self.training.graph
        part = subgraph(source, source.nodes, dict.fromkeys(self.values), ()).twin()
        self.context = begun(self.training)
        propagate(self.context, source.nodes)
        self._larger = Multiplied(self.context, self.times, self.training.counted.values())
        nodes: list[Node] = []
        for node in part.nodes:
            nodes += self._grown(part, node)
        counted = {name: value for name in self.training.counted.values() if self.context.constant(name) is not None
                   and (value := self._larger.value(name)) is not None}  # fmt: skip
        part.nodes = [node for node in nodes if counted.keys().isdisjoint(node.outputs)]
        part.initializers |= {name: Tensor(part.types[name], array=value) for name, value in counted.items()}
        part.inputs = {name: self._larger_type(name, type) for name, type in part.inputs.items()}
        types = {name: tensor.type for name, tensor in part.initializers.items()} | part.inputs | part.outputs
        marked = (name for node in part.nodes for name in node.outputs if self.context.samples(name) is not None)
        types |= {name: self._larger_type(name, part.types[name]) for name in marked if name in part.types}
        self.graph = replace(part, types=types | self._repeated)
        infer_types(self.graph)
        for name, type in part.types.items():  # what follows no single sample has the type that it had
            if not self.graph.type_of(name).static and name not in self._repeated:
                self.graph.types[name] = type

    def joined(self, batches: Iterable[Values]) -> Values:
        """The inputs of the samples of all batches. Raises NotComparableError for an input without samples that differs
        between batches."""
        batches = list(batches)
        inputs = {}
        for name, value in batches[0].items():
            values = [batch[name] for batch in batches]
            mark = self.context.samples(name)
            if mark is not None:
                inputs[name] = _in_order(values, mark)
            elif all(np.array_equal(value, array) for array in values):
                inputs[name] = value
            else:
                raise NotComparableError(f"the input {name!r} has no dimension of samples")
        return inputs

    # --- what a file wrote out for one batch -------------------------------------------------------------------------

    def _larger_type(self, name: str, type: TensorType) -> TensorType:
        mark = self.context.samples(name)
        if mark is None or type.shape is None:
            return type
        sizes = [
            size * self.times if axis == mark.axis and isinstance(size, int) else size
            for axis, size in enumerate(type.shape)
        ]
        return TensorType(type.dtype, tuple(sizes))

    def _grown(self, part: Graph, node: Node) -> Iterator[Node]:
        """A node with operands of the larger batch, behind the nodes of these operands."""
        mark = self.context.samples(node.outputs[0]) if node.outputs else None
        try:
            if mark is not None:
                self._reshape(part, node, mark)
                for index in self._spread(node):
                    axis = mark.axis - self.context.rank(node.outputs[0])
                    yield from self._repeat(part, node, index, axis, mark)
            for index, axis, mark in self._contracted(node):
                yield from self._repeat(part, node, index, axis, mark)
        except Untraceable as lost:
            raise NotComparableError(f"{node.op_type} {node.label!r}: {lost}") from lost
        yield node

    def _reshape(self, part: Graph, node: Node, mark: Mark) -> None:
        """Let a written-out target shape have more samples."""
        index = operator(node.op_type).shape or 0
        sizes = self.context.ints(node.inputs[index]) if 0 < index < len(node.inputs) else None
        if sizes is None:
            return
        name, axis = node.inputs[index], mark.axis - (self.context.rank(node.outputs[0]) - len(sizes))
        larger = self._larger.value(name)
        grows = larger is None or larger.reshape(-1).tolist() != sizes
        if axis < 0 or grows or sizes[axis] != self.context.extent(mark) or (node.is_a("Expand") and sizes[axis] == 1):
            return
        sizes[axis] *= self.times
        sizes_name = f"{node.outputs[0]}.sizes"
        part.initializers[sizes_name] = Tensor(TensorType("int64", (len(sizes),)), array=np.array(sizes, np.int64))
        _read_instead(node, index, sizes_name)

    def _spread(self, node: Node) -> Iterator[int]:
        """Places of operands with the dimensions of the result."""
        record = record_of(node)
        if record.elementwise or record.joins or record.indices is Indices.ELEMENT:
            yield from range(len(node.inputs))
        elif node.is_in(MATRIX_PRODUCTS):
            yield from range(2, len(node.inputs))
        elif node.is_in(SCATTERS):
            yield 0

    def _contracted(self, node: Node) -> Iterator[tuple[int, int, Mark]]:
        """Places of operands contracted with the samples of the other operand, with the contracted dimension, counted
        from the end."""
        if not node.is_in(MATRIX_PRODUCTS):
            return
        turned = [bool(node.attributes.get(key, 0)) for key in ("transA", "transB")]
        axes = (-2 if turned[0] else -1, -1 if turned[1] else -2)
        for index in (0, 1):
            mark = self.context.samples(node.inputs[1 - index])
            if mark is not None:
                rank = self.context.rank(node.inputs[1 - index])
                if mark.axis - rank == max(axes[1 - index], -rank):
                    yield index, max(axes[index], -self.context.rank(node.inputs[index])), mark

    def _repeat(self, part: Graph, node: Node, index: int, axis: int, mark: Mark) -> Iterator[Node]:
        """Repeat an operand that follows no single sample, and has a row for each; ``axis``: from the end."""
        name = node.inputs[index]
        present = self.context.marks.get(name)
        if not name or (present is not None and present.kind not in REDUCED):
            return
        sizes = self.context.shape(name)
        axis += len(sizes)
        extent = self.context.extent(mark)
        if axis < 0 or extent == 1 or sizes[axis] != extent or self._grows(name, axis, extent):
            return
        if not self.context.alike(name, axis, mark):
            raise NotComparableError(f"{name!r}, which follows no batch, holds a value for each sample")
        repeated, rows_name = (f"{node.outputs[0]}.{what}{index}" for what in ("operand", "rows"))
        larger = (extent * self.times if at == axis else size for at, size in enumerate(sizes))
        self._repeated[repeated] = TensorType(self.context.index.graph.type_of(name).dtype, tuple(larger))
        rows = np.arange(extent).reshape(mark.outer, 1, -1).repeat(self.times, 1).reshape(-1)
        part.initializers[rows_name] = Tensor(TensorType("int64", rows.shape), array=rows)
        yield Node("Gather", [name, rows_name], [repeated], attributes={"axis": axis})
        _read_instead(node, index, repeated)

    def _grows(self, name: str, axis: int, extent: int) -> bool:
        """Return whether a value grows by itself, since it is made of shapes."""
        value = self._larger.value(name)
        if value is not None:
            return value.ndim > axis and value.shape[axis] == extent * self.times
        makers = (self.context.index.producers.get(value) for value in ancestors(self.context.index, [name])[1])
        return any(node is not None and node.is_in(SIZES) and node.inputs[0] in self.context.marks for node in makers)

    # --- constants that may be numbers of samples ------------------------------------------------------------------

    def dividers(self, values: Iterable[str]) -> list[Dividers]:
        """Constants behind some values that may divide by the number of samples; constants of one number together."""
        index, sizes = self.context.index, self._sizes()
        cone, _ = ancestors(index, values)
        parts = (*_PARTS, *self._rates(cone))
        trained = descendants(index, [state.tensor for state in self.training.parameters])
        terms = loss_terms(self.context, UniformFactors(self.context), list(self.training.losses), trained)
        by_number: dict[str, Dividers] = {}
        for node in index.graph.nodes:
            record = record_of(node)
            factors = id(node) in cone and not node.is_in(_NO_FACTORS) and not record.raised_to
            for slot, name in enumerate(node.inputs if factors else ()):
                value = index.constants.value(name) if name else None
                number = _one_number(value) if value is not None else 1.0
                neutral = number == 1 and not (record.multiplies and self.context.batch == 2)  # 2 over 2 samples is one
                growth = 1.0 if neutral else self._growth(number, sizes, parts, below=record.exponent(slot) < 0)
                if growth == 1 and terms.is_mean(number):  # a weight of the loss stands in it as well
                    growth = 1 / self.times
                if value is not None and growth != 1 and not self._grown_value(name):
                    of_number = by_number.setdefault(f"{number:.6g}", Dividers())
                    of_number.larger[name] = np.asarray(np.asarray(value, np.float64) * growth).astype(value.dtype)
                    of_number.written[name] = value
        return list(by_number.values())

    def unsettled(self, values: Iterable[str]) -> str:
        """A constant behind some values that may be another function of the number of samples, or ''."""
        index = self.context.index
        counts = SampleCounts(self.context, self.training.states, frozenset(self.training.counted.values()))
        cone, _ = ancestors(index, values)
        for node in index.graph.nodes:
            for name in node.inputs if id(node) in cone else ():
                if not name or name in self.context.marks:
                    continue
                literal = name if counts.written_out(node, name) else counts.of(name).term
                if literal:
                    return counts.told(literal)
        return ""

    def asking(self, constants: Iterable[str]) -> Graph:
        """The graph with constants as inputs, named with ``.asked`` behind the constant's name."""
        names = {name: f"{name}{ASKED}" for name in constants}
        graph = replace(self.graph, inputs=dict(self.graph.inputs), nodes=[clone(node) for node in self.graph.nodes])
        for node in graph.nodes:
            if not names.keys().isdisjoint(node.inputs):
                node.inputs = [names.get(name, name) for name in node.inputs]
        for name, input_name in names.items():
            value = self.context.index.constants.value(name)
            assert value is not None
            graph.inputs[input_name] = graph.types[input_name] = TensorType(
                self.context.index.graph.types[name].dtype, value.shape
            )
        return graph

    def _grown_value(self, name: str) -> bool:
        """Return whether a constant is made of the shape of the batch."""
        small, large = self.context.constant(name), self._larger.value(name)
        return (
            small is not None and large is not None and not np.array_equal(small.reshape(-1)[:1], large.reshape(-1)[:1])
        )

    def _rates(self, cone: Collection[int]) -> set[float]:
        """The rates of running averages, 1 less the factor of a state: a constant may be a rate divided by the number
        of samples. ``cone``: the nodes to look at."""
        states = {state.tensor for state in self.training.states}
        by_state = [
            self.context.scalar(factor)
            for node in self.context.index.graph.nodes
            if id(node) in cone and node.is_in(SCALES)
            for name, factor in (node.inputs, node.inputs[::-1])
            if name in states
        ]
        return {1 - abs(by) for by in by_state if by and 0 < abs(by) < 1}

    def _growth(self, number: float, sizes: set[int], parts: Iterable[float], *, below: bool) -> float:
        """The factor of a constant in the larger batch: for a divisor of one of ``parts`` by the number of samples, or
        n / (n - 1) of an unbiased variance; 1 for any other. ``below``: the constant is a divisor."""
        batch, over = self.context.batch, number if below else 1 / number
        if (
            batch > 1
            and over >= 1
            and any(isclose(part * over / batch, size, rel_tol=1e-5) for part in parts for size in sizes)
        ):
            return self.times if below else 1 / self.times
        count = next((batch * size for size in sizes if corrects_variance(number, batch * size)), None)
        return 1.0 if count is None else (count - 1) * self.times / (count * self.times - 1)

    def _sizes(self) -> set[int]:
        """Products of a sampled value's dimensions, without the samples."""
        types = self.context.index.graph.types
        families: set[tuple[int, ...]] = set()
        for name, mark in self.context.marks.items():
            if mark.kind is Relation.SAMPLES:
                rest = (size for axis, size in enumerate(types[name].shape or ()) if axis != mark.axis)
                families.add((mark.outer, mark.inner, *(size for size in rest if isinstance(size, int))))
        return {size for sizes in families for size in products(sizes)}


def _in_order(values: Sequence[np.ndarray], mark: Mark) -> np.ndarray:
    """One array of the samples of several."""
    front, size, back = (shape := values[0].shape)[: mark.axis], shape[mark.axis], shape[mark.axis + 1 :]
    parts = [value.reshape(*front, mark.outer, size // mark.outer, *back) for value in values]
    return np.concatenate(parts, mark.axis + 1).reshape(*front, size * len(values), *back)


def _one_number(value: np.ndarray) -> float:
    """The size of the nonzero elements of a floating constant, 1 if they differ."""
    if value.dtype.kind not in "fV":
        return 1.0
    flat = np.abs(value.reshape(-1).astype(np.float64))
    moving = flat[flat != 0]
    return float(moving[0]) if moving.size and bool((moving == moving[0]).all()) else 1.0


def _read_instead(node: Node, index: int, name: str) -> None:
    node.inputs = [name if at == index else operand for at, operand in enumerate(node.inputs)]
