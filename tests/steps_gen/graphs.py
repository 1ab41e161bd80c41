"""Graphs written another way: other orders of nodes, parts of them as functions of the model."""

from __future__ import annotations

import random

import onnx
from onnx import ModelProto, NodeProto, helper


def reads(node: NodeProto) -> set[str]:
    """What a node reads, through the bodies of its attributes too."""
    names = set(node.input)
    for attribute in node.attribute:
        for body in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            made = {name for inner in body.node for name in inner.output}
            made |= {each.name for each in (*body.initializer, *body.input)}
            names |= {name for inner in body.node for name in reads(inner)} - made
            names |= {each.name for each in body.output} - made
    return names - {""}


def reordered(model: ModelProto, seed: int | None) -> ModelProto:
    """The same graph, its nodes in a random order that its data flow allows; without a seed, in the first such."""
    model = ModelProto.FromString(model.SerializeToString())
    generator = random.Random(seed)
    made = {name: k for k, node in enumerate(model.graph.node) for name in node.output}
    waiting, users = {}, {}
    for k, node in enumerate(model.graph.node):
        before = {made[name] for name in reads(node) if name in made}
        waiting[k] = len(before)
        for other in before:
            users.setdefault(other, []).append(k)
    ready = [k for k, count in waiting.items() if count == 0]
    order = []
    while ready:
        place = 0 if seed is None else generator.randrange(len(ready))
        k = ready.pop(place)
        order.append(k)
        for other in users.get(k, ()):
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
        read = sorted({name for node in nodes for name in reads(node)} - made)
        others = {name for other, rest in bodies.items() if other != part for node in rest for name in reads(node)}
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
