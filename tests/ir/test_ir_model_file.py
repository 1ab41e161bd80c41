"""The message of a file, parsed while it is needed."""

import os
import resource

import pytest
from onnx import AttributeProto, ModelProto, NodeProto

from gopt.errors import InputError
from gopt.ir.model_file import ModelFile, parse_model


def test_a_released_message_is_parsed_again():
    file = ModelFile(ModelProto(ir_version=7, producer_name="p").SerializeToString())
    first = file.model
    assert file.model is first
    file.release()
    assert file.model is not first
    assert file.model == first


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="the system does not tell what a process takes")
def test_too_little_memory_for_a_message_is_no_damage():
    """In a child that may take no more than it has: protobuf reports the same error for both."""
    model = ModelProto(ir_version=7)
    model.graph.node.extend([model.graph.node.add(op_type="Abs", input=["x"], output=["y"])] * 500_000)
    data = model.SerializeToString()
    child = os.fork()
    if not child:
        ended = 1
        try:
            with open("/proc/self/statm") as file:
                taken = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
            _ = ModelFile(data).model
        except MemoryError:
            ended = 0
        finally:
            os._exit(ended)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def field(number: int, data: bytes) -> bytes:
    """A field of a message; protobuf cannot write what it does not read."""
    size, left = b"", len(data)
    while left > 127:
        size, left = size + bytes((left & 127 | 128,)), left >> 7
    return bytes((number << 3 | 2,)) + size + bytes((left,)) + data


def nested(depth: int) -> bytes:
    node = NodeProto(op_type="Neg", input=["x"], output=["y"]).SerializeToString()
    for _ in range(depth):
        attribute = field(1, b"then_branch") + field(6, field(1, node)) + b"\xa0\x01" + bytes((AttributeProto.GRAPH,))
        node = field(4, b"If") + field(5, attribute)
    return ModelProto(ir_version=8).SerializeToString() + field(7, field(1, node))


def test_graphs_that_are_nested_too_deeply_are_no_damage():
    """The message was that the file is truncated or damaged."""
    assert parse_model(nested(20)).graph.node[0].op_type == "If"
    for depth in (50, 500, 5000):
        with pytest.raises(InputError) as caught:
            parse_model(nested(depth))
        assert "nests graphs in graphs deeper than protobuf reads" in caught.value.message and caught.value.hints
