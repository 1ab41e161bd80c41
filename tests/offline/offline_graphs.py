"""Fixtures, their scrambled twins, and small training steps with any update, for the offline tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from gopt import api
from gopt.ir.graph import Graph
from gopt.ir.load import load
from gopt.offline.inspect import Inspection, inspect_model

FIXTURES = Path(__file__).parents[2] / "fixtures"
NAMES = sorted(path.stem for path in FIXTURES.glob("*.onnx"))


def fixture(name: str) -> onnx.ModelProto:
    """A fixture with its values inside."""
    return onnx.load(str(FIXTURES / f"{name}.onnx"))


def scrambled(model: onnx.ModelProto, *, interface: bool = True) -> onnx.ModelProto:
    """The same model under meaningless names, dealt out in no order; ``interface``: inputs and outputs too."""
    kept = set() if interface else {info.name for info in (*model.graph.input, *model.graph.output)}
    names = [info.name for info in model.graph.input] + [tensor.name for tensor in model.graph.initializer]
    names += [name for node in model.graph.node for name in node.output if name]
    fresh = [f"z{place}" for place in range(len(names))]
    random.Random(3).shuffle(fresh)
    new = {name: name if name in kept else other for name, other in zip(dict.fromkeys(names), fresh)}
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for info in (*result.graph.input, *result.graph.output):
        info.name = new[info.name]
    del result.graph.value_info[:]
    for tensor in result.graph.initializer:
        tensor.name = new[tensor.name]
    for node in result.graph.node:
        node.name = ""
        node.input[:] = [new.get(name, name) for name in node.input]
        node.output[:] = [new.get(name, name) for name in node.output]
    return result


def saved(model: onnx.ModelProto, folder: Path, name: str = "model.onnx") -> Path:
    path = folder / name
    path.write_bytes(model.SerializeToString())
    return path


def loaded(model: onnx.ModelProto, folder: Path, name: str = "model.onnx") -> Graph:
    return load(saved(model, folder, name))


def inspected(model: onnx.ModelProto, folder: Path) -> Inspection:
    return inspect_model(api.load(saved(model, folder)))


class Step:
    """Writes a linear model with one weight ``w`` [4,3], whose update a test spells out node by node."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[TensorProto] = []
        self.states: dict[str, tuple[str, list[int]]] = {}
        self.extra: list[str] = []
        # loss = mean((x w)^2), gradient = x^T (x w) / 16
        product = self.op("MatMul", "x", "w")
        self.op("ReduceMean", self.op("Mul", product, product), out="loss", keepdims=0)
        backward = self.op("MatMul", self.op("Transpose", "x", perm=[1, 0]), product)
        self.gradient = self.op("Mul", backward, self.number(1 / 12))

    def op(self, op_type: str, *inputs: str, out: str = "", **attributes: object) -> str:
        name = out or f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, list(inputs), [name], **attributes))
        return name

    def number(self, value: float) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(value, np.float32), name))
        return name

    def state(self, name: str, new: str, shape: list[int] | None = None) -> None:
        """``new`` becomes the value that replaces the input ``name``."""
        self.states[name] = (self.op("Identity", new, out=f"{name}_out"), [4, 3] if shape is None else shape)

    def mul(self, *values: str) -> str:
        """The product of them all."""
        result = values[0]
        for value in values[1:]:
            result = self.op("Mul", result, value)
        return result

    def mean(self, old: str, new: str, beta: float) -> str:
        return self.op("Add", self.mul(old, self.number(beta)), self.mul(new, self.number(1 - beta)))

    def model(self) -> onnx.ModelProto:
        info = helper.make_tensor_value_info
        inputs = [info("x", TensorProto.FLOAT, [4, 4])]
        inputs += [info(name, TensorProto.FLOAT, []) for name in ("lr", *self.extra)]
        inputs += [info(name, TensorProto.FLOAT, shape) for name, (_, shape) in self.states.items()]
        outputs = [info("loss", TensorProto.FLOAT, [])]
        outputs += [info(new, TensorProto.FLOAT, shape) for new, shape in self.states.values()]
        graph = helper.make_graph(self.nodes, "step", inputs, outputs, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def step_with(update: Callable[[Step], None]) -> onnx.ModelProto:
    step = Step()
    update(step)
    return step.model()
