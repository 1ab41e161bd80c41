"""Optimizer graphs: what is read of them, and what is refused."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from recordings import FOLDERS

from gopt.errors import UnsupportedError
from gopt.importers.artifacts.lowering.builder import Builder
from gopt.importers.artifacts.optimizer import clip_nodes, read_optimizer
from gopt.ir.types import TensorType


def graph(name="mlp_clip"):
    return onnx.load(FOLDERS / name / "optimizer_model.onnx")


def test_what_is_read():
    found = read_optimizer(graph())
    assert found.node.op_type == "AdamWOptimizer" and found.max_norm == pytest.approx(0.05)
    assert (found.rate, found.count, found.moments) == ("learning_rate", "step", ("moment_1", "moment_2"))
    plain = read_optimizer(graph("mlp_sgd"))
    assert (plain.max_norm, plain.count, plain.moments) == (None, "", ())


def other_operator(body):
    body.node.add(op_type="ReduceAllL2", domain="com.microsoft", name="norm").input.append("gradients")


def two_clips(body):
    body.node[0].input[0] = "once"
    made = helper.make_node("InplaceClipGradNorm", ["gradients"], ["once"], domain="com.microsoft")
    body.node.insert(0, made)


def scaled_rate(body):
    body.node[1].input[0] = "other"


def two_optimizers(body):
    body.node.append(body.node[1])


def exchanged(one, two):
    def change(body):
        node = body.node[-1]
        node.input[one], node.input[two] = node.input[two], node.input[one]

    return change


def one_moment_twice(body):
    body.node[-1].input[5] = body.node[-1].input[4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (exchanged(4, 5), "reads 'second_order_moments' before 'first_order_moments', and the optimizer graph has"),
        (exchanged(2, 4), "reads 'first_order_moments' before 'gradients'"),
        (one_moment_twice, "AdamWOptimizer reads 'first_order_moments' twice"),
        (other_operator, "the optimizer graph has ReduceAllL2 'norm'"),
        (two_clips, "the optimizer graph has 2 clips"),
        (scaled_rate, "computes 'other', the rate of AdamWOptimizer"),
        (two_optimizers, "the optimizer graph has AdamWOptimizer"),
    ],
)
def test_what_is_refused(change, message):
    model = graph()
    change(model.graph)
    with pytest.raises(UnsupportedError, match=message):
        read_optimizer(model)


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_the_clip_is_of_all_gradients_together(max_norm):
    draw = np.random.default_rng(1)
    given = {name: draw.normal(size=shape).astype("f") for name, shape in (("a", (3, 2)), ("b", (4,)))}
    types = {name: TensorType("float32", value.shape) for name, value in given.items()}
    b = Builder(17, types, {}, {}, set(given))
    nodes = clip_nodes(b, list(given), ["ca", "cb"], max_norm)
    inputs = [helper.make_tensor_value_info(name, 1, value.shape) for name, value in given.items()]
    outputs = [helper.make_tensor_value_info(f"c{name}", 1, value.shape) for name, value in given.items()]
    body = helper.make_graph(nodes, "clip", inputs, outputs, b.constants)
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    found = onnxruntime.InferenceSession(model.SerializeToString()).run(None, given)
    norm = np.sqrt(sum((value.astype("d") ** 2).sum() for value in given.values()))
    for value, clipped in zip(given.values(), found):
        np.testing.assert_allclose(clipped, value * min(1, max_norm / (norm + 1e-6)), rtol=1e-6)
