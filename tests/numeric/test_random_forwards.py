"""Steps derived from forward models that ``derive_gen`` draws, beside NumPy's updates of central differences."""

from __future__ import annotations

import collections
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from derive_gen.__main__ import one
from derive_gen.judge import _session, _typed, judge
from derive_gen.make import Forward, make, pooled
from derive_gen.reference import Loss
from onnx import ModelProto, TensorProto, helper, numpy_helper

import gopt
from gopt.errors import GoptError, UnsupportedError

pytest.importorskip("onnx_ad", reason="needs pip install 'gopt[derive]'")

FEW, MANY = 8, 400
ALLOWED = {"right", "refused", "unsteady", "not run", "apart"}


def counted(seeds: range, folder: Path) -> collections.Counter[str]:
    found: collections.Counter[str] = collections.Counter()
    for seed in seeds:
        told, verdict = one(seed, folder / str(seed))
        assert verdict.outcome in ALLOWED, (told, verdict.why)
        found[verdict.outcome] += 1
    return found


@pytest.mark.rest
def test_random_models_train_as_their_differences_say(tmp_path: Path):
    assert counted(range(9_000, 9_000 + FEW), tmp_path)["right"] >= FEW / 2


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 200))])
def test_maximum_pools_train_as_their_differences_say(seed: int, tmp_path: Path):
    verdict = judge(pooled(seed), "sgd", tmp_path)
    assert verdict.outcome in ALLOWED, verdict.why


def tied(forward: Forward, folder: Path) -> tuple[Forward, Path]:
    """The model with a first weight of zeros, and batches in which many elements tie."""
    model, first = ModelProto.FromString(forward.model.SerializeToString()), next(iter(forward.weights))
    weights = dict(forward.weights)
    for each in model.graph.initializer:
        if each.name == first and each.data_type == TensorProto.FLOAT:
            weights[first] = np.zeros_like(weights[first])
            each.CopyFrom(numpy_helper.from_array(weights[first].astype(np.float32), first))
    batches = [{**batch, "x1": np.round(batch["x1"])} for batch in forward.batches]
    whole = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    fed = {name: value.astype(np.int64 if value.dtype.kind == "i" else np.float32) for name, value in whole.items()}
    np.savez(folder / "data.npz", allow_pickle=False, **fed)
    return replace(forward, model=model, weights=weights, batches=batches), folder / "data.npz"


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 60))])
def test_pools_of_elements_that_tie_are_derived(seed: int, tmp_path: Path):
    """Along equal moves of all elements, under which ties stay ties, the loss has a derivative."""
    forward, data = tied(pooled(seed), tmp_path)
    onnx.save(forward.model, tmp_path / "forward.onnx")
    knobs = {"loss": forward.loss, "optimizer": "sgd", "dims": forward.dims, "data": str(data), "lr": 1.0}
    try:
        gopt.derive(tmp_path / "forward.onnx", tmp_path / "step.onnx", gopt.DeriveOptions(**knobs))
    except GoptError as error:  # onnx infers other shapes than its evaluator makes
        assert "not confirmed" not in error.message, error.message
        return
    name, value = next(iter(forward.weights.items()))
    batch, loss = forward.batches[0], Loss(forward)
    step = _session(tmp_path / "step.onnx")
    made = step.run([f"{name}_out"], _typed(batch, step))[0].astype(np.float64)
    ends = [loss({**forward.weights, name: value + side * 1e-5}, batch) for side in (1, -1)]
    slope = (ends[0] - ends[1]) / 2e-5
    assert abs((value - made).sum() - slope) <= 1e-2 * abs(slope) + 1e-3 * np.abs(value - made).sum() + 1e-4


@pytest.mark.slow
def test_many_random_models_train_as_their_differences_say(tmp_path: Path):
    assert counted(range(10_000, 10_000 + MANY), tmp_path)["right"] >= 0.8 * MANY


def test_the_judge_sees_a_wrong_reference(tmp_path: Path):
    """The same step, held against a model with other weights."""
    forward = make(9_001)
    other = {name: value + 0.3 for name, value in forward.weights.items()}
    moved = Forward(forward.model, other, forward.loss, forward.batches, forward.dims, forward.draws)
    (tmp_path / "x").mkdir()
    assert judge(moved, "sgd", tmp_path / "x").outcome in ("WRONG", "apart")


def test_the_judge_sees_a_refusal_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(*given: object):
        raise UnsupportedError("it cannot be done", "try another")

    monkeypatch.setattr(gopt, "derive", refused)
    assert judge(make(9_001), "sgd", tmp_path).outcome == "WRONG"


def test_gradients_of_the_reference_are_exact():
    """Of a product, whose derivative is known."""
    from derive_gen.reference import gradients

    x, w = np.array([[1.0, -2.0]]), np.array([[0.5], [0.25]])
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("ReduceSum", ["y"], ["l"], keepdims=0)],
        "product", [helper.make_tensor_value_info("x", 1, [1, 2])], [helper.make_tensor_value_info("l", 1, [])],
        [numpy_helper.from_array(w.astype(np.float32), "w")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    forward = Forward(model, {"w": w}, "l", [{"x": x}], {}, ())
    np.testing.assert_allclose(gradients(Loss(forward), {"w": w}, {"x": x})["w"], x.T, atol=1e-8)
