"""A call of a function becomes the function's nodes."""

import onnx
from onnx import helper

from gopt.ir.opaque.inline import inline_call

FUNCTION = onnx.parser.parse_function("""
    <domain: "own", opset_import: ["" : 20]>
    act <slope, axis: int = 1> (a, b) => (y, z, a) {
        inner = LeakyRelu <alpha: float = @slope> (a)
        y = Softmax <axis: int = @axis> (inner)
        z = Concat <axis = 0> (a, b)
    }""")


def inlined(inputs, outputs, **attributes):
    call = helper.make_node("act", inputs, outputs, domain="own", **attributes)
    return inline_call(FUNCTION, call, "pre")


def test_values_inside_get_names_below_the_prefix():
    relu, softmax, concat, _ = inlined(["x", "w"], ["p", "q", "r"], slope=0.5)
    assert (list(relu.input), list(relu.output)) == (["x"], ["pre.inner"])
    assert (list(softmax.input), list(softmax.output)) == (["pre.inner"], ["p"])
    assert list(concat.input) == ["x", "w"]


def test_attributes_come_from_the_call_or_the_default():
    relu, softmax, *_ = inlined(["x", "w"], ["p"], slope=0.5)
    assert relu.attribute[0].f == 0.5
    assert softmax.attribute[0].i == 1
    assert inlined(["x", "w"], ["p"], axis=3)[1].attribute[0].i == 3


def test_an_attribute_that_nobody_gives_is_left_to_the_operator():
    assert not inlined(["x", "w"], ["p"])[0].attribute


def test_a_result_that_is_an_operand_passes_through_an_identity():
    last = inlined(["x", "w"], ["p", "q", "r"])[-1]
    assert (last.op_type, list(last.input), list(last.output)) == ("Identity", ["x"], ["r"])
    assert [node.op_type for node in inlined(["x", "w"], ["p"])] == ["LeakyRelu", "Softmax", "Concat"]


def test_an_operand_that_is_left_out_stays_out():
    assert list(inlined(["x"], ["p"])[2].input) == ["x", ""]
