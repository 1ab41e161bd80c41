"""The message of a file, parsed while it is needed."""

import os
import resource

import pytest
from onnx import ModelProto

from gopt.ir.model_file import ModelFile


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
