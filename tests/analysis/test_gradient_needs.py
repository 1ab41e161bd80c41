"""Inputs that a gradient must depend on, on graphs by hand."""

from __future__ import annotations

import onnx
import pytest

from gopt.analysis import gradient_needs
from gopt.analysis.gradient_needs import without_needs
from gopt.ir.graph import Graph, Node
from gopt.ir.graph_index import GraphIndex, ancestors
from gopt.ir.types import TensorType


def found(nodes: list[tuple[str, str, str]], new: str) -> dict[str, str]:
    """The input that the new value ``new`` of the state s lacks."""
    return lacking(nodes, {"s": new}, ["x", "y", "s", "w"])


def lacking(nodes: list[tuple[str, str, str]], updated: dict[str, str], names: list[str]) -> dict[str, str]:
    """The inputs that new values of states lack, of a batch of x and y; nodes as (operator, inputs, output)."""
    made = [Node(op, inputs.split(), [out]) for op, inputs, out in nodes]
    types = {name: TensorType("float32", (4,)) for node in made for name in (*node.inputs, *node.outputs)}
    types |= {node.outputs[0]: TensorType("bool", (4,)) for node in made if node.op_type == "Greater"}
    inputs = {name: types.get(name, TensorType("float32", (4,))) for name in names}
    index = GraphIndex(Graph("g", made, inputs, {"loss": types["loss"]}, {}, types, onnx.ModelProto()))
    forward, _ = ancestors(index, ["loss"])
    return without_needs(index, forward, ["loss"], ["x", "y"], updated)


SQUARE = [
    ("Mul", "x s", "a"), ("Mul", "a w", "b"), ("Sub", "b y", "d"), ("Mul", "d d", "q"), ("ReduceMean", "q", "loss"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "lacks"),
    [
        ([("Mul", "d x", "g"), ("Mul", "g w", "h"), ("Sub", "s h", "new")], None),  # the gradient
        ([("Mul", "d x", "g"), ("Mul", "g w", "h"), ("Sign", "h", "i"), ("Sub", "s i", "new")], None),
        ([("Mul", "s x", "g"), ("Sub", "s g", "new")], "wy"),  # neither the label nor the other factor
        ([("Mul", "a y", "g"), ("Sub", "s g", "new")], "w"),
    ],
)
def test_an_update_lacks_what_every_derivative_reads(nodes, lacks):
    missing = found(SQUARE + nodes, "new")
    assert ("s" in missing) == (lacks is not None) and (lacks is None or missing["s"] in lacks)


def test_the_gradient_of_a_linear_loss_is_a_value_of_the_forward():
    linear = [("Mul", "x s", "a"), ("ReduceMean", "a", "loss")]
    assert found([*linear, ("Sub", "s x", "new")], "new") == {}


def test_a_choice_alone_leads_to_the_loss():
    """What is compared with a threshold has no derivative, and what is chosen by it is no gradient."""
    chosen = [("Greater", "s x", "c"), ("Where", "c x w", "a"), ("Mul", "a y", "b"), ("Mul", "b b", "q")]
    assert "s" in found([*chosen, ("ReduceMean", "q", "loss"), ("Sub", "s x", "new")], "new")


def test_a_deep_network_has_short_masks_and_the_same_answers():
    layers = 2 * gradient_needs._MOST
    chain = [("Mul", f"{f'a{at - 1}' if at else 'x'} w{at}", f"a{at}") for at in range(layers)]
    loss = [("Sub", f"a{layers - 1} y", "d"), ("Mul", "d d", "q"), ("ReduceMean", "q", "loss")]
    back = [("Mul", f"{f'g{at + 1}' if at + 1 < layers else 'd'} w{at}", f"g{at}") for at in reversed(range(layers))]
    steps = [("Mul", f"g{at + 1} a{at - 1}", f"new{at}") for at in range(1, layers - 1)]
    means = [("Add", f"a{at} w{at}", f"new{at}") for at in range(1, layers - 1)]
    updated = {f"w{at}": f"new{at}" for at in range(1, layers - 1)}
    inputs = ["x", "y", *(f"w{at}" for at in range(layers))]
    assert not lacking([*chain, *loss, *back, *steps], updated, inputs)
    assert lacking([*chain, *loss, *means], updated, inputs).keys() == updated.keys()
    assert len(gradient_needs._groups(inputs)) <= gradient_needs._MOST
