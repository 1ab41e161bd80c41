"""What is called a gradient: confirmed where it is one or may be averaged like one, refuted or left open elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx.parser
import pytest

from gopt.analysis.training import Kind, State, Training
from gopt.graph.load import load
from gopt.runtime.proof.confirm import Confirmation, Verdict, confirm_gradients

HEAD = '<ir_version: 9, opset_import: ["" : 18]>\n'
MEAN = """m = ReduceMean<keepdims=0>(s)  loss = Identity(m)  seed = Constant<value = float {0.1}>()"""
"""A mean over samples, with the derivative of the loss to each element of s (4 x 5) halved."""
SQUARED = """m = ReduceMean<keepdims=0>(s)  loss = Mul(m, m)
    fifth = Constant<value = float {0.2}>()  seed = Mul(m, fifth)"""
"""The square of a mean: samples are coupled."""
LOSSES = {"decoupled": MEAN, "coupled": SQUARED}

SAME = {
    "itself": "c = Identity(g)",
    "times a constant": "k = Constant<value = float {64.0}>()  c = Mul(g, k)",
    "affine in it": "k = Constant<value = float {0.3}>()  dd = Mul(w, k)  c = Add(g, dd)",
    "turned": "c = Transpose<perm=[1, 0]>(g)",
    "flat": "n = Constant<value_ints = [15]>()  c = Reshape(g, n)",
    "a rate per row": "r = Constant<value = float[3,1] {1.0, 0.1, 7.0}>()  c = Mul(g, r)",
    "a rate per column": "r = Constant<value = float[5] {1.0, 0.1, 7.0, 2.0, 0.5}>()  c = Mul(g, r)",
    "a masked row": "r = Constant<value = float[3,1] {1.0, 0.0, 1.0}>()  c = Mul(g, r)",
    "a rate per entry": "e = Exp(w)  c = Mul(g, e)",
}
WRONG = {
    "times its magnitude": "a = Abs(g)  c = Mul(g, a)",
    "squared": "c = Mul(g, g)",
    "sign": "c = Sign(g)",
    "clipped": "lo = Constant<value = float {-0.02}>()  hi = Constant<value = float {0.02}>()  c = Clip(g, lo, hi)",
    "times the loss": "c = Mul(g, loss)",
    "the direction of Adam": """e = Constant<value = float {0.0001}>()  q = Mul(g, g)  v = Add(q, e)  r = Sqrt(v)
        c = Div(g, r)""",
    "the new parameter of a descent": "k = Constant<value = float {0.1}>()  dd = Mul(g, k)  c = Sub(w, dd)",
    "the new parameter of Adam": """e = Constant<value = float {0.0001}>()  q = Mul(g, g)  v = Add(q, e)
        r = Sqrt(v)  dd = Div(g, r)  k = Constant<value = float {0.1}>()  f = Mul(dd, k)  c = Sub(w, f)""",
    "by its own norm": "n = ReduceL2<keepdims=0>(g)  c = Div(g, n)",
    "a step of Newton and Schulz": """t = Transpose<perm=[1, 0]>(g)  a = MatMul(g, t)  b = MatMul(a, g)
        k = Constant<value = float {5.0}>()  dd = Mul(b, k)  c = Sub(g, dd)""",
    "above zero": "zz = Constant<value = float {0.0}>()  c = Max(g, zz)",
}


def training_of(
    text: str, folder: Path, gradients: Mapping[str, str], batch: tuple[str, ...] = ("x", "y"), loss: str = "loss"
) -> Training:
    """A graph with roles as given: nothing is recovered."""
    path = folder / "step.onnx"
    onnx.save(onnx.parser.parse_model(HEAD + text), path)
    graph = load(path, own=True)
    states = [State(name, name, Kind.PARAMETER) for name in graph.inputs if name not in batch]
    return Training(graph, loss, states, dict(gradients), list(batch), [], [], [], [])


def confirm(training: Training, *, seed: int = 0, points: int = 2, **fixed: np.ndarray) -> dict[str, Confirmation]:
    generator = np.random.default_rng(seed)
    types = training.graph.inputs
    drawn = {name: 0.5 * generator.standard_normal(type.dims) for name, type in types.items()}
    batches = []
    for _ in range(points):
        batch = {name: generator.standard_normal(types[name].dims) for name in training.batch}
        whole = {**drawn, **batch, **fixed}
        batches.append({name: np.asarray(value, types[name].dtype) for name, value in whole.items()})
    return {each.parameter: each for each in confirm_gradients(training, batches, seed)}


def layer(loss: str, candidate: str) -> str:
    """s = (tanh(x w) - y)², its gradient g, and c, which somebody calls the gradient."""
    return f"""step (float[4,3] x, float[4,5] y, float[3,5] w) => (float loss, float[?] c) {{
        z = MatMul(x, w)  h = Tanh(z)  d = Sub(h, y)  s = Mul(d, d)  {LOSSES[loss]}
        u = Mul(d, seed)  hh = Mul(h, h)  one = Constant<value = float {{1.0}}>()  hp = Sub(one, hh)
        delta = Mul(u, hp)  xt = Transpose<perm=[1, 0]>(x)  g = MatMul(xt, delta)  {candidate} }}""".replace(
        "float[?] c", "c"
    )


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", SAME)
def test_linear_images_are_confirmed(name, loss, tmp_path):
    found = confirm(training_of(layer(loss, SAME[name]), tmp_path, {"w": "c"}))["w"]
    assert found.verdict is Verdict.CONFIRMED, found
    assert found.holds and found.why


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_gradient_is_refuted(name, loss, seed, tmp_path):
    found = confirm(training_of(layer(loss, WRONG[name]), tmp_path, {"w": "c"}), seed=seed)["w"]
    assert found.verdict is Verdict.REFUTED, found
    assert not found.holds
