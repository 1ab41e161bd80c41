"""The builder of lowerings: names, results that are left out, types of what it writes."""

from __future__ import annotations

import pytest
from onnx import helper

from gopt.errors import InputError, UnsupportedError
from gopt.importers.artifacts.lowering.builder import Builder
from gopt.ir.types import TensorType


def builder(opset=17, taken=("x", "y", "spare")):
    types = {"x": TensorType("float32", (2, 3)), "open": TensorType("float32", ("n", 3))}
    return Builder(opset, types, {}, {}, set(taken))


def node(*outputs, inputs=("x",)):
    return helper.make_node("Thing", inputs, outputs, "thing", domain="com.microsoft")


def two(b, x):
    return b.op("Neg", x), b.op("Exp", b.op("Abs", x))


def test_results_have_the_names_of_the_node():
    b = builder()
    made = b.lower(node("y", "z"), two, {})
    assert [(each.op_type, list(each.input), list(each.output)) for each in made] == [
        ("Neg", ["x"], ["y"]), ("Abs", ["x"], ["thing/Abs_1"]), ("Exp", ["thing/Abs_1"], ["z"]),
    ]  # fmt: skip
    assert b.dims("thing/Abs_1") == (2, 3) and b.dtype("z") == "float32"
    assert b.lower(node("v", "w"), two, {})[1].output[0] == "thing/Abs_1_", "names are used once"


def test_what_is_left_out_is_not_written():
    assert [each.op_type for each in builder().lower(node("", "z"), two, {})] == ["Abs", "Exp"]
    assert [each.op_type for each in builder().lower(node("y"), two, {})] == ["Neg"]


def test_a_result_that_is_an_input_goes_through_an_identity():
    made = builder().lower(node("y", "z"), lambda b, x: (x, x), {})
    assert [(each.op_type, list(each.input), list(each.output)) for each in made] == [
        ("Identity", ["x"], ["y"]), ("Identity", ["x"], ["z"]),
    ]  # fmt: skip


def test_a_node_with_other_operands_or_results_is_refused():
    with pytest.raises(InputError, match="Thing 'thing' has operands or attributes that do not fit"):
        builder().lower(node("y", inputs=("x", "x")), two, {})
    with pytest.raises(InputError, match="Thing 'thing' has 3 results, and 2 are known"):
        builder().lower(node("a", "b", "c"), two, {})


def test_sizes_that_are_needed_must_be_numbers():
    with pytest.raises(UnsupportedError, match=r"the shape of 'open' is float32\[n,3\], and its sizes are needed"):
        builder().lower(node("y", inputs=("open",)), lambda b, x: b.op("Reshape", x, b.array(b.dims(x))), {})
    with pytest.raises(UnsupportedError, match="the type of 'else' is unknown"):
        builder().lower(node("y", inputs=("else",)), lambda b, x: b.number_like(1, x), {})


def test_reductions_follow_the_operator_set():
    old = builder(17).lower(node("y"), lambda b, x: b.reduce("ReduceMean", x, [1]), {})
    new = builder(18).lower(node("y"), lambda b, x: b.reduce("ReduceMean", x, [1]), {})
    assert (len(old[0].input), len(new[0].input)) == (1, 2)


def test_constants_are_written_once():
    b = builder()
    assert b.array([1, 2]) == b.array([1, 2]) != b.array([2, 1])
    assert b.array(1, "float32") != b.array(1)
    assert [each.name for each in b.constants] == ["constant_0", "constant_1", "constant_2", "constant_3"]
