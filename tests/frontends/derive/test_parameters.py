"""Which constants are trained: by operators that read them, and by patterns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import numpy_helper

import gopt
from gopt.errors import OptionError
from gopt.frontends.derive.derive import Derived, derive
from gopt.frontends.derive.options import DeriveOptions

DRAW = np.random.default_rng(9).standard_normal


def trained(folder: Path, text: str, weights: dict[str, np.ndarray], loss: str = "mse", **given: object) -> set[str]:
    return set(roles(derived(folder, text, weights, loss, **given))["states"])


def derived(folder: Path, text: str, weights: dict[str, np.ndarray], loss: str = "mse", **given: object) -> Derived:
    head = '<ir_version: 10, opset_import: ["" : 23]>'
    shown = "float l" if loss == "l" else "float[4,3] y"
    model = onnx.parser.parse_model(f"{head}\ng (float[4,3] x) => ({shown}) {{ {text} }}")
    model.graph.initializer.extend(
        numpy_helper.from_array(value if value.dtype.kind == "i" else value.astype(np.float32), name)
        for name, value in weights.items()
    )
    onnx.save(model, folder / "forward.onnx")
    options = DeriveOptions(loss=loss, optimizer="sgd", **given)  # type: ignore[arg-type]
    return derive(folder / "forward.onnx", folder / "step.onnx", options, force=True)


def roles(made: Derived) -> dict[str, dict[str, str]]:
    metadata = {each.key: each.value for each in onnx.load(made.model).metadata_props}
    return json.loads(metadata["gopt.roles"])  # type: ignore[no-any-return]


LABELS = np.array([0, 2, 1, 1])
NO_WEIGHTS = {
    "weights of classes": ("h = MatMul(x, w) l = SoftmaxCrossEntropyLoss(h, i, c)",
                           {"i": LABELS, "c": DRAW(3) ** 2}, "l"),
    "one hot": ("d = Constant<value = int64[1] {3}>() h = MatMul(x, w) o = OneHot(i, d, c) y = Mul(h, o)",
                {"i": LABELS, "c": np.array([0.5, 1])}, "mse"),
    "no elements": ("h = MatMul(x, w) y = Concat<axis=0>(h, c)", {"c": DRAW((0, 3))}, "mse"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_WEIGHTS)
def test_operands_that_are_no_weights(tmp_path: Path, name: str):
    text, weights, loss = NO_WEIGHTS[name]
    assert trained(tmp_path, text, {"w": DRAW((3, 3)), **weights}, loss) == {"w"}


def test_tables_of_angles_are_no_weights(tmp_path: Path):
    text = """h = MatMul(x, w) four = Constant<value = int64[4] {1, 1, 4, 4}>() z = Reshape(h, four)
              r = RotaryEmbedding(z, c, s, p) flat = Constant<value = int64[2] {4, 4}>() f = Reshape(r, flat)
              y = MatMul(f, v)"""
    angles = DRAW((6, 2))
    tables = {"c": np.cos(angles), "s": np.sin(angles), "p": np.arange(4).reshape(1, 4)}
    assert trained(tmp_path, text, {"w": DRAW((3, 4)), "v": DRAW((4, 3)), **tables}) == {"w", "v"}


NORM = "h = MatMul(x, norm_w) y = BatchNormalization(h, norm_s, norm_b, norm_m, norm_v)"
NORMED = {"norm_w": DRAW((3, 3)), **{f"norm_{each}": DRAW(3) ** 2 for each in "sbmv"}}


@pytest.mark.parametrize("pattern", ["*", "norm_*"])
def test_a_pattern_for_a_layer_passes_over_its_statistics(tmp_path: Path, pattern: str):
    assert trained(tmp_path, NORM, NORMED, trainable=(pattern,)) == {"norm_w", "norm_s", "norm_b"}


@pytest.mark.parametrize("pattern", ["norm_m", "*_[mv]"])
def test_a_pattern_for_statistics_alone_is_refused(tmp_path: Path, pattern: str):
    with pytest.raises(OptionError, match="'norm_m' is a running statistic"):
        trained(tmp_path, NORM, NORMED, trainable=(pattern,))


def test_a_pattern_may_match_what_the_loss_does_not_read(tmp_path: Path):
    text, weights = "y = MatMul(x, w)", {"w": DRAW((3, 3)), "pooler": DRAW(3)}
    assert trained(tmp_path, text, weights, trainable=("*",)) == {"w"}
    with pytest.raises(OptionError, match="the loss does not depend on 'pooler'"):
        trained(tmp_path, text, weights, trainable=("w", "pool*"))


def test_a_penalty_alone_is_derived_and_noted(tmp_path: Path):
    """No batch changes its gradient, so that the check of gradients does not see it."""
    text = """h = MatMul(x, w) s = Mul(h, h) a = ReduceMean<keepdims=0>(s) q = Mul(p, p) b = ReduceSum<keepdims=0>(q)
              l = Add(a, b)"""
    p = DRAW(3).astype(np.float32)
    made = derived(tmp_path, text, {"w": DRAW((3, 3)), "p": p}, "l", lr=0.25)
    assert made.confirmed == 1 and "not confirmed, for no batch changes their gradients: 'p'" in made.notes
    assert roles(made)["params"].keys() == {"w"}
    session = onnxruntime.InferenceSession(made.model)
    (new,) = session.run(["p_out"], {"x": DRAW((4, 3)).astype(np.float32)})
    np.testing.assert_allclose(new, p / 2, rtol=1e-6)


def test_another_output_may_have_any_size(tmp_path: Path):
    """The number of rows of NonZero is nowhere known."""
    head = '<ir_version: 10, opset_import: ["" : 23]>'
    text = f"{head}\ng (float[4,3] x) => (float[4,3] y, int64[2,n] k) {{ h = MatMul(x, w) y = Relu(h) k = NonZero(y) }}"
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(DRAW((3, 3)).astype(np.float32), "w"))
    onnx.save(model, tmp_path / "forward.onnx")
    made = derive(tmp_path / "forward.onnx", tmp_path / "step.onnx", DeriveOptions(loss="mse", optimizer="sgd"))
    x = DRAW((4, 3)).astype(np.float32)
    feeds = {"x": x, "target": x, "lr": np.zeros((), np.float32)}
    y, k = onnxruntime.InferenceSession(made.model).run(["y", "k"], feeds)
    np.testing.assert_array_equal(k, np.nonzero(y))


def test_without_values_inputs_are_trained(tmp_path: Path) -> None:
    """The states are fed; what is frozen is an input of the batch."""
    head = '<ir_version: 10, opset_import: ["" : 23]>'
    inputs, text = "float[4,3] x, float[3,3] w, float[3] scale", "h = MatMul(x, w) s = Tanh(h) y = Mul(s, scale)"
    onnx.save(onnx.parser.parse_model(f"{head}\ng ({inputs}) => (float[4,3] y) {{ {text} }}"), tmp_path / "fed.onnx")
    options = DeriveOptions(loss="mse", optimizer="momentum", values=False, freeze=("x",))
    made = derive(tmp_path / "fed.onnx", tmp_path / "step.onnx", options)
    assert made.confirmed == 0 and any("no gradient is confirmed" in note for note in made.notes)
    assert set(roles(made)["batch"]) == {"x", "target"}
    assert set(roles(made)["states"]) == {"w", "scale", "w.momentum_buffer", "scale.momentum_buffer"}
    graph = onnx.load(made.model).graph
    assert not {tensor.name for tensor in graph.initializer} & {value.name for value in graph.input}
    gopt.shard(made.model, 2).write(tmp_path / "ranks")
    assert gopt.verify(tmp_path / "ranks").equal
