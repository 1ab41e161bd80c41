"""Inputs, outputs, names and dimensions of a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from wild_gen.form import Form, refused
from wild_gen.rewriting import LOSS, batch, copy_of, parameters, rewrite, store
from wild_gen.steps import NAMES

Dim = Callable[[object, int], None]


def add(model: ModelProto, *nodes: NodeProto) -> None:
    model.graph.node.extend(nodes)


def output(model: ModelProto, name: str, code: int = TensorProto.FLOAT, shape: list[int] | None = None) -> None:
    model.graph.output.append(helper.make_tensor_value_info(name, code, [] if shape is None else shape))


def unused_inputs(model: ModelProto, folder: Path) -> None:
    for name, code, shape in (("wild.a", 1, [3]), ("wild.b", 7, []), ("wild.c", 9, ["N", 2])):
        model.graph.input.append(helper.make_tensor_value_info(name, code, shape))


def unused_values(model: ModelProto, folder: Path) -> None:
    """An input with a value and a constant, of types that nothing else has."""
    store(model, "wild.constant", np.arange(5), np.uint16)
    store(model, "wild.given", np.arange(6).reshape(2, 3), np.float64)
    model.graph.input.append(helper.make_tensor_value_info("wild.given", TensorProto.DOUBLE, [2, 3]))


def dead_nodes(model: ModelProto, folder: Path) -> None:
    """Nodes whose results nobody reads, of parameters and of the loss, and an output of a node that is not named."""
    add(
        model,
        helper.make_node("Neg", [parameters(model)[0]], ["wild.dead"]),
        helper.make_node("Exp", ["wild.dead"], ["wild.deader"]),
        helper.make_node("Dropout", [batch(model)], ["wild.kept", ""]),
    )


def input_as_output(model: ModelProto, folder: Path) -> None:
    """A batch and a hyper-parameter go straight through the graph."""
    first = next(each for each in model.graph.input if each.name == batch(model))
    model.graph.output.append(first)


def constant_as_output(model: ModelProto, folder: Path) -> None:
    store(model, "wild.version", [1, 2], np.int64)
    output(model, "wild.version", TensorProto.INT64, [2])


def metrics(model: ModelProto, folder: Path) -> None:
    """Metrics of other types: a flag, a shape."""
    x = batch(model)
    add(
        model,
        helper.make_node("Shape", [x], ["wild.shape"]),
        helper.make_node("Greater", [LOSS, store(model, "wild.zero", 0, _dtype(model))], ["wild.flag"]),
    )
    kind = next(each for each in model.graph.input if each.name == x).type.tensor_type
    output(model, "wild.shape", TensorProto.INT64, [len(kind.shape.dim)])
    output(model, "wild.flag", TensorProto.BOOL)


def shown_by_element(model: ModelProto, folder: Path) -> None:
    """A metric that has the type of the batch and is computed from it, element by element."""
    x = batch(model)
    add(model, helper.make_node("Abs", [x], ["wild.table"]))
    kind = next(each for each in model.graph.input if each.name == x).type.tensor_type
    output(model, "wild.table", kind.elem_type, [size.dim_value for size in kind.shape.dim])


def two_losses(model: ModelProto, folder: Path) -> None:
    """Another output as far from the data as the loss is."""
    add(model, helper.make_node("Add", [LOSS, LOSS], ["wild.loss"]))
    output(model, "wild.loss", _loss(model))


def summed_losses(model: ModelProto, folder: Path) -> None:
    """The loss is the sum of two parts, which are outputs too."""
    makers = [node.name for node in model.graph.node if LOSS in node.output]
    half = store(model, "wild.half", 0.5, _dtype(model))

    def parts(node: NodeProto) -> list[NodeProto]:
        own = copy_of(node)
        own.output[:] = ["wild.whole" if name == LOSS else name for name in node.output]
        return [
            own,
            helper.make_node("Mul", ["wild.whole", half], ["wild.part0"]),
            helper.make_node("Mul", ["wild.whole", half], ["wild.part1"]),
            helper.make_node("Add", ["wild.part0", "wild.part1"], [LOSS]),
        ]

    rewrite(model, makers, parts)
    output(model, "wild.part0", _loss(model))
    output(model, "wild.part1", _loss(model))


def _loss(model: ModelProto) -> int:
    """The type of the loss."""
    return next(each.type.tensor_type.elem_type for each in model.graph.output if each.name == LOSS)


def _dtype(model: ModelProto) -> np.dtype:
    return helper.tensor_dtype_to_np_dtype(_loss(model))


# --- dimensions -----------------------------------------------------------------------------------------------------


def dims(change: Callable[[object], None], *, outputs: bool = True) -> Callable[[ModelProto, Path], None]:
    """Change the first dimension of every input of the batch."""

    def edit(model: ModelProto, folder: Path) -> None:
        held = {each.name for each in model.graph.initializer} | {"lr"}
        for each in model.graph.input:
            if each.name not in held and each.type.tensor_type.shape.dim:
                change(each.type.tensor_type.shape.dim[0])

    return edit


def _symbol(text: str) -> Callable[[object], None]:
    def change(dim: object) -> None:
        dim.dim_param = text  # type: ignore[attr-defined]

    return change


def _size(value: int) -> Callable[[object], None]:
    def change(dim: object) -> None:
        dim.dim_value = value  # type: ignore[attr-defined]

    return change


def no_rank(model: ModelProto, folder: Path) -> None:
    """Inputs of the batch without a shape."""
    held = {each.name for each in model.graph.initializer} | {"lr"}
    for each in model.graph.input:
        if each.name not in held:
            each.type.tensor_type.ClearField("shape")


def open_outputs(model: ModelProto, folder: Path) -> None:
    """Outputs whose shapes are not declared."""
    for each in model.graph.output:
        each.type.tensor_type.ClearField("shape")


def untyped_outputs(model: ModelProto, folder: Path) -> None:
    for each in model.graph.output:
        each.ClearField("type")


def open_state(model: ModelProto, folder: Path) -> None:
    """A parameter whose declared size is a symbol, and which has a value."""
    first = next(each for each in model.graph.input if each.name == parameters(model)[0])
    first.type.tensor_type.shape.dim[0].dim_param = "rows"


# --- names ----------------------------------------------------------------------------------------------------------


def named(change: Callable[[str, int], str]) -> Callable[[ModelProto, Path], dict[str, str]]:
    """Other names for all values."""

    def edit(model: ModelProto, folder: Path) -> dict[str, str]:
        graph, table = model.graph, {"": ""}
        for each in (*graph.input, *graph.initializer, *graph.output):
            table.setdefault(each.name, change(each.name, len(table)))
        for node in graph.node:
            for name in node.output:
                table.setdefault(name, change(name, len(table)))
        for each in (*graph.input, *graph.initializer, *graph.output, *graph.value_info):
            each.name = table.get(each.name, each.name)
        for node in graph.node:
            node.input[:] = [table[name] for name in node.input]
            node.output[:] = [table[name] for name in node.output]
        return table

    return edit


ODD = [
    "/",
    " ",
    ":0",
    "\n",
    "\u00e9",
    "\u6f22",
    "\U0001f600",
    "\u202e",
    "%",
    "'",
    '"',
    "\\",
    "..",
    "\t",
    "{}",
    "$(x)",
    "--",
]


OPEN = ("momentum",)
"""Steps with no number in them that is the size of the batch."""
FORMS = [
    Form("unused inputs", unused_inputs),
    Form("unused values", unused_values),
    Form("dead nodes", dead_nodes, only=tuple(each for each in NAMES if each != "emb_adamw")),
    Form("an input as output", input_as_output, refused(4, "unchanged", "--batch")),
    Form("a constant as output", constant_as_output),
    Form("metrics of other types", metrics),
    Form("a metric by element", shown_by_element, refused(4, "no stored value", "'wild.table'", "--batch")),
    Form("two losses", two_losses),
    Form("a sum of losses", summed_losses),
    Form("symbolic batch", dims(_symbol("N")), only=OPEN),
    Form("product of symbols", dims(_symbol("batch*seq")), only=OPEN),
    Form("odd symbol", dims(_symbol("floor(N/2) + 1")), only=OPEN),
    Form("empty symbol", dims(_symbol("")), only=OPEN),
    Form("anonymous batch", dims(lambda dim: dim.Clear()), only=OPEN),  # type: ignore[attr-defined]
    Form("batch of -1", dims(_size(-1)), refused(3, "negative", "dim_param")),
    Form("batch without rank", no_rank, refused(3, "shape")),
    Form("outputs without shapes", open_outputs, refused(3, "loss", "shape")),
    Form("outputs without types", untyped_outputs, refused(3, "loss", "type")),
    Form("a parameter of open size", open_state, refused(4)),
    Form("odd names", named(lambda name, k: f"{ODD[k % len(ODD)]}{name}{ODD[k % len(ODD)]}{k}")),
    Form("names of spaces", named(lambda name, k: " " * (k + 1))),
    Form("names like numbers", named(lambda name, k: str(k))),
    Form("long names", named(lambda name, k: f"{k}_" + "x" * 4000)),
    Form("names like gopt's", named(lambda name, k: f"gopt.{k}"), refused(3, "gopt.")),
    Form("names like gopt's, nearly", named(lambda name, k: f"Gopt.shard.b0.{name}")),
]
