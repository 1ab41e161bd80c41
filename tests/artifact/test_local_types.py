"""Types on a rank of what lowering made, where onnx infers them of one node."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import FIXTURES

import gopt
from gopt.artifact.local_types import UNKNOWN, LocalTypes
from gopt.ir.graph import Node
from gopt.ir.types import TensorType


@pytest.fixture(scope="module")
def types() -> LocalTypes:
    return LocalTypes(gopt.shard(gopt.load(FIXTURES / "mlp_sgd.onnx"), 2).program)


def test_a_constant_operand_gives_the_shape(types):
    given = [TensorType("float32", (4, 6)), TensorType("int64", (1,)), TensorType("int64", (1,))]
    data = {1: np.array([1], np.int64), 2: np.array([3], np.int64)}
    assert types.infer(Node("Slice", ["x", "a", "b"], ["y"]), given, data) == (TensorType("float32", (2, 6)),)
    shape = {1: np.array([2, -1], np.int64)}
    node = Node("Reshape", ["x", "s"], ["y"])
    assert types.infer(node, [given[0], TensorType("int64", (2,))], shape) == (TensorType("float32", (2, 12)),)


def test_what_cannot_be_inferred_is_unknown(types):
    assert types.infer(Node("NoSuchOperator", ["x"], ["y"]), [UNKNOWN], {}) == ()
