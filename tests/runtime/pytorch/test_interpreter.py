"""Control flow by PyTorch, traced and not, against ONNX Runtime; nodes without a facet are refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from runtime_graphs import make

from gopt.errors import UnsupportedError
from gopt.runtime.executor import Executor, no_calls
from gopt.runtime.session import SessionCache

pytestmark = pytest.mark.torch
device = pytest.importorskip("gopt.runtime.pytorch.device")
op = helper.make_node


def body(nodes, inputs, outputs, constants=()):
    given, made = ([helper.make_tensor_value_info(*info) for info in infos] for infos in (inputs, outputs))
    stored = [numpy_helper.from_array(array, name) for name, array in dict(constants).items()]
    return helper.make_graph(nodes, "body", given, made, stored)


FLOAT, BOOL, INT = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64
TURN = [("i", INT, []), ("going", BOOL, []), ("state", FLOAT, [3])]
COUNTED = body(
    [op("Add", ["state", "x"], ["next"]), op("Identity", ["going"], ["on"]), op("Mul", ["next", "next"], ["square"])],
    TURN, [("on", BOOL, []), ("next", FLOAT, [3]), ("square", FLOAT, [3])],
)  # fmt: skip
UNTIL = body(
    [
        op("Add", ["state", "x"], ["next"]), op("ReduceMax", ["next"], ["most"], keepdims=0),
        op("Less", ["most", "limit"], ["on"]),
    ],
    TURN, [("on", BOOL, []), ("next", FLOAT, [3])], {"limit": np.float32(9)},
)  # fmt: skip
BRANCHES = [body([op(name, ["x", "x"], ["out"])], [], [("out", FLOAT, [3])]) for name in ("Add", "Mul")]
SCANNED = body(
    [op("Add", ["sum", "row"], ["next"]), op("Mul", ["next", "x"], ["shown"])],
    [("sum", FLOAT, [3]), ("row", FLOAT, [3])], [("next", FLOAT, [3]), ("shown", FLOAT, [3])],
)  # fmt: skip
STEPS = {
    "a loop of fixed turns": [op("Loop", ["turns", "", "x"], ["y", "rows"], body=COUNTED)],
    "a loop until a value is large": [op("Loop", ["", "yes", "x"], ["y"], body=UNTIL)],
    "a choice by a value": [
        op("ReduceMax", ["x"], ["most"], keepdims=0), op("Less", ["most", "one"], ["small"]),
        op("If", ["small"], ["y"], then_branch=BRANCHES[0], else_branch=BRANCHES[1]),
    ],
    "a scan backwards": [
        op("Concat", ["x", "x"], ["pair"], axis=0), op("Reshape", ["pair", "two"], ["table"]),
        op("Scan", ["x", "table"], ["y", "rows"], body=SCANNED, num_scan_inputs=1, scan_input_directions=[1]),
    ],
    "a shape that follows values": [
        op("ReduceMax", ["x"], ["most"], keepdims=0), op("Cast", ["most"], ["count"], to=INT),
        op("Reshape", ["count", "flat"], ["end"]), op("Slice", ["x", "begin", "end"], ["some"]),
        op("ReduceSum", ["some"], ["y"], keepdims=0),
    ],
}  # fmt: skip
CONSTANTS = {
    "turns": np.int64(3), "yes": np.array(True), "one": np.float32(1), "two": np.array([2, 3], np.int64),
    "flat": np.array([-1], np.int64), "begin": np.array([0], np.int64),
}  # fmt: skip


@pytest.mark.parametrize("execution", ["NODES", "TRACE"])
@pytest.mark.parametrize("name", STEPS)
def test_bodies_compute_what_onnxruntime_does(name, execution, tmp_path):
    nodes = STEPS[name]
    outputs = {out: ("float32", ["a", "b"][: 2 if out == "rows" else 1]) for out in nodes[-1].output}
    if "values" in name:
        outputs = {"y": ("float32", [])}
    graph = make(tmp_path, nodes, {"x": ("float32", [3])}, outputs, CONSTANTS)
    program = Executor(graph, device.TorchHost("cpu", device.Execution[execution]).sessions())
    for x in ([0.5, -1, 0.25], [2, 3, 1.5]):
        feeds = {"x": np.array(x, np.float32)}
        found, due = program.run(feeds, no_calls), Executor(graph, SessionCache()).run(feeds)
        for out, value in due.items():
            np.testing.assert_allclose(found[out], value, rtol=1e-6, err_msg=out)


def test_a_node_without_a_facet_is_refused_by_name(tmp_path):
    nodes = [op("Unknown", ["x"], ["y"], name="odd", domain="some.where")]
    graph = make(
        tmp_path, nodes, {"x": ("float32", [3])}, {"y": ("float32", [3])}, opsets=[helper.make_opsetid("some.where", 1)]
    )
    with pytest.raises(UnsupportedError, match=r"engine torch does not compute some.where.Unknown \('odd'\)"):
        Executor(graph, device.TorchHost().sessions())


TEXTS = {
    "value_string": "word", "value_strings": ["one", "two"],
    "value": helper.make_tensor("t", TensorProto.STRING, [1], [b"word"]),
}  # fmt: skip


@pytest.mark.parametrize("attribute", TEXTS)
def test_a_constant_of_text_is_refused_before_a_step_and_by_name(attribute, tmp_path):
    nodes = [op("Constant", [], ["word"], name="label", **{attribute: TEXTS[attribute]}), op("Neg", ["x"], ["y"])]
    nodes.append(op("Cast", ["word"], ["z"], to=FLOAT))
    outputs = {"y": ("float32", [3]), "z": ("float32", ["words"][: attribute != "value_string"])}
    graph = make(tmp_path, nodes, {"x": ("float32", [3])}, outputs)
    with pytest.raises(UnsupportedError, match=r"constant 'label': PyTorch has no tensors"):
        Executor(graph, device.TorchHost().sessions())
