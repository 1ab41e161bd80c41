"""The version of the standard operators."""

import pytest
from onnx import ModelProto, helper

from gopt.ir.opset import opset_of


@pytest.mark.parametrize(
    ("imports", "version"),
    [([("com.microsoft", 1), ("", 18)], 18), ([("ai.onnx", 21), ("gopt.comm", 1)], 21), ([("com.microsoft", 3)], 1)],
)
def test_the_standard_domain_has_two_names(imports, version):
    model = ModelProto(opset_import=[helper.make_opsetid(*each) for each in imports])
    assert opset_of(model) == version
