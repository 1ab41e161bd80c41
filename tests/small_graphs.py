"""Small graphs and steps for tests of single analyses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
from helpers import Builder, perceptron, sgd

import gopt
from gopt.analysis.training import TrainingGraph
from gopt.ir.graph import Graph, Node
from gopt.ir.load import load
from gopt.ir.types import TensorType

TYPE = TensorType("float32", (2,))


def parsed(text: str, folder: Path) -> Graph:
    """The graph of a model in onnx's text form, without its header."""
    head = '<ir_version: 10, opset_import: ["" : 20]> '
    path = folder / "graph.onnx"
    path.write_bytes(onnx.parser.parse_model(head + text).SerializeToString())
    return load(path)


def chain(*edges: str, outputs: Sequence[str] = ()) -> Graph:
    """``xab`` is a node that reads x and a and makes b; all values have two elements."""
    nodes = [Node("Op", list(edge[:-1]), [edge[-1]], name=edge) for edge in edges]
    made = {edge[-1] for edge in edges}
    inputs = {name: TYPE for edge in edges for name in edge[:-1] if name not in made}
    names = {*inputs, *made}
    return Graph("g", nodes, inputs, dict.fromkeys(outputs, TYPE), {}, dict.fromkeys(names, TYPE), onnx.ModelProto())


def sgd_step(folder: Path, *, half: bool = False) -> TrainingGraph:
    """A perceptron with plain SGD, its roles recovered; ``half``: the forward reads casts to float16."""
    b = Builder()
    network = perceptron(b, half=half)
    sgd(b, network)
    return gopt.load(b.save(folder / "step.onnx")).training
