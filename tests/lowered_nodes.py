"""What the nodes of one rank make of values, by onnx's own reference."""

from __future__ import annotations

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from gopt.lower.layout_operators import Lowered


def run(lowered: Lowered, values: dict[str, np.ndarray]) -> np.ndarray:
    """What the nodes make, or the constant or operand that stands for it."""
    known = values | lowered.constants
    nodes = [each.to_proto() for each in lowered.nodes()]
    if not nodes:
        return known[lowered.alias or "out"]
    kinds = {name: onnx.helper.np_dtype_to_tensor_dtype(value.dtype) for name, value in known.items()}
    inputs = [onnx.helper.make_tensor_value_info(name, kinds[name], value.shape) for name, value in known.items()]
    graph = onnx.helper.make_graph(nodes, "rank", inputs, [onnx.helper.make_tensor_value_info("out", 1, None)])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)])
    return ReferenceEvaluator(model).run(None, known)[0]
