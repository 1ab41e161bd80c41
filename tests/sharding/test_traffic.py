"""Calls of a step: what they carry, when they can start, who waits for them. Held against slow searches by hand."""

from __future__ import annotations

import pytest
from helpers import source

import gopt
from gopt.analysis.operators import heavy
from gopt.ir.graph import COMM, Node
from gopt.mesh import Mesh
from gopt.program import SpmdProgram
from gopt.sharding.traffic import (
    CallContent,
    CollectiveCall,
    find_calls,
    measure,
    peak_gathered,
    ready_at,
    uses_of_results,
)


def step(name: str, mesh: str, **options: object) -> SpmdProgram:
    return gopt.shard(source(name), Mesh.parse(mesh), **options).program


def call(
    carries: CallContent, sent: float, *, hidden: bool = False, beside: float = 0.0, **places: object
) -> CollectiveCall:
    given = {"place": 0, "ready": -1, "first": 1, "last": 1, "payload": 0.0, "before_use": False, **places}
    return CollectiveCall(Node("AllReduce", [], []), carries, sent=sent, hidden=hidden, beside=beside, **given)


def readers(nodes: list[Node], names: list[str]) -> list[int]:
    return [place for place, node in enumerate(nodes) if not set(names).isdisjoint(node.reads)]


def computing(nodes: list[Node], names: list[str]) -> list[int]:
    """Places of the nodes that compute with a value, seen through calls."""
    found = []
    for place in readers(nodes, names):
        through = nodes[place].domain == COMM
        found += computing(nodes, nodes[place].outputs) if through else [place]
    return found


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("gpt_adamw", "shard=2", {"stage": 3, "bucket_mb": 0.005}), ("gpt_adamw", "dp=2,shard=2", {"stage": 2}),
        ("mlp_adamw_fp16_scaler", "dp=2,tp=2", {"stage": 0}), ("cnn_sgd", "shard=2", {"stage": 1}),
    ],
)  # fmt: skip
def test_who_waits_for_a_call(name, mesh, options):
    program = step(name, mesh, **options)
    nodes = program.graph.nodes
    for each in find_calls(program):
        outputs = each.node.outputs
        assert each.first == min(computing(nodes, outputs), default=len(nodes))
        assert each.last == max(readers(nodes, outputs), default=each.place)
        assert each.hidden == any(heavy(node) for node in nodes[each.place + 1 : each.first])


def test_a_call_is_ready_behind_the_last_node_that_cannot_move():
    """A cast that a pass put in front of the call moves along; another call does not."""
    nodes = [
        Node("MatMul", ["x", "w"], ["a"]), Node("Cast", ["a"], ["b"], made_by="shard"),
        Node("AllReduce", ["b"], ["c"], domain=COMM, made_by="shard"), Node("Cast", ["c"], ["d"], made_by="shard"),
        Node("AllReduce", ["d", "b"], ["e", "f"], domain=COMM, made_by="shard"), Node("Neg", ["e"], ["g"]),
        Node("Cast", ["w"], ["h"], made_by="shard"), Node("AllGather", ["h"], ["i"], domain=COMM, made_by="shard"),
    ]  # fmt: skip
    assert ready_at(nodes) == {2: 0, 4: 2, 7: -1}
    first, last = uses_of_results(nodes)
    assert first == last == {"c": 3, "e": 5}


def test_a_call_that_reads_a_result_does_not_compute_with_it():
    """It waits on the link: what computes with a result through it is the first reader of its own results."""
    nodes = [
        Node("AllReduce", ["x"], ["a"], domain=COMM), Node("AllReduce", ["a", "w"], ["b", "c"], domain=COMM),
        Node("Neg", ["w"], ["d"]), Node("Add", ["c", "c"], ["e"]), Node("Mul", ["b", "a"], ["f"]),
    ]  # fmt: skip
    first, last = uses_of_results(nodes)
    assert first == {"a": 3, "b": 4, "c": 3}
    assert last == {"a": 4, "b": 4, "c": 3}


def test_a_gather_of_what_the_first_node_makes_is_not_before_use():
    """It waits for that node; only what ranks hold from the start may be issued ahead."""
    program = step("gpt_adamw", "shard=2", stage=3)
    gathers = [each for each in find_calls(program) if each.node.op_type == "AllGather"]
    assert gathers and all(each.before_use == (each.ready < 0) for each in gathers)
    first = gathers[0]
    made = Node("Neg", first.node.inputs, ["planted"])
    program.graph.types["planted"] = program.graph.types[first.node.inputs[0]]
    first.node.inputs = ["planted"]
    program.graph.nodes.insert(0, made)
    (found,) = (each for each in find_calls(program) if each.node is first.node)
    assert found.ready == 0 and not found.before_use


def test_bytes_of_a_call_that_carries_scalars_beside_gradients():
    both = call(CallContent.GRADIENTS, 100.0, beside=0.25)
    assert [both.sent_as(kind) for kind in CallContent] == [75.0, 0.0, 25.0]
    assert [call(CallContent.OTHER, 100.0).sent_as(kind) for kind in CallContent] == [0.0, 0.0, 100.0]
    shares = measure([both, call(CallContent.OTHER, 75.0, hidden=True)])
    assert shares.by_kind == {"gradients": 0.0, "other": 0.75}
    assert shares.hidden_share == pytest.approx(75 / 175, abs=1e-6)


def test_statistics_in_a_call_of_gradients_are_told_apart():
    program = step("cnn_sgd", "dp=2", stage=0)
    types, statistics = program.graph.types, program.training.new_statistics
    for each in find_calls(program):
        mixed = {name in statistics for name in each.node.outputs}
        if mixed == {True}:
            assert each.carries is CallContent.OTHER and each.beside == 0
        small = sum(types[name].nbytes for name in each.node.outputs if name in statistics)
        whole = sum(types[name].nbytes for name in each.node.outputs)
        if each.carries is CallContent.GRADIENTS:
            assert each.beside == pytest.approx(small / whole)


def test_gathers_that_end_where_another_begins_are_not_alive_together():
    pair = [
        call(CallContent.PARAMETERS, 0, payload=10.0, place=0, last=3, before_use=True),
        call(CallContent.PARAMETERS, 0, payload=7.0, place=4, last=6, before_use=True),
    ]
    assert peak_gathered(pair) == 10
    overlapping = [pair[0], call(CallContent.PARAMETERS, 0, payload=7.0, place=3, last=6, before_use=True)]
    assert peak_gathered(overlapping) == 17
