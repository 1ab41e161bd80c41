"""Gives values of bodies names of their own, where a value outside has the same name.

The checker accepts a stored value of a body that hides an outer one, and a value of a body whose name stands outside
later on. Whatever joins a body with the graph around it (an engine, onnx's inliner, a pass) would mistake one for the
other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto


def name_bodies_apart(model: ModelProto) -> bool:
    """Rename in place; returns whether a name changed. A body and another one beside it may have names in common."""
    names = _Names(model)
    for function in model.functions:
        names.within(function.node, {*function.input, *_made(function.node)}, {})
    graph = model.graph
    names.within(graph.node, _defined(graph), {})
    return names.changed


class _Names:
    """The names that a model has, and the renaming."""

    def __init__(self, model: ModelProto) -> None:
        self.changed = False
        self._model = model
        self._all: set[str] = set()

    def within(self, nodes: Iterable[NodeProto], outer: Set[str], renamed: Mapping[str, str]) -> None:
        """Rename in the bodies of some nodes. ``outer``: names that stand around them; ``renamed``: those of them that
        have another name by now."""
        for node in nodes:
            for body in bodies(node):
                self._body(body, outer, renamed)

    def _body(self, body: GraphProto, outer: Set[str], renamed: Mapping[str, str]) -> None:
        own = _defined(body)
        table = {**renamed, **{name: self._fresh(name) for name in sorted(own & outer)}}
        if table:
            _rename(body, table)
        self.within(body.node, outer | own | set(table.values()), table)

    def _fresh(self, name: str) -> str:
        if not self._all:
            self._all = set(_every(self._model))
        self.changed, count = True, 1
        while f"{name}_{count}" in self._all:
            count += 1
        self._all.add(f"{name}_{count}")
        return f"{name}_{count}"


def bodies(node: NodeProto) -> list[GraphProto]:
    """The subgraphs of a control-flow node."""
    found: list[GraphProto] = []
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            found.append(attribute.g)
        elif attribute.type == AttributeProto.GRAPHS:
            found.extend(attribute.graphs)
    return found


def _made(nodes: Iterable[NodeProto]) -> set[str]:
    return {name for node in nodes for name in node.output if name}


def _defined(body: GraphProto) -> set[str]:
    return {each.name for each in (*body.input, *body.initializer)} | _made(body.node)


def _rename(body: GraphProto, table: Mapping[str, str]) -> None:
    """Rename values that a body defines or reads, but for those in its own bodies."""
    for each in (*body.input, *body.output, *body.initializer, *body.value_info):
        each.name = table.get(each.name, each.name)
    for each in body.quantization_annotation:
        each.tensor_name = table.get(each.tensor_name, each.tensor_name)
    for node in body.node:
        node.input[:] = [table.get(name, name) for name in node.input]
        node.output[:] = [table.get(name, name) for name in node.output]


def _every(model: ModelProto) -> Iterator[str]:
    """Every name of a value in a model."""
    yield from _defined(model.graph)
    yield from (each.name for each in model.graph.output)
    for function in model.functions:
        yield from (*function.input, *function.output, *_made(function.node))
    nodes = [model.graph.node, *(function.node for function in model.functions)]
    while nodes:
        for node in nodes.pop():
            for body in bodies(node):
                yield from _defined(body)
                nodes.append(body.node)
