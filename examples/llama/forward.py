"""Write the forward of a Llama as ONNX, with weights as inputs: ``python examples/llama/forward.py -o llama.onnx``.

Token embedding, layers of RMSNorm, grouped-query attention with rotary positions and SwiGLU, and logits. The default is
the size of Llama 3 405B. The file has no weights, so that it stays small at any size.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

OPSET, EPS, THETA = 20, 1e-5, 500000.0
HIDDEN = -1e9
"""The score of a later token."""


class Writer:
    """Appends nodes, inputs and constants to a graph; every method returns a value's name."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.constants: dict[str, TensorProto] = {}

    def input(self, name: str, *shape: int, dtype: int = TensorProto.FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def constant(self, name: str, value: Sequence[int] | np.ndarray | float) -> str:
        array = (
            value
            if isinstance(value, np.ndarray)
            else np.array(value, np.float32 if isinstance(value, float) else np.int64)
        )
        self.constants.setdefault(name, numpy_helper.from_array(array, name))
        return name

    def ints(self, *values: int) -> str:
        return self.constant("_".join(["ints", *map(str, values)]), values)

    def __call__(self, name: str, op_type: str, *inputs: str, **attributes: int | Sequence[int]) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [name], name, **attributes))
        return name


class Llama:
    """Writes the layers; ``size`` has the options of the command line."""

    def __init__(self, size: argparse.Namespace) -> None:
        self.size, self.write = size, Writer()
        self.head = size.width // size.heads

    def model(self) -> ModelProto:
        w, size = self.write, self.size
        ids = w.input("ids", size.batch, size.tokens, dtype=TensorProto.INT64)
        self._positions()
        h = w("embedding", "Gather", w.input("embed.weight", size.vocab, size.width), ids)
        for layer in range(size.layers):
            h = self._layer(f"layers.{layer}", h)
        logits = self._linear("logits", self._norm("norm", h), "lm_head.weight", size.vocab)
        shape = size.batch, size.tokens, size.vocab
        output = helper.make_tensor_value_info(logits, TensorProto.FLOAT, shape)
        graph = helper.make_graph(w.nodes, "llama", w.inputs, [output], [*w.constants.values()])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)

    def _layer(self, name: str, h: str) -> str:
        w = self.write
        h = w(f"{name}.mixed", "Add", h, self._attention(f"{name}.attn", self._norm(f"{name}.attn_norm", h)))
        return w(f"{name}.out", "Add", h, self._mlp(f"{name}.mlp", self._norm(f"{name}.mlp_norm", h)))

    def _linear(self, name: str, h: str, weight: str, *shape: int) -> str:
        """``h`` times a weight; ``shape``: rows and columns, or columns of a weight of ``width`` rows."""
        rows, columns = (self.size.width, *shape)[-2:]
        return self.write(name, "MatMul", h, self.write.input(weight, rows, columns))

    def _norm(self, name: str, h: str) -> str:
        """RMSNorm, in primitives."""
        w = self.write
        square = w(f"{name}.square", "Mul", h, h)
        mean = w(f"{name}.mean", "ReduceMean", square, w.ints(-1), keepdims=1)
        root = w(f"{name}.root", "Sqrt", w(f"{name}.shifted", "Add", mean, w.constant("eps", EPS)))
        return w(f"{name}.scaled", "Mul", w(f"{name}.unit", "Div", h, root), w.input(f"{name}.weight", self.size.width))

    def _mlp(self, name: str, h: str) -> str:
        w, size = self.write, self.size
        gate = self._linear(f"{name}.gate", h, f"{name}.gate.weight", size.ffn)
        silu = w(f"{name}.silu", "Mul", gate, w(f"{name}.sigmoid", "Sigmoid", gate))
        inner = w(f"{name}.inner", "Mul", silu, self._linear(f"{name}.up", h, f"{name}.up.weight", size.ffn))
        return self._linear(f"{name}.down", inner, f"{name}.down.weight", size.ffn, size.width)

    def _positions(self) -> None:
        """Cosine and sine of each position's angles, and which token sees which."""
        w, size = self.write, self.size
        places = np.arange(size.tokens)
        rates = THETA ** (-np.arange(0, self.head, 2) / self.head)
        places_f = w.constant("places", places.astype(np.float32)[:, None])
        angles = w("angles", "Mul", places_f, w.constant("rates", np.tile(rates, 2).astype(np.float32)[None]))
        w("cos", "Cos", angles)
        w("sin", "Sin", angles)
        w("seen", "GreaterOrEqual", w.constant("queries", places[:, None]), w.constant("keys", places[None]))

    def _heads(self, name: str, h: str, count: int) -> str:
        """A projection of ``h`` by heads: batch, heads, tokens, width of a head."""
        w, size = self.write, self.size
        flat = self._linear(name, h, f"{name}.weight", count * self.head)
        rows = w(f"{name}.rows", "Reshape", flat, w.ints(size.batch, size.tokens, count, self.head))
        return w(f"{name}.heads", "Transpose", rows, perm=[0, 2, 1, 3])

    def _rotate(self, name: str, x: str) -> str:
        w = self.write
        w.nodes.append(helper.make_node("Split", [x], [f"{name}.left", f"{name}.right"], name, axis=-1, num_outputs=2))
        swapped = w(f"{name}.swapped", "Concat", w(f"{name}.minus", "Neg", f"{name}.right"), f"{name}.left", axis=-1)
        near, far = w(f"{name}.near", "Mul", x, "cos"), w(f"{name}.far", "Mul", swapped, "sin")
        return w(f"{name}.rotated", "Add", near, far)

    def _shared(self, name: str, x: str) -> str:
        """Keys or values for all heads: a group of heads shares one."""
        w, size = self.write, self.size
        group = size.heads // size.kv_heads
        shape = size.batch, size.kv_heads, group, size.tokens, self.head
        wide = w(f"{name}.wide", "Expand", w(f"{name}.one", "Unsqueeze", x, w.ints(2)), w.ints(*shape))
        return w(f"{name}.all", "Reshape", wide, w.ints(size.batch, size.heads, size.tokens, self.head))

    def _attention(self, name: str, h: str) -> str:
        w, size = self.write, self.size
        query = self._rotate(f"{name}.q", self._heads(f"{name}.q", h, size.heads))
        key = self._rotate(f"{name}.k", self._heads(f"{name}.k", h, size.kv_heads))
        value = self._shared(f"{name}.v", self._heads(f"{name}.v", h, size.kv_heads))
        turned = w(f"{name}.k.turned", "Transpose", self._shared(f"{name}.k", key), perm=[0, 1, 3, 2])
        scores = w(f"{name}.scores", "MatMul", query, turned)
        scores = w(f"{name}.scaled", "Mul", scores, w.constant("scale", float(self.head**-0.5)))
        scores = w(f"{name}.masked", "Where", "seen", scores, w.constant("hidden", HIDDEN))
        mixed = w(f"{name}.mix", "MatMul", w(f"{name}.shares", "Softmax", scores, axis=-1), value)
        rows = w(f"{name}.turned", "Transpose", mixed, perm=[0, 2, 1, 3])
        flat = w(f"{name}.flat", "Reshape", rows, w.ints(size.batch, size.tokens, size.width))
        return self._linear(f"{name}.out", flat, f"{name}.out.weight", size.width)


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    reader.add_argument("-o", "--output", type=Path, required=True)
    sizes = {"layers": 126, "width": 16384, "heads": 128, "kv_heads": 8, "ffn": 53248, "vocab": 128256}
    for name, number in {**sizes, "batch": 1, "tokens": 8192}.items():
        reader.add_argument(f"--{name.replace('_', '-')}", type=int, default=number, help=f"default: {number}")
    size = reader.parse_args()
    model = Llama(size).model()
    size.output.write_bytes(model.SerializeToString(deterministic=True))
    shapes = ([dim.dim_value for dim in each.type.tensor_type.shape.dim] for each in model.graph.input[1:])
    print(f"{len(model.graph.node)} nodes, {sum(map(int, map(np.prod, shapes))):,} weights")


if __name__ == "__main__":
    main()
