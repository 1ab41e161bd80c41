"""Updates in another layout than the parameter: flat gradients, a clip over rows.

`Reshape(g·c)` is `Reshape(g)·c`: a Reshape moves through operators that act element by element. A Reshape moved to the
source of the flat value meets the Reshape that made the value flat, and the two together have no effect. The update
then has the parameter's shape, and can be cut."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from gopt.analysis.layout_aliases import KEEP_ORDER, SHAPE_CHANGES, identity, keeps_order
from gopt.ir.graph import Graph, Node, clone
from gopt.ir.graph_index import GraphIndex
from gopt.ir.node_kinds import elementwise
from gopt.ir.tensor import Tensor
from gopt.ir.types import FLOATS, TensorType
from gopt.operators.kinds import CASTS, REDUCTIONS

Shape = tuple[int, ...]
MOVED = "load"
"""Origin of the Reshapes that precede a moved update."""


def in_parameter_shape(graph: Graph) -> Graph:
    """The graph with such updates in the shape of the outputs; the same object without such an update."""
    ends = _ends(graph)
    if not ends:
        return graph
    finder = _Finder(graph)
    runs = [run for run in finder.runs(ends) if finder.movable(run)]
    mover = _Mover(graph)
    for run in runs:
        mover.move(run)
    return mover.finish() if runs else graph


@dataclass(slots=True)
class _Run:
    """Elementwise-related values of one flat shape, all computable in ``shape`` instead."""

    shape: Shape
    inner: list[Node] = field(default_factory=list)
    leaves: dict[str, None] = field(default_factory=dict)
    """Values of other nodes that the run reads."""
    reductions: list[Node] = field(default_factory=list)
    """Nodes that reduce a value or a leaf of the run to one element."""
    ends: list[Node] = field(default_factory=list)
    """Nodes that reshape a value of the run, mostly to the wanted shape."""


def _ends(graph: Graph) -> dict[str, Shape]:
    """Values in another layout, made element by element, behind which Reshapes give an update the output's shape ->
    that shape."""
    types = graph.types
    states = {type for type in graph.inputs.values() if type.dtype in FLOATS and type.static and type.dims}
    if not _reshapes_update(graph, {type.shape for type in states}):
        return {}
    toward = {name for name, type in graph.outputs.items() if type in states}
    shapes: dict[str, Shape] = {}
    led: dict[str, set[Shape]] = {name: {types[name].dims} for name in toward}
    """Value -> shapes of the new states that it leads to, element by element."""
    for node in reversed(graph.nodes):
        if len(node.outputs) != 1:
            continue
        output = node.outputs[0]
        if output in led and (elementwise(node) or keeps_order(graph, node)):
            for name in node.inputs:
                led.setdefault(name, set()).update(led[output])
        if output in shapes and not elementwise(node):
            shape = shapes.pop(output)
            if keeps_order(graph, node) and node.inputs[0] not in toward:
                shapes[node.inputs[0]] = shape
        if output not in toward or output not in types:
            continue
        shape = types[output].dims
        if elementwise(node):
            for name in node.inputs:
                type = types.get(name)
                if type is not None and type.shape == shape:
                    toward.add(name)
        elif keeps_order(graph, node):
            if types[node.inputs[0]].shape == shape:
                toward.add(node.inputs[0])
            else:
                shapes[node.inputs[0]] = shape
    # What leads to a state of its own shape too stays: a flat moment stands between a gradient and its parameter.
    return {name: shape for name, shape in shapes.items() if types[name].shape not in led[name]}


def _reshapes_update(graph: Graph, shapes: Container[object]) -> bool:
    """Return whether a Reshape to a wanted shape reads a value that may be made element by element: most graphs have no
    such Reshape, and need no sweep."""
    nodes = [node for node in graph.nodes if node.op_type in KEEP_ORDER]
    if not nodes:
        return False
    index, types = GraphIndex(graph), graph.types
    for node in nodes:
        type = types.get(node.outputs[0])
        if type is None or type.shape not in shapes or not keeps_order(graph, node):
            continue
        above: Node | None = node
        while above is not None and keeps_order(graph, above):
            above = index.producers.get(above.inputs[0])
        if above is None or len(above.outputs) != 1 or elementwise(above):
            return True
    return False


class _Finder:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.types = graph, graph.types
        self.producers, self.users = graph.producers(), graph.users()
        self.taken: set[str] = set()

    def runs(self, ends: dict[str, Shape]) -> Iterable[_Run]:
        for name, shape in ends.items():
            if name not in self.taken and self._inner(name) is not None:
                yield self._run(name, shape)

    def _run(self, start: str, shape: Shape) -> _Run:
        """All values joined with a value by operators that act element by element on the shape."""
        run, flat = _Run(shape), self.types[start].shape
        stack = [start]
        while stack:
            name = stack.pop()
            if name in self.taken:
                continue
            self.taken.add(name)
            producer = self._inner(name)
            if producer is None:
                run.leaves[name] = None
                continue
            run.inner.append(producer)
            stack += [name for name in producer.inputs if self._shape(name) == flat]
            stack += [user.outputs[0] for user in self.users.get(name, ()) if self._goes_on(user, flat)]
        return run

    def _inner(self, name: str) -> Node | None:
        """The producer of a value of a run; None of a leaf.

        A gradient travels in the dtype of the first complete value: a gradient's first cast stays with the backward."""
        node = self.producers.get(name)
        if node is None or not elementwise(node):
            return None
        before = self.producers.get(node.inputs[0]) if node.is_in(CASTS) else None
        return None if before is not None and not (elementwise(before) or before.is_in(SHAPE_CHANGES)) else node

    def _goes_on(self, node: Node, flat: object) -> bool:
        return len(node.outputs) == 1 and self._shape(node.outputs[0]) == flat and self._inner(node.outputs[0]) is node

    def _shape(self, name: str) -> object:
        type = self.types.get(name)
        return None if type is None else type.shape

    def movable(self, run: _Run) -> bool:
        """Return whether only Reshapes and full reductions, which take any shape, read the run; notes both.

        A call of a function or an opaque operator takes operands in the file's shape."""
        inside = set(map(id, run.inner))
        flat = self._shape(run.inner[0].outputs[0])
        for node in run.inner:
            name = node.outputs[0]
            if len(node.outputs) != 1 or node.captures or node.origin is not None or name in self.graph.outputs:
                return False
            if not all(self._shape(name) == flat or self._broadcast(name, len(run.shape)) for name in node.inputs):
                return False
            for reader in self.users.get(name, ()):
                if id(reader) in inside:
                    continue
                if reader.origin is not None:
                    return False
                if self._reduces(reader, name):
                    run.reductions.append(reader)
                elif keeps_order(self.graph, reader):
                    run.ends.append(reader)
                else:
                    return False
        if any(self.producers.get(name) is None for name in run.leaves):
            return False  # an input: the file holds it flat
        run.reductions += [
            user
            for name in run.leaves
            for user in self.users[name]
            if user.origin is None and self._reduces(user, name)
        ]
        return True

    def _broadcast(self, name: str, rank: int) -> bool:
        """Return whether an operand has one element, and not more dimensions than the other operands."""
        type = self.types.get(name)
        return not name or (type is not None and type.elements == 1 and len(type.dims) <= rank)

    def _reduces(self, node: Node, name: str) -> bool:
        """Return whether a node reduces all of a value to a scalar, in whatever shape the value comes."""
        axes = len(node.inputs) > 1 and node.inputs[1]
        return (
            node.is_in(REDUCTIONS)
            and node.inputs[0] == name
            and not axes
            and "axes" not in node.attributes
            and self._shape(node.outputs[0]) == ()
        )


class _Mover:
    """Writes the graph with each run in the wanted shape, behind a Reshape of each leaf."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.types, self.constants = dict(graph.types), dict(graph.initializers)
        self.renamed: dict[int, dict[str, str]] = {}
        """Node -> what it reads in another shape."""
        self.behind: dict[str, list[Node]] = {}
        """Leaf -> its Reshapes."""
        self.ends: set[int] = set()

    def move(self, run: _Run) -> None:
        renamed = {leaf: f"gopt.load.{leaf}" for leaf in run.leaves}
        for leaf, name in renamed.items():
            self.types[name] = TensorType(self.types[leaf].dtype, run.shape)
            self.behind.setdefault(leaf, []).append(self._reshape(leaf, name, name))
        for node in run.inner:
            name = node.outputs[0]
            self.types[name] = TensorType(self.types[name].dtype, run.shape)
        for node in (*run.inner, *run.reductions):
            self.renamed.setdefault(id(node), {}).update(renamed)
        self.ends.update(map(id, run.ends))

    def finish(self) -> Graph:
        nodes: list[Node] = []
        for node in self.graph.nodes:
            nodes.append(self._written(node))
            for name in node.outputs:
                nodes += self.behind.get(name, ())
        written = self.graph.file_nodes or self.graph.nodes
        types = self.graph.types
        moved = {name: types[name] for name, type in self.types.items() if name in types and types[name] != type}
        return replace(
            self.graph, nodes=nodes, types=self.types, initializers=self.constants, file_nodes=written,
            file_types=moved | self.graph.file_types,
        )  # fmt: skip

    def _written(self, node: Node) -> Node:
        if id(node) in self.ends:
            unchanged = self.types[node.inputs[0]].shape == self.types[node.outputs[0]].shape
            return identity(node) if unchanged else self._reshape(node.inputs[0], node.outputs[0], node.name)
        new = self.renamed.get(id(node), {})
        if new.keys().isdisjoint(node.inputs):
            return node
        node = clone(node)
        node.inputs = [new.get(name, name) for name in node.inputs]
        return node

    def _reshape(self, source: str, output: str, name: str) -> Node:
        node = Node("Reshape", [source, self._shape(self.types[output].dims)], [output], name=name, made_by=MOVED)
        node.proto = node.to_proto()
        return node

    def _shape(self, shape: Shape) -> str:
        name = "gopt.load.shape." + "x".join(map(str, shape))
        if name not in self.constants:
            self.types[name] = TensorType("int64", (len(shape),))
            self.constants[name] = Tensor(self.types[name], array=np.array(shape, np.int64))
        return name
