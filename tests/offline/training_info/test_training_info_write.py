"""``gopt merge --training-info``: from ranks, from trainers and servers, and from ``training_info`` itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from gopt.cli.main import main
from helpers import FIXTURES
from onnx import TensorProto, helper, numpy_helper
from training_info_law import check_law
from training_info_standard import Program, StandardTrainer

import gopt
from gopt.errors import InputError, OptionError
from gopt.offline.training_info.write import merge_training_info

PREVIEW = "ai.onnx.preview.training"
RANDOM = np.random.default_rng(7)


def adam(path: Path, *, bound: tuple[str, ...] = ("w", "v_w")) -> Path:
    """An inference graph x w, its step with Gradient and Adam, and an initialization of ``bound``."""
    shapes = {"w": (4, 3), "v_w": (4, 3), "h_w": (4, 3), "idle": (2,)}
    stored = {name: RANDOM.uniform(0.1, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    inference = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "inference",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [6, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [6, 3])], [numpy_helper.from_array(stored["w"], "w")],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(PREVIEW, 1)]
    model = helper.make_model(inference, opset_imports=opsets, ir_version=10)
    info = model.training_info.add()
    nodes = [
        helper.make_node("Sub", ["y", "target"], ["apart"]),
        helper.make_node("Mul", ["apart", "apart"], ["square"]),
        helper.make_node("ReduceMean", ["square"], ["loss"], keepdims=0),
        helper.make_node("Gradient", ["w", "x", "target"], ["dw"], domain=PREVIEW, xs=["w"], zs=["x", "target"],
                         y="loss"),
        helper.make_node("Adam", ["lr", "count", "w", "dw", "v_w", "h_w"], ["w_new", "v_new", "h_new"], domain=PREVIEW,
                         alpha=0.9, beta=0.99, epsilon=1e-6),
        helper.make_node("Add", ["count", "one"], ["count_new"]),
    ]  # fmt: skip
    tensors = [numpy_helper.from_array(stored[name], name) for name in ("v_w", "h_w", "idle")]
    tensors += [numpy_helper.from_array(np.array(1, np.int64), name) for name in ("count", "one")]
    info.algorithm.CopyFrom(
        helper.make_graph(
            nodes, "algorithm",
            [helper.make_tensor_value_info("target", TensorProto.FLOAT, [6, 3]),
             helper.make_tensor_value_info("lr", TensorProto.FLOAT, [])],
            [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])], tensors,
        )
    )  # fmt: skip
    for key, value in (("w", "w_new"), ("v_w", "v_new"), ("h_w", "h_new"), ("count", "count_new")):
        info.update_binding.add(key=key, value=value)
    firsts = [
        helper.make_node("RandomNormal", [], [f"first_{name}"], shape=shapes[name], dtype=1, seed=1.0) for name in bound
    ]
    outputs = [helper.make_tensor_value_info(f"first_{name}", 1, shapes[name]) for name in bound]
    info.initialization.CopyFrom(helper.make_graph(firsts, "initialization", [], outputs))
    for name in bound:
        info.initialization_binding.add(key=name, value=f"first_{name}")
    onnx.save(model, path)
    return path


def test_training_info_is_read_written_and_read(tmp_path):
    """Adam stays one operator; the Gradient operator is the backward that gopt read it as."""
    record = check_law(adam(tmp_path / "source.onnx"), tmp_path / "written.onnx", "y")
    assert (record.states, record.initialized, record.fed) == (4, 2, ("target", "lr"))
    model = onnx.load(tmp_path / "written.onnx")
    used = [node.op_type for node in model.training_info[0].algorithm.node]
    assert used.count("Adam") == 1 and "Gradient" not in used
    assert [node.op_type for node in model.graph.node] == ["MatMul"]


def test_initialization_is_kept(tmp_path):
    """For what is still stored: ``idle`` is read by nothing."""
    source = adam(tmp_path / "source.onnx", bound=("w", "v_w", "idle"))
    assert merge_training_info(source, tmp_path / "written.onnx").initialized == 2
    found = StandardTrainer(tmp_path / "written.onnx")
    before = dict(found.values)
    found.initialize()
    (info,) = onnx.load(source).training_info
    draws = helper.make_model(info.initialization, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    expected = Program(draws).run({})
    assert np.array_equal(found.values["w"], expected["first_w"])
    assert np.array_equal(found.values["v_w"], expected["first_v_w"])
    assert np.array_equal(found.values["h_w"], before["h_w"]) and not np.array_equal(found.values["w"], before["w"])
    assert any(
        "computes first values of 2 states" in note for note in gopt.load(tmp_path / "written.onnx").training.notes
    )


@pytest.mark.parametrize(("name", "output"), [("mlp_adamw", "addmm_1"), ("mlp_ort_adamw", "addmm_1")])
def test_a_second_writing_changes_nothing(name, output, tmp_path):
    first, second = tmp_path / "first.onnx", tmp_path / "second.onnx"
    merge_training_info(FIXTURES / f"{name}.onnx", first, outputs=[output])
    merge_training_info(first, second)  # its output is the step's own now
    one, other = onnx.load(first), onnx.load(second)
    for each in (one, other):
        each.training_info[0].algorithm.ClearField("value_info")
    assert [node.output for node in one.graph.node] == [node.output for node in other.graph.node]
    assert one.training_info[0].algorithm.node == other.training_info[0].algorithm.node
    assert {each.name for each in one.graph.initializer} == {each.name for each in other.graph.initializer}
    updates = [{each.key: each.value for each in model.training_info[0].update_binding} for model in (one, other)]
    assert updates[0] == updates[1]


@pytest.mark.parametrize(("name", "output"), [("mlp_adamw", "addmm_1"), ("cnn_sgd", "addmm")])
def test_what_is_written_shards_and_verifies(name, output, tmp_path):
    merge_training_info(FIXTURES / f"{name}.onnx", tmp_path / "written.onnx", outputs=[output])
    gopt.shard(gopt.load(tmp_path / "written.onnx"), 2).write(tmp_path / "ranks")
    assert gopt.verify(tmp_path / "ranks").equal
    check_law(tmp_path / "ranks", tmp_path / "again.onnx", output)


def test_trainers_and_servers_become_one_model(tmp_path):
    gopt.split(FIXTURES / "mlp_adamw.onnx", gopt.SplitOptions(trainers=2, servers=2)).write(tmp_path / "split")
    assert check_law(tmp_path / "split", tmp_path / "written.onnx").states == 13


def test_the_command(tmp_path, capsys):
    gopt.shard(FIXTURES / "cnn_sgd.onnx", 2).write(tmp_path / "ranks")
    target = str(tmp_path / "written.onnx")
    asked = ["merge", str(tmp_path / "ranks"), "--training-info", "-o", target, "--output", "addmm"]
    assert main([*asked, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["format"] == "gopt-merge/1" and record["loss"] == "loss" and record["states"] == 13
    assert record["inputs"] == ["x"] and record["fed"] == ["y", "lr"] and record["twice"]["addmm"] == "addmm.training"
    assert main(asked) == 2  # it exists
    assert main([*asked, "--force"]) == 0
    said = capsys.readouterr().out
    assert "computes loss, replaces 13 initializers" in said and "is var.training there" in said
    assert main(["import", target, "-o", str(tmp_path / "plain.onnx")]) == 0
    assert "9 parameters, 13 states" in capsys.readouterr().out
    assert main(["inspect", target]) == 0
    assert "training_info" in capsys.readouterr().out


def test_the_commands_take_a_step_as_it_is(tmp_path, capsys):
    source, target = str(FIXTURES / "mlp_sgd.onnx"), str(tmp_path / "model.onnx")
    assert main(["merge", source, "--inference", "-o", target, "--output", "addmm_1"]) == 0
    assert main(["merge", source, "--training-info", "-o", target, "--output", "addmm_1", "--force"]) == 0
    assert len(onnx.load(target).training_info) == 1
    capsys.readouterr()
    assert main(["merge", source, "-o", target, "--force"]) != 0, "there is nothing to put together"


def test_options_that_do_not_fit_are_refused(tmp_path, capsys):
    source, target = str(FIXTURES / "mlp_sgd.onnx"), str(tmp_path / "model.onnx")
    assert main(["merge", source, "--training-info", "--inference", "-o", target]) == 2
    assert main(["merge", source, "--training-info", "--state-dict", str(tmp_path / "s.safetensors")]) == 2
    assert "--training-info needs -o MODEL" in capsys.readouterr().err
    assert main(["merge", source, "--output", "addmm_1", "-o", target]) == 2
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError):
        merge_training_info(tmp_path / "nothing.onnx", target)
    with pytest.raises(OptionError, match="exists already"):
        merge_training_info(source, FIXTURES / "mlp_sgd.onnx")
