"""Renames values of bodies named like outer values.

The checker accepts a body value with a name used outside later on, and a stored body value hiding an earlier outer
value. The first case is clear, and is renamed: code joining a body with the outer graph, such as an engine, onnx's
inliner or a pass, would confuse the values. In the second case engines read either value, ONNX Runtime sometimes this,
sometimes that: refused, unless both values are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from copy import deepcopy

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

from gopt.errors import UnsupportedError
from gopt.ir.external_data import show


def name_bodies_apart(model: ModelProto) -> bool:
    """Rename in place; returns whether a name changed. Bodies beside one another may have names in common.

    Raises UnsupportedError for a stored value hiding another value.
    """
    names = _Names(model)
    for function in model.functions:
        operands = _given(model, function)
        names.within(function.node, {*function.input, *_made(function.node)}, {}, dict.fromkeys(operands))
    graph = model.graph
    fixed = {value.name for value in graph.input}
    visible = {tensor.name: None if tensor.name in fixed else tensor for tensor in graph.initializer}
    names.within(graph.node, _defined(graph), {}, dict.fromkeys(fixed) | visible)
    return names.changed


class _Names:
    """The names a model has, and the renaming."""

    def __init__(self, model: ModelProto) -> None:
        self.changed = False
        self._model = model
        self._all: set[str] = set()

    def within(
        self, nodes: Iterable[NodeProto], outer: Set[str], renamed: Mapping[str, str],
        visible: dict[str, TensorProto | None],
    ) -> None:  # fmt: skip
        """Rename in the bodies of some nodes. ``outer``: names around; ``renamed``: outer name -> new name;
        ``visible``: names defined before the nodes, with stored values."""
        for node in nodes:
            for body in bodies(node):
                self._body(node, body, outer, renamed, visible)
            visible.update(dict.fromkeys(node.output))

    def _body(
        self, node: NodeProto, body: GraphProto, outer: Set[str], renamed: Mapping[str, str],
        visible: Mapping[str, TensorProto | None],
    ) -> None:  # fmt: skip
        names_here = _defined(body)
        stored = {tensor.name: tensor for tensor in body.initializer}
        for name in names_here & outer if stored else ():
            if name in stored and name in visible and not _same(stored[name], visible[name]):
                raise UnsupportedError(
                    f"{show(name)}, which a body of {node.op_type} {show(node.name or ''.join(node.output[:1]))} "
                    "stores, hides the value of that name outside, and engines read either",
                    "rename it in the export: names in bodies must differ from those around them",
                )
        table = {**renamed, **{name: self._fresh(name) for name in sorted(names_here & outer)}}
        if table:
            _rename(body, table)
        # Only a node with bodies looks at what is visible.
        nested = any(map(bodies, body.node))
        if nested:
            inside = {**visible, **dict.fromkeys(value.name for value in body.input), **stored}
            self.within(body.node, outer | names_here | set(table.values()), table, inside)

    def _fresh(self, name: str) -> str:
        if not self._all:
            self._all = set(_every(self._model))
        self.changed, count = True, 1
        while f"{name}_{count}" in self._all:
            count += 1
        self._all.add(f"{name}_{count}")
        return f"{name}_{count}"


def _given(model: ModelProto, function: FunctionProto) -> set[str]:
    """The operands of a function, as far as given in some call."""
    formals: set[str] = set()
    stack = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    while stack:
        node = stack.pop()
        stack.extend(inner for body in bodies(node) for inner in body.node)
        if (node.domain, node.op_type, node.overload) == (function.domain, function.name, function.overload):
            formals.update(formal for formal, actual in zip(function.input, node.input) if actual)
    return formals


def _same(stored: TensorProto, tensor: TensorProto | None) -> bool:
    """Return whether two stored values have the same bytes in the same form."""
    if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
        return False
    copy = deepcopy(tensor)
    copy.name = stored.name
    return bool(copy.SerializeToString(deterministic=True) == stored.SerializeToString(deterministic=True))


def bodies(node: NodeProto) -> list[GraphProto]:
    """The subgraphs of a control-flow node."""
    graphs: list[GraphProto] = []
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            graphs.append(attribute.g)
        elif attribute.type == AttributeProto.GRAPHS:
            graphs.extend(attribute.graphs)
    return graphs


def _made(nodes: Iterable[NodeProto]) -> set[str]:
    return {name for node in nodes for name in node.output if name}


def _defined(body: GraphProto) -> set[str]:
    return {value.name for value in (*body.input, *body.initializer)} | _made(body.node)


def _rename(body: GraphProto, table: Mapping[str, str]) -> None:
    """Rename values defined or read in a body, except in inner bodies."""
    for value in (*body.input, *body.output, *body.initializer, *body.value_info):
        value.name = table.get(value.name, value.name)
    for value in body.quantization_annotation:
        value.tensor_name = table.get(value.tensor_name, value.tensor_name)
    for node in body.node:
        node.input[:] = [table.get(name, name) for name in node.input]
        node.output[:] = [table.get(name, name) for name in node.output]


def _every(model: ModelProto) -> Iterator[str]:
    """Every name of a value in a model."""
    yield from _defined(model.graph)
    yield from (value.name for value in model.graph.output)
    for function in model.functions:
        yield from (*function.input, *function.output, *_made(function.node))
    nodes = [model.graph.node, *(function.node for function in model.functions)]
    while nodes:
        for node in nodes.pop():
            for body in bodies(node):
                yield from _defined(body)
                nodes.append(body.node)
