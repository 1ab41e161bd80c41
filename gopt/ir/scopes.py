"""Gives values of bodies names of their own, where a value outside has the same name.

The checker accepts a value of a body whose name stands outside later on, and a stored value of a body that hides one
that stands outside already. The first is clear, and is renamed: whatever joins a body with the graph around it, such as
an engine, onnx's inliner or a pass, would mistake one for the other. Engines read either value in place of the second,
ONNX Runtime sometimes the one and sometimes the other: it is refused, unless both are the same number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

from gopt.errors import UnsupportedError
from gopt.ir.external_data import show


def name_bodies_apart(model: ModelProto) -> bool:
    """Rename in place; returns whether a name changed. Bodies beside one another may have names in common.

    Raises UnsupportedError for a stored value that hides another one.
    """
    names = _Names(model)
    for function in model.functions:
        given = _given(model, function)
        names.within(function.node, {*function.input, *_made(function.node)}, {}, dict.fromkeys(given))
    graph = model.graph
    fixed = {each.name for each in graph.input}
    visible = {each.name: None if each.name in fixed else each for each in graph.initializer}
    names.within(graph.node, _defined(graph), {}, dict.fromkeys(fixed) | visible)
    return names.changed


class _Names:
    """The names that a model has, and the renaming."""

    def __init__(self, model: ModelProto) -> None:
        self.changed = False
        self._model = model
        self._all: set[str] = set()

    def within(
        self, nodes: Iterable[NodeProto], outer: Set[str], renamed: Mapping[str, str],
        visible: dict[str, TensorProto | None],
    ) -> None:  # fmt: skip
        """Rename in the bodies of some nodes. ``outer``: names that stand around them; ``renamed``: those of them that
        have another name by now; ``visible``: those that are defined before the nodes, with what is stored."""
        for node in nodes:
            for body in bodies(node):
                self._body(node, body, outer, renamed, visible)
            visible.update(dict.fromkeys(node.output))

    def _body(
        self, node: NodeProto, body: GraphProto, outer: Set[str], renamed: Mapping[str, str],
        visible: Mapping[str, TensorProto | None],
    ) -> None:  # fmt: skip
        own = _defined(body)
        stored = {each.name: each for each in body.initializer}
        for name in own & outer if stored else ():
            if name in stored and name in visible and not _same(stored[name], visible[name]):
                raise UnsupportedError(
                    f"{show(name)}, which a body of {node.op_type} {show(node.name or ''.join(node.output[:1]))} "
                    "stores, hides the value of that name outside, and engines read either",
                    "rename it in the export: names in bodies must differ from those around them",
                )
        table = {**renamed, **{name: self._fresh(name) for name in sorted(own & outer)}}
        if table:
            _rename(body, table)
        # Only a node with bodies looks at what is visible.
        nested = any(map(bodies, body.node))
        if nested:
            inside = {**visible, **dict.fromkeys(each.name for each in body.input), **stored}
            self.within(body.node, outer | own | set(table.values()), table, inside)

    def _fresh(self, name: str) -> str:
        if not self._all:
            self._all = set(_every(self._model))
        self.changed, count = True, 1
        while f"{name}_{count}" in self._all:
            count += 1
        self._all.add(f"{name}_{count}")
        return f"{name}_{count}"


def _given(model: ModelProto, function: FunctionProto) -> set[str]:
    """The operands of a function that some call gives."""
    found: set[str] = set()
    stack = [*model.graph.node, *(node for each in model.functions for node in each.node)]
    while stack:
        node = stack.pop()
        stack.extend(inner for body in bodies(node) for inner in body.node)
        if (node.domain, node.op_type, node.overload) == (function.domain, function.name, function.overload):
            found.update(formal for formal, actual in zip(function.input, node.input) if actual)
    return found


def _same(stored: TensorProto, other: TensorProto | None) -> bool:
    """Return whether two stored values are one: the same bytes in the same form."""
    if other is None or other.data_location == TensorProto.EXTERNAL:
        return False
    copy = TensorProto()
    copy.CopyFrom(other)
    copy.name = stored.name
    return bool(copy.SerializeToString(deterministic=True) == stored.SerializeToString(deterministic=True))


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
