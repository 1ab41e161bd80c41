"""Names of a derived step: its own values have names that the model does not use."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from derive_cases import forward_model
from onnx import TensorProto, helper, numpy_helper

import gopt
from gopt.frontends.derive.derive import derive
from gopt.frontends.derive.options import DeriveOptions, Norms

OWN_NAMES = [
    {"h": "lr", "t": "loss"},
    {"x": "lr", "h": "step", "t": "label", "logits": "loss"},
    {"w1": "lr", "b1": "step", "w2": "loss", "b2": "label"},
    {"w1": "unscale", "b1": "overflowed", "w2": "one", "h": "squared_norm", "t": "clip_factor", "logits": "loss_scale"},
    {"h": "w1_out", "t": "w1.exp_avg", "logits": "w1.exp_avg_out", "b1": "w1.grad", "x": "w1.grad.unscaled"},
    {"h": "adj_w1", "t": "adj_", "logits": "loss_scale_out", "b1": "loss_scale.growth_tracker", "b2": "schedule.step"},
    {"h": "criterion.logs", "t": "made.w1_out.kept", "b1": "optimizer.rate", "x": "schedule.rate"},
]  # fmt: skip
"""Values of the model -> names that the step has for its own values."""


@pytest.mark.parametrize("names", OWN_NAMES, ids=[next(iter(names.values())) for names in OWN_NAMES])
def test_values_of_the_model_may_have_any_name(tmp_path: Path, names: dict[str, str]):
    """The step gives its own values other names, and computes the same."""
    knobs = {"clip_norm": 0.5, "loss_scale": "dynamic", "schedule": "cosine", "schedule_options": {"total_steps": 4}}
    options = DeriveOptions(loss="cross-entropy", optimizer="adam", **knobs)
    model = forward_model()
    onnx.save(model, tmp_path / "plain.onnx")
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for each in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        each.name = names.get(each.name, each.name)
    onnx.save(model, tmp_path / "named.onnx")
    plain = derive(tmp_path / "plain.onnx", tmp_path / "a.onnx", options)
    named = derive(tmp_path / "named.onnx", tmp_path / "b.onnx", options)
    assert (plain.lr_input, plain.nodes, plain.states) == ("lr", named.nodes, named.states)
    assert (named.lr_input == "lr") == ("lr" not in names.values())
    note = next((each for each in named.notes if "uses names of the step" in each), "")
    assert ("'lr' is 'lr.2'" in note) == (named.lr_input == "lr.2")
    runs = [_trained(tmp_path / "a.onnx", "x"), _trained(tmp_path / "b.onnx", names.get("x", "x"))]
    for name in ("w1", "b1", "w2", "b2"):
        np.testing.assert_array_equal(runs[0][name], runs[1][names.get(name, name)])


def _trained(path: Path, x: str) -> dict[str, np.ndarray]:
    """The states behind three steps, read by the roles that the file names."""
    model, random = onnx.load(path), np.random.default_rng(7)
    roles = json.loads(next(each.value for each in model.metadata_props if each.key == "gopt.roles"))
    values = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    states = {name: values[name] for name in roles["states"]}
    (label,) = set(roles["batch"]) - {x}
    (rate,) = {each.name for each in model.graph.input} - set(roles["states"]) - set(roles["batch"])
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for _ in range(3):
        feeds = {x: random.standard_normal((6, 4)).astype(np.float32), label: random.integers(0, 3, 6)}
        made = session.run(list(roles["states"].values()), {**feeds, **states, rate: np.array(0.05, np.float32)})
        states = dict(zip(roles["states"], made))
    return states


def test_statistics_and_draws_take_free_names(tmp_path: Path):
    random, shapes = np.random.default_rng(0), {"w": (4, 4), "s": (4,), "b": (4,), "m": (4,), "v": (4,)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m_out"]),
        helper.make_node("BatchNormalization", ["m_out", "s", "b", "m", "v"], ["draw_0"]),
        helper.make_node("Dropout", ["draw_0"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "norm", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [6, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [6, 4])],
        [numpy_helper.from_array(random.uniform(0.5, 1, shapes[name]).astype(np.float32), name) for name in shapes],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "m.onnx")
    options = DeriveOptions(loss="mse", optimizer="sgd", batchnorm=Norms.TRAIN, dropout=Norms.TRAIN)
    derived = derive(tmp_path / "m.onnx", tmp_path / "s.onnx", options)
    assert derived.inputs == ("x", "target", "draw_0.2", "lr")
    assert "the model uses names of the step, so that 'm_out' is 'm_out.2', 'draw_0' is 'draw_0.2'" in derived.notes
    states = gopt.load(tmp_path / "s.onnx").training.graph.outputs
    assert {"m_out.2", "v_out", "w_out"} <= set(states)
