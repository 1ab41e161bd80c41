"""Operators written one behind the other."""

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from gopt.ir.tape import ProtoTape


def computed(tape: ProtoTape, result: str, **feeds: np.ndarray) -> np.ndarray:
    inputs = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in feeds]
    output = onnx.helper.make_value_info(result, onnx.TypeProto())
    graph = onnx.helper.make_graph(tape.nodes, "g", inputs, [output])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", tape.opset)])
    return ReferenceEvaluator(model).run(None, feeds)[0]


@pytest.mark.parametrize("opset", [12, 13, 17, 18, 21])
@pytest.mark.parametrize("op_type", ["ReduceSum", "ReduceMean", "ReduceMax"])
def test_a_reduction_has_its_axes_where_the_version_wants_them(opset: int, op_type: str):
    tape, x = ProtoTape("t", opset), np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    found = computed(tape, tape.reduce(op_type, "x", [0, -1], keepdims=0), x=x)
    onnx.checker.check_model(onnx.helper.make_model(
        onnx.helper.make_graph(tape.nodes, "g", [onnx.helper.make_tensor_value_info("x", 1, (2, 3, 4))],
                               [onnx.helper.make_tensor_value_info(tape.nodes[-1].output[0], 1, (3,))]),
        opset_imports=[onnx.helper.make_opsetid("", opset)]), full_check=True)  # fmt: skip
    assert np.array_equal(found, getattr(x, op_type.removeprefix("Reduce").lower())((0, 2)))


def test_values_are_moved_and_made_as_asked():
    tape, x = ProtoTape("t", 21), np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    cut = tape.slice(tape.reshape("x", [6, 4]), 1, 3, axis=-1)
    whole = tape.op("Add", cut, tape.zeros([6, 1], "float32"))
    assert np.array_equal(computed(tape, tape.cast(whole, "float64"), x=x), x.reshape(6, 4)[:, 1:3].astype(float))
    assert [node.output[0] for node in tape.nodes] == [f"t.{place}" for place in range(1, len(tape.nodes) + 1)]


def test_nothing_is_added_where_nothing_is_to_be_done():
    tape = ProtoTape("t", 21)
    assert tape.cast("x", "float32", "float32") == tape.reduce("ReduceSum", "x", []) == "x"
    assert not tape.nodes
    assert tape.op("Neg", "x", output="y") == "y"
