"""Small constants put together from constants are known to inference."""

import numpy as np
import onnx
import pytest
from helpers import Builder

from gopt import limits
from gopt.errors import InputError
from gopt.ir.constant_folding import Constants, as_folded, fold_small
from gopt.ir.graph import Graph, Node
from gopt.ir.load import load
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType


def made(b: Builder, tmp_path):
    graph = load(b.save(tmp_path / "g.onnx"))
    return graph, fold_small(graph.nodes, graph.initializers, graph.inputs)


def test_axes_that_are_reshaped_and_cast_give_a_rank(tmp_path):
    b = Builder()
    b.input("x", (3, 5))
    axis = b.op("Constant", value_int=1)
    flat = b.op("Cast", b.op("Reshape", axis, b.op("Constant", value_ints=[-1])), to=7)
    b.output("out", b.op("ReduceL2", "x", flat, keepdims=1), ("a", "b"))
    graph, folded = made(b, tmp_path)
    assert folded[flat].tolist() == [1]
    assert graph.types["out"].shape == (3, 1)


def test_every_rule_says_what_the_operator_does(tmp_path):
    b = Builder()
    b.input("x", (2,), "int64")
    two = b.const([3, 4], "int64")
    column = b.op("Unsqueeze", two, b.const([1], "int64"))
    joined = b.op("Concat", column, column, axis=1)
    back = b.op("Squeeze", column, b.const([1], "int64"))
    b.output("out", b.op("Add", back, "x"), (2,), "int64")
    b.output("other", b.op("Identity", joined), (2, 2), "int64")
    _, folded = made(b, tmp_path)
    assert folded[joined].tolist() == [[3, 3], [4, 4]]
    assert folded[back].tolist() == [3, 4]


def test_inputs_and_large_values_are_left_alone(tmp_path):
    b = Builder()
    b.state("given", np.zeros(2, np.int64))
    long = b.const(np.zeros(100), "int64")
    b.output("one", b.op("Identity", "given"), (2,), "int64")
    b.output("two", b.op("Identity", long), (100,), "int64")
    assert made(b, tmp_path)[1] == {}


def test_a_malformed_node_is_refused(tmp_path):
    b = Builder()
    b.input("x", (2,), "int64")
    bad = b.op("Reshape", b.const([1, 2, 3], "int64"), b.const([2, 2], "int64"))
    b.output("out", b.op("Add", bad, "x"), (2,), "int64")
    with pytest.raises(InputError, match=r"'?n0|n1"):
        made(b, tmp_path)


def test_sizes_and_axes_are_computed(tmp_path):
    b = Builder()
    b.input("x", (3, 5))
    one, three = b.const([1], "int64"), b.const([3], "int64")
    filled = b.op("ConstantOfShape", one, value=onnx.numpy_helper.from_array(np.array([2], np.int64)))
    made_of = {
        "range": b.op("Range", b.const(0, "int64"), b.const(6, "int64"), b.const(2, "int64")),
        "sum": b.op("Add", filled, three),
        "difference": b.op("Sub", filled, three),
        "product": b.op("Mul", filled, three),
        "negative": b.op("Neg", three),
        "picked": b.op("Gather", b.const([7, 8, 9], "int64"), filled, axis=0),
    }
    axis = b.op("Sub", filled, one)
    b.output("out", b.op("ReduceL2", "x", axis, keepdims=1), ("a", "b"))
    for name, value in made_of.items():
        b.output(name, value, ("n",), "int64")
    graph, folded = made(b, tmp_path)
    assert graph.types["out"].shape == (3, 1)
    found = {name: folded[name].tolist() for name in made_of}
    assert found == {
        "range": [0, 2, 4],
        "sum": [5],
        "difference": [-1],
        "product": [6],
        "negative": [-3],
        "picked": [9],
    }


def test_what_would_be_large_is_not_made(tmp_path):
    b = Builder()
    sizes = b.const([1 << 40], "int64")
    filled = b.op("ConstantOfShape", sizes, value=onnx.numpy_helper.from_array(np.array([2], np.int64)))
    numbers = b.op("Range", b.const(0, "int64"), b.const(1 << 40, "int64"), b.const(1, "int64"))
    b.output("one", filled, ("n",), "int64")
    b.output("two", numbers, ("m",), "int64")
    assert made(b, tmp_path)[1] == {}


def test_a_tile_without_elements_is_not_made_by_way_of_a_large_one():
    """NumPy repeats along one dimension after the other: memory ran out for a result of nothing."""
    node, operands = Node("Tile", ["x", "n"], ["y"]), [np.zeros((1, 1), np.int64), np.array([1 << 44, 0])]
    assert as_folded(node, operands) is None


def constants(b: Builder, tmp_path) -> Constants:
    graph = load(b.save(tmp_path / "g.onnx"))
    return Constants(graph, graph.producers())


def test_factors_and_shapes_that_nodes_make_are_constants(tmp_path):
    b = Builder()
    x = b.input("x", (3, 5))
    sizes = b.op("Concat", b.op("Shape", x, start=1), b.op("Constant", value_ints=[2]), axis=0)
    factor = b.op("Div", b.op("CastLike", b.op("Constant", value_int=1), x), b.op("Cast", b.const(4, "int64"), to=1))
    grown = b.op("Expand", factor, sizes)
    b.output("out", b.op("ReduceSum", b.op("Mul", b.op("ReduceMean", x, keepdims=0), grown), keepdims=0), ())
    found = constants(b, tmp_path)
    assert found.value(sizes).tolist() == [5, 2]
    assert found.number(factor) == 0.25
    assert found.value(grown).shape == (5, 2)
    assert found.value("x") is None and found.number("out") is None


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"value": onnx.numpy_helper.from_array(np.array([1, 2]))}, np.array([1, 2])),
        ({"value_ints": [1, 2]}, np.array([1, 2])),
        ({"value_int": 3}, np.array(3)),
        ({"value_float": 0.5}, np.array(0.5, np.float32)),
        ({"value_strings": ["a"]}, None),
    ],
)
def test_a_constant_is_read_in_each_of_its_forms(attributes, expected):
    graph = Graph("g", [Node("Constant", [], ["c"], attributes=attributes)], {}, {}, {}, {}, onnx.ModelProto())
    found = Constants(graph).value("c")
    assert (found is None) == (expected is None)
    if expected is not None:
        assert found.dtype == expected.dtype
        assert (found == expected).all()


@pytest.mark.parametrize(
    ("operands", "attributes", "expected"),
    [
        (["a"], {}, [0, -1]), ([], {"axes": [2]}, [2]), (["none"], {}, []), ([], {"axes": []}, []), ([], {}, None),
        ([""], {}, None), (["x"], {}, None),
    ],
)  # fmt: skip
def test_axes_are_named_by_an_operand_or_an_attribute_and_an_empty_list_is_one(operands, attributes, expected):
    stored = {name: Tensor(TensorType("int64", (len(axes),)), array=np.array(axes, np.int64))
              for name, axes in (("a", [0, -1]), ("none", []))}  # fmt: skip
    node = Node("ReduceSum", ["x", *operands], ["y"], attributes=attributes)
    types = {"x": TensorType("float32", (2, 3)), **{name: each.type for name, each in stored.items()}}
    graph = Graph("g", [node], {"x": types["x"]}, {}, stored, types, onnx.ModelProto())
    assert Constants(graph).axes(node) == expected


@pytest.mark.parametrize("shape", [(1 << 20, 1 << 20), (limits.FOLDED_ELEMENTS + 1,)])
def test_a_large_constant_is_not_made(shape, tmp_path):
    b = Builder()
    b.input("x", (2,))
    sizes = b.op("Identity", b.const(list(shape), "int64"))
    grown = b.op("Expand", b.const(1.0), sizes)
    filled = b.op("ConstantOfShape", sizes)
    total = b.op("Add", b.op("ReduceMax", b.op("Add", grown, filled), keepdims=0), "x")
    b.output("out", total, (2,))
    found = constants(b, tmp_path)
    assert found.value(grown) is None and found.value(filled) is None and found.number(total) is None


@pytest.mark.parametrize(
    ("left", "right", "quotient"),
    [([7, -7], [2, 2], [3, -3]), ([1, 1], [0, 2], None),
     ([-(2**63), -(2**63)], [2, -3], [-(2**62), 2**63 // 3])],
)  # fmt: skip
def test_whole_numbers_are_divided_towards_zero(left, right, quotient, tmp_path):
    b = Builder()
    b.input("x", (2,), "int64")
    made = b.op("Div", b.const(left, "int64"), b.const(right, "int64"))
    b.output("out", b.op("Add", made, "x"), (2,), "int64")
    value = constants(b, tmp_path).value(made)
    assert (None if value is None else value.tolist()) == quotient


def test_absent_operands_keep_the_places_of_others(tmp_path):
    """A Clip without a lower bound took the upper one for it, and a Slice without axes its steps for axes."""
    b = Builder()
    b.input("x", (2,))
    value = b.const([1.0, 5.0])
    clipped = b.op("Clip", b.op("Neg", b.op("Neg", value)), "", b.const(3.0))
    places = [b.const(each, "int64") for each in ([0], [4], [2])]
    sliced = b.op("Slice", b.const([1, 2, 3, 4], "int64"), *places[:2], "", places[2])
    ranged = b.op("Range", b.const(0.5), b.const(2.6), b.const(1.0))
    b.output("out", b.op("Add", "x", clipped), (2,))
    for name in (sliced, ranged):
        b.output(f"{name}.out", b.op("Identity", name), (None,), "int64" if name == sliced else "float32")
    graph = load(b.save(tmp_path / "g.onnx"))
    constants = Constants(graph)
    assert constants.value(clipped).tolist() == [1.0, 3.0]
    assert constants.value(sliced).tolist() == [1, 3]
    assert constants.value(ranged).tolist() == [0.5, 1.5, 2.5]
    assert fold_small(graph.nodes, graph.initializers, graph.inputs)[sliced].tolist() == [1, 3]


@pytest.mark.parametrize(
    ("op_type", "operands", "multiple"),
    [
        ("Mul", "x2", ("x", 2)), ("Mul", "2x", ("x", 2)), ("Div", "x2", ("x", 0.5)), ("Div", "2x", None),
        ("Div", "x0", None), ("Mul", "x0", ("x", 0)), ("Mul", "xx", None), ("Neg", "x", ("x", -1)),
        ("Identity", "x", ("x", 1)), ("Abs", "x", None), ("Add", "x2", None),
    ],
)  # fmt: skip
def test_a_known_multiple_of_an_operand(op_type, operands, multiple, tmp_path):
    b = Builder()
    b.input("x", (2,))
    names = {"x": "x", "2": b.const([2.0]), "0": b.const([0.0])}
    b.output("out", b.op(op_type, *(names[name] for name in operands)), (2,))
    graph = load(b.save(tmp_path / "g.onnx"))
    assert Constants(graph).multiple(graph.nodes[-1]) == multiple
