"""A second engine finds rewrites and kernels that compute something else, and nothing where engines round apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

import gopt
from gopt.errors import UnsupportedError
from gopt.frontends.derive import confirm as derive_confirm
from gopt.frontends.derive.derive import derive
from gopt.frontends.derive.options import DeriveOptions
from gopt.ir.graph import Graph
from gopt.ir.load import graph_of
from gopt.runtime import fallback_kernels, session
from gopt.runtime.executor import Executor
from gopt.runtime.reference_eval import seconds
from gopt.runtime.session import SessionCache
from gopt.verification import second_engine
from gopt.verification.engine_check import EngineCheck, EngineDifference
from gopt.verification.reference_graphs import refuse_call
from gopt.verification.second_engine import PLAIN, REFERENCE, compare_engines

FIXTURES = Path(__file__).parents[2] / "fixtures"
op = helper.make_node


def model(nodes, shape, stored) -> ModelProto:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [value("x", 1, shape)], [value(nodes[-1].output[0], 1, None)],
        [numpy_helper.from_array(array, name) for name, array in stored.items()],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=8)
    return onnx.shape_inference.infer_shapes(made)


def folded() -> ModelProto:
    """A product, turned, and its frozen normalisation."""
    random = np.random.default_rng(5)
    stored = {"w": random.standard_normal((4, 4)), **{name: 0.3 + random.random(4) for name in "sbmv"}}
    nodes = [
        op("Tanh", ["x"], ["h"]), op("MatMul", ["h", "w"], ["t"]), op("Transpose", ["t"], ["u"], perm=[1, 0]),
        op("BatchNormalization", ["u", "s", "b", "m", "v"], ["q"], name="norm"), op("Softmax", ["q"], ["y"]),
    ]  # fmt: skip
    return model(nodes, [4, 4], {name: array.astype(np.float32) for name, array in stored.items()})


def compared(one: ModelProto, **feeds) -> EngineCheck:
    graph, cache = graph_of(one), SessionCache()
    shape = [dim.dim_value for dim in one.graph.input[0].type.tensor_type.shape.dim]
    feeds = feeds or {"x": np.random.default_rng(1).standard_normal(shape).astype(np.float32)}
    return compare_engines(graph, feeds, Executor(graph, cache).run(feeds, refuse_call), cache, refuse_call)


PADDED = FIXTURES / "cases" / "engine" / "pad_maxpool.onnx"


@pytest.mark.parametrize("most", [second_engine.SECONDS, -1.0])
def test_a_wrong_rewrite_is_found_by_either_engine(most, monkeypatch):
    monkeypatch.setattr(second_engine, "SECONDS", most)
    assert compared(folded()) == EngineCheck(PLAIN if most < 0 else REFERENCE, 1)
    assert compared(onnx.load(PADDED)).difference is None
    monkeypatch.setattr(session, "WRONG", frozenset())
    found = compared(folded()).difference
    assert (found.node, found.value, found.rewritten) == ("BatchNormalization 'norm'", "q", True)
    assert compared(onnx.load(PADDED)).difference.node.startswith("MaxPool")


def test_a_kernel_that_differs_is_named_and_no_rewrite(monkeypatch):
    wrong = {**fallback_kernels.FALLBACK_KERNELS, "Erf": lambda x: x}
    monkeypatch.setattr(fallback_kernels, "FALLBACK_KERNELS", wrong)
    fallback_kernels.operators.cache_clear()
    try:
        found = compared(model([op("Tanh", ["x"], ["h"]), op("Erf", ["h"], ["y"], name="erf")], [5], {})).difference
    finally:
        monkeypatch.undo()
        fallback_kernels.operators.cache_clear()
    assert (found.node, found.rewritten) == ("Erf 'erf'", False)


def test_ties_and_noise_are_no_difference():
    """Maxima tie in zeros; a difference of equal sums is nothing but rounding."""
    pooled = [
        op("Relu", ["x"], ["h"]), op("MaxPool", ["h"], ["p", "i"], kernel_shape=[2], strides=[2]),
        op("Cast", ["i"], ["y"], to=1),
    ]  # fmt: skip
    assert compared(model(pooled, [1, 2, 8], {}), x=-np.ones((1, 2, 8), np.float32)).difference is None
    noise = [op("ReduceSum", ["x"], ["s"], keepdims=0), op("Transpose", ["x"], ["t"], perm=[1, 0]),
             op("ReduceSum", ["t"], ["r"], keepdims=0), op("Sub", ["s", "r"], ["y"])]  # fmt: skip
    assert compared(model(noise, [40, 50], {})) == EngineCheck(REFERENCE, 1)


def test_what_draws_is_not_compared():
    drawn = [op("RandomNormalLike", ["x"], ["r"]), op("Add", ["x", "r"], ["y"])]
    assert compared(model(drawn, [3], {})).why == "the step draws random numbers"


def test_the_estimate_chooses_the_engine():
    graph = graph_of(folded())
    assert seconds(graph) < 0.01
    large = graph_of(model([op("MatMul", ["x", "w"], ["y"])], [4096, 2048], {"w": np.zeros((2048, 4096), np.float32)}))
    assert seconds(large) > 2
    assert seconds(replace(graph, types={})) == float("inf")


def test_verify_says_what_the_second_engine_made(tmp_path, monkeypatch):
    gopt.shard(FIXTURES / "mlp_adamw.onnx", 2).write(tmp_path / "out")
    result = gopt.verify(tmp_path / "out", steps=1)
    assert result.equal and [each.engine for each in result.engines] == [REFERENCE, REFERENCE]
    assert result.to_json()["engines"][0] == {
        "engine": REFERENCE, "values": 5, "why": "", "unexplained": [], "difference": None
    }  # fmt: skip
    for rewritten, outcome in ((True, "different"), (False, "unconfirmed")):
        check = EngineCheck(REFERENCE, 1, difference=EngineDifference("Relu 'r'", "h", 0.5, rewritten))
        monkeypatch.setattr("gopt.verification.verify.check_step", lambda *given, check=check: [check])
        result = gopt.verify(tmp_path / "out", steps=1)
        assert result.outcome.value == outcome and "Relu 'r'" in result.reason()


def test_derive_refuses_what_engines_make_different_steps_of(tmp_path, monkeypatch):
    made = derive(PADDED, tmp_path / "step.onnx", DeriveOptions(loss="mse", optimizer="sgd"))
    assert made.confirmed == 4 and not any("engine" in note for note in made.notes)
    check = EngineCheck(REFERENCE, 1, difference=EngineDifference("Relu 'r'", "h", 0.5, True))
    monkeypatch.setattr(derive_confirm, "check_step", lambda *given: [check])
    with pytest.raises(UnsupportedError, match="two engines make different steps of it: a rewrite of ONNX Runtime"):
        derive(PADDED, tmp_path / "other.onnx", DeriveOptions(loss="mse", optimizer="sgd"))
    monkeypatch.setattr(derive_confirm, "check_step", lambda *given: [EngineCheck("", why="it is new")])
    notes = derive(PADDED, tmp_path / "third.onnx", DeriveOptions(loss="mse", optimizer="sgd")).notes
    assert "one step is not confirmed by a second engine: it is new" in notes


def test_what_no_node_explains_is_in_doubt():
    assert list(EngineCheck(REFERENCE, 1, "too many", None, ("y",)).doubts()) == [
        ("y", f"{REFERENCE} computes it otherwise, by more than rounding: too many")
    ]


def update(nodes, shape, stored=()) -> Graph:
    value = helper.make_tensor_value_info
    inputs = [value("w", 1, shape), value("g", 1, shape), value("lr", 1, []), *(value(n, 1, d) for n, d in stored)]
    body = helper.make_graph(nodes, "u", inputs, [value("new", 1, shape)])
    return graph_of(
        onnx.shape_inference.infer_shapes(helper.make_model(body, opset_imports=[helper.make_opsetid("", 20)]))
    )


def test_an_update_by_elements_is_compared_on_some_rows(monkeypatch):
    """An update of a large value that mixes rows is compared on all of it."""
    monkeypatch.setattr(second_engine, "MOST_ELEMENTS", 12)
    feeds = {"w": np.ones((8, 4), np.float32), "g": np.ones((8, 4), np.float32), "lr": np.float32(0.5)}
    plain = [op("Mul", ["g", "lr"], ["d"]), op("Sub", ["w", "d"], ["new"])]
    part, rows = second_engine._first_rows(update(plain, [8, 4]))
    assert part.outputs["new"].dims == (3, 4) and rows == dict.fromkeys(("w", "g", "d", "new"), 3)
    cut = {name: value[:3] if value.ndim else value for name, value in feeds.items()}
    found = Executor(part, SessionCache()).run(cut, refuse_call)
    assert np.array_equal(found["new"], np.full((3, 4), 0.5, np.float32))
    mixed = [op("ReduceL2", ["g"], ["n"], keepdims=0), op("Div", ["g", "n"], ["d"]), op("Sub", ["w", "d"], ["new"])]
    whole = update(mixed, [8, 4])
    assert second_engine._first_rows(whole) == (whole, {})
    scaled = [op("Mul", ["g", "s"], ["d"]), op("Sub", ["w", "d"], ["new"])]
    whole = update(scaled, [8, 4], [("s", [4])])
    assert second_engine._first_rows(whole) == (whole, {})


def test_results_of_both_engines_are_held_in_parts(monkeypatch):
    monkeypatch.setattr(second_engine, "TOGETHER", 100)
    value = helper.make_tensor_value_info
    nodes = [op("Neg", ["x"], [f"y{n}"]) for n in range(9)]
    body = helper.make_graph(nodes, "p", [value("x", 1, [20])], [value(f"y{n}", 1, [20]) for n in range(9)])
    graph = graph_of(helper.make_model(body, opset_imports=[helper.make_opsetid("", 20)]))
    parts = list(second_engine._parts(graph))
    assert [len(each.outputs) for each in parts] == [2, 2, 2, 2, 1] and len(parts[0].nodes) == 2
    assert [name for each in parts for name in each.outputs] == list(graph.outputs)
