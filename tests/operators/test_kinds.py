"""What gopt knows of single operators."""

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from gopt.operators import kinds

FAMILIES = {name: value for name, value in vars(kinds).items() if name.isupper() and isinstance(value, frozenset)}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_family_has_standard_operators_alone(name):
    contributed = {"GroupQueryAttention", "MultiHeadAttention"}
    known = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == ""}
    assert FAMILIES[name] - contributed <= known


@pytest.mark.parametrize("name", sorted(kinds.MOVES - {"Identity"}))
def test_what_moves_elements_keeps_each_of_them_once(name):
    x = np.arange(6, dtype=np.float32).reshape(2, 1, 3)
    operands = {"Reshape": [np.array([3, 2])], "Squeeze": [np.array([1])], "Unsqueeze": [np.array([0])]}.get(name, [])
    names = ["x", *(f"o{place}" for place in range(len(operands)))]
    node = onnx.helper.make_node(name, names, ["y"])
    found = ReferenceEvaluator(node).run(None, dict(zip(names, [x, *operands])))[0]
    assert sorted(found.reshape(-1).tolist()) == x.reshape(-1).tolist()
    if name in kinds.VIEWS:
        assert found.reshape(-1).tolist() == x.reshape(-1).tolist()
