"""The Loop of the reference evaluator against that of ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
from node_models import session
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from gopt.runtime.fallback_loop import Loop


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_carried_and_stacked_results(shape, turns):
    """The body adds an outer value to what it carries, and shows the sum of every turn."""
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("Add", ["held", "outer"], ["next"]),
            helper.make_node("Identity", ["next"], ["shown"]),
            helper.make_node("Identity", ["go"], ["on"]),
        ],
        "body",
        [value("turn", TensorProto.INT64, []), value("go", TensorProto.BOOL, []), value("held", 1, shape)],
        [value("on", TensorProto.BOOL, []), value("next", 1, shape), value("shown", 1, shape)],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["turns", "", "first"], ["last", "all"], body=body)],
        "loop",
        [value("first", 1, shape), value("outer", 1, shape)],
        [value("last", 1, shape), value("all", 1, [turns, *shape])],
        [numpy_helper.from_array(np.array(turns, np.int64), "turns")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    feeds = {name: np.random.default_rng(k).random(shape, np.float32) for k, name in enumerate(("first", "outer"))}
    feeds = {name: np.asarray(array, np.float32) for name, array in feeds.items()}
    wanted = session(model).run(None, feeds)
    found = ReferenceEvaluator(model, new_ops=[Loop]).run(None, feeds)
    for due, mine in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(mine, due)
