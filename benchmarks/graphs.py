"""Training steps of a wanted size, without stored values: ``python benchmarks/graphs.py mlp 20000 step.onnx``.

A small tape writes each forward node with its backward, so that the gradients are right whatever the shape of the
net; every parameter then gets AdamW written out. Tensors are small: the graph's size is what is measured.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, ValueInfoProto

Shape = tuple[int, ...]
Attribute = int | float | str | Sequence[int]
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
OPSET, IR_VERSION = 20, 10


class Writer:
    """Writes nodes, inputs, outputs and constants, and knows every value's shape."""

    def __init__(self, name: str) -> None:
        self.model = ModelProto(ir_version=IR_VERSION)
        self.model.opset_import.add(domain="", version=OPSET)
        self.graph: GraphProto = self.model.graph
        self.graph.name = name
        self.shapes: dict[str, Shape] = {}
        self._constants: dict[tuple[int, Shape, tuple[float, ...]], str] = {}

    def input(self, name: str, shape: Shape, dtype: int = FLOAT) -> str:
        self._describe(self.graph.input.add(), name, shape, dtype)
        self.shapes[name] = shape
        return name

    def output(self, name: str, shape: Shape, dtype: int = FLOAT) -> None:
        self._describe(self.graph.output.add(), name, shape, dtype)

    def constant(self, values: float | Sequence[float], shape: Shape = (), dtype: int = FLOAT) -> str:
        """A constant, stored once however often it is asked for."""
        flat = tuple(values) if isinstance(values, Sequence) else (values,)
        key = (dtype, shape, flat)
        if key not in self._constants:
            name = f"const_{len(self._constants)}"
            tensor = self.graph.initializer.add(name=name, data_type=dtype, dims=shape)
            if dtype == INT64:
                tensor.int64_data.extend(int(value) for value in flat)
            else:
                tensor.float_data.extend(flat)
            self.shapes[name] = shape
            self._constants[key] = name
        return self._constants[key]

    def ints(self, *values: int) -> str:
        return self.constant(values, (len(values),), INT64)

    def op(self, op_type: str, inputs: Sequence[str], shape: Shape, output: str = "", **attributes: Attribute) -> str:
        """Add a node; its output's name."""
        place = len(self.graph.node)
        name = output or f"{op_type.lower()}_{place}"
        node = self.graph.node.add(op_type=op_type, name=f"node_{op_type}_{place}", input=inputs, output=[name])
        for key, value in attributes.items():
            _set_attribute(node.attribute.add(name=key), value)
        self.shapes[name] = shape
        return name

    def binary(self, op_type: str, a: str, b: str, output: str = "") -> str:
        return self.op(op_type, [a, b], _broadcast(self.shapes[a], self.shapes[b]), output)

    def _describe(self, info: ValueInfoProto, name: str, shape: Shape, dtype: int) -> None:
        info.name = name
        info.type.tensor_type.elem_type = dtype
        info.type.tensor_type.shape.SetInParent()
        for size in shape:
            info.type.tensor_type.shape.dim.add(dim_value=size)


def _set_attribute(attribute: AttributeProto, value: Attribute) -> None:
    if isinstance(value, int):
        attribute.type, attribute.i = AttributeProto.INT, value
    elif isinstance(value, float):
        attribute.type, attribute.f = AttributeProto.FLOAT, value
    elif isinstance(value, str):
        attribute.type, attribute.s = AttributeProto.STRING, value.encode()
    else:
        attribute.type = AttributeProto.INTS
        attribute.ints.extend(value)


def _broadcast(a: Shape, b: Shape) -> Shape:
    rank = max(len(a), len(b))
    wide_a, wide_b = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    return tuple(max(pair) for pair in zip(wide_a, wide_b, strict=True))


class Tape:
    """Forward operations that remember how to write their backward."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.parameters: dict[str, Shape] = {}
        self._steps: list[tuple[str, Callable[[str], None]]] = []
        self._made: set[str] = set()
        self._gradients: dict[str, str] = {}

    def parameter(self, name: str, *shape: int) -> str:
        self.parameters[name] = shape
        return self.writer.input(name, shape)

    def backward(self) -> dict[str, str]:
        """Write the backward of all that was done; the gradient of every parameter."""
        for output, step in reversed(self._steps):
            if output in self._gradients:
                step(self._gradients[output])
        return {name: self._gradients[name] for name in self.parameters}

    # --- operations -------------------------------------------------------------------------------------------------

    def add(self, a: str, b: str) -> str:
        out = self.writer.binary("Add", a, b)

        def back(g: str) -> None:
            self._give(a, g)
            self._give(b, g)

        return self._did(out, back)

    def sub(self, a: str, b: str) -> str:
        w = self.writer
        out = w.binary("Sub", a, b)

        def back(g: str) -> None:
            self._give(a, g)
            self._give(b, w.op("Neg", [g], w.shapes[g]))

        return self._did(out, back)

    def mul(self, a: str, b: str) -> str:
        w = self.writer
        out = w.binary("Mul", a, b)

        def back(g: str) -> None:
            self._give(a, w.binary("Mul", g, b))
            self._give(b, w.binary("Mul", g, a))

        return self._did(out, back)

    def div(self, a: str, b: str) -> str:
        w = self.writer
        out = w.binary("Div", a, b)

        def back(g: str) -> None:
            part = w.binary("Div", g, b)
            self._give(a, part)
            self._give(b, w.op("Neg", [w.binary("Mul", part, out)], w.shapes[out]))

        return self._did(out, back)

    def scale(self, a: str, factor: float) -> str:
        """``a`` times a constant."""
        w = self.writer
        out = w.binary("Mul", a, w.constant(factor))
        return self._did(out, lambda g: self._give(a, w.binary("Mul", g, w.constant(factor))))

    def shift(self, a: str, constant: str) -> str:
        """``a`` plus a constant value, which gets no gradient."""
        return self._did(self.writer.binary("Add", a, constant), lambda g: self._give(a, g))

    def sqrt(self, a: str) -> str:
        w = self.writer
        out = w.op("Sqrt", [a], w.shapes[a])
        return self._did(out, lambda g: self._give(a, w.binary("Div", w.binary("Mul", g, w.constant(0.5)), out)))

    def tanh(self, a: str) -> str:
        w = self.writer
        out = w.op("Tanh", [a], w.shapes[a])

        def back(g: str) -> None:
            slope = w.binary("Sub", w.constant(1.0), w.binary("Mul", out, out))
            self._give(a, w.binary("Mul", g, slope))

        return self._did(out, back)

    def softmax(self, a: str) -> str:
        w = self.writer
        out = w.op("Softmax", [a], w.shapes[a], axis=-1)

        def back(g: str) -> None:
            weighted = w.binary("Mul", g, out)
            total = w.op("ReduceSum", [weighted, w.ints(-1)], (*w.shapes[a][:-1], 1), keepdims=1)
            self._give(a, w.binary("Sub", weighted, w.binary("Mul", out, total)))

        return self._did(out, back)

    def mean(self, a: str) -> str:
        """The mean over the last axis, which stays with size 1."""
        w = self.writer
        shape = w.shapes[a]
        out = w.op("ReduceMean", [a, w.ints(-1)], (*shape[:-1], 1), keepdims=1)

        def back(g: str) -> None:
            part = w.binary("Mul", g, w.constant(1.0 / shape[-1]))
            self._give(a, w.op("Expand", [part, w.ints(*shape)], shape))

        return self._did(out, back)

    def reshape(self, a: str, *shape: int) -> str:
        w = self.writer
        before = w.shapes[a]
        out = w.op("Reshape", [a, w.ints(*shape)], shape)
        return self._did(out, lambda g: self._give(a, w.op("Reshape", [g, w.ints(*before)], before)))

    def transpose(self, a: str, *perm: int) -> str:
        out = self._transposed(a, perm)
        inverse = sorted(range(len(perm)), key=perm.__getitem__)
        return self._did(out, lambda g: self._give(a, self._transposed(g, inverse)))

    def matmul(self, a: str, b: str) -> str:
        """Of equal leading axes, or of a ``b`` with two axes and an ``a`` with two."""
        w = self.writer
        out = self._product(a, b)
        swap = [*range(len(w.shapes[a]) - 2), len(w.shapes[a]) - 1, len(w.shapes[a]) - 2]

        def back(g: str) -> None:
            if a in self._made or a in self.parameters:
                self._give(a, self._product(g, self._transposed(b, swap)))
            self._give(b, self._product(self._transposed(a, swap), g))

        return self._did(out, back)

    def lookup(self, table: str, ids: str) -> str:
        """Rows of ``table``."""
        w = self.writer
        rows, shape = w.shapes[ids], w.shapes[table]
        out = w.op("Gather", [table, ids], (*rows, *shape[1:]), axis=0)

        def back(g: str) -> None:
            zeros = w.op("ConstantOfShape", [w.ints(*shape)], shape)
            places = w.op("Unsqueeze", [ids, w.ints(-1)], (*rows, 1))
            self._give(table, w.op("ScatterND", [zeros, places, g], shape, reduction="add"))

        return self._did(out, back)

    def cross_entropy(self, logits: str, labels: str) -> str:
        """The mean loss of ``labels`` under ``logits``, both over rows: where the backward begins."""
        w = self.writer
        rows, classes = w.shapes[logits]
        bounds = w.constant((0.0, 1.0), (2,))
        target = w.op("OneHot", [labels, w.ints(classes), bounds], (rows, classes), axis=-1)
        logs = w.op("LogSoftmax", [logits], (rows, classes), axis=-1)
        total = w.op("ReduceSum", [w.binary("Mul", target, logs)], (), keepdims=0)
        loss = w.op("Mul", [total, w.constant(-1.0 / rows)], (), output="loss")

        def back(_: str) -> None:
            gap = w.binary("Sub", w.op("Exp", [logs], (rows, classes)), target)
            self._give(logits, w.binary("Mul", gap, w.constant(1.0 / rows)))

        self._gradients[loss] = loss
        return self._did(loss, back)

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _did(self, output: str, back: Callable[[str], None]) -> str:
        self._steps.append((output, back))
        self._made.add(output)
        return output

    def _give(self, name: str, gradient: str) -> None:
        """Add to the gradient of ``name``; axes along which it was broadcast are summed."""
        w = self.writer
        shape, found = w.shapes[name], w.shapes[gradient]
        if found != shape:
            lead = len(found) - len(shape)
            axes = [axis for axis, size in enumerate(found) if axis < lead or size != shape[axis - lead]]
            kept = tuple(1 if axis in axes else size for axis, size in enumerate(found))
            gradient = w.op("ReduceSum", [gradient, w.ints(*axes)], kept, keepdims=1)
            if kept != shape:
                gradient = w.op("Reshape", [gradient, w.ints(*shape)], shape)
        if name in self._gradients:
            gradient = w.binary("Add", self._gradients[name], gradient)
        self._gradients[name] = gradient

    def _transposed(self, a: str, perm: Sequence[int]) -> str:
        shape = self.writer.shapes[a]
        return self.writer.op("Transpose", [a], tuple(shape[axis] for axis in perm), perm=perm)

    def _product(self, a: str, b: str) -> str:
        shapes = self.writer.shapes
        return self.writer.op("MatMul", [a, b], (*shapes[a][:-1], shapes[b][-1]))


# --- the optimizer --------------------------------------------------------------------------------------------------


def adamw(tape: Tape, gradients: dict[str, str], *, own_steps: bool = False, clip: float | None = None) -> None:
    """AdamW, 16 nodes a parameter, bias corrections from a step counter in the graph.

    ``own_steps`` gives every parameter a counter of its own; ``clip`` is a bound on the norm of all gradients.
    """
    w = tape.writer
    rate = w.input("lr", ())
    counter = None if own_steps else _counter(w, "step")
    if clip is not None:
        gradients = _clipped(w, gradients, clip)
    for name, shape in tape.parameters.items():
        correct1, correct2 = counter or _counter(w, f"{name}.step")
        _adamw_one(w, name, gradients[name], rate, correct1, correct2)
        for each in (name, f"{name}.m", f"{name}.v"):
            w.output(f"{each}.new", shape)


def _adamw_one(w: Writer, name: str, gradient: str, rate: str, correct1: str, correct2: str) -> None:
    def op(op_type: str, a: str, b: str | float, output: str = "") -> str:
        return w.binary(op_type, a, w.constant(b) if isinstance(b, float) else b, output)

    m, v = (w.input(f"{name}.{suffix}", w.shapes[name]) for suffix in "mv")
    m = op("Add", op("Mul", m, 0.9), op("Mul", gradient, 0.1), f"{name}.m.new")
    square = op("Mul", op("Mul", gradient, gradient), 0.001)
    v = op("Add", op("Mul", v, 0.999), square, f"{name}.v.new")
    root = w.op("Sqrt", [op("Div", v, correct2)], w.shapes[name])
    change = op("Div", op("Div", m, correct1), op("Add", root, 1e-8))
    change = op("Add", change, op("Mul", name, 0.01))
    op("Sub", name, op("Mul", change, rate), f"{name}.new")


def _counter(w: Writer, name: str) -> tuple[str, str]:
    """A step counter and the two bias corrections that follow from it."""
    before = w.input(name, (), INT64)
    after = w.op("Add", [before, w.constant(1, (), INT64)], (), output=f"{name}.new")
    w.output(after, (), INT64)
    count = w.op("Cast", [after], (), to=FLOAT)
    first, second = (
        w.binary("Sub", w.constant(1.0), w.binary("Pow", w.constant(beta), count)) for beta in (0.9, 0.999)
    )
    return first, second


def _clipped(w: Writer, gradients: dict[str, str], bound: float) -> dict[str, str]:
    total = ""
    for gradient in gradients.values():
        part = w.op("ReduceSum", [w.binary("Mul", gradient, gradient)], (), keepdims=0)
        total = w.binary("Add", total, part) if total else part
    norm = w.op("Sqrt", [total], ())
    factor = w.binary("Min", w.constant(1.0), w.binary("Div", w.constant(bound), norm))
    return {name: w.binary("Mul", gradient, factor) for name, gradient in gradients.items()}


# --- the two shapes -------------------------------------------------------------------------------------------------


def mlp(
    layers: int, *, own_steps: bool = False, clip: float | None = None, width: int = 32, batch: int = 4
) -> ModelProto:
    """Square layers with biases and tanh between, softmax cross-entropy at the end."""
    w = Writer("mlp")
    tape = Tape(w)
    h, labels = w.input("x", (batch, width)), w.input("y", (batch,), INT64)
    for place in range(layers):
        h = tape.matmul(h, tape.parameter(f"layer{place}.weight", width, width))
        h = tape.add(h, tape.parameter(f"layer{place}.bias", width))
        h = tape.tanh(h) if place < layers - 1 else h
    return _step(tape, h, labels, own_steps=own_steps, clip=clip)


class Size(NamedTuple):
    """How large a decoder is; the default is small, so that only its number of nodes counts."""

    batch: int = 2
    length: int = 4
    width: int = 16
    words: int = 24
    heads: int = 2


GPT2 = Size(1, 1024, 768, 50257, 12)
"""With 12 blocks the shapes of GPT-2 124M, query, key and value apart."""


def gpt(blocks: int, *, own_steps: bool = False, clip: float | None = None, size: Size = Size()) -> ModelProto:
    """A decoder: attention and MLP blocks, layer norms in primitives, one table for both ends."""
    batch, length, width, words, heads = size
    w = Writer("gpt")
    tape = Tape(w)
    ids, labels = w.input("ids", (batch, length), INT64), w.input("labels", (batch * length,), INT64)
    table = tape.parameter("wte", words, width)
    h = tape.add(tape.lookup(table, ids), tape.parameter("wpe", length, width))
    h = tape.reshape(h, batch * length, width)
    for place in range(blocks):
        name = f"h{place}"
        h = tape.add(h, _attention(tape, _norm(tape, h, f"{name}.ln1"), name, (batch, length, heads)))
        inner = tape.tanh(_linear(tape, _norm(tape, h, f"{name}.ln2"), f"{name}.fc", 4 * width))
        h = tape.add(h, _linear(tape, inner, f"{name}.out", width))
    logits = tape.matmul(_norm(tape, h, "ln"), tape.transpose(table, 1, 0))
    return _step(tape, logits, labels, own_steps=own_steps, clip=clip)


def _attention(tape: Tape, h: str, name: str, split: tuple[int, int, int]) -> str:
    """``split``: batch, length and heads."""
    w = tape.writer
    batch, length, heads = split
    rows, width = w.shapes[h]
    size = width // heads

    def head(part: str) -> str:
        value = tape.reshape(_linear(tape, h, f"{name}.{part}", width), batch, length, heads, size)
        return tape.transpose(value, 0, 2, 1, 3)

    query, key, value = head("q"), head("k"), head("v")
    scores = tape.scale(tape.matmul(query, tape.transpose(key, 0, 1, 3, 2)), 1 / math.sqrt(size))
    mask = [0.0 if column <= row else -1e4 for row in range(length) for column in range(length)]
    scores = tape.softmax(tape.shift(scores, w.constant(mask, (length, length))))
    mixed = tape.transpose(tape.matmul(scores, value), 0, 2, 1, 3)
    return _linear(tape, tape.reshape(mixed, rows, width), f"{name}.proj", width)


def _linear(tape: Tape, h: str, name: str, width: int) -> str:
    product = tape.matmul(h, tape.parameter(f"{name}.weight", tape.writer.shapes[h][-1], width))
    return tape.add(product, tape.parameter(f"{name}.bias", width))


def _norm(tape: Tape, h: str, name: str) -> str:
    w = tape.writer
    width = w.shapes[h][-1]
    centred = tape.sub(h, tape.mean(h))
    spread = tape.sqrt(tape.shift(tape.mean(tape.mul(centred, centred)), w.constant(1e-5)))
    scaled = tape.mul(tape.div(centred, spread), tape.parameter(f"{name}.weight", width))
    return tape.add(scaled, tape.parameter(f"{name}.bias", width))


def _step(tape: Tape, logits: str, labels: str, *, own_steps: bool, clip: float | None) -> ModelProto:
    loss = tape.cross_entropy(logits, labels)
    tape.writer.output(loss, ())
    adamw(tape, tape.backward(), own_steps=own_steps, clip=clip)
    return tape.writer.model


SHAPES: dict[str, Callable[..., ModelProto]] = {"mlp": mlp, "gpt": gpt}


def build(shape: str, nodes: int, *, own_steps: bool = False, clip: float | None = None) -> ModelProto:
    """The step of that shape with the number of nodes next to ``nodes``."""
    make = SHAPES[shape]
    few, more = (len(make(depth, own_steps=own_steps, clip=clip).graph.node) for depth in (2, 3))
    depth = max(1, 2 + round((nodes - few) / (more - few)))
    return make(depth, own_steps=own_steps, clip=clip)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("nodes", type=int)
    parser.add_argument("file", type=Path)
    parser.add_argument("--own-steps", action="store_true", help="a step counter for every parameter")
    parser.add_argument("--clip", type=float, help="bound on the norm of all gradients")
    given = parser.parse_args()
    model = build(given.shape, given.nodes, own_steps=given.own_steps, clip=given.clip)
    given.file.write_bytes(model.SerializeToString(deterministic=True))
    print(len(model.graph.node))


if __name__ == "__main__":
    main()
