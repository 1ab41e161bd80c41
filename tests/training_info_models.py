"""Models in ``training_info`` that tests make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import gopt
from gopt.errors import GoptError

PREVIEW = "ai.onnx.preview.training"
RANDOM = np.random.default_rng(7)
W = RANDOM.standard_normal((4, 3)).astype(np.float32)
B = RANDOM.standard_normal(3).astype(np.float32)


def model_of(optimizer: str = "sgd", w: np.ndarray = W, b: np.ndarray = B) -> ModelProto:
    """An inference graph x w + b; its algorithm has a loss, a Gradient and the update."""
    inference = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["xw"]), helper.make_node("Add", ["xw", "b"], ["y"])],
        "inference",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [6, len(w)])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [6, len(b)])],
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(b, "b")],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(PREVIEW, 1)]
    model = helper.make_model(inference, opset_imports=opsets, ir_version=10)
    info = model.training_info.add()
    nodes = [
        helper.make_node("Sub", ["y", "target"], ["apart"]),
        helper.make_node("Mul", ["apart", "apart"], ["square"]),
        helper.make_node("ReduceMean", ["square"], ["loss"], keepdims=0),
        helper.make_node("Gradient", ["w", "b", "x", "target"], ["dw", "db"], domain=PREVIEW, xs=["w", "b"],
                         zs=["x", "target"], y="loss"),
    ]  # fmt: skip
    stored = []
    if optimizer == "sgd":
        for name in "wb":
            nodes += [
                helper.make_node("Mul", ["lr", f"d{name}"], [f"m{name}"]),
                helper.make_node("Sub", [name, f"m{name}"], [f"{name}_new"]),
            ]
    else:
        states = ["v_w", "v_b", "h_w", "h_b"]
        made = ["w_new", "b_new", *(f"{each}_new" for each in states)]
        nodes.append(
            helper.make_node("Adam", ["lr", "count", "w", "b", "dw", "db", *states], made, domain=PREVIEW, alpha=0.9,
                             beta=0.99, epsilon=1e-6)
        )  # fmt: skip
        nodes.append(helper.make_node("Add", ["count", "one"], ["count_new"]))
        shapes = {"v_w": w, "v_b": b, "h_w": w, "h_b": b}
        stored = [numpy_helper.from_array(np.zeros_like(each), name) for name, each in shapes.items()]
        stored += [numpy_helper.from_array(np.array(1, np.int64), name) for name in ("count", "one")]
        for name in ("count", *states):
            info.update_binding.add(key=name, value=f"{name}_new")
    for name in "wb":
        info.update_binding.add(key=name, value=f"{name}_new")
    info.algorithm.CopyFrom(
        helper.make_graph(
            nodes, "algorithm",
            [helper.make_tensor_value_info("target", TensorProto.FLOAT, [6, len(b)]),
             helper.make_tensor_value_info("lr", TensorProto.FLOAT, [])],
            [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])], stored,
        )
    )  # fmt: skip
    return model


def saved(model: ModelProto, folder: Path) -> Path:
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def refusal(edit: Callable[[ModelProto], None], kind: type[GoptError], folder: Path) -> GoptError:
    """The error that loading ``model_of()`` raises after an edit."""
    model = model_of()
    edit(model)
    with pytest.raises(kind) as caught:
        gopt.load(saved(model, folder))
    return caught.value
