"""Edits that change nothing: what is true of a step stays true. Each takes a model and gives another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from helpers import scramble
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper, shape_inference

from steps_gen.graphs import reordered

KINDS = ("identity", "mul-one", "reshape", "flat-pair", "transpose-pair", "cast", "expand")
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass
class Edited:
    """A model, what became of old names, and values that stand for others behind nodes that change nothing."""

    model: ModelProto
    names: dict[str, str] = field(default_factory=dict)
    stands_for: dict[str, str] = field(default_factory=dict)


def types_of(model: ModelProto) -> dict[str, tuple[int, tuple[int, ...] | None]]:
    """Element type and shape of every value, as far as they are known."""
    graph = shape_inference.infer_shapes(model, data_prop=True).graph
    found: dict[str, tuple[int, tuple[int, ...] | None]] = {}
    for each in (*graph.input, *graph.output, *graph.value_info):
        type = each.type.tensor_type
        known = type.HasField("shape") and all(size.HasField("dim_value") for size in type.shape.dim)
        found[each.name] = (type.elem_type, tuple(size.dim_value for size in type.shape.dim) if known else None)
    return found


class _Inserts:
    """Adds nodes that change nothing, and the constants that they need."""

    def __init__(self, model: ModelProto) -> None:
        self.graph = model.graph
        self.made: dict[str, str] = {}
        """What inserted nodes make -> what it equals."""
        self.types = types_of(model)
        self.count = 0

    def stored(self, value: object, dtype: object) -> str:
        self.count += 1
        name = f"same.c{self.count}"
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def nodes(self, kind: str, old: str, new: str, of: str) -> list[NodeProto]:
        """``new`` as ``old``, of which ``of`` has the type; one Identity where the kind needs a float or a shape."""
        code, shape = self.types.get(of, (0, None))
        self.count += 1
        middle = f"same.v{self.count}"
        self.made |= {middle: of, old: of, new: of}
        if kind == "mul-one" and code in FLOATS:
            return [helper.make_node("Mul", [old, self.stored(1, helper.tensor_dtype_to_np_dtype(code))], [new])]
        if kind == "cast" and code in FLOATS:
            return [helper.make_node("Cast", [old], [new], to=code)]
        if kind == "reshape" and shape is not None:
            return [helper.make_node("Reshape", [old, self.stored(shape, np.int64)], [new])]
        if kind == "expand" and shape is not None:
            return [helper.make_node("Expand", [old, self.stored(shape, np.int64)], [new])]
        if kind == "flat-pair" and shape is not None:
            first = helper.make_node("Reshape", [old, self.stored([-1], np.int64)], [middle])
            return [first, helper.make_node("Reshape", [middle, self.stored(shape, np.int64)], [new])]
        if kind == "transpose-pair" and shape is not None and len(shape) > 1:
            perm = [*range(1, len(shape)), 0]
            back = [perm.index(k) for k in range(len(perm))]
            first = helper.make_node("Transpose", [old], [middle], perm=perm)
            return [first, helper.make_node("Transpose", [middle], [new], perm=back)]
        return [helper.make_node("Identity", [old], [new])]


def before_outputs(model: ModelProto, kind: str, which: Iterable[str] | None = None) -> Edited:
    """Nodes that change nothing in front of the outputs; the value they read has another name."""
    model = ModelProto.FromString(model.SerializeToString())
    inserts, graph = _Inserts(model), model.graph
    wanted = [each.name for each in graph.output if which is None or each.name in set(which)]
    table = {name: f"{name}.before" for name in wanted}
    made = {name for node in graph.node for name in node.output}
    for node in graph.node:
        _rename(node, table)
    for name in wanted:
        if name in made:
            graph.node.extend(inserts.nodes(kind, table[name], name, name))
    return Edited(_named(model), {}, inserts.made)


def behind(model: ModelProto, kind: str, values: Iterable[str], users: set[str]) -> Edited:
    """Nodes that change nothing between values and those of their readers that are listed."""
    model = ModelProto.FromString(model.SerializeToString())
    inserts, graph = _Inserts(model), model.graph
    table = {name: f"{name}.behind" for name in dict.fromkeys(values)}
    given = [each.name for each in graph.input if each.name in table]
    nodes = [node for name in given for node in inserts.nodes(kind, name, table[name], name)]
    for node in graph.node:
        if node.name in users:
            for k, name in enumerate(node.input):
                node.input[k] = table.get(name, name)
        nodes.append(node)
        for name in node.output:
            if name in table:
                nodes.extend(inserts.nodes(kind, name, table[name], name))
    kept = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)
    return Edited(_named(model), {}, inserts.made)


def _rename(node: NodeProto, table: dict[str, str]) -> None:
    for names in (node.input, node.output):
        names[:] = [table.get(name, name) for name in names]
    for attribute in node.attribute:
        for body in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            for inner in body.node:
                _rename(inner, table)


def _named(model: ModelProto) -> ModelProto:
    """Every node has a name of its own, so that edits can be told apart."""
    for k, node in enumerate(model.graph.node):
        node.name = node.name or f"same.n{k}"
    return model


def renamed(model: ModelProto) -> Edited:
    new, table = scramble(model, 5)
    return Edited(new, table)


def shuffled(model: ModelProto) -> Edited:
    return Edited(reordered(model, 5))


def products_split(model: ModelProto) -> Edited:
    """a·b + c in one node becomes two: Gemm with plain factors as MatMul and Add, Sum as Adds."""
    model = ModelProto.FromString(model.SerializeToString())
    nodes = []
    for node in model.graph.node:
        given = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        if node.op_type == "Sum" and len(node.input) > 1:
            held = node.input[0]
            for k, other in enumerate(node.input[1:]):
                last = k == len(node.input) - 2
                new = node.output[0] if last else f"{node.output[0]}.part{k}"
                nodes.append(helper.make_node("Add", [held, other], [new]))
                held = new
        elif node.op_type == "Gemm" and given.get("alpha", 1) == given.get("beta", 1) == 1 and len(node.input) == 3:
            sides = []
            for k, flag in enumerate(("transA", "transB")):
                sides.append(node.input[k])
                if given.get(flag, 0):
                    sides[k] = f"{node.output[0]}.side{k}"
                    nodes.append(helper.make_node("Transpose", [node.input[k]], [sides[k]], perm=[1, 0]))
            nodes.append(helper.make_node("MatMul", sides, [f"{node.output[0]}.product"]))
            nodes.append(helper.make_node("Add", [f"{node.output[0]}.product", node.input[2]], [node.output[0]]))
        else:
            nodes.append(node)
    return _with(model, nodes)


def products_merged(model: ModelProto, keep: Iterable[str] = ()) -> Edited:
    """Two become one: a difference is a sum with a negative, an Add of an Add that nothing else reads is a Sum.

    ``keep``: values that must not disappear.
    """
    keep = {*keep, *(each.name for each in model.graph.output)}
    model = ModelProto.FromString(model.SerializeToString())
    types = types_of(model)
    users: dict[str, int] = {each.name: 1 for each in model.graph.output}
    for node in model.graph.node:
        for name in node.input:
            users[name] = users.get(name, 0) + 1
    single: dict[str, NodeProto] = {}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        kind = types.get(node.output[0], (0, None)) if node.output else (0, None)
        if node.op_type == "Sub" and kind[0] in (TensorProto.FLOAT,):
            nodes.append(helper.make_node("Neg", [node.input[1]], [f"{node.output[0]}.negative"]))
            nodes.append(helper.make_node("Add", [node.input[0], f"{node.output[0]}.negative"], [node.output[0]]))
            continue
        if node.op_type == "Add" and kind[0] in (TensorProto.FLOAT,) and node.input[0] in single:
            inner = single[node.input[0]]
            nodes = [each for each in nodes if each is not inner]
            node = helper.make_node("Sum", [*inner.input, node.input[1]], [node.output[0]])
        elif node.op_type == "Add" and users.get(node.output[0], 0) == 1 and node.output[0] not in keep:
            single[node.output[0]] = node
        nodes.append(node)
    return _with(model, nodes)


def _with(model: ModelProto, nodes: Iterable[NodeProto]) -> Edited:
    kept = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return Edited(_named(model))


WHOLE: dict[str, Callable[[ModelProto], Edited]] = {
    "renamed": renamed,
    "shuffled": shuffled,
    "split": products_split,
}
"""Edits of a whole model that need to know nothing of it."""
