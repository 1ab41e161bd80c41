"""An If whose condition the sizes decide is replaced by its branch, whose constants are weights then."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from derive_cases import DerivedRun

import gopt
from gopt.errors import OptionError

TEXT = """<ir_version: 10, opset_import: ["" : 18]>
decided (float[batch, 3] x) => (float[batch, 3] y)
<int64[1] limit = {LIMIT}, float[3] scale = {1.5, 0.5, 2.0}>
{
  first = Constant <value_ints: ints = [0]> ()
  shape = Shape (x)
  size = Gather <axis: int = 0> (shape, first)
  wide = Greater (size, limit)
  h = If (wide) <
    then_branch = wide_branch () => (float[batch, 3] out) <float[3] w = {0.3, -0.2, 0.1}> {
      moved = Add (x, w)
      out = Mul (moved, scale)
    },
    else_branch = narrow_branch () => (float[batch, 3] out2) <float[3] w2 = {0.7, 0.2, -0.4}> {
      out2 = Sub (x, w2)
    }
  >
  moved2 = Tanh (h)
  again = If (wide) <
    then_branch = second_branch () => (float[batch, 3] given) { given = Identity (moved2) },
    else_branch = third_branch () => (float[batch, 3] other) { other = Neg (moved2) }
  >
  y = Add (again, scale)
}"""


def derived(limit: int, folder: Path) -> DerivedRun:
    onnx.save(onnx.parser.parse_model(TEXT.replace("LIMIT", str(limit))), folder / "m.onnx")
    options = gopt.DeriveOptions(loss="mse", optimizer="sgd", lr=1.0, dims={"batch": 4})
    made = gopt.derive(folder / "m.onnx", folder / "s.onnx", options, force=True)
    assert made.confirmed == made.parameters == 2
    return DerivedRun(folder / "s.onnx")


def test_the_branch_that_runs_is_trained(tmp_path: Path):
    x, target = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3), np.zeros((4, 3), np.float32)
    for limit, weight in ((2, "w"), (4, "w2")):
        run = derived(limit, tmp_path)
        before = run.states
        assert set(before) == {"scale", weight}
        assert not any(node.op_type == "If" for node in onnx.load(tmp_path / "s.onnx").graph.node)
        loss = run.step(x=x, target=target)
        w, scale = before[weight].astype(np.float64), before["scale"].astype(np.float64)

        def y(w: np.ndarray, scale: np.ndarray = scale, limit: int = limit) -> np.ndarray:
            return np.tanh((x + w) * scale) + scale if limit == 2 else -np.tanh(x - w) + scale

        assert loss == pytest.approx((y(w) ** 2).mean(), rel=1e-5)
        for place in range(3):
            move = np.eye(3)[place] * 1e-6
            slope = ((y(w + move) ** 2).mean() - (y(w - move) ** 2).mean()) / 2e-6
            assert before[weight][place] - run.states[weight][place] == pytest.approx(slope, rel=1e-3, abs=1e-6)


def test_names_of_two_bodies_stay_apart(tmp_path: Path):
    """Bodies may use one name twice; what is put in their place may not."""
    text = TEXT.replace("given = Identity (moved2)", "moved = Exp (moved2) given = Identity (moved)")
    onnx.save(onnx.parser.parse_model(text.replace("LIMIT", "1")), tmp_path / "m.onnx")
    options = gopt.DeriveOptions(loss="mse", optimizer="sgd", dims={"batch": 4})
    assert gopt.derive(tmp_path / "m.onnx", tmp_path / "s.onnx", options).confirmed == 2


def test_where_all_weights_are_in_bodies_the_refusal_says_so(tmp_path: Path):
    text = TEXT.replace(", float[3] scale = {1.5, 0.5, 2.0}", ", float scale = {1.5}").replace(
        "Greater (size, limit)", "Greater (total, scale)"
    )
    text = text.replace("size = Gather", "total = ReduceSum <keepdims: int = 0> (x)\n  size = Gather")
    onnx.save(onnx.parser.parse_model(text.replace("LIMIT", "1")), tmp_path / "m.onnx")
    options = gopt.DeriveOptions(loss="mse", optimizer="sgd", dims={"batch": 4})
    with pytest.raises(OptionError, match="'w', 'w2' in bodies of control flow cannot be trained"):
        gopt.derive(tmp_path / "m.onnx", tmp_path / "s.onnx", options)
