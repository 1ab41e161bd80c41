"""Parts of a step as functions of the model: nested, with attributes, optional inputs, overloads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import onnx
from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto, helper
from steps_gen.graphs import into_functions

from wild_gen.form import Form
from wild_gen.rewriting import copy_of, forward, infos, opset, own_domain, rewrite, store


def function(
    model: ModelProto, name: str, inputs: Sequence[str], outputs: Sequence[str], nodes: Sequence[NodeProto],
    attributes: Sequence[str] = (), defaults: Sequence[AttributeProto] = (), overload: str = "", domain: str = "own",
) -> FunctionProto:  # fmt: skip
    """Add a function to a model."""
    opsets = [helper.make_opsetid("", opset(model)), helper.make_opsetid("own", 1)]
    made = helper.make_function(domain, name, inputs, outputs, nodes, opsets, attributes, list(defaults))
    made.overload = overload
    model.functions.append(made)
    own_domain(model, domain)
    return made


def products(model: ModelProto) -> list[str]:
    """The nodes of the forward that multiply matrices."""
    return [node.name for node in forward(model) if node.op_type in ("MatMul", "Gemm", "Conv")]


def each_product(model: ModelProto, folder: Path) -> None:
    """Each product of the forward in a function that has the inner names of the other."""
    for k, name in enumerate(products(model)):

        def call(node: NodeProto, kind: str = f"Product{k}") -> list[NodeProto]:
            inner = copy_of(node)
            names = [f"i{at}" for at in range(len(node.input))]
            inner.input[:], inner.output[:], inner.name = names, ["o"], "inner"
            function(model, kind, names, ["o"], [inner])
            return [helper.make_node(kind, node.input, node.output, domain="own", name=node.name)]

        rewrite(model, [name], call)


def nested(model: ModelProto, folder: Path) -> None:
    """A function that calls a function that calls a function."""
    each_product(model, folder)
    for level in range(2):
        for made in list(model.functions)[-len(products_called(model)) :]:
            name = f"{made.name}_{level}"
            call = helper.make_node(made.name, made.input, ["inside"], domain="own")
            same = helper.make_node("Identity", ["inside"], made.output)
            function(model, name, made.input, made.output, [call, same])
            for node in model.graph.node:
                if node.domain == "own" and node.op_type == made.name:
                    node.op_type = name


def products_called(model: ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.domain == "own"]


def with_attribute(model: ModelProto, folder: Path) -> None:
    """The axes of a Transpose, or the factor of a LeakyRelu of one, as attributes of the call; one by default."""
    function(
        model,
        "Slope",
        ["a"],
        ["b"],
        [NodeProto.FromString(_referring("LeakyRelu", "alpha", "slope", AttributeProto.FLOAT))],
        ["slope"],
    )
    function(
        model, "Slope1", ["a"], ["b"],
        [NodeProto.FromString(_referring("LeakyRelu", "alpha", "slope", AttributeProto.FLOAT))],
        [], [helper.make_attribute("slope", 1.0)],
    )  # fmt: skip

    known = infos(model)

    def behind(node: NodeProto) -> list[NodeProto]:
        own, out = copy_of(node), node.output[0]
        if known[out].type.tensor_type.elem_type == onnx.TensorProto.DOUBLE:
            raise ValueError("ONNX Runtime has no LeakyRelu of doubles")
        own.output[0] = f"{out}.first"
        return [
            own,
            helper.make_node("Slope", [f"{out}.first"], [f"{out}.second"], domain="own", slope=1.0, name=f"{out}.s"),
            helper.make_node("Slope1", [f"{out}.second"], [out], domain="own", name=f"{out}.t"),
        ]

    rewrite(model, products(model), behind)


def _referring(op_type: str, name: str, to: str, kind: int) -> bytes:
    node = helper.make_node(op_type, ["a"], ["b"])
    attribute = node.attribute.add()
    attribute.name, attribute.ref_attr_name, attribute.type = name, to, kind
    return node.SerializeToString()


def optional_inputs(model: ModelProto, folder: Path) -> None:
    """A function with a middle input that calls leave empty, and a last one that they leave out."""
    clip = helper.make_node("Clip", ["a", "low", "high"], ["b"])
    function(model, "Limited", ["a", "low", "high"], ["b"], [clip])
    bounds = {
        code: store(model, f"wild.high{code}", 6e4, helper.tensor_dtype_to_np_dtype(code)) for code in (1, 10, 11)
    }
    known = infos(model)

    def behind(node: NodeProto) -> list[NodeProto]:
        own, out = copy_of(node), node.output[0]
        own.output[0] = f"{out}.first"
        high = bounds[known[out].type.tensor_type.elem_type]
        calls = [
            helper.make_node("Limited", [f"{out}.first", "", high], [f"{out}.second"], domain="own"),
            helper.make_node("Limited", [f"{out}.second"], [out], domain="own"),
        ]
        return [own, *calls]

    rewrite(model, products(model), behind)


def overloads(model: ModelProto, folder: Path) -> None:
    """Two functions of one name: with the overload two the second is meant."""
    model.ir_version = max(model.ir_version, 10)
    function(model, "Same", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])], overload="wrong")
    function(model, "Same", ["a"], ["b"], [helper.make_node("Identity", ["a"], ["b"])], overload="two")

    def behind(node: NodeProto) -> list[NodeProto]:
        own, out = copy_of(node), node.output[0]
        own.output[0] = f"{out}.first"
        call = helper.make_node("Same", [f"{out}.first"], [out], domain="own")
        call.overload = "two"
        return [own, call]

    rewrite(model, products(model), behind)


def update_overloads(model: ModelProto, folder: Path) -> None:
    """New parameters go through a function, of which another overload would negate them."""
    model.ir_version = max(model.ir_version, 10)
    function(model, "Same", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])])
    function(model, "Same", ["a"], ["b"], [helper.make_node("Identity", ["a"], ["b"])], overload="two")
    outs = {each.name for each in model.graph.output} - {"loss"}

    def behind(node: NodeProto) -> list[NodeProto]:
        own, out = copy_of(node), node.output[0]
        own.output[0] = f"{out}.first"
        call = helper.make_node("Same", [f"{out}.first"], [out], domain="own", name=f"{out}.call")
        call.overload = "two"
        return [own, call]

    rewrite(model, [n.name for n in model.graph.node if len(n.output) == 1 and outs.intersection(n.output)], behind)


def unused(model: ModelProto, folder: Path) -> None:
    function(model, "Never", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])])
    function(model, "Again", ["a"], ["b"], [helper.make_node("Never", ["a"], ["b"], domain="own")])


def other_opset(model: ModelProto, folder: Path) -> None:
    """A function that imports an older operator set, whose operators the model's has as well."""
    twice = [helper.make_node("Add", ["a", "a"], ["c"]), helper.make_node("Sub", ["c", "a"], ["b"])]
    made = helper.make_function("own", "Around", ["a"], ["b"], twice, [helper.make_opsetid("", 14)])
    model.functions.append(made)
    own_domain(model)

    def behind(node: NodeProto) -> list[NodeProto]:
        own, out = copy_of(node), node.output[0]
        own.output[0] = f"{out}.first"
        return [own, helper.make_node("Around", [f"{out}.first"], [out], domain="own")]

    rewrite(model, products(model), behind)


def with_body(model: ModelProto, folder: Path) -> None:
    """A function with an If in it, whose branches read the function's own values."""

    def branch(name: str) -> onnx.GraphProto:
        out = onnx.ValueInfoProto(name="c")
        return helper.make_graph([helper.make_node("Identity", ["a"], ["c"])], name, [], [out])

    true = helper.make_node("Constant", [], ["t"], value=helper.make_tensor("t", onnx.TensorProto.BOOL, [], [True]))
    choose = helper.make_node("If", ["t"], ["b"], then_branch=branch("then"), else_branch=branch("else"))
    function(model, "Chosen", ["a"], ["b"], [true, choose])

    def behind(node: NodeProto) -> list[NodeProto]:
        own, out = copy_of(node), node.output[0]
        own.output[0] = f"{out}.first"
        return [own, helper.make_node("Chosen", [f"{out}.first"], [out], domain="own")]

    rewrite(model, products(model), behind)


def parts(choose: Callable[[ModelProto, NodeProto], str]) -> Callable[[ModelProto, Path], None]:
    """Each part of the graph as one function; \"\" leaves a node where it is."""

    def edit(model: ModelProto, folder: Path) -> None:
        made = into_functions(model, {node.name: choose(model, node) for node in model.graph.node})
        model.CopyFrom(made)

    return edit


def _forward_names(model: ModelProto) -> set[str]:
    return {node.name for node in forward(model)}


def whole(model: ModelProto, folder: Path) -> None:
    """The whole step as one call. Stored constants become inputs of it."""
    parts(lambda model, node: "step")(model, folder)


FORMS = [
    Form("products as functions", each_product),
    Form("functions in functions", nested),
    Form("functions with attributes", with_attribute),
    Form("functions with optional inputs", optional_inputs),
    Form("overloads", overloads),
    Form("overloads in the update", update_overloads),
    Form("functions that nobody calls", unused),
    Form("a function of another operator set", other_opset),
    Form("a function with a body of control flow", with_body),
    Form("the forward as one function", parts(lambda m, node: "forward" if node.name in _forward_names(m) else "")),
    Form(
        "the backward and update as one function",
        parts(lambda m, node: "" if node.name in _forward_names(m) else "rest"),
    ),
    Form("the step as one function", whole),
]
