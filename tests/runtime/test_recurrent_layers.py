"""Recurrent layers in NumPy beside ONNX Runtime's in float32."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from gopt.runtime import recurrent_layers as recurrent

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
KERNELS = {"RNN": recurrent.rnn, "GRU": recurrent.gru, "LSTM": recurrent.lstm}
TIMES, COUNT, WIDTH, HIDDEN = 4, 3, 2, 5


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(
    ("op", "more", "given"),
    [
        ("RNN", {}, ""), ("RNN", {"activations": ["Relu"]}, "b"), ("GRU", {}, "blh"), ("GRU", {"clip": 0.3}, "b"),
        ("GRU", {"linear_before_reset": 1}, "bl"), ("LSTM", {}, "blhc"), ("LSTM", {}, "p"), ("LSTM", {}, ""),
    ],
)  # fmt: skip
def test_it_is_what_onnx_runtime_computes(op, more, given, direction):
    ways, rows, random = 1 + (direction == "bidirectional"), GATES[op] * HIDDEN, np.random.default_rng(0)
    more = {**more, "activations": more["activations"] * ways} if "activations" in more else more
    shapes = {
        "x": (TIMES, COUNT, WIDTH), "w": (ways, rows, WIDTH), "r": (ways, rows, HIDDEN), "b": (ways, 2 * rows),
        "l": (COUNT,), "h": (ways, COUNT, HIDDEN), "c": (ways, COUNT, HIDDEN), "p": (ways, 3 * HIDDEN),
    }  # fmt: skip
    values = {name: random.standard_normal(shape) for name, shape in shapes.items()}
    values["l"] = np.array([4, 1, 3], np.int32)
    names = [name if name in "xwr" or name in given else "" for name in shapes]
    names = names[: {"RNN": 6, "GRU": 6, "LSTM": 8}[op]]
    ours = KERNELS[op](*(values[name] if name else None for name in names), direction=direction, **more)
    outputs = ["y", "y_h", "y_c"][: 2 + (op == "LSTM")]
    while not names[-1]:
        names.pop()
    node = helper.make_node(op, names, outputs, hidden_size=HIDDEN, direction=direction, **more)
    kinds = {name: TensorProto.INT32 if name == "l" else TensorProto.FLOAT for name in names if name}
    inputs = [helper.make_tensor_value_info(name, kind, shapes[name]) for name, kind in kinds.items()]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph([node], "one", inputs, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    run = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    theirs = run.run(None, {n: values[n].astype(np.int32 if n == "l" else np.float32) for n in kinds})
    for own, other in zip(ours, theirs, strict=True):
        assert own.dtype == np.float64 and own.shape == other.shape
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)
