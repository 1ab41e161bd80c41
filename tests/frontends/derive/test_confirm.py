"""Gradients that differences between batches cannot tell: they are held against differences of the loss itself."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from derive_cases import DerivedRun
from onnx import helper

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.api import read_roles, with_stored_roles
from gopt.errors import UnsupportedError
from gopt.frontends.derive import confirm
from gopt.frontends.derive import derive as front_end
from gopt.frontends.derive.options import DeriveOptions
from gopt.ir.graph import Node
from gopt.ir.load import load
from gopt.runtime import large_products
from gopt.verification.gradient_check import check_gradients, large_weights
from gopt.verification.gradient_check.forward import CheckedForward, Values

BESIDE = """<ir_version: 10, opset_import: ["" : 20]>
beside (float[3, 2] x) => (float loss) <float[3, 2] w = {0.3, -0.5, 0.7, 0.2, -0.9, 0.4}> {
  both = Concat <axis: int = 1> (w, x)
  wave = Sin (both)
  product = Mul (both, wave)
  loss = ReduceMean <keepdims: int = 0> (product)
}"""
"""The gradient by w is the same for every batch, and reads the batch all the same."""
JUMPS = """<ir_version: 10, opset_import: ["" : 20]>
jumps (float[4, 3] x) => (float loss) <float[3, 2] w = {0.3, -0.5, 0.7, 0.2, -0.9, 0.4}> {
  h = MatMul (x, w)
  s = Shrink <lambd: float = 0.2> (h)
  t = Tanh (s)
  loss = ReduceMean <keepdims: int = 0> (t)
}"""
"""Shrink jumps where its operand leaves the band around zero."""
OPTIONS = DeriveOptions(loss="loss", optimizer="sgd", lr=1.0)


LEAVES = {
    "log": ("s = ReduceSum <keepdims: int = 0> (z)", "loss = Log (s)"),
    "root": ("s = ReduceSum <keepdims: int = 0> (z)", "loss = Sqrt (s)"),
    "arc": ("s = ReduceSum <keepdims: int = 0> (z)", "loss = Acosh (s)"),
    "power": (
        "s = ReduceSum <keepdims: int = 0> (z)",
        "p = Constant <value_float: float = 1.5> ()",
        "loss = Pow (s, p)",
    ),
}
"""Ends of a forward that leave the numbers where a batch puts them below zero, or one."""


def leaving(kind: str, seed: int, sign: str = "z = Identity (y)") -> onnx.ModelProto:
    values = ", ".join(f"{each:.4f}" for each in np.random.default_rng(seed).standard_normal(6) * 2)
    lines = "\n".join(("y = MatMul (x, w)", sign, *LEAVES[kind]))
    return onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]>\n'
        f"leaving (float[4, 3] x) => (float loss) <float[3, 2] w = {{{values}}}> {{\n{lines}\n}}"
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", LEAVES)
def test_points_without_numbers_are_passed_over(kind: str, seed: int, tmp_path: Path):
    """About half of all batches give no number, so that some seeds begin with three of these."""
    onnx.save(leaving(kind, seed), tmp_path / "m.onnx")
    options = DeriveOptions(loss="loss", optimizer="sgd", seed=seed)
    assert gopt.derive(tmp_path / "m.onnx", tmp_path / "s.onnx", options).confirmed == 1


@pytest.mark.parametrize("kind", ["log", "root"])
def test_the_node_that_leaves_the_numbers_everywhere_is_named(kind: str, tmp_path: Path):
    onnx.save(leaving(kind, 0, "a = Abs (y)\nz = Neg (a)"), tmp_path / "m.onnx")
    node = {"log": "Log", "root": "Sqrt"}[kind]
    with pytest.raises(UnsupportedError, match=f"not a number on any batch: {node} .* first to leave the numbers"):
        gopt.derive(tmp_path / "m.onnx", tmp_path / "s.onnx", OPTIONS)


@pytest.mark.parametrize("text", [BESIDE, JUMPS], ids=["beside", "jumps"])
def test_it_is_confirmed_by_differences_of_the_loss(text: str, tmp_path: Path):
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    assert gopt.derive(tmp_path / "m.onnx", tmp_path / "s.onnx", OPTIONS).confirmed == 1


def test_the_gradient_beside_the_batch_is_right(tmp_path: Path):
    onnx.save(onnx.parser.parse_model(BESIDE), tmp_path / "m.onnx")
    gopt.derive(tmp_path / "m.onnx", tmp_path / "s.onnx", OPTIONS)
    run = DerivedRun(tmp_path / "s.onnx")
    w = run.states["w"].astype(np.float64)
    run.run = run.session.run(["w_out"], {"x": np.ones((3, 2), np.float32), "w": run.states["w"]})
    np.testing.assert_allclose(w - run.run[0], (np.sin(w) + w * np.cos(w)) / 12, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("factor", [1.1, -1.0, 0.0])
def test_a_wrong_one_is_refused(factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    true = front_end.write_step

    def planted(*given: object):
        step = true(*given)
        tensor = next(each for each in step.graph.initializers.values() if np.allclose(each.numpy(), 1 / 12))
        tensor.array = np.asarray(factor * tensor.numpy(), np.float32)
        return step

    monkeypatch.setattr(front_end, "write_step", planted)
    onnx.save(onnx.parser.parse_model(BESIDE), tmp_path / "m.onnx")
    with pytest.raises(UnsupportedError, match="'w' is not confirmed"):
        gopt.derive(tmp_path / "m.onnx", tmp_path / "s.onnx", OPTIONS)


def test_a_zero_gradient_stays_unconfirmed(tmp_path: Path):
    """Nothing is compared where both are zero on all batches."""
    model = onnx.parser.parse_model(BESIDE.replace("Sin (both)", "Relu (far)"))
    model.graph.node.insert(1, helper.make_node("Sub", ["both", "much"], ["far"]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1e6, np.float32), "much"))
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(UnsupportedError, match="nothing was compared"):
        gopt.derive(tmp_path / "m.onnx", tmp_path / "s.onnx", OPTIONS)


def convolutions() -> onnx.ModelProto:
    """A net of the blocks of image models: depthwise and grouped convolutions with a shuffle between, branches that are
    joined, both pools."""
    random = np.random.default_rng(5)
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]>
    net (float[2, 3, 12, 12] x) => (float[2, 5] y) {
      a = Conv <pads = [1,1,1,1], strides = [2,2]> (x, first, first_b)
      b = Relu (a)
      p = MaxPool <kernel_shape = [3,3], strides = [2,2], pads = [1,1,1,1]> (b)
      d = Conv <group = 8, pads = [1,1,1,1]> (p, deep)
      g = Conv <group = 2> (d, grouped, grouped_b)
      five = Constant <value_ints = [2, 2, 4, 3, 3]> ()
      r = Reshape (g, five)
      t = Transpose <perm = [0, 2, 1, 3, 4]> (r)
      four = Constant <value_ints = [2, 8, 3, 3]> ()
      s = Reshape (t, four)
      one = Conv (s, narrow)
      two = Conv <pads = [1,1,1,1]> (s, wide)
      three = AveragePool <kernel_shape = [3,3], pads = [1,1,1,1]> (s)
      joined = Concat <axis = 1> (one, two, three)
      k = Relu (joined)
      m = GlobalAveragePool (k)
      f = Flatten (m)
      y = Gemm (f, head, head_b)
    }""")
    shapes = {
        "first": (8, 3, 3, 3), "first_b": (8,), "deep": (8, 1, 3, 3), "grouped": (8, 4, 1, 1), "grouped_b": (8,),
        "narrow": (4, 8, 1, 1), "wide": (4, 8, 3, 3), "head": (16, 5), "head_b": (5,),
    }  # fmt: skip
    for name, shape in shapes.items():
        fan = max(int(np.prod(shape[1:])), 1)
        value = random.normal(0, fan**-0.5 if len(shape) > 1 else 0.1, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return model


ERRORS = {
    "twice": lambda g: 2 * g,
    "zero": lambda g: 0 * g,
    "its sign": lambda g: -g,
    "a hundredth": lambda g: 1.01 * g,
    "kernels turned": lambda g: np.ascontiguousarray(np.swapaxes(g, -1, -2)) if g.ndim > 1 else g[::-1],
    "turned": lambda g: np.ascontiguousarray(np.flip(g)),
    "a missing half": lambda g: np.where(np.arange(g.size).reshape(g.shape) % 2, g, 0),
    "a missing element": lambda g: np.where(np.abs(g) == np.abs(g).max(), 0, g),
}
NET = DeriveOptions(loss="cross-entropy", optimizer="sgd", lr=1.0)


@pytest.mark.parametrize("seed", range(2))
def test_a_net_of_convolutions_is_confirmed_in_few_runs(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    onnx.save(convolutions(), tmp_path / "m.onnx")
    runs: list[int] = []
    true = CheckedForward.loss
    monkeypatch.setattr(CheckedForward, "loss", lambda *given: runs.append(1) or true(*given))
    options = DeriveOptions(loss="cross-entropy", optimizer="sgd", seed=seed)
    assert gopt.derive(tmp_path / "m.onnx", tmp_path / "s.onnx", options).confirmed == 9
    assert len(runs) <= 40, "all are moved together"


def plant(name: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true = CheckedForward.loss_and_gradients

    def planted(forward: CheckedForward, point: Values) -> tuple[float, Values]:
        loss, gradients = true(forward, point)
        key = forward.training.gradients[name]
        return loss, {**gradients, key: ERRORS[error](gradients[key])}

    monkeypatch.setattr(CheckedForward, "loss_and_gradients", planted)


LAYERS = """<ir_version: 10, opset_import: ["" : 20]>
layers (float[3, 20] x) => (float[3, 6] y) {
  h = Gemm (x, w0, b0)
  r = Relu (h)
  k = Gemm <transB: int = 1> (r, w1)
  t = Tanh (k)
  y = Gemm <alpha: float = 0.5, transB: int = 1> (t, w2, b2)
}"""
WIDTHS = {"w0": (20, 16), "b0": (16,), "w1": (12, 16), "w2": (6, 12), "b2": (6,)}


def layers(monkeypatch: pytest.MonkeyPatch) -> onnx.ModelProto:
    """Products of matrices, of which all but the last are called large, as of 25088 x 4096 in a classifier."""
    monkeypatch.setattr(large_weights, "LARGE", 100)
    monkeypatch.setattr(large_products, "_PIECE", 64)
    random, model = np.random.default_rng(11), onnx.parser.parse_model(LAYERS)
    for name, shape in WIDTHS.items():
        value = (random.standard_normal(shape) * 0.4).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return model


def test_large_weights_stay_float32_and_are_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[frozenset[str], set[str]]] = []
    true = CheckedForward.loss_and_gradients

    def watched(forward: CheckedForward, point: Values) -> tuple[np.ndarray, Values]:
        loss, gradients = true(forward, point)
        narrow = {name for name, key in forward.training.gradients.items() if gradients[key].dtype == np.float32}
        seen.append((forward.large, narrow))
        return loss, gradients

    monkeypatch.setattr(CheckedForward, "loss_and_gradients", watched)
    onnx.save(layers(monkeypatch), tmp_path / "m.onnx")
    assert gopt.derive(tmp_path / "m.onnx", tmp_path / "s.onnx", NET).confirmed == 5
    assert seen == [(frozenset({"w0", "w1"}), {"w0", "w1"})] * 2, "slopes alone tell it"


@pytest.mark.parametrize("name", ["w0", "w1", "b0"])
@pytest.mark.parametrize("error", ["a missing element", "turned", "twice"])
def test_an_error_beside_large_weights_is_found(name: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plant(name, error, monkeypatch)
    onnx.save(layers(monkeypatch), tmp_path / "m.onnx")
    with pytest.raises(UnsupportedError, match=f"the gradient of '{name}' is not confirmed"):
        gopt.derive(tmp_path / "m.onnx", tmp_path / "s.onnx", NET)


@pytest.mark.parametrize("wrong", ["", "first"])
def test_verify_finds_it_where_all_are_moved_together(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A constant factor may be averaged, and is told from the others'; magnitudes may not."""
    onnx.save(convolutions(), tmp_path / "m.onnx")
    gopt.derive(tmp_path / "m.onnx", tmp_path / "s.onnx", NET)
    graph = load(tmp_path / "s.onnx")
    training = read_roles(graph, with_stored_roles(graph, RoleMap(), "the step"))
    draws = islice(confirm._points(training, NET), 3)
    if wrong:
        bent = Node("Abs", [training.gradients[wrong]], ["bent"])
        graph.types["bent"] = graph.types[training.gradients[wrong]]
        graph.nodes.append(bent)
        training.gradients[wrong] = "bent"
    plant("wide", "a hundredth", monkeypatch)
    found = check_gradients(training, [{**confirm._states(training), **draw} for draw in draws], 0)
    assert [each.parameter for each in found if not each.holds] == ([wrong] if wrong else [])
    ratios = {each.parameter: float(np.mean(each.ratios)) for each in found if each.holds}
    assert ratios.pop("wide") == pytest.approx(1.01 * np.median([*ratios.values()]), rel=1e-3)
    assert np.ptp([*ratios.values()]) < 1e-3


QUICK = [
    ("first_b", "a missing half"),
    ("deep", "a hundredth"),
    ("wide", "a missing element"),
    ("first", "kernels turned"),
]
PLANTED = [(name, error) for name in ("first", "first_b", "deep", "grouped", "narrow", "wide") for error in ERRORS]


@pytest.mark.parametrize(
    ("name", "error"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in PLANTED if each not in QUICK)]
)
def test_an_error_in_one_gradient_of_a_net_is_found(
    name: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plant(name, error, monkeypatch)
    onnx.save(convolutions(), tmp_path / "m.onnx")
    with pytest.raises(UnsupportedError, match=f"the gradient of '{name}' is not confirmed"):
        gopt.derive(tmp_path / "m.onnx", tmp_path / "s.onnx", NET)
