"""Names in bodies and functions that stand outside too: hidden, defined later, omitted, used twice, two bodies deep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from wild_gen.bodies import TRUE, body, each_product, in_loop, in_scan
from wild_gen.form import Form, refused
from wild_gen.functions import function, products
from wild_gen.rewriting import FLOATS, copy_of, infos, parameters, rewrite, store
from wild_gen.steps import NAMES

Wrap = Callable[[ModelProto, NodeProto, ValueInfoProto], list[NodeProto]]
OUTER = "wild.outer"
"""A constant of the graph; bodies hide it."""


def one(kind: ValueInfoProto, name: str) -> TensorProto:
    """A stored one of a value's type."""
    dtype = helper.tensor_dtype_to_np_dtype(kind.type.tensor_type.elem_type)
    return numpy_helper.from_array(np.asarray(1, dtype), name)


def ones(kind: ValueInfoProto, name: str) -> TensorProto:
    """Stored ones of a value's type and shape: the checker wants both of what hides another value."""
    dtype = helper.tensor_dtype_to_np_dtype(kind.type.tensor_type.elem_type)
    shape = [dim.dim_value for dim in kind.type.tensor_type.shape.dim]
    return numpy_helper.from_array(np.ones(shape, dtype), name)


def like(kind: ValueInfoProto, name: str) -> ValueInfoProto:
    made = ValueInfoProto()
    made.CopyFrom(kind)
    made.name = name
    return made


def outer_three(model: ModelProto) -> None:
    """A stored three of the graph, for every type: who mistakes it for a body's one is far off."""
    for code in (*FLOATS, TensorProto.FLOAT16):
        name = f"{OUTER}{code}"
        if not any(each.name == name for each in model.graph.initializer):
            store(model, name, 3, helper.tensor_dtype_to_np_dtype(code))


def read_outside(model: ModelProto, made: list[NodeProto], out: str, kind: ValueInfoProto) -> list[NodeProto]:
    """Nodes that make ``out`` times three, over three."""
    three = f"{OUTER}{kind.type.tensor_type.elem_type}"
    return [*made, helper.make_node("Mul", [f"{out}.once", three], [f"{out}.thrice"]),
            helper.make_node("Div", [f"{out}.thrice", three], [out])]  # fmt: skip


def hidden(model: ModelProto, node: NodeProto, kind: ValueInfoProto) -> list[NodeProto]:
    """Both branches store a one under the name of the graph's three; the else branch of an If, in an If."""
    outer_three(model)
    out, three = node.output[0], f"{OUTER}{kind.type.tensor_type.elem_type}"

    def branch(name: str, deep: bool) -> GraphProto:
        first, made = copy_of(node), f"{out}.{name}"
        first.output[0] = f"{made}.first"
        scaled = helper.make_node("Mul", [first.output[0], three], [made])
        if not deep:
            inside = body(name, [first, scaled], [], [like(kind, made)])
            inside.initializer.append(one(kind, three))
            return inside
        halves = [branch(f"{name}.t", False), branch(f"{name}.e", False)]
        choose = helper.make_node("If", [TRUE], [f"{made}.chosen"], then_branch=halves[0], else_branch=halves[1])
        again = helper.make_node("Mul", [f"{made}.chosen", three], [made])
        inside = body(name, [choose, again], [], [like(kind, made)])
        inside.initializer.append(one(kind, three))
        return inside

    choose = helper.make_node(
        "If", [TRUE], [f"{out}.once"], then_branch=branch("then", True), else_branch=branch("else", False)
    )
    return read_outside(model, [choose], out, kind)


def hides_states(model: ModelProto, folder: Path) -> None:
    """Bodies store ones under the names of parameters, of new states, of values of the backward."""
    _hides(model, one_branch=False)


def hides_later(model: ModelProto, folder: Path) -> None:
    """Bodies store ones under the names of new states and of values of the backward, which stand behind them."""
    _hides(model, one_branch=False, states=False)


def hides_parameters(model: ModelProto, folder: Path) -> None:
    """The branch that runs stores ones under the names of parameters, which the other one reads."""
    _hides(model, one_branch=True)


def _hides(model: ModelProto, one_branch: bool, states: bool = True) -> None:
    known, graph = infos(model), model.graph
    store(model, TRUE, True, bool)
    made = [node.output[0] for node in graph.node]
    others = dict.fromkeys(
        [
            *(parameters(model) if states else []),
            *([] if one_branch else [*(each.name for each in graph.output), *made[len(made) // 2 :: 3]]),
        ]
    )

    def wrap(node: NodeProto) -> list[NodeProto]:
        out, kind = node.output[0], known[node.output[0]]
        code = kind.type.tensor_type.elem_type
        free = [
            name for name in others
            if name in known and known[name].type.tensor_type.elem_type == code and name not in (*node.input, out)
        ]  # fmt: skip
        branches = []
        for label in ("then", "else"):
            first = copy_of(node)
            first.output[0] = f"{out}.{label}"
            nodes, last = [first], first.output[0]
            for name in free:
                nodes.append(helper.make_node("ReduceMax", [name], [f"{last}.r"], keepdims=0))
                nodes.append(helper.make_node("Mul", [last, f"{last}.r"], [f"{last}.m"]))
                last = f"{last}.m"
            inside = body(label, nodes, [], [like(kind, last)])
            inside.initializer.extend(ones(known[name], name) for name in free if label == "then" or not one_branch)
            branches.append(inside)
        choose = helper.make_node("If", [TRUE], [out], name=node.name, then_branch=branches[0], else_branch=branches[1])
        return [choose]

    rewrite(model, products(model), wrap)


def copied(model: ModelProto, node: NodeProto, kind: ValueInfoProto) -> list[NodeProto]:
    """Both branches store a number that the graph has under the same name, as some exporters do; one reads its own."""
    out, name = node.output[0], f"wild.same{kind.type.tensor_type.elem_type}"
    if not any(each.name == name for each in model.graph.initializer):
        model.graph.initializer.append(one(kind, name))
    branches = []
    for label in ("then", "else"):
        first, made = copy_of(node), f"{out}.{label}"
        first.output[0] = f"{made}.first"
        inside = body(label, [first, helper.make_node("Mul", [first.output[0], name], [made])], [], [like(kind, made)])
        if label == "then":
            inside.initializer.append(one(kind, name))
        branches.append(inside)
    choose = helper.make_node("If", [TRUE], [f"{out}.c"], then_branch=branches[0], else_branch=branches[1])
    return [choose, helper.make_node("Mul", [f"{out}.c", name], [out])]


def named_later(model: ModelProto, node: NodeProto, kind: ValueInfoProto) -> list[NodeProto]:
    """Values of both branches have the names of values that the graph makes behind the If; one is the If's result."""
    out = node.output[0]

    def branch(name: str, last: str) -> GraphProto:
        first = copy_of(node)
        first.output[0] = f"{out}.later"
        same = helper.make_node("Identity", [f"{out}.later"], [last])
        return body(name, [first, same], [], [like(kind, last)])

    branches = branch("then", f"{out}.chosen"), branch("else", out)
    choose = helper.make_node("If", [TRUE], [f"{out}.chosen"], then_branch=branches[0], else_branch=branches[1])
    return [
        choose,
        helper.make_node("Neg", [f"{out}.chosen"], [f"{out}.later"]),
        helper.make_node("Neg", [f"{out}.later"], [out]),
    ]


def rows_named_later(model: ModelProto, node: NodeProto, kind: ValueInfoProto) -> list[NodeProto]:
    """A Scan, or a Loop where the product is none of a matrix, whose inner values are named as later ones."""
    out = node.output[0]
    inside = copy_of(node)
    inside.output[0] = f"{out}.scanned"
    known = ValueInfoProto()
    known.CopyFrom(kind)
    made = in_scan(model, inside, kind)
    made = made if len(made) == 1 and made[0].op_type == "Scan" else in_loop(model, inside, kind)
    for each in made:
        for attribute in each.attribute:
            if attribute.HasField("g"):
                _renamed(attribute.g, f"{out}.scanned.made", f"{out}.later")
                _renamed(attribute.g, f"{out}.scanned.last", f"{out}.later")
    return [
        *made,
        helper.make_node("Neg", [f"{out}.scanned"], [f"{out}.later"]),
        helper.make_node("Neg", [f"{out}.later"], [out]),
    ]


def _renamed(graph: GraphProto, old: str, new: str) -> None:
    for each in graph.output:
        each.name = new if each.name == old else each.name
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]


def loop_hides(model: ModelProto, node: NodeProto, kind: ValueInfoProto) -> list[NodeProto]:
    """A Loop whose body stores a one under the name of the graph's three."""
    outer_three(model)
    out, three = node.output[0], f"{OUTER}{kind.type.tensor_type.elem_type}"
    inside = copy_of(node)
    inside.output[0] = f"{out}.once"
    made = in_loop(model, inside, kind)
    for attribute in made[0].attribute:
        if attribute.HasField("g"):
            for tensor in attribute.g.initializer:
                tensor.name = three
            for each in attribute.g.node:
                each.input[:] = [three if name == f"{out}.once.own" else name for name in each.input]
    return read_outside(model, made, out, kind)


def omitted(model: ModelProto, folder: Path) -> None:
    """A function with a body that stores a value under the name of an operand, which both calls leave out; the body's
    other values are named as values of the graph."""
    _omitted(model, given=False)


def omitted_once(model: ModelProto, folder: Path) -> None:
    """The second call gives the operand."""
    _omitted(model, given=True)


def _omitted(model: ModelProto, given: bool) -> None:
    known = infos(model)
    unread = {
        code: store(model, f"wild.unread{code}", 3, helper.tensor_dtype_to_np_dtype(code))
        for code in (*FLOATS, TensorProto.FLOAT16)
    }

    def made(code: int, out: str) -> str:
        name = f"Hiding{code}"
        if any(each.name == name for each in model.functions):
            return name
        kind = ValueInfoProto()
        kind.type.tensor_type.elem_type = code

        def branch(label: str) -> GraphProto:
            scaled = helper.make_node("Mul", ["a", "s"], [out])
            inside = body(label, [scaled], [], [ValueInfoProto(name=out)])
            inside.initializer.append(one(kind, "s"))
            return inside

        true = helper.make_node("Constant", [], ["t"], value=helper.make_tensor("t", TensorProto.BOOL, [], [True]))
        choose = helper.make_node("If", ["t"], ["b"], then_branch=branch("then"), else_branch=branch("else"))
        function(model, name, ["a", "s"], ["b"], [true, choose])
        return name

    def behind(node: NodeProto) -> list[NodeProto]:
        own, out = copy_of(node), node.output[0]
        own.output[0] = f"{out}.first"
        code = known[out].type.tensor_type.elem_type
        name = made(code, out)
        return [
            own,
            helper.make_node(name, [f"{out}.first"], [f"{out}.second"], domain="own"),
            helper.make_node(name, [f"{out}.second", unread[code] if given else ""], [out], domain="own"),
        ]

    rewrite(model, products(model), behind)


def optional_in_body(model: ModelProto, folder: Path) -> None:
    """A function whose body reads an operand that a call leaves out, and one that it gives."""
    known = infos(model)
    highs = {code: store(model, f"wild.top{code}", 6e4, helper.tensor_dtype_to_np_dtype(code)) for code in (1, 10, 11)}

    def branch(label: str) -> GraphProto:
        inside = helper.make_node("Clip", ["a", "low", "high"], ["c"])
        return body(label, [inside], [], [ValueInfoProto(name="c")])

    true = helper.make_node("Constant", [], ["t"], value=helper.make_tensor("t", TensorProto.BOOL, [], [True]))
    choose = helper.make_node("If", ["t"], ["b"], then_branch=branch("then"), else_branch=branch("else"))
    function(model, "ClipWithin", ["a", "low", "high"], ["b"], [true, choose])

    def behind(node: NodeProto) -> list[NodeProto]:
        own, out = copy_of(node), node.output[0]
        own.output[0] = f"{out}.first"
        high = highs[known[out].type.tensor_type.elem_type]
        return [
            own,
            helper.make_node("ClipWithin", [f"{out}.first", "", high], [f"{out}.second"], domain="own"),
            helper.make_node("ClipWithin", [f"{out}.second"], [out], domain="own"),
        ]

    rewrite(model, products(model), behind)


WIDE = tuple(name for name in NAMES if "fp16" not in name)
"""Steps whose parameters have the type of the products."""
HIDES = refused(4, "hides", "rename it in the export")
FORMS = [
    Form("bodies that hide a constant", each_product(hidden), HIDES),
    Form("bodies that store a constant again", each_product(copied)),
    Form("bodies that hide states and later values", hides_states, HIDES, WIDE),
    Form("a branch that hides parameters", hides_parameters, HIDES, WIDE),
    Form("bodies that hide later values", hides_later),
    Form("values of bodies named as later ones", each_product(named_later)),
    Form("values of Scan and Loop named as later ones", each_product(rows_named_later)),
    Form("a Loop that hides a constant", each_product(loop_hides), HIDES),
    Form("a function that hides an omitted operand", omitted),
    Form("a function that hides an operand omitted once", omitted_once, HIDES),
    Form("a function whose body reads an omitted operand", optional_in_body),
]
