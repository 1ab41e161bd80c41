"""What the kernels of ONNX Runtime training 1.19.2 made of single operators: fixtures/ort/README.md."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import onnxruntime
from helpers import ROOT

from gopt.importers.artifacts.lowering.builder import Builder
from gopt.importers.artifacts.lowering.table import LOWERINGS
from gopt.importers.artifacts.lowering.value_types import value_types

FILE = ROOT / "fixtures" / "ort" / "recorded" / "operators.npz"
Arrays = dict[str, np.ndarray]


@cache
def archive() -> Arrays:
    with np.load(FILE) as file:
        return dict(file)


def names() -> list[str]:
    with np.load(FILE) as file:
        return [name.removesuffix(":model") for name in file.files if name.endswith(":model")]


def part(case: str, kind: str) -> Arrays:
    """Inputs (``in``) or results (``out``) of a case."""
    prefix = f"{case}:{kind}:"
    return {name.removeprefix(prefix): value for name, value in archive().items() if name.startswith(prefix)}


def model_of(case: str) -> onnx.ModelProto:
    return onnx.load_from_string(archive()[f"{case}:model"].tobytes())


def lowered(model: onnx.ModelProto, opset: int = 17) -> onnx.ModelProto:
    """The model with every operator of the table in standard ones."""
    body = model.graph
    taken = {name for node in body.node for name in (*node.input, *node.output)}
    b = Builder(
        opset, value_types(model), {name: node for node in body.node for name in node.output},
        {each.name: each for each in body.initializer}, taken,
    )  # fmt: skip
    nodes = []
    for node in body.node:
        record = LOWERINGS.get((node.domain, node.op_type))
        nodes += b.learn([node]) if record is None else record.nodes(b, node)
    made = onnx.ModelProto(ir_version=8, opset_import=[onnx.helper.make_opsetid("", opset)])
    made.graph.CopyFrom(body)
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    made.graph.initializer.extend(b.constants)
    return made


def run(model: onnx.ModelProto, given: Arrays, wanted: list[str]) -> Arrays:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    read = {each.name for each in session.get_inputs()}
    results = session.run(wanted, {name: value for name, value in given.items() if name in read})
    return dict(zip(wanted, results, strict=True))
