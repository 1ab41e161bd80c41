"""Writes attention.onnx and mlp.onnx, and has Polygraphy 0.53.6 shard them for 2 ranks.

``pip install polygraphy onnx onnx_graphsurgeon numpy``, then ``python make.py``: no test runs it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper

HOME = Path(__file__).parent
SAMPLES, WIDTH, INNER = 8, 16, 32
SHARD = ["polygraphy", "multi-device", "shard"]
OPTIONS = ["--one-shot", "--gpus", "2", "--nb-rank", "2", "--shape-inference", "--no-onnxruntime-shape-inference"]


def write(name: str, nodes: list[NodeProto], weights: dict[str, tuple[int, int]]) -> None:
    generator = np.random.default_rng(0)
    values = [
        onnx.numpy_helper.from_array((generator.standard_normal(shape) * 0.3).astype(np.float32), weight)
        for weight, shape in weights.items()
    ]
    x, y = (helper.make_tensor_value_info(value, TensorProto.FLOAT, [SAMPLES, WIDTH]) for value in "xy")
    graph = helper.make_graph(nodes, name, [x], [y], values)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), HOME / f"{name}.onnx"
    )


def node(op_type: str, inputs: str, output: str, **attributes: object) -> NodeProto:
    return helper.make_node(op_type, inputs.split(), [output], output, **attributes)


def main() -> None:
    attention = [
        node("MatMul", "x wq", "q"), node("MatMul", "x wk", "k"), node("MatMul", "x wv", "v"),
        node("Transpose", "k", "kt", perm=[1, 0]), node("MatMul", "q kt", "s"), node("Softmax", "s", "p", axis=-1),
        node("MatMul", "p v", "o"), node("MatMul", "o wo", "y"),
    ]  # fmt: skip
    write("attention", attention, dict.fromkeys(("wq", "wk", "wv", "wo"), (WIDTH, WIDTH)))
    mlp = [
        node("MatMul", "x gate", "a"), node("Sigmoid", "a", "b"), node("Mul", "a b", "c"), node("MatMul", "x up", "u"),
        node("Mul", "c u", "e"), node("MatMul", "e down", "f"), node("Add", "x f", "y"),
    ]  # fmt: skip
    write("mlp", mlp, {"gate": (WIDTH, INNER), "up": (WIDTH, INNER), "down": (INNER, WIDTH)})
    context = ["--parallelism", "CP", "--cp-type", "native", "--attention-pattern", "0", "--k-idx", "1"]
    tensor = ["--parallelism", "TP", "--external-data-size-threshold", "1M"]
    for name, options, output in (("attention", context, "attention_cp2"), ("mlp", tensor, "mlp")):
        command = [*SHARD, f"{name}.onnx", *OPTIONS, *options, "-o", f"{output}.onnx"]
        subprocess.run(command, cwd=HOME, check=True)


if __name__ == "__main__":
    main()
