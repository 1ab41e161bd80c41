"""Graphs in float64: every operator that the runtime has no such kernel for agrees with its float32 kernel."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import run_graph
from onnx import helper

from gopt.errors import UnsupportedError
from gopt.ir.graph import Graph
from gopt.ir.load import load
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType
from gopt.runtime.fallback_kernels import FALLBACK_KERNELS
from gopt.runtime.float64 import Float64Graph
from gopt.runtime.proto import as_node
from gopt.runtime.reference_eval import evaluate
from gopt.runtime.session import SessionCache
from gopt.runtime.widen import widened

IMAGE = (2, 4, 7, 6)
COMMON = [
    ("Conv", [IMAGE, (6, 4, 3, 2)], {}),
    ("Conv", [IMAGE, (6, 2, 3, 3), (6,)], {"group": 2, "pads": [1, 0, 2, 1], "strides": [2, 1]}),
    ("Conv", [IMAGE, (8, 1, 2, 2)], {"group": 4, "dilations": [2, 3]}),
    ("Conv", [IMAGE, (3, 4, 3, 3)], {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ("Conv", [IMAGE, (3, 4, 4, 4)], {"auto_pad": "SAME_LOWER"}),
    ("Conv", [(2, 3, 9), (5, 3, 3)], {"pads": [1, 1]}),
    ("Conv", [(1, 2, 4, 5, 3), (4, 1, 2, 2, 2)], {"group": 2}),
    ("ConvTranspose", [IMAGE, (4, 3, 3, 2)], {}),
    ("ConvTranspose", [IMAGE, (4, 3, 3, 3), (6,)], {"group": 2, "strides": [2, 3], "pads": [1, 1, 0, 2]}),
    ("ConvTranspose", [IMAGE, (4, 2, 3, 3)], {"strides": [2, 2], "output_padding": [1, 1], "dilations": [1, 2]}),
    ("ConvTranspose", [IMAGE, (4, 2, 1, 1)], {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("ConvTranspose", [IMAGE, (4, 2, 3, 3)], {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ("AveragePool", [IMAGE], {"kernel_shape": [3, 2], "strides": [2, 2]}),
    ("AveragePool", [IMAGE], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}),
    ("AveragePool", [IMAGE], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}),
    ("AveragePool", [IMAGE], {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}),
    ("AveragePool", [IMAGE], {"kernel_shape": [3, 2], "strides": [2, 3], "ceil_mode": 1, "count_include_pad": 1,
                              "pads": [1, 1, 1, 1]}),
    ("LpPool", [IMAGE], {"kernel_shape": [2, 2], "p": 3}),
    ("GlobalAveragePool", [IMAGE], {}),
    ("GlobalMaxPool", [IMAGE], {}),
    ("InstanceNormalization", [IMAGE, (4,), (4,)], {"epsilon": 1e-3}),
    ("LayerNormalization", [IMAGE, (7, 6), (7, 6)], {"axis": 2, "epsilon": 1e-3}),
    ("MeanVarianceNormalization", [IMAGE], {}),
    ("PRelu", [IMAGE, (4, 1, 1)], {}),
    ("Mean", [IMAGE, (6,), (1,)], {}),
    ("NonZero", [(3, 4)], {}),
    ("Gelu", [IMAGE], {}),
    ("Elu", [IMAGE], {"alpha": 0.3}), ("Celu", [IMAGE], {"alpha": 0.3}), ("Selu", [IMAGE], {}),
    ("LeakyRelu", [IMAGE], {"alpha": 0.3}), ("HardSigmoid", [IMAGE], {}), ("ThresholdedRelu", [IMAGE], {"alpha": 0.4}),
    *((name, [IMAGE], {}) for name in (
        "Asinh", "Atan", "Cosh", "Sinh", "Tan", "Erf", "HardSwish", "Mish", "Softplus", "Softsign",
    )),
    *((name, [(3, 4)], {"positive": True}) for name in ("Acos", "Asin", "Atanh")),
    ("Acosh", [(3, 4)], {"above": True}),
]  # fmt: skip


def graph_of(op: str, shapes: list[tuple[int, ...]], attributes: dict[str, object], opset: int = 22) -> Graph:
    names = [f"x{place}" for place in range(len(shapes))]
    given = {name: value for name, value in attributes.items() if name not in ("positive", "above")}
    node = as_node(helper.make_node(op, names, ["y"], **given))
    inputs = {name: TensorType("float32", shape) for name, shape in zip(names, shapes)}
    header = onnx.ModelProto(ir_version=10, opset_import=[helper.make_opsetid("", opset)])
    made = "int64" if op == "NonZero" else "float32"
    rank = None if op == "NonZero" else (None,) * len(shapes[0])
    types = {**inputs, "y": TensorType(made, rank)}
    return Graph("one", [node], inputs, {"y": types["y"]}, {}, types, header)


def values(shapes, attributes):
    generator = np.random.default_rng(0)
    drawn = [generator.standard_normal(shape) for shape in shapes]
    if "positive" in attributes:
        drawn = [np.tanh(each) for each in drawn]
    if "above" in attributes:
        drawn = [1 + np.abs(each) for each in drawn]
    return {f"x{place}": each for place, each in enumerate(drawn)}


@pytest.mark.parametrize(("op", "shapes", "attributes"), COMMON, ids=lambda each: each if isinstance(each, str) else "")
def test_float64_agrees_with_the_kernel_of_float32(op, shapes, attributes):
    graph = graph_of(op, shapes, attributes)
    given = values(shapes, attributes)
    runnable = Float64Graph(widened(graph, "float64"), SessionCache())
    # Of that one the runtime has a kernel, but not with all that may be asked of it.
    assert runnable.substitutes == (op != "LayerNormalization"), "the runtime has a kernel: no need for ours"
    ours = evaluate(widened(graph, "float64"), given)["y"]
    theirs = run_graph(graph, {name: value.astype(np.float32) for name, value in given.items()})["y"]
    assert ours.dtype == (np.int64 if op == "NonZero" else np.float64)
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=3e-5, atol=3e-5)
    if op != "NonZero":
        assert np.abs(ours - theirs).max() > 0 or op in ("GlobalMaxPool", "ThresholdedRelu"), "float32 all along"
    np.testing.assert_allclose(runnable.run(given)["y"], ours, rtol=1e-13)


def test_every_substitute_is_held_against_a_kernel():
    elsewhere = {"OneHot", "RMSNormalization", "Resize", "Swish", "Upsample", "RNN", "GRU", "LSTM"}
    assert {op for op, _, _ in COMMON} | elsewhere == set(FALLBACK_KERNELS)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("place", ["half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"])
@pytest.mark.parametrize("by", ["scales", "sizes"])
def test_resize(by, place, mode):
    last = (np.array([1, 1, 2.5, 0.6], np.float32), "float32") if by == "scales" else (np.array([2, 4, 9, 3]), "int64")
    names = ["x", "", "how"] if by == "scales" else ["x", "", "", "how"]
    node = as_node(helper.make_node("Resize", names, ["y"], mode=mode, coordinate_transformation_mode=place))
    header = onnx.ModelProto(ir_version=10, opset_import=[helper.make_opsetid("", 19)])
    inputs = {"x": TensorType("float32", IMAGE)}
    types = {**inputs, "y": TensorType("float32", (None,) * 4), "how": TensorType(last[1], (4,))}
    graph = Graph("one", [node], inputs, {"y": types["y"]}, {"how": Tensor(types["how"], array=last[0])}, types, header)
    x = np.random.default_rng(0).standard_normal(IMAGE)
    ours = Float64Graph(widened(graph, "float64"), SessionCache()).run({"x": x})["y"]
    theirs = run_graph(graph, {"x": x.astype(np.float32)})["y"]
    assert ours.dtype == np.float64
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_one_hot(axis):
    node = as_node(helper.make_node("OneHot", ["i", "depth", "values"], ["y"], axis=axis))
    header = onnx.ModelProto(ir_version=10, opset_import=[helper.make_opsetid("", 20)])
    inputs = {
        "i": TensorType("int64", (2, 3)), "depth": TensorType("int64", (1,)), "values": TensorType("float32", (2,)),
    }  # fmt: skip
    graph = Graph(
        "one", [node], inputs, {"y": TensorType("float32", (None,) * 3)}, {},
        {**inputs, "y": TensorType("float32", (None,) * 3)}, header,
    )  # fmt: skip
    given = {"i": np.array([[0, 3, -1], [4, 2, -5]]), "depth": np.array([4]), "values": np.array([0.5, 2.0])}
    ours = Float64Graph(widened(graph, "float64"), SessionCache()).run(given)["y"]
    theirs = run_graph(graph, {**given, "values": given["values"].astype(np.float32)})["y"]
    np.testing.assert_array_equal(ours, theirs)


def loaded(text: str, folder: Path) -> Graph:
    path = folder / "graph.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    return load(path, own=True)


def test_what_has_a_kernel_stays_in_its_session_around_what_has_none(tmp_path):
    graph = loaded(
        """<ir_version: 9, opset_import: ["" : 20]>
        step (float[2,3,5,5] x, float[4,3,3,3] w, float[4] b) => (float loss)
        { c = Conv(x, w, b)  e = Exp(c)  r = Erf(e)  s = Sqrt(r)  loss = ReduceMean<keepdims=0>(s) }""",
        tmp_path,
    )
    given = {"x": np.ones((2, 3, 5, 5)), "w": np.full((4, 3, 3, 3), 0.01), "b": np.arange(4.0)}
    runnable = Float64Graph(widened(graph, "float64"), SessionCache())
    assert runnable.substitutes == 2
    found = runnable.run(given)["loss"]
    wanted = np.mean([math.sqrt(math.erf(math.exp(0.27 + place))) for place in range(4)])
    assert abs(found - wanted) < 1e-14


@pytest.mark.parametrize("flag", [True, False])
def test_bodies_of_control_flow_are_widened(flag, tmp_path):
    graph = loaded(
        """<ir_version: 9, opset_import: ["" : 20]>
        step (bool flag, float[2,3,5,5] x, float[4,3,3,3] w) => (float[2,4,3,3] y)
        { y = If (flag) <
            then_branch = yes () => (float[2,4,3,3] a) { a = Conv(x, w) },
            else_branch = no () => (float[2,4,3,3] b)
            { c = Conv(x, w)  two = Constant<value_float = 2.0>()  b = Mul(c, two) }> }""",
        tmp_path,
    )
    given = {"flag": np.array(flag), "x": np.full((2, 3, 5, 5), 1 / 3), "w": np.ones((4, 3, 3, 3))}
    found = Float64Graph(widened(graph, "float64"), SessionCache()).run(given)["y"]
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, 9.0 if flag else 18.0, rtol=1e-15)


def test_functions_of_the_model_are_widened(tmp_path):
    graph = loaded(
        """<ir_version: 9, opset_import: ["" : 20, "own" : 1]>
        step (float[3] x) => (float[3] y) { y = own.third(x) }
        <domain: "own", opset_import: ["" : 20]>
        third (x) => (y) { three = Constant<value_float = 3.0>()  y = Div(x, three) }""",
        tmp_path,
    )
    found = Float64Graph(widened(graph, "float64"), SessionCache()).run({"x": np.ones(3)})["y"]
    assert (found == 1 / 3).all()


def test_what_nothing_runs_is_refused_by_name(tmp_path):
    graph = graph_of("Conv", [IMAGE, (6, 4, 3, 2)], {})
    graph.nodes[0].op_type = "NoSuchOperator"
    proto = graph.nodes[0].to_proto()
    proto.op_type = "NoSuchOperator"
    graph.nodes[0].proto = proto
    with pytest.raises(UnsupportedError, match="NoSuchOperator"):
        Float64Graph(graph, SessionCache())


@pytest.mark.parametrize("domain", ["", "ai.onnx"])
def test_the_standard_may_be_imported_by_either_name(domain):
    graph = graph_of("Neg", [(2,)], {})
    graph.header.opset_import[0].domain = domain
    assert evaluate(graph, {"x0": np.array([1.0, -2.0], np.float32)})["y"].tolist() == [-1, 2]
