"""The loss with readings of its values held, or passed straight through."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx.parser
import onnx.shape_inference
import pytest

from gopt.analysis.training import State, StateKind, TrainingGraph
from gopt.ir.load import load
from gopt.verification.gradient_check.forward import CheckedForward
from gopt.verification.gradient_check.held_forward import EVERY, HeldForward, Stop
from gopt.verification.reference_graphs import refuse_call

TEXT = """<ir_version: 9, opset_import: ["" : 18]>
step (double[3] w) => (double loss, double[3] g) {
    two = Constant<value = double {2.0}>()  h = Mul(w, two)  s = Mul(h, h)  r = Round(h)  p = Mul(s, r)
    loss = ReduceSum<keepdims=0>(p)  g = Identity(w) }"""
AT = np.array([0.6, 1.2, -0.9])
MOVE = np.array([1e-4, 2e-4, -1e-4])


@pytest.mark.parametrize(
    ("stops", "slope"),
    [
        ((), lambda h: 2 * h * np.round(h)),
        ((Stop("s", EVERY, "h"),), lambda h: 0 * h),
        ((Stop("s", 0, "h"),), lambda h: h * np.round(h)),
        ((Stop("r", 0, "h", through=True),), lambda h: 2 * h * np.round(h) + h * h),
        ((Stop("r", 0, "h", through=True, bounded=True),), lambda h: 2 * h * np.round(h) + h * h * (np.abs(h) <= 1)),
        ((Stop("s", EVERY, "h"), Stop("r", 0, "h", through=True)), lambda h: h * h),
    ],
)
def test_slopes_are_those_with_readings_held(stops, slope, tmp_path: Path) -> None:
    onnx.save(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(TEXT)), tmp_path / "step.onnx")
    graph = load(tmp_path / "step.onnx", own=True)
    training = TrainingGraph(graph, ("loss",), [State("w", "g", StateKind.PARAMETER)], {"w": "g"}, [], [], [], [])
    every = [Stop("s", EVERY, "h"), Stop("s", 0, "h"), Stop("r", 0, "h", through=True)]
    held = HeldForward(CheckedForward(training, refuse_call), [*every, Stop("r", 0, "h", through=True, bounded=True)])
    (point,) = held.on(held.points([{"w": AT}]), stops)
    ends = [held.losses({**point, "w": AT + sign * MOVE})[0] for sign in (1, -1)]
    assert np.isclose((ends[0] - ends[1]) / 2, float(np.vdot(slope(2 * AT), 2 * MOVE)), rtol=1e-5)
