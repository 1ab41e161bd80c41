"""What onnx's checker refuses, and what it is shown."""

import numpy as np
import pytest
from model_files import small, value
from onnx import ModelProto, helper, numpy_helper

from gopt.errors import InputError
from gopt.ir.model_file import ModelFile
from gopt.ir.onnx_checker import accepts, check_legal, check_structure, without_nodes


def file_of(model: ModelProto) -> ModelFile:
    return ModelFile(model.SerializeToString())


def test_a_node_without_a_name_is_named_by_its_output():
    model = small(nodes=[helper.make_node("Transpose", ["x"], ["turned"], perm=[0, 0])])
    model.graph.output[0].name = "turned"
    with pytest.raises(InputError, match=r"is not a valid ONNX model: .*turned"):
        check_legal(file_of(model))


def test_the_structure_alone_says_nothing_of_shapes():
    model = small(nodes=[helper.make_node("MatMul", ["b", "w"], ["y"])])
    check_structure(file_of(model))
    with pytest.raises(InputError, match="ncompatible"):
        check_legal(file_of(model))


def test_large_values_are_not_shown_to_the_checker(monkeypatch):
    import onnx

    shown: list[int] = []
    real = onnx.checker.check_model
    monkeypatch.setattr(onnx.checker, "check_model", lambda data, **how: shown.append(len(data)) or real(data, **how))
    stored = numpy_helper.from_array(np.zeros((3, 40_000), np.float32), "w")
    check_legal(
        file_of(small(initializer=[stored], inputs=[value("x"), value("b", (1,))], outputs=[value("y", ("N", "M"))]))
    )
    assert shown and max(shown) < 1000


def test_a_model_without_its_nodes_is_a_model():
    model = small(value_info=[value("h", ("N", 4))])
    rest = without_nodes(model)
    assert accepts(rest.SerializeToString(), full=True)
    assert [len(part) for part in (rest.graph.node, rest.graph.output, rest.graph.value_info)] == [0, 0, 0]
    assert [info.name for info in rest.graph.input] == ["x", "b"]
