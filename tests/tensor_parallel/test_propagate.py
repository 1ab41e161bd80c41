"""What propagation puts between the operators of a step: the counts of Megatron, and gradients by placement."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers import source
from splits import split

from gopt.ir.graph import COMM
from gopt.ir.phase import Phase
from gopt.records.placements import Partial, Replicated, Shard
from gopt.tensor_parallel.propagate import propagate

BLOCKS = 2


def found(made, *, least: int = 0) -> Counter[tuple[Phase, str]]:
    graph = made.made.graph
    return Counter(
        (node.phase, node.op_type) for node in graph.nodes
        if node.domain == COMM and graph.types[node.outputs[0]].elements >= least
    )  # fmt: skip


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


def exchanged(made, op_type: str = "AllToAll") -> Counter[Phase]:
    return Counter(node.phase for node in made.made.graph.nodes if node.op_type == op_type)


@pytest.mark.parametrize("members", [2, 4])
def test_tokens_go_to_their_experts_and_back_by_one_exchange_each(members):
    """And gradients the same way; views of what was exchanged are not exchanged again."""
    made = split("families/moe_adamw", members, sequence=True)
    assert exchanged(made) == {Phase.FORWARD: 2, Phase.BACKWARD: 2}
    assert not exchanged(split("families/moe_adamw", members)), "all members have all tokens"


def test_thirds_of_a_fused_weight_are_cut_and_written_in_parts():
    """No value is gathered: a Slice takes a run, and the ScatterND of its gradient writes one."""
    made = split("families/vit_mom", 3)
    assert made.made.conversions["gather from region"] == 0 and not made.made.whole
    runs = [
        made.made.placements[node.outputs[0]] for node in made.made.graph.nodes
        if node.is_a("Slice", "ScatterND") and node.outputs[0] in made.made.placements
    ]  # fmt: skip
    assert [each.runs for each in runs] == [1] * 6 + [3] * 6
    activations = found(made, least=3 * 17 * 24)
    assert activations == {(Phase.FORWARD, "AllReduce"): 4, (Phase.BACKWARD, "AllReduce"): 4}


def test_draws_of_dropout_are_cut_like_the_weights_that_they_meet():
    made = split("families/vit_mom", 3).made
    kept = [node for node in made.graph.nodes if node.is_a("Mul") and made.graph.types[node.outputs[0]].dims == DRAWN]
    assert kept and all(made.placements[node.outputs[0]].sizes == (2, 1, 1) for node in kept)
    cut = [node.inputs[0] for node in made.graph.nodes if node.op_type == "DimSlice"]
    assert len([name for name in cut if made.graph.types[name].dims == DRAWN]) == 2, "once for both directions"


DRAWN = (3, 4, 17, 17)
"""Samples, heads, queries, keys."""


@pytest.mark.parametrize("members", [2, 4])
def test_blocks_of_grouped_heads_have_two_sums_each_way(members):
    """With more members than heads of keys, the gradients of keys and values are gathered: once each."""
    made = split("families/llama_adamw_clip", members)
    count = found(made, least=3 * 8 * 32)
    sums = {(Phase.FORWARD, "AllReduce"): 2 * BLOCKS + 1, (Phase.BACKWARD, "AllReduce"): 2 * BLOCKS + 1}
    assert count == sums | ({(Phase.BACKWARD, "AllGather"): 2 * BLOCKS} if members > 2 else {})


def test_cross_attention_has_its_own_sums():
    """Two layers of an encoder-decoder with one attention more; the memory's gradient is summed once."""
    made = split("families/t5_adamw")
    count = found(made, least=3 * 6 * 20)
    assert set(count) == {(Phase.FORWARD, "AllReduce"), (Phase.BACKWARD, "AllReduce")}
    assert count[Phase.FORWARD, "AllReduce"] == 5 + 2, "and a lookup in the table each"


@pytest.mark.parametrize(("name", "sums", "least"), [("t5_adamw", 5, 3 * 6 * 20), ("vit_mom", 4, 3 * 17 * 24)])
def test_every_stream_is_shared_out_by_its_tokens(name, sums, least):
    """Encoder and decoder have other lengths; patches and the token of the class are in no input of the batch."""
    count = found(split(f"families/{name}", 3, sequence=True), least=least)
    lookups = 2 if name == "t5_adamw" else 0
    assert count[Phase.FORWARD, "ReduceScatter"] == sums + lookups and not count[Phase.FORWARD, "AllReduce"]
    assert not count[Phase.BACKWARD, "AllReduce"]
    assert count[Phase.BACKWARD, "ReduceScatter"] >= sums
