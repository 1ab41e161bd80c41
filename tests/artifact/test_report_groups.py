"""What the report lists, in groups: nothing is lost, and each says what it was for and what stands for it."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from helpers import FIXTURES, rank_path
from hypothesis import given
from hypothesis import strategies as st

import gopt
from gopt.artifact.manifest_check import read_manifest
from gopt.artifact.report_check import read_report
from gopt.artifact.report_groups import (
    OpFact,
    RemovedVarFact,
    expand_added_vars,
    expand_ops,
    expand_removed_vars,
    total,
)
from gopt.artifact.report_tables import group_added_ops, group_removed_ops, group_removed_vars
from gopt.errors import InputError
from gopt.ir.phase import Phase

pytestmark = pytest.mark.usefixtures("unchecked")

WORDS = st.sampled_from(["a", "b"])
BY = st.lists(WORDS, max_size=2).map(tuple)
OPS = st.lists(
    st.builds(OpFact, WORDS, WORDS, WORDS, WORDS, st.none() | WORDS, WORDS, WORDS, BY), max_size=12
)  # fmt: skip
SHAPES = st.none() | st.just((2, 3)) | st.just((None, "n"))
VALUES = st.lists(
    st.builds(
        RemovedVarFact, WORDS, WORDS, WORDS, WORDS, st.none() | WORDS, WORDS, WORDS, SHAPES, st.integers(0, 2), BY
    ),
    max_size=12,
)  # fmt: skip


@given(OPS)
def test_operators_are_given_back_one_by_one(facts):
    for groups in (group_removed_ops(facts), group_added_ops(facts)):
        assert sorted(expand_ops(groups), key=str) == sorted(facts, key=str)
        assert total(groups) == len(facts) and all(group.fault() is None for group in groups)


@given(VALUES)
def test_values_are_given_back_one_by_one(facts):
    groups = group_removed_vars(facts)
    assert sorted(expand_removed_vars(groups), key=str) == sorted(facts, key=str)
    assert total(groups) == len(facts) and all(group.fault() is None for group in groups)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "out"
    gopt.shard(gopt.load(FIXTURES / "gpt_adamw_clip_sched_fp16.onnx"), 3, stage=3).write(out)
    return out


def test_every_node_that_a_rank_lacks_and_every_one_that_it_has_more_is_listed(folder):
    report = read_report(folder, read_manifest(folder)[0])
    source = onnx.load(str(FIXTURES / "gpt_adamw_clip_sched_fp16.onnx"), load_external_data=False).graph
    known = {node.name or node.output[0]: node for node in source.node}
    for rank in range(3):
        graph = onnx.load(str(rank_path(folder, rank)), load_external_data=False).graph
        added = {node.output[0] for node in graph.node if any(e.key == "gopt.pass" for e in node.metadata_props)}
        kept = {node.name or node.output[0] for node in graph.node} - added
        gone = {fact.name for fact in expand_ops(report.removed_ops) if on(rank, fact.ranks)}
        assert gone == known.keys() - kept
        assert {fact.name for fact in expand_ops(report.added_ops) if on(rank, fact.ranks)} == added


def test_what_stands_for_an_operator_is_in_the_ranks(folder):
    report = read_report(folder, read_manifest(folder)[0])
    graphs = [onnx.load(str(rank_path(folder, rank)), load_external_data=False).graph for rank in range(3)]
    made = {name for graph in graphs for node in graph.node for name in node.output}
    made |= {each.name for graph in graphs for each in graph.input}
    updates = [fact for fact in expand_ops(report.removed_ops) if fact.pass_name == "shard" and fact.of]
    assert updates and all(fact.replaced_by and made.issuperset(fact.replaced_by) for fact in updates)
    assert {fact.role for fact in updates} == {"update"}
    parameters = {state.tensor for state in read_manifest(folder)[0].states if state.kind == "parameter"}
    assert {fact.of for fact in updates} <= parameters


def test_added_values_have_the_types_of_the_ranks(folder):
    """Compared with what onnx infers of each rank's file from its inputs."""
    report = read_report(folder, read_manifest(folder)[0])
    said = {fact.name: fact for fact in expand_added_vars(report.added_vars)}
    assert not [name for name, fact in said.items() if fact.dtype == "undefined"]
    compared = 0
    for rank in range(3):
        model = onnx.load(str(rank_path(folder, rank)), load_external_data=True)
        graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        for info in (*graph.value_info, *graph.input, *graph.output):
            dims = info.type.tensor_type.shape.dim
            if info.name not in said or not all(dim.HasField("dim_value") for dim in dims):
                continue
            (here,) = (each for each in said[info.name].per_rank if on(rank, each.ranks))
            assert here.shape == tuple(dim.dim_value for dim in dims), info.name
            compared += 1
    assert compared > 20


@pytest.mark.parametrize(
    ("key", "change", "said"),
    [
        ("removed_ops", {"count": 999}, "removed_ops[0]: count: 999 stands for"),
        ("removed_vars", {"replaced_by": [["a"], ["b"]]}, "removed_vars[0]: rows have"),
    ],
)
def test_a_group_that_contradicts_itself_is_refused(key, change, said, folder, tmp_path):
    document = json.loads((folder / "report.json").read_text())
    document[key][0].update(change)
    (tmp_path / "report.json").write_text(json.dumps(document))
    with pytest.raises(InputError) as error:
        read_report(tmp_path, read_manifest(folder)[0])
    assert said in error.value.message.replace("\\", "")


def test_a_report_of_an_older_gopt_is_refused_by_its_format(folder, tmp_path):
    document = json.loads((folder / "report.json").read_text())
    document |= {"format": "gopt-report/1", "removed_ops": [{"name": "a"}]}
    (tmp_path / "report.json").write_text(json.dumps(document))
    with pytest.raises(InputError) as error:
        read_report(tmp_path, read_manifest(folder)[0])
    assert "its format is 'gopt-report/1'" in error.value.message and "write the folder again" in error.value.hints[0]


def test_before_and_after(folder):
    """Against the files: what they hold and how long they are."""
    report = read_report(folder, read_manifest(folder)[0])
    assert report.before_after is not None
    before, after = report.before_after.source, report.before_after.largest
    model = onnx.load(str(FIXTURES / "gpt_adamw_clip_sched_fp16.onnx"), load_external_data=False)
    largest = onnx.load(str(rank_path(folder, report.before_after.rank)), load_external_data=False)
    assert (before.nodes, after.nodes) == (len(model.graph.node), len(largest.graph.node))
    usage = report.ranks[report.before_after.rank]
    assert (after.parameters, after.traffic) == (usage.nbytes.parameters, usage.bytes_sent)
    assert after.calls == sum(node.domain == "gopt.comm" for node in largest.graph.node)
    assert before.optimizer_states > 2.5 * after.optimizer_states and before.peak_live > 0 < after.peak_live


def on(rank: int, ranks: str) -> bool:
    parts = [part.split("-") for part in ranks.split(",")]
    return any(int(first) <= rank <= int(*last or [first]) for first, *last in parts)


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("gpt_adamw", "dp=2,tp=2", {}),
        ("cnn_sgd", "h=2", {}),
        ("mlp_adamw", "shard=2", {"stage": 3}),
        ("mlp_adamw_bf16", "shard=2", {"stage": 3, "partition": "rows"}),
    ],
)
def test_an_added_operator_has_the_role_of_its_phase(name, mesh, options):
    sharded = gopt.shard(FIXTURES / f"{name}.onnx", mesh, **options)
    training = sharded.program.training
    readable = {fact.name: fact.role for fact in expand_ops(sharded.report().added_ops)}
    nodes = [node for block in sharded.ranks[0].blocks for node in block.nodes]
    pools = [node for node in sharded.program.source.graph.nodes if node.is_a("MaxPool")]
    pools = [node for node in pools if node.phase is Phase.FORWARD]
    places = [name for node in pools for name in node.outputs if name]  # which the backward alone reads
    forward = above(nodes, [training.loss, *places])
    backward = above(nodes, training.gradients.values()) - forward
    held = {node.label: node.outputs[0] for node in nodes if readable.get(node.label, "") != "communication"}
    phase = {
        label: "forward" if output in forward else "backward" if output in backward else "update"
        for label, output in held.items() if label in readable
    }  # fmt: skip
    assert phase == {label: readable[label] for label in phase}
    assert len(phase) >= 10


def above(nodes, names) -> set[str]:
    """The values from which some are computed, and these. A packed call makes each result of one operand."""
    makers = {name: (node, at) for node in nodes for at, name in enumerate(node.outputs)}
    found, waiting = set(), list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            node, at = makers.get(name, (None, 0))
            packed = node is not None and node.op_type == "AllReduce"
            waiting += [] if node is None else [node.inputs[at]] if packed else node.reads
    return found


def test_calls_between_members_say_that_they_carry_activations():
    """Gradients are reduced over dp alone; what tp sends is of the computation itself."""
    sharded = gopt.shard(FIXTURES / "gpt_adamw.onnx", "dp=2,tp=2")
    carried = {each.reason for each in sharded.report().added_ops if each.role == "communication"}
    assert carried == {
        "communication over tp: activations",
        "communication over tp: gradients of activations",
        "communication over dp: gradients",
    }


def test_pulled_parameters_are_laid_out_for_the_forward():
    split = gopt.split(FIXTURES / "mlp_adamw.onnx", gopt.SplitOptions(trainers=2, servers=2))
    roles = {fact.name: fact.role for fact in expand_ops(split.report().added_ops)}
    assert roles["fc1.weight"] == "forward" and roles["gopt.ps.k0.parameter_out"] == "update"
