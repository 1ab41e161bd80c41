"""What gopt knows of single operators."""

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from small_graphs import parsed

from gopt.ir.graph import Node
from gopt.operators import kinds
from gopt.operators.kinds import control_flow, draws, elementwise, heavy, random, reads_value, value_reads

BRANCH = """g (bool c, float[2] x) => (float[2] y) {
    y = If(c) <then_branch = yes () => (float[2] p) { p = RandomNormalLike%s(x) },
               else_branch = no () => (float[2] q) { q = Neg(x) }>
}"""


def test_operators_of_other_domains_are_unknown():
    assert elementwise(Node("Add", ["a", "b"], ["c"]))
    assert not elementwise(Node("Add", ["a", "b"], ["c"], domain="own"))
    assert heavy(Node("MultiHeadAttention", [], [], domain="com.microsoft"))


def test_operands_read_for_shape_or_type_alone_give_no_value():
    assert not value_reads(Node("Shape", ["a"], ["b"]))
    assert list(value_reads(Node("CastLike", ["a", "b"], ["c"]))) == ["a"]
    assert not reads_value(Node("CastLike", ["a", "b"], ["c"]), "b")
    assert reads_value(Node("CastLike", ["a", "b"], ["c"], domain="own"), "b")
    assert reads_value(Node("CastLike", ["a", "a"], ["c"]), "a")


@pytest.mark.parametrize(("seed", "drawn"), [("", True), ("<seed = 1.0>", False)])
def test_a_generator_in_a_branch_counts(seed, drawn, tmp_path):
    (node,) = parsed(BRANCH % seed, tmp_path).nodes
    assert control_flow(node)
    assert random(node) is drawn
    assert draws(node) is drawn


def test_a_generator_with_a_seed_draws_the_same_again():
    assert random(Node("RandomNormal", [], ["a"], attributes={"shape": [2]}))
    assert not random(Node("RandomNormal", [], ["a"], attributes={"shape": [2], "seed": 1.0}))
    assert not random(Node("Add", ["a", "b"], ["c"]))


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
