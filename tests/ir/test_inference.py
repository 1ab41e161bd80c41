"""Types of values: stored, declared and inferred."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from model_files import refusal, save, small, value
from onnx import helper, numpy_helper
from operator_forms import forms

from gopt.errors import InputError
from gopt.ir.load import load
from gopt.ir.types import TensorType
from gopt.operators.table import OPERATORS


def test_large_values_take_no_part_in_inference_but_small_ones_do(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(np.zeros((600,), np.float32))),
        helper.make_node("Reshape", ["big", "shape"], ["r"]),
        helper.make_node("Add", ["r", "k"], ["y"]),
    ]
    stored = [
        numpy_helper.from_array(np.zeros((1200,), np.float32), "big"),
        numpy_helper.from_array(np.array([2, -1], np.int64), "shape"),
    ]
    model = small(nodes=nodes, initializer=stored, inputs=[], outputs=[value("y", ("a", "b"))])
    graph = load(save(tmp_path, model))
    assert graph.types["r"] == TensorType("float32", (2, 600))
    assert graph.types["k"] == TensorType("float32", (600,))


def test_an_operator_that_nobody_knows_is_no_refusal(tmp_path: Path) -> None:
    unknown = helper.make_node("Mystery", ["x"], ["y"], domain="nobody.knows")
    model = small(nodes=[unknown])
    refusal(load, save(tmp_path, model), InputError, "No opset import for domain 'nobody.knows'")
    model.opset_import.add(domain="nobody.knows", version=1)
    graph = load(save(tmp_path, model))
    assert graph.types["y"] == TensorType("float32", ("N", 4))


def test_a_declared_shape_in_numbers_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", lambda *_, **__: pytest.fail("not needed"))
    declared = [value("h", (2, 4)), value("s", (2, 4))]
    model = small(inputs=[value("x"), value("b", (4,))], outputs=[value("y", (2, 4))], value_info=declared)
    assert load(save(tmp_path, model)).types["h"] == TensorType("float32", (2, 4))


def test_a_shape_made_of_known_sizes_needs_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Following the data of a step by onnx-ad took 50 MB a layer, a dimension for each element of a norm's weight."""
    infer = onnx.shape_inference.infer_shapes

    def without_data(*given: object, data_prop: bool = False, **options: object) -> onnx.ModelProto:
        assert not data_prop
        return infer(*given, **options)

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", without_data)
    nodes = [
        helper.make_node("Relu", ["x"], ["h"]),
        helper.make_node("Shape", ["h"], ["sizes"], end=1),
        helper.make_node("Size", ["stored"], ["more"]),
        helper.make_node("Unsqueeze", ["more", "zero"], ["last"]),
        helper.make_node("Concat", ["sizes", "last"], ["shape"], axis=0),
        helper.make_node("ConstantOfShape", ["shape"], ["y"]),
    ]
    stored = [numpy_helper.from_array(np.ones(3, np.float32), "stored"), numpy_helper.from_array(np.array([0]), "zero")]
    borders = {"inputs": [value("x", (2, 4))], "outputs": [value("y", ("a", "b"))]}
    graph = load(save(tmp_path, small(nodes=nodes, initializer=stored, **borders)))
    assert graph.types["y"] == TensorType("float32", (2, 3))


def test_a_long_row_is_not_followed_element_by_element(tmp_path):
    """ONNX's data propagation makes a dimension of each element of a row: 24 GB for a flat parameter of 40 million."""
    nodes = [
        helper.make_node("Slice", ["x", "a", "b"], ["half"]),
        helper.make_node("Concat", ["half", "half"], ["again"], axis=0),
        helper.make_node("Identity", ["again"], ["y"]),
        helper.make_node("NonZero", ["y"], ["places"]),  # an open shape, for which data is followed
    ]
    bounds = [numpy_helper.from_array(np.array([at], np.int64), name) for name, at in (("a", 0), ("b", 2_000_000))]
    row = helper.make_tensor_value_info("x", 1, [4_000_000])
    graph = helper.make_graph(nodes, "g", [row], [helper.make_tensor_value_info("y", 1, [4_000_000])], bounds)
    (tmp_path / "m.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    code = (
        "import resource, sys\nfrom gopt.ir.load import load\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(*load(sys.argv[1]).types['half'].shape)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "m.onnx")], capture_output=True, text=True)
    shape, kilobytes = done.stdout.split()
    assert (int(shape), int(kilobytes) < 200_000) == (2_000_000, True), done


@pytest.mark.parametrize("op_type", sorted(each for each in OPERATORS if forms(each)))
def test_every_operator_that_has_a_record_is_typed(op_type: str, tmp_path: Path) -> None:
    """onnx itself infers nothing of a GroupNormalization: its result and all behind it had no type."""
    use = next((each for each in forms(op_type) if each.opset >= 20), forms(op_type)[0])
    names = [f"x{place}" if each is not None else "" for place, each in enumerate(use.inputs)]
    if op_type == "MeanVarianceNormalization":  # onnx's checker forgets that its axes have a default
        use = replace(use, attributes={"axes": [0, 2, 3]})
    first = helper.make_node(op_type, names, [f"y{place}" for place in range(use.results)], **use.attributes)
    stored = [numpy_helper.from_array(each, name) for name, each in zip(names, use.inputs) if each is not None]
    fed, held = stored[0], stored[1:]
    model = small(
        nodes=[first, helper.make_node("Shape", ["y0"], ["shape"])],
        initializer=held,
        inputs=[helper.make_tensor_value_info(fed.name, fed.data_type, list(fed.dims))],
        outputs=[helper.make_tensor_value_info("shape", onnx.TensorProto.INT64, ["rank"])],
    )
    model.opset_import[0].version = use.opset
    assert load(save(tmp_path, model)).type_of("y0").dtype != "undefined"
