"""Types survive ONNX messages."""

import pytest
from onnx import TensorProto, helper

from gopt.ir.type_proto import read_type, value_info
from gopt.ir.types import TensorType


@pytest.mark.parametrize("shape", [(2, "N", None), (), None])
def test_types_survive_their_message(shape):
    type = TensorType("float16", shape)
    assert read_type(value_info("x", type).type) == type


def test_what_is_no_dense_tensor_has_no_type():
    assert (
        read_type(helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, []))).shape is None
    )
