"""The checker of split steps: errors that others shipped, each planted in a right step."""

from __future__ import annotations

import pytest
from helpers import NAMES, Builder, Network, sgd
from plants import change_attributes
from splits import Split, split, split_training

import gopt
from gopt.errors import InvariantError
from gopt.ir.graph import COMM, Node, clone
from gopt.ir.phase import Phase
from gopt.records.mesh import Mesh
from gopt.records.placements import Shard
from gopt.tensor_parallel.check import check
from gopt.verification.verify import Verifier


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
    made = split("gpt_adamw", sequence=True)
    placements = check(made.training, made.made.graph, "tp", made.states)
    tokens = [each for each in placements.values() if isinstance(each, Shard) and each.length == 8]
    assert Shard(1, (4, 4)) in tokens, "activations of [samples, tokens, features]"


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


def scaled_columns() -> Builder:
    """tanh(x w0 t) w1, with one number ``t`` for all columns: it is whole, and its gradient is a sum over them."""
    b = Builder()
    x, y = b.input("x", (4, 3)), b.input("y", (4, 2))
    w0, t, w1 = b.parameter("w0", (3, 8)), b.parameter("t", (1,)), b.parameter("w1", (8, 2))
    h = b.op("MatMul", x, w0)
    a = b.op("Tanh", b.op("Mul", h, t))
    difference = b.op("Sub", b.op("MatMul", a, w1), y)
    net = Network(b, {w0: (3, 8), t: (1,), w1: (8, 2)})
    net.loss = b.op("ReduceMean", b.op("Mul", difference, difference), keepdims=0)
    delta = b.op("Mul", difference, b.const(0.25))
    net.gradients[w1] = b.op("MatMul", b.op("Transpose", a, perm=[1, 0]), delta)
    back = b.op("MatMul", delta, b.op("Transpose", w1, perm=[1, 0]))
    inner = b.op("Mul", back, b.op("Sub", b.const(1.0), b.op("Mul", a, a)))
    each = b.op("ReduceSum", b.op("Mul", inner, h), b.const([0, 1], "int64"), keepdims=0)
    net.gradients[t] = b.op("Reshape", each, b.const([1], "int64"))
    net.gradients[w0] = b.op("MatMul", b.op("Transpose", x, perm=[1, 0]), b.op("Mul", inner, t))
    sgd(b, net)
    return b


def test_a_weight_that_all_columns_read_is_summed_without_a_split_by_tokens(tmp_path):
    """As of norms of queries and keys, which others reduce with a split by tokens alone."""
    step = gopt.load(scaled_columns().save(tmp_path / "step.onnx"))
    made = split_training(step.training)
    gradient = made.training.gradients["t"]
    found = [node for node in calls(made, "AllReduce", Phase.BACKWARD) if gradient in node.outputs]
    refused(made, without(made, found), "partial sum")
    gopt.shard(step, Mesh.parse("dp=2,tp=2"), stage=0).write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(steps=2, confirm=False).equal


def test_the_final_norm_is_reduced_over_another_group():
    made = split("gpt_adamw", sequence=True)
    gradient = made.training.gradients["ln_f.weight"]
    (call,) = [node for node in calls(made, "AllReduce", Phase.BACKWARD) if gradient in node.outputs]
    change_attributes(made.made, call, group="dp")
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


def test_a_norm_into_which_each_member_adds_a_whole_tensor():
    """The terms of split parameters and what a replicated one has are added first, and summed over members then."""
    made = split("mlp_mom_clip_sched")
    nodes = list(made.made.graph.nodes)
    (call,) = [n for n in calls(made, "AllReduce", Phase.UPDATE) if made.made.graph.types[n.outputs[0]].elements == 1]
    joined = next(node for node in nodes if call.outputs[0] in node.inputs)
    assert joined.op_type == "Add"
    each, whole = f"{joined.outputs[0]}.each", joined.outputs
    joined.inputs = [call.inputs[0] if name == call.outputs[0] else name for name in joined.inputs]
    joined.outputs, call.inputs, call.outputs = [each], [each], whole
    made.made.graph.types[each] = made.made.graph.types[whole[0]]
    nodes.remove(call)
    nodes.insert(nodes.index(joined) + 1, call)
    refused(made, nodes, "Add", "partial sum")


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_the_dual_of_a_gather_cuts_by_other_sizes(phase):
    made = split("gpt_adamw", sequence=True)
    call = calls(made, "ReduceScatter", phase)[-1]
    sizes = list(call.attributes["sizes"])
    change_attributes(made.made, call, sizes=[sizes[0] + 1, sizes[1] - 1])
    refused(made, None, "it takes")


def test_an_own_part_is_cut_by_other_sizes():
    """Uneven parts of a whole value, in the other order."""
    made = split("mlp_adamw_accum", 3)
    graph = made.made.graph
    cuts = [n for n in graph.nodes if n.op_type == "DimSlice" and len(set(n.attributes["sizes"])) > 1]
    assert cuts
    change_attributes(made.made, cuts[0], sizes=list(cuts[0].attributes["sizes"])[::-1])
    refused(made, None)


def test_a_part_is_cut_by_other_sizes_than_it_is_joined_by():
    made = split("gpt_adamw", sequence=True)
    gather = calls(made, "AllGather", Phase.FORWARD)[0]
    change_attributes(made.made, gather, sizes=[5, 3])
    refused(made, None, "as it is joined")


def test_a_gather_along_another_dimension():
    made = split("gpt_adamw", sequence=True)
    gather = calls(made, "AllGather", Phase.FORWARD)[0]
    change_attributes(made.made, gather, axis=0)
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
