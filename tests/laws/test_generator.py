"""The generator of steps tells the truth: its gradients are those of its losses, its steps are what it says."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from products import part, spread
from steps_gen.judge import draw_batches
from steps_gen.make import Made, make
from steps_gen.oracle import Oracle
from steps_gen.plan import NETWORKS, Plan, draw

SCALES = {"none": 1.0, "constant": 16.0, "state": 8.0, "dynamic": 8.0}


def slopes(made: Made, parameter: str) -> tuple[float, float]:
    """Along one direction: what the generator's gradient says, and a difference quotient of the loss in float64."""
    oracle = Oracle(made)
    feeds = {name: np.asarray(made.known[name]) for name in (each.name for each in oracle.first.graph.input)}
    feeds |= {k: v for k, v in draw_batches(made, 1, 0)[0].items() if k in feeds}
    evaluator = ReferenceEvaluator(doubled(oracle.first))
    wide = {k: v.astype(np.float64) if v.dtype.kind == "f" else v for k, v in feeds.items()}
    direction = np.random.default_rng(1).standard_normal(wide[parameter].shape)

    def run(move: float) -> dict[str, np.ndarray]:
        given = {**wide, parameter: wide[parameter] + move * direction}
        return dict(zip([each.name for each in oracle.first.graph.output], evaluator.run(None, given), strict=True))

    gradient = run(0.0)[made.gradients[parameter]]
    rise = (run(1e-6)["loss"] - run(-1e-6)["loss"]) / 2e-6
    return float(np.vdot(gradient, direction)), float(rise) * SCALES[made.plan.scale]


def doubled(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph in float64."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    for info in (*model.graph.input, *model.graph.output):
        if info.type.tensor_type.elem_type in (1, 10):
            info.type.tensor_type.elem_type = 11
    for k, stored in enumerate(model.graph.initializer):
        if stored.data_type in (1, 10):
            value = onnx.numpy_helper.to_array(stored).astype(np.float64)
            model.graph.initializer[k].CopyFrom(onnx.numpy_helper.from_array(value, stored.name))
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i in (1, 10):
                attribute.i = 11
    return model


FORWARDS = [("squares", "Tanh", "single"), ("sum", "Sigmoid", "cast"), ("cross-entropy", "Relu", "half")]


@pytest.mark.parametrize(("network", "forward"), spread(NETWORKS, FORWARDS))
def test_gradients_are_those_of_the_loss(network, forward):
    loss, activation, precision = forward
    plan = Plan(
        seed=3, network=network, loss=loss, activation=activation, precision=precision, scale="state", mask="forward"
    )
    made = make(plan)
    for parameter in made.gradients:
        told, found = slopes(made, parameter)
        assert told == pytest.approx(found, rel=1e-4, abs=1e-5), parameter


def test_a_wrong_rule_of_the_backward_is_seen(monkeypatch):
    from steps_gen import tape

    monkeypatch.setitem(tape.RULES, "Tanh", tape._identity)
    made = make(Plan(network="mlp"))
    told, found = slopes(made, "p0")
    assert told != pytest.approx(found, rel=1e-2)


@pytest.mark.parametrize("seed", part(range(25), 6))
def test_steps_are_valid_models(seed):
    plan = draw(seed)
    made = make(plan)
    onnx.checker.check_model(made.model, full_check=True)
    assert {made.names.get(name, name) for name in made.states} <= {each.name for each in made.model.graph.input}
    assert draw(seed) == plan and make(plan).model == made.model
