"""Two models of two batch sizes become one: every form of a constant, run at a third size, and what is refused."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from gopt.errors import UnsupportedError
from gopt.frontends.pytorch.batch_sizes import join_sizes, pairs_of_sizes
from gopt.ir.load import graph_of
from gopt.runtime.reference_eval import evaluate

SIZES = (11, 13)
FORMS = {
    "rows of a Reshape": ("Reshape", lambda b: np.array([b * 2, 3])),
    "two dimensions of a Reshape": ("Reshape", lambda b: np.array([b, 1, 6, 1, b * 0 + 1])),
    "a Reshape that infers another dimension": ("Reshape", lambda b: np.array([b, -1])),
    "a shape": ("Expand", lambda b: np.array([2, b, 6])),
    "a count with an offset": ("Expand", lambda b: np.array([b - 3 - (b - 4), b, 6])),
    "one over a count": ("Mul", lambda b: np.array(1 / (6 * b), np.float32)),
    "a count": ("Mul", lambda b: np.array(0.3 * b, np.float32)),
    "the unbiased variance": ("Mul", lambda b: np.array(6 * b / (6 * b - 1), np.float32)),
    "one over each of several": ("Mul", lambda b: np.array([1, 2, 3, 4, 5, 6], np.float32) / b),
    "equal rows": ("Add", lambda b: np.tile(np.arange(6, dtype=np.float32), (b, 1))),
    "one number all over": ("Add", lambda b: np.full((b, 6), 2.5, np.float32)),
    "numbers of rows": ("Gather", lambda b: np.arange(b)),
    "numbers of rows from another first": ("Gather", lambda b: np.arange(b).astype(np.int32).reshape(b, 1)),
    "places of rows and columns": (
        "GatherND",
        lambda b: np.stack(np.broadcast_arrays(np.arange(b)[:, None], np.arange(4)), -1),
    ),
    "pairs of a row and a column": ("GatherND", lambda b: np.stack(np.meshgrid(range(b), range(4), indexing="ij"), -1)),
    "rows along the second axis": ("Gather", lambda b: np.stack([np.arange(b)] * 2)),
    "the same at any size": ("Mul", lambda b: np.array(2.0, np.float32)),
}


def model_of(form: str, size: int, constant_node: bool = False) -> ModelProto:
    op, value = FORMS[form]
    array = value(size)
    held = numpy_helper.from_array(array, f"constant_of_{size}")
    nodes = [helper.make_node(op, ["x", held.name], ["y"], "reader"), helper.make_node("Neg", ["y"], ["z"])]
    if constant_node:
        nodes.insert(0, helper.make_node("Constant", [], [held.name], value=held))
    made = {
        "Reshape": lambda x: x.reshape(array), "Expand": lambda x: np.broadcast_to(x, array),
        "Gather": lambda x: x[array], "GatherND": lambda x: x[array[..., 0], array[..., 1]],
    }.get(op, lambda x: x)  # fmt: skip
    shape = made(np.zeros((size, 6))).shape
    graph = helper.make_graph(
        nodes, "step", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [size, 6])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, shape)], [] if constant_node else [held],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize("as_node", [False, True], ids=["initializer", "Constant"])
@pytest.mark.parametrize("form", FORMS)
def test_a_constant_is_a_function_of_the_size(form: str, as_node: bool):
    joined = join_sizes((model_of(form, SIZES[0], as_node), model_of(form, SIZES[1], as_node)), SIZES)
    onnx.checker.check_model(joined, full_check=True)
    assert joined.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    for size in (2, 7, 40):
        x = np.random.default_rng(size).standard_normal((size, 6)).astype(np.float32)
        expected = evaluate(graph_of(model_of(form, size)), {"x": x})["z"]
        found = evaluate(graph_of(joined), {"x": x})["z"]
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=5e-7)


def test_equal_constants_of_one_size_may_differ_at_another():
    """At 11 rows the exporter has one constant for a count of rows and an 11 of the code."""

    def model(size: int) -> ModelProto:
        own, rows = np.array([11, 6]), np.array([size, 6])
        names = ["own", "own" if size == 11 else "rows"]
        stored = {name: numpy_helper.from_array(value, name) for name, value in zip(names, (own, rows))}
        nodes = [
            helper.make_node("ConstantOfShape", [names[0]], ["first"]),
            helper.make_node("Expand", ["x", names[1]], ["second"]),
            helper.make_node("ReduceSum", ["second"], ["sum"], keepdims=1),
            helper.make_node("Add", ["first", "sum"], ["z"]),
        ]
        graph = helper.make_graph(
            nodes, "step", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [size, 6])],
            [helper.make_tensor_value_info("z", TensorProto.FLOAT, [11, 6])], list(stored.values()),
        )  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)

    joined = join_sizes((model(11), model(13)), SIZES)
    found = evaluate(graph_of(joined), {"x": np.ones((4, 6), np.float32)})["z"]
    np.testing.assert_array_equal(found, np.full((11, 6), 24, np.float32))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda b: np.array(float(b * b), np.float32), "not a known function of the size"),
        (lambda b: np.array(np.sqrt(b), np.float32), "not a known function of the size"),
        (lambda b: np.tril(np.ones((b, 6), np.float32)), "not a known function of the size"),
        (lambda b: np.array([1.0 / b, b], np.float32), "not a known function of the size"),
        (lambda b: np.arange(b)[::-1].reshape(b, 1), "not a known function of the size"),
    ],
)
def test_another_function_is_refused_with_its_reader(value, words, monkeypatch):
    monkeypatch.setitem(FORMS, "other", ("Mul", value))
    with pytest.raises(UnsupportedError, match=words) as caught:
        join_sizes((model_of("other", SIZES[0]), model_of("other", SIZES[1])), SIZES)
    assert "Mul 'reader'" in caught.value.message and caught.value.hints


def test_other_nodes_and_attributes_are_refused():
    one, two = model_of("a shape", 11), model_of("a shape", 13)
    two.graph.node[1].op_type = "Abs"
    with pytest.raises(UnsupportedError, match="Neg '' is Abs '' at another size"):
        join_sizes((one, two), SIZES)
    two = model_of("a shape", 13)
    two.graph.node[1].attribute.append(helper.make_attribute("axis", 13))
    with pytest.raises(UnsupportedError, match="an attribute of Neg"):
        join_sizes((one, two), SIZES)
    del two.graph.node[1]
    with pytest.raises(UnsupportedError, match="2 nodes at one size of the batch and 1 at another"):
        join_sizes((one, two), SIZES)
    with pytest.raises(UnsupportedError, match="no input has the batch as a dimension"):
        join_sizes((one, one), SIZES)


def test_sizes_are_primes_that_divide_no_dimension():
    assert list(pairs_of_sizes([1, 2, 8, 768])) == [(11, 13), (17, 19), (23, 29)]
    assert next(pairs_of_sizes([0, 22, 26, 17 * 19])) == (23, 29)
