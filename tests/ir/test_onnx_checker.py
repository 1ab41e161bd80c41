"""What onnx's checker refuses, and what it is shown."""

import subprocess
import sys

import numpy as np
import pytest
from model_files import small, value
from onnx import ModelProto, helper, numpy_helper

from gopt.errors import InputError
from gopt.ir.model_file import ModelFile
from gopt.ir.onnx_checker import accepts, check_legal, check_structure, without_nodes


def file_of(model: ModelProto) -> ModelFile:
    return ModelFile(model.SerializeToString())


def test_a_node_without_a_name_is_named_by_its_output():
    model = small(nodes=[helper.make_node("Transpose", ["x"], ["turned"], perm=[0, 0])])
    model.graph.output[0].name = "turned"
    with pytest.raises(InputError, match=r"is not a valid ONNX model: .*turned"):
        check_legal(file_of(model))


def test_the_structure_alone_says_nothing_of_shapes():
    model = small(nodes=[helper.make_node("MatMul", ["b", "w"], ["y"])])
    check_structure(file_of(model))
    with pytest.raises(InputError, match="ncompatible"):
        check_legal(file_of(model))


def test_large_values_are_not_shown_to_the_checker(monkeypatch):
    import onnx

    shown: list[int] = []
    real = onnx.checker.check_model
    monkeypatch.setattr(onnx.checker, "check_model", lambda data, **how: shown.append(len(data)) or real(data, **how))
    stored = numpy_helper.from_array(np.zeros((3, 40_000), np.float32), "w")
    check_legal(
        file_of(small(initializer=[stored], inputs=[value("x"), value("b", (1,))], outputs=[value("y", ("N", "M"))]))
    )
    assert shown and max(shown) < 1000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no /proc")
def test_large_values_are_copied_once_at_most():
    """ByteSize writes a message to tell its size: twice the value at once."""
    code = (
        "import numpy as np\nfrom onnx import helper, numpy_helper\nfrom gopt.ir.onnx_checker import check_structure\n"
        "from gopt.ir.model_file import ModelFile\n"
        "stored = numpy_helper.from_array(np.ones(1 << 25, np.float32), 'w')\n"
        "known = helper.make_tensor_value_info('y', 1, [1 << 25])\n"
        "node = helper.make_node('Neg', ['w'], ['y'])\n"
        "model = helper.make_model(helper.make_graph([node], 'g', [], [known], [stored]))\n"
        "model.ir_version, file = 10, ModelFile(b'')\nfile._model = model\n"
        "open('/proc/self/clear_refs', 'w').write('5')\n"
        "peak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "before = peak(); check_structure(file); print(peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200 << 10, "KiB; the value has 128 MiB"


def test_a_model_without_its_nodes_is_a_model():
    model = small(value_info=[value("h", ("N", 4))])
    rest = without_nodes(model)
    assert accepts(rest.SerializeToString(), full=True)
    assert [len(part) for part in (rest.graph.node, rest.graph.output, rest.graph.value_info)] == [0, 0, 0]
    assert [info.name for info in rest.graph.input] == ["x", "b"]
