"""Attributes as Python values and back."""

import pytest
from onnx import AttributeProto, helper

from gopt.ir.attributes import attribute_value, make_attribute


@pytest.mark.parametrize("value", [3, 0.5, "text", [1, 2], [0.5, 1.5], ["a", "b"]])
def test_a_value_survives_its_message(value):
    assert attribute_value(make_attribute("key", value)) == value


def test_an_empty_list_has_the_type_of_its_key():
    assert make_attribute("cuts", []).type == AttributeProto.INTS
    assert make_attribute("shapes", ()).type == AttributeProto.STRINGS
    assert attribute_value(make_attribute("cuts", [])) == []


def test_text_that_is_no_utf8_is_still_read():
    attribute = helper.make_attribute("key", b"\xff")
    assert attribute_value(attribute) == "\ufffd"
