"""What propagation puts between the operators of a step: the counts of Megatron, and gradients by placement."""

from __future__ import annotations

from collections import Counter

from helpers import source
from splits import split

from gopt.ir.graph import COMM
from gopt.ir.phase import Phase
from gopt.sharding.placements import Partial, Replicated, Shard
from gopt.tensor_parallel.propagate import propagate

BLOCKS = 2


def found(made, *, least: int = 0) -> Counter[tuple[Phase, str]]:
    graph = made.made.graph
    return Counter(
        (node.phase, node.op_type) for node in graph.nodes
        if node.domain == COMM and graph.types[node.outputs[0]].elements >= least
    )  # fmt: skip


def found_sizes(made) -> list[int]:
    graph = made.made.graph
    return [graph.types[node.outputs[0]].elements for node in graph.nodes if node.domain == COMM]


ACTIVATION = 4 * 8 * 16
"""Elements of an activation of gpt_adamw: samples, tokens, channels."""


def test_a_block_has_two_all_reduces_forward_and_two_backward():
    made = split("gpt_adamw")
    count = found(made, least=ACTIVATION)
    # One more each: the sum of the table's rows, and the gradient of what the classes read.
    assert count == {(Phase.FORWARD, "AllReduce"): 2 * BLOCKS + 1, (Phase.BACKWARD, "AllReduce"): 2 * BLOCKS + 1}


def test_no_logits_are_gathered():
    made = split("gpt_adamw")
    assert not any(node.op_type == "AllGather" for node in made.made.graph.nodes)
    assert (
        max(made.made.graph.types[n.outputs[0]].elements for n in made.made.graph.nodes if n.domain == COMM) < 32 * 64
    )


def test_by_tokens_each_all_reduce_is_a_scatter_and_a_gather():
    made = split("gpt_adamw", sequence=True)
    count = found(made, least=ACTIVATION)
    assert count[Phase.FORWARD, "AllReduce"] == count[Phase.BACKWARD, "AllReduce"] == 0
    assert count[Phase.FORWARD, "ReduceScatter"] == count[Phase.FORWARD, "AllGather"] == 2 * BLOCKS + 1
    assert count[Phase.BACKWARD, "ReduceScatter"] == count[Phase.BACKWARD, "AllGather"] == 2 * BLOCKS + 1


def test_gradients_are_summed_by_placement_alone():
    def completed(sequence: bool) -> set[str]:
        made = split("gpt_adamw", sequence=sequence)
        sums = {
            name for node in made.made.graph.nodes if node.domain == COMM and node.op_type == "AllReduce"
            for name in node.outputs
        }  # fmt: skip
        return {weight for weight, gradient in made.training.gradients.items() if gradient in sums}

    assert completed(sequence=False) == set()  # nor the bias behind the rows' reduction, nor the tied table
    norms = {f"blocks.{n}.ln{k}.{part}" for n in range(BLOCKS) for k in (1, 2) for part in ("weight", "bias")}
    rows = {f"blocks.{n}.{layer}.bias" for n in range(BLOCKS) for layer in ("proj", "down")}
    assert completed(sequence=True) == norms | rows | {"ln_f.weight", "ln_f.bias"}


def test_without_seeds_nothing_changes():
    training = source("gpt_adamw").training
    made = propagate(training, training.graph.copy(), "tp", 2, {})
    assert not made.conversions
    assert [node.op_type for node in made.graph.nodes] == [node.op_type for node in training.graph.nodes]


def test_results_of_the_step_are_placed_as_their_states():
    made = split("gpt_adamw")
    for state in made.training.states:
        wanted = made.states.get(state.tensor, Replicated())
        assert made.made.placements.get(state.updated, Replicated()) == wanted
    assert made.training.loss not in made.made.placements


def test_a_value_is_converted_once_for_all_readers():
    made = split("gpt_adamw", sequence=True)
    inputs = [tuple(node.inputs) for node in made.made.graph.nodes if node.domain == COMM]
    assert len(inputs) == len(set(inputs))


def test_terms_reach_no_reader_that_is_not_linear():
    made = split("gpt_adamw")
    readers = Counter(
        node.op_type for node in made.made.graph.nodes
        if any(isinstance(made.made.placements.get(name), Partial) for name in node.inputs)
    )  # fmt: skip
    assert set(readers) <= {"AllReduce", "Reshape", "Squeeze", "Neg", "Add", "Transpose"}


def test_heads_stay_together():
    made = split("gpt_adamw")
    assert made.states["blocks.0.qkv.weight"] == Shard(0, (8, 8), 3)
