"""The message of a file, parsed while it is needed."""

from onnx import ModelProto

from gopt.ir.model_file import ModelFile


def test_a_released_message_is_parsed_again():
    file = ModelFile(ModelProto(ir_version=7, producer_name="p").SerializeToString())
    first = file.model
    assert file.model is first
    file.release()
    assert file.model is not first
    assert file.model == first
