"""Ranks are proven without the nodes that they have from the source unchanged, and a wrong node is no such node."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from corpus.plants import in_order
from edit_gen.edits import drawn
from helpers import edit_rank, script_of
from onnx import ModelProto, NodeProto, helper, numpy_helper
from products import part, spread
from test_proof_prove import SETS, SPLIT_SETS, sharded

import gopt
from gopt.verification.proof.folder import folder_relation
from gopt.verification.proof.prove import Prover, ShortProver, proof_of
from gopt.verification.proof.relation import ProofRelation
from gopt.verification.proof.unchanged_nodes import without_unchanged_nodes

SHORT = ["copies", "states", "gradients", "rows", "owners", "broadcast", "hybrid", "micro-steps", "sum", "replicas"]
WHOLE = ["parameters", "all", "stages", "tensor"]
"""Option sets with and without nodes that ranks have from the source unchanged."""
BLOCKS = 5


def nodes_of(relation: ProofRelation) -> int:
    return sum(len(graph.nodes) for rank in relation.ranks for graph in rank.graphs.values())


@pytest.mark.parametrize("name", ["mlp_adamw", "cnn_sgd"])
@pytest.mark.parametrize("kind", SHORT)
def test_the_rest_of_the_ranks_proves_what_all_of_them_do(name: str, kind: str, tmp_path: Path) -> None:
    assert sharded(name, SETS[kind], tmp_path / "ranks")
    relation = folder_relation(tmp_path / "ranks")
    shorter = without_unchanged_nodes(relation)
    assert shorter is not None and nodes_of(shorter) < nodes_of(relation)
    short = ShortProver(shorter).run()
    assert short.claims == Prover(relation).run().claims and short.proven


@pytest.mark.parametrize("kind", WHOLE)
def test_ranks_with_few_nodes_of_the_source_are_read_in_full(kind: str, tmp_path: Path) -> None:
    assert sharded("gpt_adamw", (SETS | SPLIT_SETS)[kind], tmp_path / "ranks")
    relation = folder_relation(tmp_path / "ranks")
    assert without_unchanged_nodes(relation) is None
    assert proof_of(relation).proven


def test_a_statistic_that_micro_steps_move_is_no_operand_of_an_unchanged_node(tmp_path: Path) -> None:
    assert sharded("cnn_sgd", SETS["own statistics"], tmp_path / "ranks")
    relation = folder_relation(tmp_path / "ranks")
    shorter = without_unchanged_nodes(relation)
    moving = {state.tensor for state in relation.training.states if state.kind.value == "statistic"}
    assert moving
    for rank in shorter.ranks if shorter is not None else ():
        for phase, graph in rank.graphs.items():
            kept = {output for node in graph.nodes for output in node.outputs}
            readers = [node for node in relation.ranks[0].graphs[phase].nodes if moving.intersection(node.inputs)]
            assert kept.issuperset(output for node in readers for output in node.outputs)
    assert proof_of(relation).claims == Prover(relation).run().claims


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ranks of a step of equal layers."""
    home = tmp_path_factory.mktemp("layers")
    (home / "step.onnx").write_bytes(script_of("benchmarks/graphs.py").gpt(BLOCKS).SerializeToString())
    gopt.shard(home / "step.onnx", 2, prove=False).write(home / "ranks")
    return home / "ranks"


def reader(model: ModelProto, value: str, *op_types: str) -> NodeProto:
    return next(node for node in model.graph.node if value in node.input and (node.op_type in op_types or not op_types))


def behind(model: ModelProto, value: str, *op_types: str) -> NodeProto:
    """The node of a type that a chain of first readers leads to."""
    node = reader(model, value)
    while node.op_type not in op_types:
        node = reader(model, node.output[0])
    return node


def twin_weight(model: ModelProto) -> None:
    node = reader(model, "h3.fc.weight", "MatMul")
    node.input[1] = "h2.fc.weight"


def twin_weight_in_the_backward(model: ModelProto) -> None:
    reader(model, "h3.fc.weight", "Transpose").input[0] = "h4.fc.weight"


def twin_bias(model: ModelProto) -> None:
    node = reader(model, "h3.out.bias", "Add")
    node.input[list(node.input).index("h3.out.bias")] = "h4.out.bias"


def bypassed(model: ModelProto) -> None:
    node = behind(model, "h3.fc.bias", "Tanh")
    node.CopyFrom(helper.make_node("Identity", list(node.input), list(node.output), name=node.name))


def other_operator(model: ModelProto) -> None:
    reader(model, "h3.out.bias", "Add").op_type = "Sub"


def other_constant(model: ModelProto) -> None:
    nodes = [node for node in model.graph.node if node.op_type == "Add" and node.input[1].startswith("const_")]
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    value = numpy_helper.to_array(stored[nodes[9].input[1]])
    model.graph.initializer.append(numpy_helper.from_array(value * 2, "twice"))
    nodes[9].input[1] = "twice"


def exchanged_gradients(model: ModelProto) -> None:
    call = next(node for node in model.graph.node if node.op_type == "ReduceScatter")
    gathered = next(node for node in model.graph.node if node.op_type == "AllGather")
    first, second = (list(gathered.output).index(f"h{layer}.k.weight.new") for layer in (2, 3))
    call.input[first], call.input[second] = call.input[second], call.input[first]


WRONG = [
    twin_weight, twin_weight_in_the_backward, twin_bias, bypassed, other_operator, other_constant,
    exchanged_gradients,
]  # fmt: skip


@pytest.mark.rest
@pytest.mark.parametrize(("wrong", "ranks"), spread(WRONG, [(1,), (0, 1)]))
def test_a_wrong_node_in_a_layer_behind_the_first_is_named(wrong, ranks, layers: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = Path(shutil.copytree(layers, tmp_path / "ranks"))
    for rank in ranks:
        edit_rank(folder, rank, lambda model: (wrong(model), in_order(model)))
    relation = folder_relation(folder)
    proof = proof_of(relation)
    assert proof.verdict.value == "different"
    assert proof.claims == Prover(relation).run().claims


@pytest.mark.parametrize("seed", part(range(40), 3))
def test_after_a_random_edit_the_claims_are_those_of_all_nodes(seed: int, layers: Path, tmp_path: Path) -> None:
    folder, draw = Path(shutil.copytree(layers, tmp_path / "ranks")), random.Random(seed)
    path = folder / draw.choice(["rank_0000.onnx", "rank_0001.onnx"])
    edit = drawn(path, draw)
    if edit is not None and edit.of(path, [("shard", 2)]):
        gopt.seal(folder)
    try:
        whole = Prover(folder_relation(folder)).run().claims
    except gopt.GoptError as error:
        with pytest.raises(type(error)):
            gopt.prove(folder)
        return
    assert gopt.prove(folder).claims == whole
