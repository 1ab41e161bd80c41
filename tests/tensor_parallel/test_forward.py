"""What can be had in parts in a forward, and which weights are behind a value."""

from __future__ import annotations

import pytest
from helpers import FIXTURES, source

import gopt
from gopt.ir.graph import Node
from gopt.ir.phase import Phase
from gopt.records.placements import REPLICATED, Shard
from gopt.tensor_parallel.forward import Forward


def forward(name: str = "families/llama_adamw_clip") -> Forward:
    return Forward(source(name).training)


def made(found: Forward, weight: str) -> str:
    """What the product with a weight makes."""
    view = next(node for node in found.nodes if weight in node.inputs)
    value = view.outputs[0] if view.is_a("Transpose") else weight
    return next(node.outputs[0] for node in found.nodes if value in node.inputs and node.is_a("MatMul"))


def test_hidden_values_are_free_and_the_residual_stream_is_not():
    found = forward()
    assert found.free(made(found, "blocks.0.gate.weight"), Shard(1, (22, 21)))
    assert found.free(made(found, "blocks.0.q.weight"), Shard(1, (16, 16)))
    stream = made(found, "blocks.0.o.weight")
    assert not found.free(stream, Shard(1, (16, 16))), "the next norm sums its squares"
    assert not found.free("embedding", Shard(2, (16, 16)))


def test_heads_that_are_no_whole_numbers_are_not_free():
    found = forward()
    assert not found.free(made(found, "blocks.0.q.weight"), Shard(1, (17, 15)))


def test_logits_are_free_up_to_the_loss():
    found = forward()
    assert found.free(made(found, "head.weight"), Shard(1, (25, 25)))


def test_a_long_way_is_followed_without_recursion():
    training = gopt.load(FIXTURES / "mlp_sgd.onnx").training
    graph = training.graph
    hidden = next(node.outputs[0] for node in graph.nodes if node.is_a("Relu"))
    value = hidden
    for place in range(3000):
        node = Node("Neg", [value], [f"long{place}"])
        node.phase, value = Phase.FORWARD, f"long{place}"
        graph.nodes.append(node)
        graph.types[value] = graph.types[hidden]
    shard = Shard(1, (32, 32))
    assert Forward(training).free(hidden, shard)
    end = Node("TopK", [value, "k"], ["values", "places"])
    end.phase = Phase.FORWARD
    graph.nodes.append(end)
    graph.types |= dict.fromkeys(("k", "values", "places"), graph.types[hidden])
    assert not Forward(training).free(hidden, shard), "what stands at the end needs it whole"


@pytest.mark.parametrize("shard", [Shard(1, (11, 10)), Shard(0, (3, 1))], ids=str)
def test_weights_behind_a_value(shard):
    found = forward("families/moe_adamw")
    assert found.weights("experts.up", shard) == [("experts.up", shard)]
    view = next(node for node in found.nodes if "experts.router.weight" in node.inputs)
    assert found.weights(view.outputs[0], Shard(1, (3, 1))) == [("experts.router.weight", Shard(0, (3, 1)))]
    assert found.weights("experts.up", REPLICATED) == []


def test_experts_are_summed_and_hidden_values_of_one_product_are_needed_on_the_way():
    found = forward("families/moe_adamw")
    product = next(node for node in found.nodes if "experts.up" in node.inputs)
    assert found.summed(product.outputs[0], Shard(0, (2, 2))) == [("experts.down", Shard(0, (2, 2)))]
    stream = made(found, "proj.weight")
    assert found.summed(stream, Shard(1, (8, 8))) is None, "a norm needs it whole"


def test_a_product_of_one_operand_has_no_weight():
    found = forward()
    assert found.weighed(Node("Einsum", ["blocks.0.q.weight"], ["t"], attributes={"equation": "ij->ji"})) == []
    assert found.weighed(Node("MatMul", ["x", "blocks.0.q.weight"], ["t"])) == [(1, 0)]
