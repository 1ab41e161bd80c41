"""The canonical text: a golden file, and what may not change it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from offline_graphs import FIXTURES, NAMES, fixture, loaded
from onnx import helper, numpy_helper

from gopt import api
from gopt.ir.load import load
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType
from gopt.offline.text import attribute_text, canonical_text, number_text, ref, tensor_text

GOLDEN = Path(__file__).parent / "golden"


def test_golden() -> None:
    source = api.load(FIXTURES / "mlp_sgd.onnx")
    text = canonical_text(source.training.graph, source.training)
    path = GOLDEN / "mlp_sgd.txt"
    if os.environ.get("GOPT_UPDATE_GOLDENS") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_every_fixture_has_one_line_per_node(name: str) -> None:
    graph = load(FIXTURES / f"{name}.onnx")
    text = canonical_text(graph)
    body = text.split("\nnodes\n")[1].split("\n\noutputs\n")[0].splitlines()
    assert len(body) == len(graph.nodes)
    assert canonical_text(graph) == text


def test_what_an_exporter_says_about_itself_is_left_out(tmp_path: Path) -> None:
    model = fixture("mlp_adamw")
    before = canonical_text(loaded(model, tmp_path))
    model.producer_name, model.producer_version, model.doc_string = "someone", "9", "words"
    model.graph.doc_string, model.graph.name = "words", "another"
    helper.set_model_props(model, {"key": "value"})
    for place, node in enumerate(model.graph.node):
        node.name, node.doc_string = f"n{place}", "words"
        entry = node.metadata_props.add()
        entry.key, entry.value = "pkg.torch.onnx.stack_trace", "words"
    for tensor in model.graph.initializer:  # typed fields in place of raw bytes
        if tensor.data_type == onnx.TensorProto.FLOAT:
            value = numpy_helper.to_array(tensor)
            tensor.ClearField("raw_data")
            tensor.float_data.extend(value.ravel().tolist())
    initializers = list(model.graph.initializer)
    del model.graph.initializer[:]
    model.graph.initializer.extend(reversed(initializers))
    assert canonical_text(loaded(model, tmp_path)) == before


def test_values_inside_and_in_external_data_read_alike() -> None:
    inside, outside = (load(FIXTURES / f"{name}.onnx") for name in ("mlp_adamw", "mlp_adamw_external"))
    assert canonical_text(inside) == canonical_text(outside)


def test_control_flow_and_functions_are_written_out(tmp_path: Path) -> None:
    body = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["inner"])], "body", [], [helper.make_tensor_value_info("inner", 1, [2])]
    )
    node = helper.make_node("If", ["flag"], ["y"], then_branch=body, else_branch=body)
    graph = helper.make_graph(
        [node], "g",
        [helper.make_tensor_value_info("x", 1, [2]), helper.make_tensor_value_info("flag", 9, [])],
        [helper.make_tensor_value_info("y", 1, [2])],
    )  # fmt: skip
    text = canonical_text(loaded(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), tmp_path))
    branch = "() -> (%inner) {%inner = Neg(%x)}"
    assert f"  %y = If(%flag) {{else_branch={branch}, then_branch={branch}}} : float32[2]\n" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "1.0"), (1e-6, "1.0e-6"), (0.1, "0.1"), (3, "3"), ("a\nb", '"a\\nb"'), ([1, 2], "[1, 2]"), ([], "[]"),
     (float("inf"), "inf"), (float("nan"), "nan"), (-0.0, "-0.0"), ([0.5], "[0.5]"), (1e30, "1.0e+30")],
)  # fmt: skip
def test_attribute_text(value: object, text: str) -> None:
    assert attribute_text(value) == text


def test_odd_names_are_quoted() -> None:
    assert [ref("a.b/c:0"), ref("a b"), ref(""), ref('q"')] == ["%a.b/c:0", '%"a b"', "_", '%"q\\""']


def test_small_tensors_show_their_elements() -> None:
    def text(array: np.ndarray, dtype: str) -> str:
        return tensor_text(Tensor(TensorType(dtype, array.shape), array=array))

    assert text(np.array([True, False]), "bool") == "bool[2] [true, false]"
    assert text(np.array(7, np.int64), "int64") == "int64[] 7"
    assert text(np.zeros((0,), np.float32), "float32") == "float32[0] []"
    assert text(np.zeros(9, np.float32), "float32").startswith("float32[9] #")
    assert number_text(np.float16(0.1)) == "0.1"
