"""Halves on the CPU: every operator rounds once, moves stay as they are."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from helpers import run_graph
from onnx import TensorProto, helper, numpy_helper
from runtime_graphs import FIXTURES, alone, comm, make

from gopt.errors import UnsupportedError
from gopt.ir.graph import Graph, Node
from gopt.ir.load import load
from gopt.ir.types import LOW_PRECISION, TensorType
from gopt.runtime.emulate_half import emulate_half

op = helper.make_node
NUMPY = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
CODE = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


def ops(graph: Graph) -> list[str]:
    return [node.op_type for node in graph.nodes]


def run(graph: Graph, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    return alone(graph).run(feeds)


@pytest.mark.parametrize("dtype", sorted(LOW_PRECISION))
def test_2048_plus_1_is_2048_wherever_the_graph_is_cut(tmp_path, dtype):
    kind = (dtype, [2])
    feeds = {"a": np.full(2, 2048, NUMPY[dtype]), "b": np.ones(2, NUMPY[dtype])}
    whole = make(
        tmp_path, [op("Add", ["a", "b"], ["c"]), op("Transpose", ["c"], ["t"]), op("Sub", ["t", "a"], ["d"])],
        {"a": kind, "b": kind}, {"d": kind},
    )  # fmt: skip
    partition = make(
        tmp_path, [op("Add", ["a", "b"], ["c"]), comm("AllReduce", ["c"], ["t"]), op("Sub", ["t", "a"], ["d"])],
        {"a": kind, "b": kind}, {"d": kind}, values={"t": kind},
    )  # fmt: skip
    assert not run(whole, **feeds)["d"].any()
    assert not alone(partition).run(feeds, lambda index, node, inputs: inputs)["d"].any()


def test_a_graph_without_halves_is_given_back(tmp_path):
    kind = ("float32", [2])
    graph = make(tmp_path, [op("Relu", ["x"], ["y"])], {"x": kind}, {"y": kind})
    assert emulate_half(graph) is graph


def test_moves_stay_and_operators_are_wrapped_once_per_value(tmp_path):
    kind = ("bfloat16", [2, 2])
    nodes = [
        op("Transpose", ["x"], ["t"]), op("Relu", ["t"], ["r"]), op("Mul", ["t", "t"], ["m"]),
        op("Concat", ["r", "m"], ["y"], axis=0),
    ]  # fmt: skip
    graph = emulate_half(make(tmp_path, nodes, {"x": kind}, {"y": ("bfloat16", [4, 2])}))
    assert ops(graph) == ["Transpose", "Cast", "Relu", "Cast", "Mul", "Cast", "Concat"]
    assert graph.types["r"].dtype == "bfloat16"
    assert graph.outputs["y"].dtype == "bfloat16"


@pytest.mark.parametrize("name", ["mlp_adamw_bf16", "cnn_mom_fp16", "gpt_adamw_clip_sched_fp16"])
def test_lowering_twice_changes_nothing(name):
    once = emulate_half(load(FIXTURES / f"{name}.onnx"))
    twice = emulate_half(once)
    assert [repr(node) for node in twice.nodes] == [repr(node) for node in once.nodes]


def test_the_graph_given_is_not_changed(tmp_path):
    kind = ("float16", [2])
    graph = make(tmp_path, [op("Relu", ["x"], ["y"])], {"x": kind}, {"y": kind})
    emulate_half(graph)
    assert ops(graph) == ["Relu"]
    assert set(graph.types) == {"x", "y"}


def test_absent_optional_inputs_stay_absent(tmp_path):
    kind = ("bfloat16", [2])
    graph = make(tmp_path, [op("Clip", ["x", "", "high"], ["y"])], {"x": kind, "high": ("bfloat16", [])}, {"y": kind})
    assert emulate_half(graph).nodes[2].inputs == ["gopt.lower.wide.x", "", "gopt.lower.wide.high"]
    found = run(graph, x=np.array([1, 3], NUMPY["bfloat16"]), high=np.array(2, NUMPY["bfloat16"]))["y"]
    assert found.tolist() == [1, 2]


@pytest.mark.parametrize("dtype", sorted(LOW_PRECISION))
def test_attributes_that_name_a_half(tmp_path, dtype):
    half = numpy_helper.from_array(np.array([1.5], NUMPY[dtype]))
    nodes = [
        op("ConstantOfShape", ["shape"], ["filled"], value=half),
        op("Constant", [], ["constant"], value=half),
        op("Cast", ["x"], ["cast"], to=CODE[dtype]),
        op("CastLike", ["x", "constant"], ["like"]),
    ]
    names = ["filled", "cast", "like"]
    if dtype == "float16":  # ONNX gives neither of them in bfloat16
        nodes.append(op("EyeLike", ["x"], ["eye"], dtype=CODE[dtype]))
        nodes.append(op("RandomUniformLike", ["x"], ["random"], dtype=CODE[dtype], seed=1.0))
        names += ["eye", "random"]
    square = (dtype, [2, 2])
    outputs = dict.fromkeys(names, square) | {"constant": (dtype, [1])}
    graph = make(tmp_path, nodes, {"x": ("float32", [2, 2])}, outputs, {"shape": np.array([2, 2])})
    found = run(graph, x=np.array([[1, 2], [3, 4.001]], np.float32))
    assert {array.dtype for array in found.values()} == {NUMPY[dtype]}
    assert found["filled"].tolist() == [[1.5, 1.5], [1.5, 1.5]]
    assert "eye" not in found or found["eye"].tolist() == [[1, 0], [0, 1]]
    assert found["constant"].tolist() == [1.5]
    assert found["cast"].tolist() == found["like"].tolist() == [[1, 2], [3, 4]]


def test_rounding_is_to_nearest_even_as_in_numpy(tmp_path):
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    for dtype in LOW_PRECISION:
        kind = (dtype, [1000])
        graph = make(tmp_path, [op("Mul", ["x", "x"], ["y"])], {"x": kind}, {"y": kind})
        x = values.astype(NUMPY[dtype])
        wide = x.astype(np.float32)
        assert run(graph, x=x)["y"].tobytes() == (wide * wide).astype(NUMPY[dtype]).tobytes()


def test_an_unknown_type_is_named():
    header = helper.make_model(helper.make_graph([], "g", [], []), opset_imports=[helper.make_opsetid("", 20)])
    half = TensorType("float16", (2,))
    nodes = [Node("Foo", ["x"], ["u"]), Node("Add", ["u", "x"], ["y"])]
    graph = Graph("g", nodes, {"x": half}, {"y": half}, {}, {"x": half, "y": half}, header)
    with pytest.raises(UnsupportedError, match=r"type of value 'u' is unknown"):
        emulate_half(graph)


def branch(name: str, operator: str, dtype: str):
    """x·captured, made twice so that something is rounded in between."""
    made = helper.make_tensor_value_info(f"{name}.out", CODE[dtype], [2])
    nodes = [op(operator, ["x", "b"], [f"{name}.mid"]), op("Sub", [f"{name}.mid", "x"], [f"{name}.out"])]
    return helper.make_graph(nodes, name, [], [made])


@pytest.mark.parametrize("dtype", sorted(LOW_PRECISION))
def test_bodies_of_control_flow_are_lowered(tmp_path, dtype):
    kind = (dtype, [2])
    nodes = [
        op("If", ["c"], ["i"], then_branch=branch("then", "Add", dtype), else_branch=branch("else", "Mul", dtype)),
        op("Mul", ["i", "x"], ["y"]),
    ]
    graph = make(tmp_path, nodes, {"c": ("bool", []), "x": kind, "b": kind}, {"i": kind, "y": kind})
    feeds = {"x": np.full(2, 2048, NUMPY[dtype]), "b": np.ones(2, NUMPY[dtype])}
    for condition in (True, False):
        assert run(graph, c=np.array(condition), **feeds)["i"].tolist() == [0, 0]
    once = emulate_half(graph)
    assert [n.to_proto() for n in emulate_half(once).nodes] == [n.to_proto() for n in once.nodes]


@pytest.mark.parametrize("dtype", sorted(LOW_PRECISION))
def test_functions_that_meet_a_half_are_expanded(tmp_path, dtype):
    function = helper.make_function(
        "user", "Lose", ["p", "q"], ["r"], [op("Add", ["p", "q"], ["s"]), op("Sub", ["s", "p"], ["r"])],
        [helper.make_opsetid("", 20)],
    )  # fmt: skip
    kind = (dtype, [2])
    nodes = [op("Lose", ["a", "b"], ["c"], domain="user"), op("Lose", ["a", "b"], ["d"], domain="user")]
    graph = make(
        tmp_path, nodes, {"a": kind, "b": kind}, {"c": kind, "d": kind},
        functions=[function], opsets=[helper.make_opsetid("user", 1)],
    )  # fmt: skip
    found = run(graph, a=np.full(2, 2048, NUMPY[dtype]), b=np.ones(2, NUMPY[dtype]))
    assert found["c"].tolist() == found["d"].tolist() == [0, 0]


def test_a_half_step_is_close_to_its_full_one():
    """A bf16 multi-layer step through the whole way: load, lower, run; against the same step in float32."""
    half, full = load(FIXTURES / "mlp_adamw_bf16.onnx"), load(FIXTURES / "mlp_adamw.onnx")
    rng = np.random.default_rng(3)
    batch = {}
    for name, type in full.inputs.items():
        if name not in full.initializers:
            shape = [size if isinstance(size, int) else 4 for size in type.shape or ()]
            whole = type.dtype.startswith("int")
            batch[name] = rng.integers(0, 2, shape) if whole else rng.normal(size=shape).astype(np.float32)
    shared = {name: value for name, value in batch.items() if name in half.inputs}
    loss = next(iter(full.outputs))
    one, other = run_graph(half, shared)[loss], run_graph(full, batch)[loss]
    assert 0 < abs(float(one) - float(other)) < 0.05
