"""Graphs written another way: other orders of nodes, parts of them as functions of the model."""

from __future__ import annotations

import random

import onnx
from onnx import ModelProto, NodeProto, helper


def _reads(node: NodeProto) -> set[str]:
    names = set(node.input)
    for attribute in node.attribute:
        if attribute.HasField("g"):
            names.update(name for inner in attribute.g.node for name in inner.input)
    return names - {""}


def reordered(model: ModelProto, seed: int | None) -> ModelProto:
    """The same graph, its nodes in a random order that its data flow allows; without a seed, in the first such."""
    model = ModelProto.FromString(model.SerializeToString())
    generator = random.Random(seed)
    made = {name: k for k, node in enumerate(model.graph.node) for name in node.output}
    waiting, readers = {}, {}
    for k, node in enumerate(model.graph.node):
        before = {made[name] for name in _reads(node) if name in made}
        waiting[k] = len(before)
        for other in before:
            readers.setdefault(other, []).append(k)
    ready = [k for k, count in waiting.items() if count == 0]
    order = []
    while ready:
        place = 0 if seed is None else generator.randrange(len(ready))
        k = ready.pop(place)
        order.append(k)
        for other in readers.get(k, ()):
            waiting[other] -= 1
            if waiting[other] == 0:
                ready.append(other)
    nodes = [model.graph.node[k] for k in order]
    assert len(nodes) == len(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def into_functions(model: ModelProto, parts: dict[str, str]) -> ModelProto:
    """The nodes of each part as one function of the model."""
    model = ModelProto.FromString(model.SerializeToString())
    graph = model.graph
    outside: set[str] = {value.name for value in graph.output}
    bodies: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        bodies.setdefault(parts.get(node.name, ""), []).append(node)
    calls = []
    for part in sorted(set(bodies) - {""}):
        nodes = bodies[part]
        made = {name for node in nodes for name in node.output}
        read = sorted({name for node in nodes for name in _reads(node)} - made)
        others = {name for other, rest in bodies.items() if other != part for node in rest for name in _reads(node)}
        given = sorted(made & (outside | others))
        kind = f"update_{part}"
        own = helper.make_opsetid("", 20)
        model.functions.append(helper.make_function("own", kind, read, given, nodes, [own]))
        calls.append(helper.make_node(kind, read, given, name=f"call_{part}", domain="own"))
    rest = bodies.get("", [])
    model = ModelProto.FromString(model.SerializeToString())
    del model.graph.node[:]
    model.graph.node.extend([*rest, *calls])
    model.opset_import.append(helper.make_opsetid("own", 1))
    model = reordered(model, None)
    onnx.checker.check_model(model)
    return model
