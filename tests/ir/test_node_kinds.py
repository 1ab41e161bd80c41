"""What gopt knows of single nodes."""

import pytest
from small_graphs import parsed

from gopt.ir.graph import Node
from gopt.ir.node_kinds import (
    chosen_by,
    control_flow,
    divisor_of,
    draws,
    elementwise,
    heavy,
    in_proportion,
    never_draws,
    random,
    reads_value,
    record_of,
    value_reads,
)

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


@pytest.mark.parametrize(
    ("op_type", "scaled", "divisor"),
    [("Mul", ["a", "b"], ""), ("Div", ["a"], "b"), ("Add", [], ""), ("MatMul", [], "")],
)
def test_products_and_quotients_are_told_by_slopes(op_type, scaled, divisor):
    node = Node(op_type, ["a", "b"], ["c"])
    assert [name for name in "ab" if in_proportion(node, name)] == scaled
    assert divisor_of(node) == divisor
    assert not in_proportion(Node(op_type, ["a", "b"], ["c"], domain="own"), "a")


def test_a_choice_is_among_the_operands_behind_the_condition():
    assert chosen_by(Node("Where", ["c", "a", "b"], ["d"])) == ["a", "b"]
    assert not chosen_by(Node("Gather", ["a", "i"], ["d"]))  # it chooses places, and not operands
    assert record_of(Node("Where", ["c", "a", "b"], ["d"], domain="own")).name == ""


@pytest.mark.parametrize(("operands", "never"), [(["x"], True), (["x", "r", ""], True), (["x", "r", "t"], False)])
def test_a_dropout_draws_where_it_is_switched_on(operands, never):
    assert never_draws("Dropout", operands) is never
    assert not never_draws("Bernoulli", operands)
