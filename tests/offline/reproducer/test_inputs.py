"""What is kept of inputs: the graph, without values unless they are asked for, and nothing that lies beside it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from helpers import FIXTURES, Builder, perceptron, sgd
from onnx import numpy_helper

from gopt import limits
from gopt.errors import InputError
from gopt.offline.reproducer import inputs
from gopt.offline.reproducer.inputs import contents
from gopt.offline.reproducer.values import LEFT_OUT, fill_values, model_tensors


@pytest.fixture
def step(tmp_path):
    b = Builder()
    sgd(b, perceptron(b, (20, 30, 2)))
    return b.save(tmp_path / "step.onnx")


def stored(data: bytes) -> dict[str, onnx.TensorProto]:
    return {each.name: each for each in onnx.load_from_string(data).graph.initializer}


def test_large_values_are_left_out_and_small_ones_stay(step):
    (kept,) = contents(step, "model", False)
    before, after = stored(step.read_bytes()), stored(kept.data)
    assert before.keys() == after.keys()
    assert after["w0"].doc_string == LEFT_OUT and not after["w0"].raw_data and list(after["w0"].dims) == [20, 30]
    small = [name for name in before if numpy_helper.to_array(before[name]).nbytes <= limits.CHECKED_BYTES]
    assert "w0" not in small and all(before[name] == after[name] for name in small)
    assert before["w0"].raw_data[:64] not in kept.data


def test_values_are_kept_where_they_are_asked_for(step):
    (kept,) = contents(step, "model", True)
    assert stored(kept.data) == stored(step.read_bytes())


def test_drawn_values_have_the_type_and_are_the_same_each_time(step):
    (kept,) = contents(step, "model", False)
    first, second = onnx.load_from_string(kept.data), onnx.load_from_string(kept.data)
    assert fill_values(first) and fill_values(second) and first == second
    onnx.checker.check_model(first, full_check=True)
    drawn = numpy_helper.to_array(next(each for each in model_tensors(first) if each.name == "w0"))
    assert drawn.shape == (20, 30) and np.all(drawn > 0) and drawn.std() > 0


def test_a_fill_beyond_the_limit_is_refused(step):
    model = onnx.load(step)
    model.graph.initializer.add(name="huge", data_type=1, dims=[1 << 40], doc_string=LEFT_OUT)
    with pytest.raises(InputError, match="REPRODUCER_VALUES"):
        fill_values(model)


def test_external_values_get_a_place_of_their_own():
    path = FIXTURES / "mlp_adamw_external.onnx"
    graph, values = contents(path, "model", True)
    (alone,) = contents(path, "model", False)
    assert values.name == inputs.VALUES_FILE and values.nbytes == len(b"".join(values.blocks())) > 0
    for data in (graph.data, alone.data):
        model = onnx.load_from_string(data)
        places = {e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"}
        assert places == {inputs.VALUES_FILE}
        assert b"mlp_adamw_external.bin" not in data


def test_of_a_folder_only_what_gopt_wrote_is_kept(tmp_path, step):
    for name in ("manifest.json", "secret.txt", "secret.onnx", "states.bin"):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / name).write_text("secret")
    (tmp_path / "out/rank_0000.onnx").write_bytes(step.read_bytes())
    (tmp_path / "out/rank_0001.onnx").symlink_to("/etc/hostname")
    assert [each.name for each in contents(tmp_path / "out", "folder", False)] == ["manifest.json", "rank_0000.onnx"]
    assert "states.bin" in [each.name for each in contents(tmp_path / "out", "folder", True)]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds nothing"):
        contents(tmp_path / "empty", "folder", True)


def test_a_file_that_is_no_model_is_kept_only_with_values(tmp_path):
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"\x08secret")
    with pytest.raises(InputError, match="is not an ONNX model"):
        contents(path, "model", False)
    assert contents(path, "model", True)[0].data == b"\x08secret"
    assert contents(tmp_path / "missing.onnx", "model", False) == []
