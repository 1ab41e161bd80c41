"""Updates that run in another layout than their parameter: flat gradients, a clip over rows.

`Reshape(g·c)` is `Reshape(g)·c`: a Reshape moves through operators that act element by element. Moved to where the
flat value comes from, it meets the Reshape that made it flat, and both change nothing. The update then has the
parameter's shape, and can be cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from gopt.analysis.layouts import RESHAPES
from gopt.analysis.operators import elementwise
from gopt.graph.model import Graph, Node, Tensor, clone
from gopt.graph.types import FLOATS, TensorType

_REDUCTIONS = frozenset(
    ["ReduceSum", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceMean", "ReduceMax", "ReduceMin"]
)


def in_parameter_shape(graph: Graph) -> Graph:
    """The graph with such updates in the shape of their outputs; the same object where there are none."""
    ends = _ends(graph)
    if not ends:
        return graph
    finder = _Finder(graph)
    runs = [run for run in finder.runs(ends) if finder.movable(run)]
    return _moved(graph, runs) if runs else graph


@dataclass(slots=True)
class _Run:
    """Values of one flat shape that are made of one another element by element, to be had in ``shape``."""

    shape: tuple[int | str | None, ...]
    inner: list[Node] = field(default_factory=list)
    leaves: dict[str, None] = field(default_factory=dict)
    """What the run reads of other nodes."""
    reductions: list[Node] = field(default_factory=list)
    """What reduces one of its values, or a leaf, to one element."""


def _ends(graph: Graph) -> dict[str, Node]:
    """Flat values behind which a Reshape gives an update the shape of its output -> that Reshape."""
    types = graph.types
    states = {type for type in graph.inputs.values() if type.dtype in FLOATS and type.static and type.elements > 1}
    toward = {name for name, type in graph.outputs.items() if type in states}
    found: dict[str, Node] = {}
    for node in reversed(graph.nodes):
        if len(node.outputs) != 1:
            continue
        if node.outputs[0] in found and not elementwise(node):
            del found[node.outputs[0]]
        if node.outputs[0] not in toward:
            continue
        want = types.get(node.outputs[0])
        if want is None:
            continue
        if elementwise(node):
            toward.update(name for name in node.inputs if name in types and types[name].shape == want.shape)
        elif node.is_a(*RESHAPES):
            source = types.get(node.inputs[0])
            if source is not None and source.static and source.elements == want.elements:
                if source.shape == want.shape:
                    toward.add(node.inputs[0])
                else:
                    found[node.inputs[0]] = node
    return found


class _Finder:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.types = graph, graph.types
        self.producer, self.readers = graph.producers(), graph.readers()
        self.taken: set[str] = set()

    def runs(self, ends: dict[str, Node]) -> Iterable[_Run]:
        for name, end in ends.items():
            if name not in self.taken and self._inner(name) is not None:
                yield self._run(name, self.types[end.outputs[0]].shape or ())

    def _run(self, start: str, shape: tuple[int | str | None, ...]) -> _Run:
        """All that is joined with a value by operators that act element by element on its shape."""
        run, flat = _Run(shape), self.types[start].shape
        stack = [start]
        while stack:
            name = stack.pop()
            if name in self.taken:
                continue
            self.taken.add(name)
            maker = self._inner(name)
            if maker is None:
                run.leaves[name] = None
                continue
            run.inner.append(maker)
            stack += [each for each in maker.inputs if each and self._shape(each) == flat]
            stack += [each.outputs[0] for each in self.readers.get(name, ()) if self._goes_on(each, flat)]
        return run

    def _inner(self, name: str) -> Node | None:
        """The node that makes a value of a run; None of a leaf.

        A gradient travels in the dtype in which it is first complete: the first cast of one stays with the backward.
        """
        node = self.producer.get(name)
        if node is None or not elementwise(node):
            return None
        before = self.producer.get(node.inputs[0]) if node.is_a("Cast") else None
        return None if before is not None and not (elementwise(before) or before.is_a(*RESHAPES)) else node

    def _goes_on(self, node: Node, flat: object) -> bool:
        return len(node.outputs) == 1 and self._shape(node.outputs[0]) == flat and self._inner(node.outputs[0]) is node

    def _shape(self, name: str) -> object:
        type = self.types.get(name)
        return None if type is None else type.shape

    def movable(self, run: _Run) -> bool:
        """Whether nothing but Reshapes to the wanted shape and full reductions read the run; notes the reductions."""
        inside = set(map(id, run.inner))
        flat = self._shape(run.inner[0].outputs[0])
        for node in run.inner:
            name = node.outputs[0]
            if len(node.outputs) != 1 or node.captures or node.origin is not None or name in self.graph.outputs:
                return False
            if not all(self._shape(each) == flat or self._broadcast(each, len(run.shape)) for each in node.inputs):
                return False
            for reader in self.readers.get(name, ()):
                if id(reader) in inside:
                    continue
                if self._reduces(reader, name):
                    run.reductions.append(reader)
                elif not (reader.is_a(*RESHAPES) and self._shape(reader.outputs[0]) == run.shape):
                    return False
        if any(self.producer.get(name) is None for name in run.leaves):
            return False  # an input: the file holds it flat
        run.reductions += [each for name in run.leaves for each in self.readers[name] if self._reduces(each, name)]
        return True

    def _broadcast(self, name: str, rank: int) -> bool:
        """Whether an operand has one element, and not more dimensions than the values beside it."""
        type = self.types.get(name)
        return not name or (type is not None and type.elements == 1 and len(type.dims) <= rank)

    def _reduces(self, node: Node, name: str) -> bool:
        """Whether a node reduces all of a value to a scalar, in whatever shape the value comes."""
        given = len(node.inputs) > 1 and node.inputs[1]
        return (
            node.is_a(*_REDUCTIONS)
            and node.inputs[0] == name
            and not given
            and "axes" not in node.attributes
            and self._shape(node.outputs[0]) == ()
        )


def _moved(graph: Graph, runs: list[_Run]) -> Graph:
    """The graph with each run in its wanted shape, behind a Reshape of each of its leaves."""
    types, constants = dict(graph.types), dict(graph.initializers)
    edits: dict[int, dict[str, str]] = {}
    behind: dict[str, list[Node]] = {}
    for run in runs:
        shape = _shape_constant(constants, types, run)
        renamed = {}
        for leaf in run.leaves:
            name = renamed[leaf] = f"gopt.load.{leaf}"
            types[name] = TensorType(types[leaf].dtype, run.shape)
            node = Node("Reshape", [leaf, shape], [name], name=name)
            node.made_by = "load"
            node.proto = node.to_proto()
            behind.setdefault(leaf, []).append(node)
        for node in run.inner:
            output = node.outputs[0]
            types[output] = TensorType(types[output].dtype, run.shape)
        for node in (*run.inner, *run.reductions):
            edits.setdefault(id(node), {}).update(renamed)
    nodes: list[Node] = []
    for node in graph.nodes:
        new = edits.get(id(node), {})
        if not new.keys().isdisjoint(node.inputs):
            node = clone(node)
            node.inputs = [new.get(name, name) for name in node.inputs]
        nodes.append(node)
        for name in node.outputs:
            nodes += behind.get(name, ())
    return replace(graph, nodes=nodes, types=types, initializers=constants, written=graph.written or graph.nodes)


def _shape_constant(constants: dict[str, Tensor], types: dict[str, TensorType], run: _Run) -> str:
    name = "gopt.load.shape." + "x".join(map(str, run.shape))
    if name not in constants:
        types[name] = TensorType("int64", (len(run.shape),))
        constants[name] = Tensor(types[name], array=np.array(run.shape, np.int64))
    return name
