"""The checker of split steps: errors that others shipped, each planted in a right step."""

from __future__ import annotations

import pytest
from helpers import NAMES
from splits import Split, split

from gopt.errors import InvariantError
from gopt.ir.graph import COMM, Node, clone
from gopt.ir.phase import Phase
from gopt.sharding.placements import Shard
from gopt.tensor_parallel.check import check


def judge(made: Split, nodes: list[Node] | None = None) -> None:
    graph = made.made.graph
    if nodes is not None:
        graph.nodes = nodes
    check(made.training, graph, "tp", made.states)


def calls(made: Split, op_type: str, phase: Phase) -> list[Node]:
    return [n for n in made.made.graph.nodes if n.domain == COMM and n.op_type == op_type and n.phase is phase]


def without(made: Split, gone: list[Node]) -> list[Node]:
    """The nodes with calls that give what they are given."""
    ids, nodes = set(map(id, gone)), []
    for node in made.made.graph.nodes:
        if id(node) in ids:
            nodes.append(Node("Identity", node.inputs, node.outputs))
        else:
            nodes.append(node)
    return nodes


def refused(made: Split, nodes: list[Node] | None, *words: str) -> None:
    with pytest.raises(InvariantError) as caught:
        judge(made, nodes)
    text = " ".join([caught.value.message, *caught.value.hints])
    for word in words:
        assert word in text, text


@pytest.mark.parametrize("members", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_what_propagation_makes_is_right(name, members):
    made = split(name, members)
    placements = check(made.training, made.made.graph, "tp", made.states)
    assert any(isinstance(each, Shard) for each in placements.values())


def test_a_step_by_tokens_is_right():
    judge(split("gpt_adamw", sequence=True))


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_a_missing_reduction(phase):
    made = split("gpt_adamw")
    # The terms go on until a nonlinear operator, or one that adds a whole value to them, meets them.
    refused(made, without(made, calls(made, "AllReduce", phase)[1:2]), "partial sum")


def test_no_reductions_at_all():
    """As where a group of one switches them off for all."""
    made = split("gpt_adamw")
    every = [node for node in made.made.graph.nodes if node.op_type == "AllReduce"]
    refused(made, without(made, every), "partial sum")


def test_a_gradient_by_tokens_is_not_summed():
    """The weight of a LayerNorm that reads parts of the tokens."""
    made = split("gpt_adamw", sequence=True)
    gradient = made.training.gradients["blocks.0.ln1.weight"]
    (call,) = [node for node in calls(made, "AllReduce", Phase.BACKWARD) if gradient in node.outputs]
    refused(made, without(made, [call]), "partial sum")


def test_the_final_norm_is_reduced_over_another_group():
    made = split("gpt_adamw", sequence=True)
    gradient = made.training.gradients["ln_f.weight"]
    (call,) = [node for node in calls(made, "AllReduce", Phase.BACKWARD) if gradient in node.outputs]
    call._attributes = {**call.attributes, "group": "dp"}
    refused(made, None, gradient, "partial sum")


def test_a_reduction_done_twice():
    made = split("gpt_adamw")
    call = calls(made, "AllReduce", Phase.FORWARD)[1]
    again = clone(call)
    again.inputs, again.outputs = [f"{call.outputs[0]}.once"], call.outputs
    call.outputs = again.inputs
    nodes = list(made.made.graph.nodes)
    nodes.insert(nodes.index(call) + 1, again)
    made.made.graph.types[call.outputs[0]] = made.made.graph.types[again.outputs[0]]
    refused(made, nodes, "replicated", "terms of a sum")


def test_a_norm_that_counts_a_whole_tensor_for_each_member():
    """The members' sums are joined with those of replicated parameters before they are completed."""
    made = split("mlp_mom_clip_sched")
    norms = [n for n in calls(made, "AllReduce", Phase.UPDATE) if made.made.graph.types[n.outputs[0]].elements == 1]
    assert norms
    refused(made, without(made, norms), "partial sum")


def test_a_part_is_cut_by_other_sizes_than_it_is_joined_by():
    made = split("gpt_adamw", sequence=True)
    gather = calls(made, "AllGather", Phase.FORWARD)[0]
    gather._attributes = {**gather.attributes, "sizes": [5, 3]}
    refused(made, None, "as it is joined")


def test_a_gather_along_another_dimension():
    made = split("gpt_adamw", sequence=True)
    gather = calls(made, "AllGather", Phase.FORWARD)[0]
    gather._attributes = {**gather.attributes, "axis": 0}
    refused(made, None, "as it is joined")


def test_a_mean_of_unequal_parts():
    made = split("emb_adamw", 3)
    graph = made.made.graph
    state = next(name for name, place in made.states.items() if isinstance(place, Shard) and len(set(place.sizes)) > 1)
    graph.types["mean"] = type(graph.types[state])(graph.types[state].dtype, ())
    mean = Node("ReduceMean", [state], ["mean"], attributes={"keepdims": 0})
    refused(made, [mean, *graph.nodes], state, "no rule splits it so")


def test_a_square_root_of_terms():
    made = split("gpt_adamw")
    call = calls(made, "AllReduce", Phase.FORWARD)[1]
    root = Node("Sqrt", call.inputs, ["root"])
    made.made.graph.types["root"] = made.made.graph.types[call.inputs[0]]
    nodes = list(made.made.graph.nodes)
    nodes.insert(nodes.index(call), root)
    refused(made, nodes, "Sqrt", "partial sum")


def test_a_state_that_keeps_another_part():
    made = split("mlp_sgd")
    name = next(iter(made.states))
    made.states.pop(name)
    refused(made, None)
