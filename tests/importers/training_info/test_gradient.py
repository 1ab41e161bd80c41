"""Gradient operators: their attributes, a gradient of a gradient, and where they may stand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper
from training_info_models import PREVIEW, B, W, model_of, refusal, saved
from written_steps import NET, SHAPES, Written, hold_ranks, sgd

import gopt
from gopt.errors import GoptError, InputError, UnsupportedError

Edit = Callable[[ModelProto], None]


def place_of(nodes: list[NodeProto]) -> int:
    return next(place for place, each in enumerate(nodes) if each.op_type == "Gradient")


def attribute(name: str, value: object, *inputs: str) -> Edit:
    def edit(model: ModelProto) -> None:
        nodes = model.training_info[0].algorithm.node
        node = nodes[place_of(list(nodes))]
        node.attribute.remove(next(each for each in node.attribute if each.name == name))
        node.attribute.append(helper.make_attribute(name, value))
        if inputs:
            node.input[:] = inputs

    return edit


def shows(name: str, *shape: int) -> Edit:
    """The algorithm declares an output."""
    info = helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
    return lambda model: model.training_info[0].algorithm.output.append(info)


def in_a_branch(model: ModelProto) -> None:
    """The gradient by w comes from a Gradient in the body of an If."""
    algorithm = model.training_info[0].algorithm
    nodes = list(algorithm.node)
    place = place_of(nodes)
    kind = [helper.make_tensor_value_info("inner", TensorProto.FLOAT, [4, 3])]
    inner = helper.make_node("Gradient", ["w", "x"], ["inner"], domain=PREVIEW, xs=["w"], zs=["x"], y="loss")
    same = helper.make_node("Identity", ["w"], ["inner"])
    then, other = (helper.make_graph([each], "body", [], kind) for each in (inner, same))
    nodes[place].output[0] = ""
    nodes.insert(place, helper.make_node("If", ["positive"], ["dw"], then_branch=then, else_branch=other))
    nodes.insert(place, helper.make_node("Greater", ["loss", "lr"], ["positive"]))
    del algorithm.node[:]
    algorithm.node.extend(nodes)


NO_LIST, NO_NAME = "attribute xs is not a list of names", "attribute y is not a name"


@pytest.mark.parametrize(
    ("edit", "kind", "message"),
    [
        (attribute("xs", "w"), InputError, NO_LIST),
        (attribute("xs", [1, 2]), InputError, NO_LIST),
        (attribute("xs", [b"\xff"]), InputError, NO_LIST),
        (attribute("y", 3), InputError, NO_NAME),
        (attribute("y", ["loss"]), InputError, NO_NAME),
        (attribute("xs", ["w", "w"], "w", "w", "x", "target"), InputError, "names 'w' twice in xs"),
        (attribute("y", "square"), UnsupportedError, "differentiates 'square', which is float32[6,3] and no scalar"),
        (shows("y", 6, 4), InputError, "output 'y' of the algorithm is float32[6,4], in the inference graph it is"),
        (in_a_branch, UnsupportedError, "'inner' comes from a Gradient operator"),
    ],
)
def test_broken_gradients_are_refused_by_name(tmp_path: Path, edit: Edit, kind: type[GoptError], message: str):
    error = refusal(edit, kind, tmp_path)
    assert message in error.message
    assert error.hints


def test_a_gradient_of_a_gradient(tmp_path: Path):
    """The loss has a penalty on the gradient by w: the second Gradient differentiates what the first became."""
    model = model_of()
    algorithm = model.training_info[0].algorithm
    nodes = list(algorithm.node)
    names = {"dw": "ddw", "db": "ddb"}
    for node in nodes[4:]:
        node.input[:] = [names.get(each, each) for each in node.input]
    second = [
        helper.make_node("ReduceSumSquare", ["dw"], ["penalty"], keepdims=0),
        helper.make_node("Add", ["loss", "penalty"], ["total"]),
        helper.make_node("Gradient", ["w", "b", "x"], ["ddw", "ddb"], domain=PREVIEW, xs=["w", "b"], zs=["x"],
                         y="total"),
    ]  # fmt: skip
    del algorithm.node[:]
    algorithm.node.extend([*nodes[:4], *second, *nodes[4:]])
    gopt.import_step(saved(model, tmp_path), tmp_path / "step.onnx")
    random = np.random.default_rng(1)
    x, target = random.standard_normal((6, 4)).astype(np.float32), random.standard_normal((6, 3)).astype(np.float32)
    feeds = {"x": x, "target": target, "lr": np.ones((), np.float32)}
    w, b = onnxruntime.InferenceSession(tmp_path / "step.onnx").run(["w_new", "b_new"], feeds)
    apart = 2 / 18 * (x @ W + B - target)
    through = apart + 4 / 18 * (x @ (x.T @ apart))
    np.testing.assert_allclose(w, W - x.T @ through, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(b, B - through.sum(0), rtol=1e-5, atol=1e-5)


# --- several operators: parameters that one does not differentiate by change as well -------------------------------

BACKWARD = ("do", "gb1", "ht", "gw1", "w1t", "dh", "above", "mask", "dh1", "gb0", "xt", "gw0")
FUNCTION = helper.make_function(
    "own", "Linear", ["a", "b"], ["c"], [helper.make_node("MatMul", ["a", "b"], ["c"])], [helper.make_opsetid("", 20)]
)
STEP = Written(NET + sgd())


def in_standard_form(*groups: tuple[str, ...], function: bool = False) -> ModelProto:
    """``STEP`` with a Gradient operator for each group of parameters in the place of its backward."""
    plain, model = STEP.model(), ModelProto(ir_version=10)
    model.opset_import.extend([*plain.opset_import, helper.make_opsetid(PREVIEW, 1)])
    model.graph.name, info = "inference", model.training_info.add()
    nodes = [node for node in plain.graph.node if node.output[0] not in BACKWARD]
    behind = next(place for place, node in enumerate(nodes) if node.output[0] == "o") + 1
    model.graph.node.extend(nodes[:behind])
    model.graph.initializer.extend(plain.graph.initializer)
    model.graph.input.extend(each for each in plain.graph.input if each.name == "x")
    model.graph.output.append(helper.make_tensor_value_info("o", TensorProto.FLOAT, [4, 2]))
    loss = next(place for place, node in enumerate(nodes) if node.output[0] == "loss") + 1
    info.algorithm.name = "algorithm"
    info.algorithm.node.extend(nodes[behind:loss])
    for names in groups:
        info.algorithm.node.append(
            helper.make_node("Gradient", names, [f"g{name}" for name in names], domain=PREVIEW, xs=names, y="loss")
        )
    info.algorithm.node.extend(nodes[loss:])
    info.algorithm.input.extend(each for each in plain.graph.input if each.name in ("y", "lr"))
    info.algorithm.output.append(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
    for name in SHAPES:
        info.update_binding.add(key=name, value=f"{name}_out")
    if function:
        model.functions.append(FUNCTION)
        model.opset_import.append(helper.make_opsetid("own", 1))
        for node in model.graph.node:
            if node.op_type == "MatMul":
                node.op_type, node.domain = "Linear", "own"
    return model


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    "groups", [(("w0", "b0"), ("w1", "b1")), (("w1",), ("b0", "w0"), ("b1",))], ids=["two", "three"]
)
def test_operators_for_a_part_of_the_parameters_each(groups, stage, tmp_path):
    """The derivative by w0 reads w1, which the step replaces: onnx-ad must not compute with its first value."""
    hold_ranks(STEP, tmp_path, 2, stage, file=in_standard_form(*groups))


def test_functions_on_the_way_of_a_gradient(tmp_path):
    hold_ranks(STEP, tmp_path, 2, 2, file=in_standard_form(tuple(SHAPES), function=True))


def test_a_gradient_inside_a_function_is_refused(tmp_path):
    model = in_standard_form(("w0", "b0", "w1", "b1"))
    node = next(each for each in model.training_info[0].algorithm.node if each.op_type == "Gradient")
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(PREVIEW, 1)]
    model.functions.append(helper.make_function("own", "Grads", node.input, node.output, [node], opsets))
    model.opset_import.append(helper.make_opsetid("own", 1))
    node.op_type, node.domain = "Grads", "own"
    del node.attribute[:]
    with pytest.raises(UnsupportedError, match="Gradient 'gw0' is inside function 'Grads'"):
        gopt.load(saved(model, tmp_path))
