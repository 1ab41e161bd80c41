"""Where a written model keeps states, constants, defaults, functions and metadata."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import FIXTURES, Builder, perceptron
from onnx import helper, numpy_helper
from training_info_law import check_law

import gopt
from gopt.offline import merge
from gopt.offline.training_info.write import merge_training_info


def written(source: Path, target: Path, *outputs: str) -> onnx.ModelProto:
    check_law(source, target, *outputs)
    return onnx.load(target)


def test_states_are_initializers_of_the_graph_that_reads_them(tmp_path):
    model = written(FIXTURES / "mlp_adamw.onnx", tmp_path / "written.onnx")
    (info,) = model.training_info
    inference = {each.name for each in model.graph.initializer}
    assert inference == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}
    states = {each.tensor for each in gopt.load(FIXTURES / "mlp_adamw.onnx").training.states}
    own = {each.name for each in info.algorithm.initializer}
    assert states - inference < own and not own & inference
    assert {each.key for each in info.update_binding} == states
    assert [each.name for each in model.graph.input] == ["x"]
    assert [each.name for each in info.algorithm.input] == ["y", "lr"]
    assert not info.HasField("initialization"), "the stored values are the first ones"


def test_large_values_lie_beside_the_model(tmp_path, monkeypatch):
    """All of them in the inference graph, where ``onnx.load`` finds them; small ones stay where they are read."""
    monkeypatch.setattr(merge, "EMBED", 4096)
    source, target = FIXTURES / "mlp_adamw.onnx", tmp_path / "written.onnx"
    record = check_law(source, target)
    bare = onnx.load(target, load_external_data=False)
    (info,) = bare.training_info
    beside = {each.name for each in bare.graph.initializer if each.data_location == onnx.TensorProto.EXTERNAL}
    assert {"fc1.weight", "fc1.weight.exp_avg", "fc2.weight.exp_avg_sq"} <= beside
    assert record.data and (tmp_path / record.data).exists() and target.stat().st_size < 40_000
    assert all(each.data_location != onnx.TensorProto.EXTERNAL for each in info.algorithm.initializer)
    assert {"step", "fc1.bias.exp_avg"} <= {each.name for each in info.algorithm.initializer}
    old = record.data
    merge_training_info(FIXTURES / "mlp_sgd.onnx", target, outputs=["addmm_1"], force=True)
    assert not (tmp_path / old).exists(), "the values of the model that is replaced go"


def test_a_default_that_inference_reads_stays_one(tmp_path):
    """An input with a value is not a state: who feeds it gets another result, of inference and of the step."""
    b = Builder(4)
    net = perceptron(b, (3, 5, 2))
    lr = b.state("lr", np.array(0.01, np.float32))
    scale = b.state("scale", np.array(2, np.float32))
    b.output("loss", net.loss, ())
    (hidden,) = [node.output[0] for node in b.nodes if node.op_type == "Tanh"]
    b.output("shown", b.op("ReduceSum", b.op("Mul", hidden, scale), b.const([1], "int64"), keepdims=0), (4,))
    for name, shape in net.params.items():
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", lr, net.gradients[name])), shape)
    model = written(b.save(tmp_path / "step.onnx"), tmp_path / "written.onnx", "shown")
    (info,) = model.training_info
    assert [each.name for each in model.graph.input] == ["x", "scale"]
    assert [each.name for each in info.algorithm.input] == ["y", "lr"]
    stored = {
        each.name: numpy_helper.to_array(each) for each in (*model.graph.initializer, *info.algorithm.initializer)
    }
    assert stored["scale"] == 2 and stored["lr"] == np.float32(0.01)


def test_a_state_that_stays_is_bound_to_a_result(tmp_path):
    """An output that is an input: update_binding names results alone."""
    model = onnx.load(FIXTURES / "mlp_sgd.onnx")
    model.graph.input.append(helper.make_tensor_value_info("kept", 1, [3]))
    model.graph.output.append(helper.make_tensor_value_info("kept", 1, [3]))
    model.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "kept"))
    onnx.save(model, tmp_path / "step.onnx")
    (info,) = written(tmp_path / "step.onnx", tmp_path / "written.onnx").training_info
    assert {each.key: each.value for each in info.update_binding}["kept"] == "kept_out"


def test_operators_that_need_functions_bring_them(tmp_path):
    """The optimizer stays one operator, and a runtime without a kernel for it has its body."""
    model = written(FIXTURES / "mlp_ort_adamw.onnx", tmp_path / "written.onnx")
    assert any(node.op_type == "AdamWOptimizer" for node in model.training_info[0].algorithm.node)
    assert [each.name for each in model.functions] == ["AdamWOptimizer"]
    assert {each.domain for each in model.opset_import} >= {"", "com.microsoft"}


@pytest.mark.parametrize("version", [4, 9])
def test_an_old_file_gets_the_version_that_has_training_info(version, tmp_path):
    model = onnx.load(FIXTURES / "mlp_sgd.onnx")
    model.ir_version = version
    model.metadata_props.add(key="author", value="somebody")
    onnx.save(model, tmp_path / "step.onnx")
    found = written(tmp_path / "step.onnx", tmp_path / "written.onnx")
    assert found.ir_version == max(version, 7)
    assert {each.key for each in found.metadata_props} == {"author", "gopt.training_info"}
