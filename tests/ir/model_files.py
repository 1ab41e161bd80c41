"""A small model that tests edit, save and load, and how a refusal must look."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from gopt.errors import GoptError

Edit = Callable[[ModelProto], object]

FLOAT = TensorProto.FLOAT


def value(name: str, shape: Sequence[int | str] | None = (2, 3), dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def small(**changes: Any) -> ModelProto:
    """y = relu(x · w + b), with w stored."""
    parts: dict[str, Any] = {
        "nodes": [
            helper.make_node("MatMul", ["x", "w"], ["h"], name="first"),
            helper.make_node("Add", ["h", "b"], ["s"], name="second"),
            helper.make_node("Relu", ["s"], ["y"], name="third"),
        ],
        "inputs": [value("x", ("N", 3)), value("b", (4,))],
        "outputs": [value("y", ("N", 4))],
        "initializer": [numpy_helper.from_array(np.arange(12, dtype=np.float32).reshape(3, 4), "w")],
        "functions": [],
    } | changes
    functions = parts.pop("functions")
    graph = helper.make_graph(parts.pop("nodes"), "step", **parts)
    opsets = [helper.make_opsetid("", 18), *([helper.make_opsetid("user", 1)] if functions else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=functions)


def save(folder: Path, model: ModelProto | bytes, name: str = "m.onnx") -> Path:
    path = folder / name
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    return path


def edited(edit: Edit, **changes: Any) -> ModelProto:
    model = small(**changes)
    edit(model)
    return model


def refusal(call: Callable[[Any], object], path: Path, kind: type[GoptError], pattern: str) -> GoptError:
    with pytest.raises(GoptError) as caught:
        call(path)
    error = caught.value
    assert type(error) is kind, error
    assert error.message.isprintable(), "one line"
    assert str(path) in error.message
    assert re.search(pattern, error.message), error.message
    return error


def branch(name: str, reads: str) -> GraphProto:
    nodes = [helper.make_node("Relu", [reads], [f"{name}_r"]), helper.make_node("Neg", [f"{name}_r"], [f"{name}_n"])]
    return helper.make_graph(nodes, name, [], [value(f"{name}_n", None)])


def function(name: str, calls: str, domain: str = "") -> onnx.FunctionProto:
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("user", 1)]
    nodes = [
        helper.make_node(calls, ["a"], ["mid"], domain=domain),
        helper.make_node(calls, ["mid"], ["z"], domain=domain),
    ]
    return helper.make_function("user", name, ["a"], ["z"], nodes, opsets)
