"""What an inference graph and an algorithm share, what they compute each for itself, and what cannot be divided."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from helpers import FIXTURES, Builder, perceptron
from onnx import helper
from training_info_law import check_law, last_product
from training_info_standard import joined

import gopt
from gopt.errors import OptionError, UnsupportedError
from gopt.offline.inference.forward import forward_only
from gopt.offline.inference.write import merge_inference
from gopt.offline.training_info.division import divide
from gopt.offline.training_info.write import merge_training_info


def test_the_algorithm_has_every_node_that_inference_lacks():
    training = gopt.load(FIXTURES / "mlp_adamw.onnx").training
    parts = divide(training, forward_only(training, [last_product(training)]))
    whole = [node.first_output for node in (*parts.inference.nodes, *parts.nodes)]
    assert len(whole) == len(set(whole))
    assert set(whole) == {node.first_output for node in training.graph.nodes}
    assert not parts.names and 0 < len(parts.inference.nodes) < len(parts.nodes)


def test_what_batch_norm_changes_is_computed_for_both(tmp_path):
    """The inference graph is that of ``--inference``; training reads statistics of the batch under other names."""
    source, target = FIXTURES / "cnn_sgd.onnx", tmp_path / "written.onnx"
    written = check_law(source, target, "addmm")
    assert written.twice["addmm"] == "addmm.training"
    merge_inference(source, tmp_path / "model.onnx", outputs=["addmm"])
    x = np.random.default_rng(1).standard_normal((8, 1, 8, 8), np.float32)
    found = [
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(["addmm"], {"x": x})[0]
        for path in (target, tmp_path / "model.onnx")
    ]
    assert np.array_equal(*found)
    model = onnx.load(target)
    names = [node.name for node in joined(model).graph.node if node.name]
    assert len(names) == len(set(names))
    convolutions = [
        sum(node.op_type == "Conv" for node in each.graph.node) for each in (onnx.load(source), joined(model))
    ]
    assert convolutions[1] == convolutions[0] + 1, "the one before the first statistic is computed once"


def test_a_loss_that_evaluation_changes_is_refused(tmp_path):
    with pytest.raises(OptionError, match="the loss 'loss' is another value in evaluation, where running") as caught:
        merge_training_info(FIXTURES / "cnn_sgd.onnx", tmp_path / "written.onnx", outputs=["loss"])
    assert caught.value.hints and not list(tmp_path.iterdir())
    with pytest.raises(OptionError, match="where dropout passes values on"):
        merge_training_info(FIXTURES / "real" / "dropout_mlp.onnx", tmp_path / "written.onnx", outputs=["loss"])


def test_a_loss_that_both_compute_alike_is_an_output_of_inference(tmp_path):
    written = check_law(FIXTURES / "mlp_sgd.onnx", tmp_path / "written.onnx", "loss")
    assert written.inputs == ("x", "y") and written.fed == ("lr",)


def test_a_forward_that_is_not_named_is_asked_for(tmp_path):
    with pytest.raises(OptionError, match="no output beside its loss") as caught:
        merge_training_info(FIXTURES / "mlp_sgd.onnx", tmp_path / "written.onnx")
    assert "addmm_1" in "".join(caught.value.hints)
    with pytest.raises(OptionError, match="computes no value 'addmm_9'"):
        merge_training_info(FIXTURES / "mlp_sgd.onnx", tmp_path / "written.onnx", outputs=["addmm_9"])


def calling(path: Path) -> Path:
    """A forward through a function of the model, which updates a statistic as well: gopt writes it out."""
    b = Builder(2)
    x, y, lr = b.input("x", (4, 3)), b.input("y", (4, 5)), b.input("lr", ())
    w, mean = b.parameter("w", (3, 5)), b.small("mean", (5,))
    b.extra_domains.append("local")
    z, new_mean = b.op("Squash", b.op("MatMul", x, w), mean, outputs=2, domain="local")
    apart = b.op("Sub", z, y)
    loss = b.op("ReduceMean", b.op("Mul", apart, apart), keepdims=0)
    steep = b.op("Sub", b.const(1.0), b.op("Mul", z, z))
    gradient = b.op("MatMul", b.op("Transpose", x), b.op("Mul", b.op("Mul", apart, b.const(0.1)), steep))
    b.output("loss", loss, ())
    b.output("z", z, (4, 5))
    b.output("w_out", b.op("Sub", w, b.op("Mul", lr, gradient)), (3, 5))
    b.output("mean_out", new_mean, (5,))
    model = b.model()
    nodes = [
        helper.make_node("Constant", [], ["axes"], value_ints=[0]),
        helper.make_node("ReduceMean", ["h", "axes"], ["batch"], keepdims=0),
        helper.make_node("Constant", [], ["share"], value_float=0.1),
        helper.make_node("Sub", ["batch", "m"], ["step"]),
        helper.make_node("Mul", ["step", "share"], ["part"]),
        helper.make_node("Add", ["m", "part"], ["m_new"]),
        helper.make_node("Neg", ["h"], ["turned"]),
        helper.make_node("Tanh", ["turned"], ["squashed"]),
        helper.make_node("Neg", ["squashed"], ["z"]),
    ]
    opsets = [helper.make_opsetid("", 20)]
    model.functions.append(helper.make_function("local", "Squash", ["h", "m"], ["z", "m_new"], nodes, opsets))
    onnx.save(model, path)
    return path


def test_a_function_of_the_forward_leaves_no_name_of_gopt(tmp_path):
    """The written model has names that begin with nothing of gopt's, so that it can be read again."""
    source, target = calling(tmp_path / "step.onnx"), tmp_path / "written.onnx"
    check_law(source, target, "z")
    model = onnx.load(target)
    assert any(node.op_type == "Squash" for node in model.training_info[0].algorithm.node)
    used = {name for node in joined(model).graph.node for name in (node.name, *node.input, *node.output)}
    assert [name for name in used if name.startswith("gopt.")] == []


def with_branch(path: Path) -> Path:
    """A dropout whose result a branch reads as an outer value."""
    b = Builder(3)
    net = perceptron(b, (3, 4), bias=False)
    lr = b.input("lr", ())
    (w,) = net.params
    masked = b.op("Dropout", b.op("MatMul", "x", w), b.const(0.5), b.const(True, "bool"), seed=1)
    branch = helper.make_graph(
        [helper.make_node("ArgMax", [masked], ["inner"], axis=1)], "branch", [],
        [helper.make_tensor_value_info("inner", 7, (4, 1))],
    )  # fmt: skip
    condition = b.op("Less", lr, b.const(1.0))
    shown = b.op("If", condition, then_branch=branch, else_branch=branch)
    b.output("loss", net.loss, ())
    b.output("shown", shown, (4, 1), "int64")
    b.output("best", b.op("ArgMax", masked, axis=0), (1, 4), "int64")
    b.output("w_out", b.op("Sub", w, b.op("Mul", lr, net.gradients[w])), (3, 4))
    return b.save(path)


def test_a_branch_that_reads_a_value_with_two_names_is_refused(tmp_path):
    source = with_branch(tmp_path / "step.onnx")
    with pytest.raises(UnsupportedError, match=r"a body of If .* reads '.*', which is another value in evaluation"):
        merge_training_info(source, tmp_path / "written.onnx", outputs=["best"])


def test_a_collective_is_refused_by_name(tmp_path):
    model = onnx.load(FIXTURES / "mlp_sgd.onnx")
    gradient = gopt.load(FIXTURES / "mlp_sgd.onnx").training.gradients["fc1.bias"]
    for node in model.graph.node:
        node.input[:] = ["reduced" if name == gradient else name for name in node.input]
    place = 1 + next(k for k, node in enumerate(model.graph.node) if gradient in node.output)
    model.graph.node.insert(
        place, helper.make_node("AllReduce", [gradient], ["reduced"], domain="gopt.comm", group="dp", reduce="mean")
    )
    model.opset_import.append(helper.make_opsetid("gopt.comm", 1))
    onnx.save(model, tmp_path / "step.onnx")
    with pytest.raises(
        UnsupportedError, match=r"the step has the collective AllReduce .*: training_info describes one"
    ):
        merge_training_info(tmp_path / "step.onnx", tmp_path / "written.onnx", outputs=["addmm_1"])
