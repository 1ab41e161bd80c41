"""Operators on drawn windows, right and wrong ones, read into expressions beside the operator on the whole."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from gopt.ir.load import load
from gopt.verification.proof.constants import ConstantTable
from gopt.verification.proof.evaluation import ExpressionValues, computed
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.operators import NodeReader

KINDS = ("Conv", "Conv", "ConvTranspose", "MaxPool", "AveragePool", "Pad", "Weight", "Weight")


class Windows:
    """A graph in the making: ``whole`` nodes of the source, then nodes of a rank."""

    def __init__(self, seed: int) -> None:
        self.dice, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.stored: list[onnx.TensorProto] = []
        self.inputs: dict[str, np.ndarray] = {}
        self.whole = 0

    def leaf(self, *shape: int) -> str:
        name = f"x{len(self.inputs)}"
        self.inputs[name] = self.numbers.standard_normal(shape)
        return name

    def ints(self, *values: int) -> str:
        self.stored.append(numpy_helper.from_array(np.array(values, np.int64), f"c{len(self.stored)}"))
        return self.stored[-1].name

    def op(self, kind: str, *inputs: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(kind, list(inputs), [f"v{len(self.nodes)}"], **attributes))
        return self.nodes[-1].output[0]

    def rows(self, value: str, start: int, stop: int, axis: int) -> str:
        return self.op("Slice", value, self.ints(start), self.ints(stop), self.ints(axis))

    def filled(self, shape: list[int], value: float) -> str:
        tensor = numpy_helper.from_array(np.full(1, value, np.float32))
        return self.op("ConstantOfShape", self.ints(*shape), value=tensor)

    def window(self, value: str, shape: list[int], axis: int, start: int, stop: int, border: float) -> str:
        """Places of a value, in one or two pieces, and a border beside it."""
        low = min(max(start, 0), shape[axis])
        high = max(min(stop, shape[axis]), low)
        cut = self.dice.randint(low, high)
        parts = [self.rows(value, a, b, axis) for a, b in ((low, cut), (cut, high)) if a < b]
        beside = [*shape[:axis], 0, *shape[axis + 1 :]]
        for count, at in ((min(stop, low) - start, 0), (stop - max(start, high), len(parts) + 1)):
            if count > 0:
                beside[axis] = count
                parts.insert(at, self.filled(beside, border))
        return self.op("Concat", *parts, axis=axis) if len(parts) > 1 else parts[0]

    def draw(self) -> str:
        """The result of a rank's operator."""
        kind, dice, axis = self.dice.choice(KINDS), self.dice, 2
        kernel, stride, dilation = dice.randint(1, 3), dice.randint(1, 2), dice.randint(1, 2)
        length, extent = dice.randint(6, 10), (kernel - 1) * dilation + 1
        pad, behind = (dice.randint(0, extent - 1) if kind != "AveragePool" else 0 for _ in "fb")
        shape = [2, 3, length, 5]
        x, off = self.leaf(*shape), dice.choice([0, 0, 0, -1, 1])
        made = (length + pad + behind - extent) // stride + 1
        slid = {"strides": [stride, 1], "dilations": [dilation, 1]}
        if kind == "Pad":
            slid, stride, extent, made = {}, 1, 1, length + pad + behind
        start = dice.randint(0, made - 1)
        stop = dice.randint(start + 1, made)
        if kind == "Weight":
            g = self.leaf(4, 3, made, 5)
            self.op("Conv", x, g, pads=[pad, 1, behind, 1], strides=[dilation, 1], dilations=[stride, 1])
            self.whole = len(self.nodes)
            first = start * stride - pad + off
            last = first + (stop - start - 1) * stride + (kernel - 1) * dilation + 1
            read = self.window(x, shape, axis, first, last, dice.choice([0.0, 0.0, 0.0, 1.0]))
            part = self.rows(g, start, stop, axis)
            return self.op("Conv", read, part, pads=[0, 1, 0, 1], strides=[dilation, 1], dilations=[stride, 1])
        if kind == "ConvTranspose":
            weight = self.leaf(3, 2, kernel, 2)
            more = dice.randint(0, stride - 1)
            self.op("ConvTranspose", x, weight, pads=[pad, 0, behind, 0], output_padding=[more, 0], **slid)
            self.whole = len(self.nodes)
            size = (length - 1) * stride + extent + more - pad - behind
            start, stop = sorted(dice.sample(range(length + 1), 2))
            terms = self.op("ConvTranspose", self.rows(x, start, stop, axis), weight, **slid)
            low, reach = max(start * stride, pad), min((stop - 1) * stride + extent, pad + size)
            if low >= reach:
                return terms
            low, reach = low - start * stride, reach - start * stride
            return self.rows(terms, dice.randint(low, reach - 1), reach, axis)
        first = start * stride - pad + off
        read = first, first + (stop - start - 1) * stride + extent
        lowest = kind == "MaxPool"
        border = dice.choice([-np.inf if lowest else 0.0] * 4 + [0.0 if lowest else 1.0])
        if kind == "Pad":
            self.op("Pad", x, self.ints(0, 0, pad, 1, 0, 0, behind, 0))
            self.whole = len(self.nodes)
            return self.op("Pad", self.window(x, shape, axis, *read, border), self.ints(0, 0, 0, 1, 0, 0, 0, 0))
        more = {"kernel_shape": [kernel, 1]} if "Pool" in kind else {}
        weights = [self.leaf(2, 3, kernel, 1)] if kind == "Conv" else []
        self.op(kind, x, *weights, pads=[pad, 0, behind, 0], **slid, **more)
        self.whole = len(self.nodes)
        padded = dice.choice([0, 0, 0, 1])  # the rank's operator pads, too
        return self.op(
            kind, self.window(x, shape, axis, *read, border), *weights, pads=[padded, 0, 0, 0], **slid, **more
        )

    def values(self, folder: Path) -> tuple[bool, np.ndarray, np.ndarray]:
        """Whether the result is read as one of the whole; the result by its expression, and node by node."""
        result = self.draw()
        inputs = [helper.make_tensor_value_info(name, 1, array.shape) for name, array in self.inputs.items()]
        outputs = [helper.make_tensor_value_info(result, 1, None)]
        graph = helper.make_graph(self.nodes, "g", inputs, outputs, self.stored)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
        onnx.save(onnx.shape_inference.infer_shapes(model), folder / "g.onnx")
        loaded, expressions = load(folder / "g.onnx"), Expressions({})
        table = ConstantTable(expressions)
        reader = NodeReader(expressions, loaded, frozenset(), table)
        numbers = {name: expressions.leaf("batch", name, array.shape) for name, array in self.inputs.items()}
        numbers |= {name: table.stored(tensor) for name, tensor in loaded.initializers.items()}
        arrays = {**self.inputs, **{name: tensor.numpy() for name, tensor in loaded.initializers.items()}}
        for index, node in enumerate(loaded.nodes):
            if index == self.whole:
                expressions.seal()
            numbers |= zip(node.outputs, reader.results(node, [numbers[name] for name in node.inputs]))
            operands = [arrays[name] for name in node.inputs]
            arrays |= {name: computed(loaded, node, at, operands) for at, name in enumerate(node.outputs)}
        leaves = expressions.values
        evaluation = ExpressionValues(
            expressions, lambda leaf, _: leaves.get(leaf, self.inputs.get(str(leaf.attributes))), table.origins
        )
        (value,) = evaluation.values([numbers[result]], {})
        return reader.core(numbers[result]) < expressions.of_ranks, value, arrays[result]
