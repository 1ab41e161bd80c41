"""Pads that ONNX Runtime finds itself forget dilations: sessions have them in numbers."""

from __future__ import annotations

import numpy as np
import pytest
from engine_gen.judge import judge
from onnx import helper

from gopt.errors import RunError
from gopt.operators.kinds import POOLS
from gopt.runtime.session import SessionCache


@pytest.mark.parametrize("op_type", sorted(POOLS))
def test_automatic_pads_beside_dilations(op_type):
    """ONNX Runtime forgets the dilations there; over an open length the pool is refused by name."""
    node = helper.make_node(op_type, ["x"], ["y"], kernel_shape=[3], strides=[2], dilations=[2], auto_pad="SAME_LOWER")
    x = np.random.default_rng(3).standard_normal((1, 2, 7)).astype(np.float32)
    for length in (7, "L"):
        info = helper.make_tensor_value_info("x", 1, [1, 2, length])
        graph = helper.make_graph([node], "pool", [info], [helper.make_tensor_value_info("y", 1, None)])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
        if length == "L":
            with pytest.raises(RunError, match=f"{op_type} 'y' has automatic pads"):
                SessionCache().get(model.SerializeToString())
        else:
            assert judge(model, {"x": x}).outcome == "right"
