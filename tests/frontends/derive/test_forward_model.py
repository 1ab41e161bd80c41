"""Forward models of all forms: control flow that reads weights, bfloat16, older operator sets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import gopt
from gopt.errors import RunError, UnsupportedError
from gopt.frontends.derive.derive import derive
from gopt.frontends.derive.forward_model import read_forward
from gopt.frontends.derive.options import DeriveOptions, Norms
from gopt.runtime import capacity

BODIES = {
    "If, one branch each": """zero = Constant<value = float {0}>() sum = ReduceSum<keepdims=0>(x) c = Less(sum, zero)
        h = If (c) <then_branch = a () => (float[4,3] p) { p = MatMul(x, w) },
                    else_branch = b () => (float[4,3] q) { r = MatMul(x, v)  q = Tanh(r) }>
        y = MatMul(h, w)""",
    "Loop that carries": """n = Constant<value = int64 {3}>() c = Constant<value = bool {1}>() h = MatMul(x, v)
        y = Loop (n, c, h) <body = b (int64 i, bool k, float[4,3] s) => (bool o, float[4,3] t)
        { o = Identity(k) m = MatMul(s, w) t = Tanh(m) }>""",
    "Loop that stops early": """n = Constant<value = int64 {9}>() c = Constant<value = bool {1}>()
        big = Constant<value = float {6}>() h = MatMul(x, v)
        y = Loop (n, c, h) <body = b (int64 i, bool k, float[4,3] s) => (bool o, float[4,3] t)
        { m = MatMul(s, w) t = Add(m, s) e = ReduceL1<keepdims=0>(t) o = Less(e, big) }>""",
    "Scan": """h = MatMul(x, v) zeros = Constant<value = float[3] {0, 0, 0}>()
        last, y = Scan <num_scan_inputs = 1, body = b (float[3] s, float[3] u) => (float[3] t, float[3] r)
        { m = MatMul(s, w) t = Add(m, u) r = Tanh(t) }> (zeros, h)""",
    "If in a Loop": """n = Constant<value = int64 {2}>() c = Constant<value = bool {1}>()
        zero = Constant<value = float {0}>()
        y = Loop (n, c, x) <body = b (int64 i, bool k, float[4,3] s) => (bool o, float[4,3] t)
        { o = Identity(k) m = MatMul(s, w) e = ReduceSum<keepdims=0>(m) d = Less(e, zero)
          t = If (d) <then_branch = p () => (float[4,3] f) { f = MatMul(m, v) },
                      else_branch = q () => (float[4,3] g) { g = Tanh(m) }> }>""",
}


def written(folder: Path, text: str, weights: Mapping[str, np.ndarray], opset: int = 20) -> Path:
    """A model from ``x`` to ``y``, both float32 [4, 3], with stored ``weights``."""
    head = f'<ir_version: 8, opset_import: ["" : {opset}]>'
    model = onnx.parser.parse_model(f"{head}\ng (float[4,3] x) => (float[4,3] y) {{ {text} }}")
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    onnx.save(model, folder / "forward.onnx")
    return folder / "forward.onnx"


def weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    return {name: (random.standard_normal((3, 3)) * 0.6).astype(np.float32) for name in "wv"}


def mean_square(path: Path, feeds: Mapping[str, np.ndarray]) -> float:
    """The loss of ``--loss mse`` with a target of zeros, of a forward model whose weights are fed."""
    model = onnx.load(path)
    for each in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(each.name, each.data_type, each.dims))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return float(np.mean(session.run(["y"], dict(feeds))[0].astype(np.float64) ** 2))


def stepped(path: Path, x: np.ndarray) -> dict[str, np.ndarray]:
    """What one step of SGD with a rate of one takes off each state: its gradient."""
    model = onnx.load(path)
    states = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    states = {each.name: states[each.name] for each in model.graph.input if each.name in states}
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    made = session.run([f"{name}_out" for name in states], {"x": x, "target": np.zeros((4, 3), np.float32), **states})
    return {name: value - new for (name, value), new in zip(states.items(), made)}


SGD = {"loss": "mse", "optimizer": "sgd", "lr": 1.0}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_read_weights(tmp_path: Path, name: str):
    """On batches for both branches and several numbers of rounds, against differences of the forward model."""
    forward, used = written(tmp_path, BODIES[name], weights()), weights()
    derived = derive(forward, tmp_path / "step.onnx", DeriveOptions(**SGD))
    assert derived.parameters == derived.confirmed == 2 + (name == "Scan")
    for seed in range(3):
        x = np.random.default_rng(seed).standard_normal((4, 3)).astype(np.float32) * (0.2 + seed)
        found = stepped(tmp_path / "step.onnx", x)
        for key, value in used.items():
            direction = np.random.default_rng(9).standard_normal(value.shape).astype(np.float32)
            ends = [mean_square(forward, {**used, "x": x, key: value + side * direction}) for side in (1e-3, -1e-3)]
            quotient = (ends[0] - ends[1]) / 2e-3
            assert float((found[key] * direction).sum()) == pytest.approx(quotient, rel=2e-2, abs=2e-3), (key, seed)


def test_constants_in_bodies_are_named(tmp_path: Path):
    text = """n = Constant<value = int64 {2}>() c = Constant<value = bool {1}>() h = MatMul(x, w)
        y = Loop (n, c, h) <body = b (int64 i, bool k, float[4,3] s) => (bool o, float[4,3] t)
        { o = Identity(k) inner = Constant<value = float[3] {1, 2, 3}>() m = Mul(s, inner) t = Tanh(m) }>"""
    derived = derive(written(tmp_path, text, weights()), tmp_path / "step.onnx", DeriveOptions(**SGD))
    assert "not trained, for they are in bodies of control flow: 'inner'" in derived.notes


@pytest.mark.parametrize("operator", ["batchnorm", "dropout"])
def test_training_mode_in_a_body_is_refused(tmp_path: Path, operator: str):
    made = {"batchnorm": "BatchNormalization(x, s, s, s, s)", "dropout": "Dropout(x)"}[operator]
    text = f"""zero = Constant<value = float {{0}}>() sum = ReduceSum<keepdims=0>(x) c = Less(sum, zero) h = If (c) <
        then_branch = a () => (float[4,3] p) {{ p = {made} }}, else_branch = b () => (float[4,3] q) {{ q = Tanh(x) }}>
        y = MatMul(h, w)"""
    forward = written(tmp_path, text, {**weights(), "s": np.ones(3, np.float32)})
    assert derive(forward, tmp_path / "kept.onnx", DeriveOptions(**SGD)).parameters == 1
    with pytest.raises(UnsupportedError, match="'p' is in the body of control flow") as caught:
        derive(forward, tmp_path / "step.onnx", DeriveOptions(**SGD, **{operator: Norms.TRAIN}))
    assert caught.value.hints == (f"--{operator} keep",)


def half_model(path: Path, kind: int) -> dict[str, np.ndarray]:
    """An MLP with a softmax and a scale by a constant, in one element type; returns its weights."""
    random, dtype = np.random.default_rng(0), helper.tensor_dtype_to_np_dtype(kind)
    shapes = {"w1": (4, 5), "b1": (5,), "w2": (5, 3), "b2": (3,)}
    stored = {name: (random.standard_normal(shape) * 0.5).astype(dtype) for name, shape in shapes.items()}
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["p"]),
        helper.make_node("Add", ["p", "b1"], ["h"]),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("Gemm", ["t", "w2", "b2"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes, "half", [helper.make_tensor_value_info("x", kind, [6, 4])],
        [helper.make_tensor_value_info("logits", kind, [6, 3])],
        [numpy_helper.from_array(value, name) for name, value in stored.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return stored


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "nadam", "lion"])
def test_bfloat16(tmp_path: Path, optimizer: str):
    """The step is in bfloat16 throughout, its gradients are confirmed, and it shards."""
    half_model(tmp_path / "half.onnx", TensorProto.BFLOAT16)
    knobs = {"clip_norm": 1.0, "loss_scale": "dynamic"} if optimizer == "adamw" else {}
    options = DeriveOptions(loss="cross-entropy", optimizer=optimizer, **knobs)
    derived = derive(tmp_path / "half.onnx", tmp_path / "step.onnx", options)
    assert derived.parameters == derived.confirmed == 4
    graph = gopt.load(tmp_path / "step.onnx").training.graph
    assert {graph.types[f"{name}.grad"].dtype for name in ("w1", "b1", "w2", "b2")} == {"bfloat16"}
    gopt.shard(tmp_path / "step.onnx", 2).write(tmp_path / "ranks")
    assert gopt.verify(tmp_path / "ranks").equal


def test_a_step_in_bfloat16_moves_as_one_in_float32(tmp_path: Path):
    stored, random = half_model(tmp_path / "half.onnx", TensorProto.BFLOAT16), np.random.default_rng(1)
    derive(tmp_path / "half.onnx", tmp_path / "step.onnx", DeriveOptions(loss="mse", optimizer="sgd", lr=1.0))
    x = random.standard_normal((6, 4)).astype(ml_dtypes.bfloat16)
    target = random.standard_normal((6, 3)).astype(ml_dtypes.bfloat16)
    evaluator = ReferenceEvaluator(str(tmp_path / "step.onnx"))
    found = dict(zip(evaluator.output_names, evaluator.run(None, {"x": x, "target": target, **stored})))
    w1, b1, w2, b2, x, target = (np.asarray(each).astype(np.float64) for each in (*stored.values(), x, target))
    t = np.tanh(x @ w1 + b1)
    into_logits = 2 * (t @ w2 + b2 - target) / 18
    into_h = into_logits @ w2.T * (1 - t * t)
    for name, gradient in {
        "w1": x.T @ into_h,
        "b1": into_h.sum(0),
        "w2": t.T @ into_logits,
        "b2": into_logits.sum(0),
    }.items():
        moved = stored[name].astype(np.float64) - found[f"{name}_out"].astype(np.float64)
        np.testing.assert_allclose(moved, gradient, atol=0.03 * np.abs(gradient).max() + 0.01, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "eps", "noted"), [("FLOAT16", 1e-8, True), ("FLOAT16", 1e-4, False), ("FLOAT", 1e-8, False)]
)
def test_an_epsilon_that_is_zero_in_float16_is_noted(tmp_path: Path, kind: str, eps: float, noted: bool):
    half_model(tmp_path / "half.onnx", TensorProto.DataType.Value(kind))
    options = DeriveOptions(loss="mse", optimizer="adam", optimizer_options={"eps": eps})
    notes = derive(tmp_path / "half.onnx", tmp_path / "step.onnx", options).notes
    assert any("is zero in float16" in note for note in notes) == noted


def test_bfloat16_beside_float64_is_refused(tmp_path: Path):
    half_model(tmp_path / "half.onnx", TensorProto.BFLOAT16)
    model = onnx.load(tmp_path / "half.onnx")
    model.graph.node[2].output[0] = "narrow"
    model.graph.node.insert(3, helper.make_node("Cast", ["narrow"], ["wide"], to=TensorProto.DOUBLE))
    model.graph.node.insert(4, helper.make_node("Cast", ["wide"], ["t"], to=TensorProto.BFLOAT16))
    onnx.save(model, tmp_path / "both.onnx")
    with pytest.raises(UnsupportedError, match="in bfloat16 and in float64"):
        derive(tmp_path / "both.onnx", tmp_path / "step.onnx", DeriveOptions(loss="mse", optimizer="sgd"))


OLDER = {
    13: "axes = Constant<value_ints=[1]>() a = MatMul(x, w) b = Softmax(a) c = ReduceSum<keepdims=1>(b, axes) "
        "d = ReduceMean<axes=[1]>(a) e = Mul(c, d) y = Add(e, b)",
    14: "a = MatMul(x, w) b = HardSwish(a) y = CumSum(b, one)",
    15: "a = MatMul(x, w) p, q = Split<axis=1>(a, sizes) y = Concat<axis=1>(q, p)",
    16: "a = MatMul(x, w) z = Constant<value = float {0}>() c = Greater(a, z) y = Where(c, a, z)",
    17: "a = MatMul(x, w) y = LayerNormalization(a, s, s)",
    18: "a = MatMul(x, w) p, q, r = Split<axis=1, num_outputs=3>(a) y = Concat<axis=1>(r, p, q)",
    19: "a = MatMul(x, w) y = Reshape(a, shape)",
}  # fmt: skip


@pytest.mark.parametrize("opset", OLDER)
def test_older_operator_sets(tmp_path: Path, opset: int):
    extra = {"one": np.array(1), "sizes": np.array([1, 2]), "shape": np.array([4, 3]), "s": np.float32([1, 2, 3])}
    used = {
        name: value
        for name, value in {**weights(), **extra}.items()
        if f"{name})" in OLDER[opset] or f"{name}," in OLDER[opset]
    }
    forward = written(tmp_path, OLDER[opset], used, opset)
    derived = derive(forward, tmp_path / "step.onnx", DeriveOptions(**SGD))
    assert derived.confirmed == derived.parameters >= 1
    x = np.random.default_rng(4).standard_normal((4, 3)).astype(np.float32)
    found, direction = (
        stepped(tmp_path / "step.onnx", x),
        np.random.default_rng(9).standard_normal((3, 3)).astype(np.float32),
    )
    ends = [mean_square(forward, {**used, "x": x, "w": used["w"] + side * direction}) for side in (1e-3, -1e-3)]
    assert float((found["w"] * direction).sum()) == pytest.approx((ends[0] - ends[1]) / 2e-3, rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("two", ["value_int = 2", "value = int32 {2}", "value_ints = [2]"])
def test_a_whole_exponent(tmp_path: Path, two: str):
    text = f"two = Constant<{two}>() h = MatMul(x, w) y = Pow(h, two)"
    path = written(tmp_path, text, {"w": weights()["w"]})
    assert derive(path, tmp_path / "step.onnx", DeriveOptions(loss="mse", optimizer="sgd")).confirmed == 1


@pytest.mark.parametrize("free", [1423, 1424])
def test_a_size_that_no_memory_holds_is_refused_before_it_is_drawn(tmp_path: Path, monkeypatch, free: int):
    """Three batches of N x 3 in float32, and the largest value, N x 20, in float64 with its gradient."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 20]>\ng (float[N,3] x) => (float[N,20] y) { y = MatMul(x, w) }'
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones((3, 20), np.float32), "w"))
    onnx.save(model, tmp_path / "m.onnx")
    size = 4  # 4 x 3 x 4 x 3 + 4 x 20 x 16 = 1424
    monkeypatch.setattr(capacity, "free_memory", lambda: free)
    if free == 1424:
        read_forward(tmp_path / "m.onnx", {"N": size})
        return
    with pytest.raises(RunError, match="value 'y' is float32") as caught:
        read_forward(tmp_path / "m.onnx", {"N": size})
    assert "--dim" in caught.value.hints[0]
