"""Parts of the forward in bodies of If, Loop and Scan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from wild_gen.form import Form, refused
from wild_gen.functions import products
from wild_gen.rewriting import copy_of, forward, infos, parameters, replace_nodes, rewrite, store
from wild_gen.steps import NAMES

Wrap = Callable[[ModelProto, NodeProto, ValueInfoProto], list[NodeProto]]
TRUE = "wild.true"


def body(name: str, nodes: list[NodeProto], inputs: list[ValueInfoProto], outputs: list[ValueInfoProto]) -> GraphProto:
    return helper.make_graph(nodes, name, inputs, outputs)


def _info(like: ValueInfoProto, name: str) -> ValueInfoProto:
    made = ValueInfoProto()
    made.CopyFrom(like)
    made.name = name
    return made


def each_product(wrap: Wrap) -> Callable[[ModelProto, Path], None]:
    """Every product of the forward, wrapped."""

    def edit(model: ModelProto, folder: Path) -> None:
        known = infos(model)
        if not any(each.name == TRUE for each in model.graph.initializer):
            store(model, TRUE, True, bool)
            store(model, "wild.one", 1, np.int64)
        rewrite(model, products(model), lambda node: wrap(model, node, known[node.output[0]]))

    return edit


def inner(node: NodeProto, suffix: str) -> NodeProto:
    """The node as it is in a body: it reads outer values, and makes a value of the body."""
    made = copy_of(node)
    made.output[0] = f"{node.output[0]}.{suffix}"
    return made


def in_if(model: ModelProto, node: NodeProto, kind: ValueInfoProto) -> list[NodeProto]:
    """Both branches do the same, with outer values and states."""
    branches = [
        body(name, [inner(node, name)], [], [_info(kind, f"{node.output[0]}.{name}")]) for name in ("then", "else")
    ]
    return [
        helper.make_node("If", [TRUE], node.output, name=node.name, then_branch=branches[0], else_branch=branches[1])
    ]


def in_if_same_names(model: ModelProto, node: NodeProto, kind: ValueInfoProto) -> list[NodeProto]:
    """The branches' values have one name; the second multiplies by a stored one."""
    out = f"{node.output[0]}.in"
    first = body("b", [inner(node, "in")], [], [_info(kind, out)])
    scaled = helper.make_node("Mul", [f"{node.output[0]}.early", f"{node.output[0]}.own"], [out])
    second = body("b", [inner(node, "early"), scaled], [], [_info(kind, out)])
    dtype = helper.tensor_dtype_to_np_dtype(kind.type.tensor_type.elem_type)
    second.initializer.append(numpy_helper.from_array(np.asarray(1, dtype), f"{node.output[0]}.own"))
    return [helper.make_node("If", [TRUE], node.output, name=node.name, then_branch=first, else_branch=second)]


def in_if_in_if(model: ModelProto, node: NodeProto, kind: ValueInfoProto) -> list[NodeProto]:
    """An If in both branches of an If."""

    def branch(name: str) -> GraphProto:
        within = copy_of(node)
        within.output[0] = f"{node.output[0]}.{name}"
        deep = in_if(model, within, kind)
        return body(name, deep, [], [_info(kind, within.output[0])])

    return [
        helper.make_node("If", [TRUE], node.output, name=node.name, then_branch=branch("t"), else_branch=branch("e"))
    ]


def returns_outer(model: ModelProto, node: NodeProto, kind: ValueInfoProto) -> list[NodeProto]:
    """Branches without nodes, which return a value of the graph around them."""
    first = copy_of(node)
    first.output[0] = f"{node.output[0]}.first"
    branches = [body(name, [], [], [_info(kind, first.output[0])]) for name in ("then", "else")]
    choose = helper.make_node("If", [TRUE], node.output, then_branch=branches[0], else_branch=branches[1])
    return [first, choose]


def by_data(model: ModelProto, node: NodeProto, kind: ValueInfoProto) -> list[NodeProto]:
    """The condition is computed from what the product makes."""
    first, out = copy_of(node), node.output[0]
    first.output[0] = f"{out}.first"
    peak = helper.make_node("ReduceMax", [first.output[0]], [f"{out}.peak"], keepdims=0)
    wide = helper.make_node("Cast", [f"{out}.peak"], [f"{out}.wide"], to=TensorProto.FLOAT)
    same = helper.make_node("Equal", [f"{out}.wide", f"{out}.wide"], [f"{out}.cond"])
    same_branch = body(
        "then", [helper.make_node("Identity", [first.output[0]], [f"{out}.then"])], [], [_info(kind, f"{out}.then")]
    )
    other = body(
        "else", [helper.make_node("Neg", [first.output[0]], [f"{out}.else"])], [], [_info(kind, f"{out}.else")]
    )
    choose = helper.make_node("If", [f"{out}.cond"], [out], then_branch=same_branch, else_branch=other)
    return [first, peak, wide, same, choose]


def in_loop(model: ModelProto, node: NodeProto, kind: ValueInfoProto) -> list[NodeProto]:
    """A loop of one turn whose body reads outer values and has an initializer of its own."""
    out = node.output[0]
    step = helper.make_tensor_value_info(f"{out}.turn", TensorProto.INT64, [])
    go = helper.make_tensor_value_info(f"{out}.go", TensorProto.BOOL, [])
    on = helper.make_tensor_value_info(f"{out}.on", TensorProto.BOOL, [])
    scaled = helper.make_node("Mul", [f"{out}.body", f"{out}.own"], [f"{out}.last"])
    again = helper.make_node("Identity", [f"{out}.go"], [f"{out}.on"])
    inside = body("loop", [inner(node, "body"), scaled, again], [step, go], [on, _info(kind, f"{out}.last")])
    dtype = helper.tensor_dtype_to_np_dtype(kind.type.tensor_type.elem_type)
    inside.initializer.append(numpy_helper.from_array(np.asarray(1, dtype), f"{out}.own"))
    if not any(each.name == "wild.first" for each in model.graph.initializer):
        store(model, "wild.first", [0], np.int64)
    return [
        helper.make_node("Loop", ["wild.one", TRUE], [f"{out}.stacked"], name=node.name, body=inside),
        helper.make_node("Squeeze", [f"{out}.stacked", "wild.first"], [out], name=f"{node.name}.s"),
    ]


def carried(model: ModelProto, node: NodeProto, kind: ValueInfoProto) -> list[NodeProto]:
    """A loop without a number of turns that hands its value on, and stops after the first."""
    out = node.output[0]
    first = copy_of(node)
    first.output[0] = f"{out}.first"
    step = helper.make_tensor_value_info(f"{out}.turn", TensorProto.INT64, [])
    go = helper.make_tensor_value_info(f"{out}.go", TensorProto.BOOL, [])
    on = helper.make_tensor_value_info(f"{out}.on", TensorProto.BOOL, [])
    nodes = [
        helper.make_node("Identity", [f"{out}.held"], [f"{out}.next"]),
        helper.make_node("Not", [f"{out}.go"], [f"{out}.on"]),
    ]
    inside = body("loop", nodes, [step, go, _info(kind, f"{out}.held")], [on, _info(kind, f"{out}.next")])
    return [first, helper.make_node("Loop", ["", TRUE, first.output[0]], [out], body=inside)]


def in_scan(model: ModelProto, node: NodeProto, kind: ValueInfoProto) -> list[NodeProto]:
    """Row by row: the body reads a row, and the parameter from outside."""
    out, (left, right) = node.output[0], node.input[:2]
    known = infos(model)
    if node.op_type != "MatMul" or len(known[left].type.tensor_type.shape.dim) != 2:
        return [node]
    rows, outs = _info(known[left], f"{out}.row"), _info(kind, f"{out}.made")
    for each in (rows, outs):
        del each.type.tensor_type.shape.dim[0]
    inside = body("scan", [helper.make_node("MatMul", [f"{out}.row", right], [f"{out}.made"])], [rows], [outs])
    return [helper.make_node("Scan", [left], [out], name=node.name, body=inside, num_scan_inputs=1)]


def update_in_if(model: ModelProto, folder: Path) -> None:
    """The last node before each new parameter, in both branches of an If."""
    known = infos(model)
    store(model, TRUE, True, bool)
    outs = {each.name for each in model.graph.output} - {"loss"}
    chosen = [node.name for node in model.graph.node if node.output[0] in outs]
    rewrite(model, chosen, lambda node: in_if(model, node, known[node.output[0]]))


def states_through_if(model: ModelProto, folder: Path) -> None:
    """One If behind the step: new states where the rate is a number, old ones else."""
    held, outs = {each.name for each in model.graph.initializer}, infos(model)
    pairs = {f"{name}_out": name for name in held if f"{name}_out" in {each.name for each in model.graph.output}}
    makers = [node.name for node in model.graph.node if pairs.keys() & set(node.output)]

    def renamed(node: NodeProto) -> list[NodeProto]:
        made = copy_of(node)
        made.output[:] = [f"{name}.new" if name in pairs else name for name in node.output]
        return [made]

    def branch(name: str, of: dict[str, str]) -> GraphProto:
        nodes = [helper.make_node("Identity", [value], [f"{out}.in_{name}"]) for out, value in of.items()]
        return body(name, nodes, [], [_info(outs[out], f"{out}.in_{name}") for out in of])

    names = sorted(pairs)
    rewrite(model, makers, renamed)
    for node in model.graph.node:
        node.input[:] = [f"{name}.new" if name in pairs else name for name in node.input]
    model.graph.node.append(helper.make_node("Equal", ["lr", "lr"], ["wild.number"], name="wild.equal"))
    new, old = (
        branch("new", {name: f"{name}.new" for name in names}),
        branch("old", {name: pairs[name] for name in names}),
    )
    gate = helper.make_node("If", ["wild.number"], names, name="wild.gate", then_branch=new, else_branch=old)
    model.graph.node.append(gate)


def counter_in_loop(model: ModelProto, folder: Path) -> None:
    """A counter of updates, of which a loop of one turn makes the next."""
    store(model, TRUE, True, bool)
    store(model, "wild.one", 1, np.int64)
    store(model, "wild.count", 0, np.int64)
    count = helper.make_tensor_value_info("wild.count", TensorProto.INT64, [])
    model.graph.input.append(count)
    model.graph.output.append(_info(count, "wild.next"))
    turn, held, made = (_info(count, f"wild.{name}") for name in ("turn", "held", "made"))
    go, on = (helper.make_tensor_value_info(f"wild.{name}", TensorProto.BOOL, []) for name in ("go", "on"))
    nodes = [
        helper.make_node("Add", ["wild.held", "wild.one"], ["wild.made"]),
        helper.make_node("Identity", ["wild.go"], ["wild.on"]),
    ]
    inside = body("loop", nodes, [turn, go, held], [on, made])
    model.graph.node.append(helper.make_node("Loop", ["wild.one", TRUE, "wild.count"], ["wild.next"], body=inside))


def parameter_through_if(model: ModelProto, folder: Path) -> None:
    """The forward reads each parameter through an If that returns it."""
    store(model, TRUE, True, bool)
    known, names = infos(model), parameters(model)
    inside = {node.name for node in forward(model)}
    nodes = []
    for name in names:
        branches = [body(each, [], [], [_info(known[name], name)]) for each in ("then", "else")]
        nodes.append(helper.make_node("If", [TRUE], [f"{name}.read"], then_branch=branches[0], else_branch=branches[1]))
    for node in model.graph.node:
        made = copy_of(node)
        if node.name in inside:
            made.input[:] = [f"{name}.read" if name in names else name for name in node.input]
        nodes.append(made)
    replace_nodes(model.graph, nodes)


FORMS = [
    Form("products in If", each_product(in_if)),
    Form("If with one name in both branches", each_product(in_if_same_names)),
    Form("If in If", each_product(in_if_in_if)),
    Form("If that returns outer values", each_product(returns_outer), refused(3, "If", "first")),
    Form("If by data", each_product(by_data)),
    Form("products in Loop", each_product(in_loop)),
    Form("Loop that carries a value", each_product(carried), only=tuple(each for each in NAMES if each != "momentum")),
    Form("Loop whose results have no known type", each_product(carried), refused(4, "'w0'", "--params"), ("momentum",)),
    Form("products in Scan", each_product(in_scan)),
    Form("updates in If", update_in_if),
    Form("states through one If", states_through_if),
    Form("a counter in Loop", counter_in_loop, refused(4, "'wild.next'", "--states wild.count=wild.next")),
    Form("parameters through If", parameter_through_if, refused(3, "If", "not an output")),
]
