"""Calls of a step: what they carry, when they can start, who waits for them. Held against slow searches by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from helpers import FIXTURES, source

import gopt
from gopt.ir.graph import COMM, Node
from gopt.ir.node_kinds import heavy
from gopt.ir.types import TensorType
from gopt.records.mesh import Mesh
from gopt.records.placements import FlatShard, Sharding
from gopt.spmd.program import SpmdProgram
from gopt.spmd.traffic import (
    CallContent,
    CollectiveCall,
    Overlap,
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


FLAT = Sharding.along("shard", FlatShard.whole((0, 8, 16, 24)))


def by_hand() -> SimpleNamespace:
    """A step of 3 x 2 ranks: a gather before use and one behind the update, and all kinds of calls between."""
    shapes = {
        "w": (6, 4), "w_part": (24,), "x": (2, 6), "h": (2, 4), "loss": (), "dw": (6, 4), "mean": (4,),
        "mean_all": (4,), "loss_all": (), "mix_dw": (6, 4), "dw_part": (24,), "dw_sum": (24,), "new_part": (24,),
        "new": (6, 4), "stat": (4,), "rows": (6, 4), "one": (3, 5), "ones": (3, 5), "less": (3, 5), "sent": (3, 5),
    }  # fmt: skip
    nodes = [
        Node("Constant", [], ["one"], made_by="shard"),
        Node("AllGather", ["w_part"], ["w"], domain=COMM, attributes={"group": "shard", "shapes": ["6,4"]}),
        Node("MatMul", ["x", "w"], ["h"]), Node("ReduceMean", ["h"], ["loss"]), Node("ReduceMean", ["h"], ["mean"]),
        Node("MatMul", ["h", "x"], ["dw"]),
        Node("AllReduce", ["loss"], ["loss_all"], domain=COMM, attributes={"group": "dp+shard"}),
        Node("AllReduce", ["dw", "mean"], ["mix_dw", "mean_all"], domain=COMM, attributes={"group": "dp"}),
        Node("ReduceScatter", ["mix_dw"], ["dw_part"], domain=COMM, attributes={"group": "shard"}),
        Node("AllReduce", ["dw_part"], ["dw_sum"], domain=COMM, attributes={"group": "dp"}),
        Node("Sub", ["w_part", "dw_sum"], ["new_part"]),
        Node("AllGather", ["new_part"], ["new"], domain=COMM, attributes={"group": "shard", "axis": 0}),
        Node("Broadcast", ["mean_all"], ["stat"], domain=COMM, attributes={"group": "dp", "shapes": ["4"]}),
        Node("AllGather", ["w_part"], ["rows"], domain=COMM, attributes={"group": "shard", "axis": 0}),
        Node("AllReduce", ["one"], ["ones"], domain=COMM, attributes={"group": "dp"}), Node("Neg", ["ones"], ["less"]),
        Node("Broadcast", ["less"], ["sent"], domain=COMM, attributes={"group": "dp"}),
    ]  # fmt: skip
    return SimpleNamespace(
        graph=SimpleNamespace(
            nodes=nodes, types={name: TensorType("float32", shape) for name, shape in shapes.items()}
        ),
        training=SimpleNamespace(gradients={"w": "dw"}, new_statistics={"mean_all", "stat"}),
        mesh=Mesh.parse("dp=2,shard=3"),
        stages=None,
        sharded=dict.fromkeys(("w_part", "dw_part", "dw_sum", "new_part"), FLAT),
    )


def test_every_figure_of_calls_by_hand():
    """Bytes: B of the tensors that move, a member's part where members have parts; (n-1)/n of them, twice to reduce."""
    found = [
        (each.carries.value, each.place, each.ready, each.first, each.last, each.payload, pytest.approx(each.sent),
         each.hidden, each.before_use, pytest.approx(each.beside))
        for each in find_calls(by_hand())
    ]  # fmt: skip
    assert found == [
        ("parameters", 1, -1, 2, 2, 96.0, 64.0, False, True, 0),
        ("other", 6, 3, 17, 6, 4.0, 2 * 5 / 6 * 4, False, False, 0),
        ("gradients", 7, 5, 10, 12, 112.0, 112.0, False, False, 16 / 112),
        ("gradients", 8, 7, 10, 9, 96.0, 64.0, False, False, 0),
        ("gradients", 9, 8, 10, 10, 32.0, 32.0, False, False, 0),
        ("parameters", 11, 10, 17, 11, 96.0, 64.0, False, False, 0),
        ("other", 12, 7, 17, 12, 16.0, 8.0, False, False, 0),
        ("parameters", 13, -1, 17, 13, 96.0, 64.0, False, False, 0),
        ("gradients", 14, -1, 15, 15, 60.0, 60.0, False, False, 0),
        ("parameters", 16, 15, 17, 16, 60.0, 30.0, False, False, 0),
    ]


def test_a_call_is_hidden_by_heavy_work_before_its_first_use_alone():
    program = by_hand()
    nodes = program.graph.nodes
    nodes[2], nodes[3] = Node("ReduceMean", ["x"], ["loss"]), Node("MatMul", ["x", "w"], ["h"])
    assert not find_calls(program)[0].hidden, "the product is the first use itself"
    nodes[2] = Node("MatMul", ["x", "x"], ["loss"])
    assert find_calls(program)[0].hidden


def test_where_nothing_is_said_of_parts_they_are_inferred():
    """Also of a program that passes still change, which breaks rules for a while."""
    program = gopt.shard(FIXTURES / "mlp_adamw.onnx", "dp=2,shard=2", stage=2).program  # its source is changed
    bytes = [each.payload for each in find_calls(program)]
    assert program.sharded and bytes == [each.payload for each in find_calls(program, program.sharded)]
    program.sharded = {}
    part = next(
        name for each in find_calls(program) if each.node.op_type == "ReduceScatter" for name in each.node.outputs
    )
    wrong = Node("Softmax", [part], ["planted"], made_by="plant")
    program.graph.types["planted"] = program.graph.types[part]
    program.training.metrics.append("planted")
    program.graph.nodes.append(wrong)
    assert [each.payload for each in find_calls(program)] == bytes
    whole = [each.payload for each in find_calls(program, {})]
    assert whole != bytes and all(one >= other for one, other in zip(whole, bytes))


def test_only_gathers_before_use_are_alive_from_their_issue_to_their_last_reader():
    early = call(CallContent.PARAMETERS, 0, payload=10.0, place=0, last=3, before_use=True)
    late = call(CallContent.PARAMETERS, 0, payload=70.0, place=1, last=2)
    assert peak_gathered([early, late]) == 10 and peak_gathered([late]) == 0


def test_an_overlap_of_nothing_hides_nothing():
    assert measure([call(CallContent.PARAMETERS, 4.0, hidden=True)]) == Overlap(1.0, {"parameters": 1.0}, 0)
    assert measure([]) == Overlap(0.0, {}, 0)


def test_what_a_call_carries_follows_all_that_it_moves():
    """A gradient of one element is a gradient; a statistic beside a parameter makes no call of statistics."""
    program = by_hand()
    program.training.gradients["scale"] = "loss"
    nodes = program.graph.nodes
    nodes.append(
        Node("AllReduce", ["ones", "loss_all"], ["twos", "loss_of_all"], domain=COMM, attributes={"group": "dp"})
    )
    nodes.append(Node("Broadcast", ["mean_all", "less"], ["stat", "all"], domain=COMM, attributes={"group": "dp"}))
    program.graph.types |= {"twos": program.graph.types["ones"], "loss_of_all": program.graph.types["loss"]}
    found = {each.place: (each.carries, each.beside) for each in find_calls(program)}
    assert found[6][0] is CallContent.GRADIENTS
    assert found[17] == (CallContent.GRADIENTS, pytest.approx(4 / 64))
    assert found[18] == (CallContent.PARAMETERS, 0.0)
