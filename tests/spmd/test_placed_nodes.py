"""Nodes planted beside shards of a bucket, and what the verifier says that each makes (``gopt.spmd.verifier``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers import FIXTURES

import gopt
from gopt.errors import InvariantError
from gopt.ir.graph import COMM, SPMD, Node
from gopt.ir.opaque.refold import RefoldedCall
from gopt.ir.types import TensorType
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh
from gopt.records.placements import FULLY_REPLICATED, PER_MEMBER, REPLICATED, FlatShard, OnMember, Sharding
from gopt.spmd.program import SpmdProgram
from gopt.spmd.verifier import ShardingInference, infer_shardings, parts_so_far


def sharded(name: str, mesh: str, stage: int, *, accumulate: int = 1) -> SpmdProgram:
    pipeline = build_pipeline(defaults={"shard": {"stage": stage}})
    return gopt.shard(FIXTURES / f"{name}.onnx", Mesh.parse(mesh), accumulate=accumulate, pipeline=pipeline).program


def plant(step: SpmdProgram, op_type: str, inputs: str, output: str, **more: Any) -> None:
    """A node behind all others, whose result is shown: what nothing needs is not looked at."""
    step.graph.nodes.append(Node(op_type, inputs.split(" ") if inputs else [], [output], made_by="plant", **more))
    step.training.metrics.append(output)


def refused(step: SpmdProgram) -> str:
    with pytest.raises(InvariantError) as caught:
        infer_shardings(step)
    return caught.value.message


S1, S2 = FlatShard((0, 2, 8), 0, 8), FlatShard((0, 3, 8), 0, 8)
ON_S1, ON_1 = Sharding.along("shard", S1), Sharding.along("shard", OnMember(1))
VALUES = {"s1": (8,), "s2": (8,), "whole": (8,), "alone": (8,), "one": (), "out": (8,), "own_one": (), "pair": (2,)}


def among(*, fast: bool = True) -> SpmdProgram:
    """A step with two shards of a bucket (``s1``, ``s2``), a value on one member of ``shard`` and an equal one."""
    step = sharded("mlp_mom_clip_sched", "dp=2,shard=2", 0)
    step.graph.types.update({name: TensorType("float32", shape) for name, shape in VALUES.items()})
    at = {"domain": SPMD, "attributes": {"starts": [0], "sizes": [8]}}
    plant(step, "Constant", "", "one")
    plant(step, "Constant", "", "pair")
    plant(step, "Constant", "", "whole")
    plant(step, "Identity", "whole", "alone", sharding=ON_1)
    plant(step, "LocalSlice", "whole", "s1", sharding=ON_S1, **at)
    plant(step, "LocalSlice", "whole", "s2", sharding=Sharding.along("shard", S2), **at)
    plant(step, "Identity", step.training.loss, "own_one")
    return step


LOST = "refused"
USES = [
    ("Add s1 s1", ON_S1, S1), ("Add s1 one", ON_S1, S1), ("Clip s1 - one", ON_S1, S1),
    ("CastLike s1 whole", ON_S1, S1), ("Add s1 s2", ON_S1, LOST), ("Add s1 whole", ON_S1, LOST),
    ("Add one s2", ON_S1, LOST), ("MatMul s1 s1", ON_S1, LOST), ("Add s1 x", ON_S1, LOST),
    ("Add s1 untyped", ON_S1, LOST), ("Add s1 own_one", ON_S1, LOST), ("Add s1 s1", FULLY_REPLICATED, S1),
    ("Add alone alone", ON_1, OnMember(1)), ("Add alone alone", FULLY_REPLICATED, LOST), ("ReduceSum s1", ON_S1, LOST),
    ("Shape s1", FULLY_REPLICATED, PER_MEMBER), ("Shape alone", FULLY_REPLICATED, LOST),
    ("Shape whole", FULLY_REPLICATED, REPLICATED),
    ("Shape s1", ON_S1, LOST), ("Shape places", FULLY_REPLICATED, REPLICATED), ("Add s1 pair", ON_S1, LOST),
    ("Shape own_one", FULLY_REPLICATED, REPLICATED),
    ("Shape untyped", FULLY_REPLICATED, PER_MEMBER),
    ("RandomUniformLike whole", FULLY_REPLICATED, PER_MEMBER), ("RandomUniformLike s1", FULLY_REPLICATED, LOST),
    ("Dropout whole", FULLY_REPLICATED, REPLICATED), ("If one", FULLY_REPLICATED, PER_MEMBER),
]  # fmt: skip


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("text", "sharding", "made"), USES)
def test_what_a_node_makes_of_shards(text, sharding, made, fast, monkeypatch):
    """Whether nodes on one shard go through their operators' rules, or are seen to need none."""
    if not fast:
        monkeypatch.setattr(ShardingInference, "_shard_of", lambda *_: None)
    step = among()
    op_type, _, inputs = text.partition(" ")
    if op_type == "Shape":
        plant(step, "NonZero", "x", "untyped")
        plant(step, "NonZero", "whole", "places")
    plant(step, op_type, inputs.replace("-", ""), "out", sharding=sharding)
    step.graph.nodes[-1].captures = ("x",) if op_type == "If" else ()
    if made == LOST:
        assert refused(step).startswith(f"{op_type} 'out' reads ")
    else:
        assert infer_shardings(step).of("out")[1] == made


@pytest.mark.parametrize("op_type", ["Shape", "Add", "CastLike", "RandomUniformLike"])
def test_an_operator_of_another_domain_takes_whole_values(op_type):
    step = among()
    plant(step, op_type, "s1 s1", "out", domain="my", sharding=ON_S1)
    assert refused(step).startswith(f"{op_type} 'out' reads 's1'")


def test_nodes_of_shards_along_two_axes():
    step = among()
    both = Sharding((("dp", OnMember(0)), ("shard", S1)))
    plant(step, "Add", "s1 s1", "out", sharding=both)
    assert infer_shardings(step).of("out") == (OnMember(0), S1)


@pytest.mark.parametrize("op_type", ["LocalSlice", "DimSlice"])
def test_only_equal_values_are_cut(op_type):
    step = among()
    attributes = {"group": "shard", "starts": [0], "sizes": [8]}
    plant(step, op_type, "x", "out", domain=SPMD, attributes=attributes, sharding=ON_S1)
    assert refused(step).startswith(f"{op_type} 'out' reads 'x'")


def test_a_step_that_is_not_finished_is_not_judged():
    """A node that breaks its rule has the placement at which it runs."""
    step = among()
    plant(step, "MatMul", "s1 s1", "out", sharding=ON_S1)
    step.graph.nodes = [*step.graph.nodes]  # what was found before holds of another list
    assert parts_so_far(step)["out"] == ON_S1
    assert refused(step)


def test_sums_over_micro_steps_are_sharded_as_they_are_carried():
    step = sharded("mlp_adamw", "dp=2,shard=2", 2, accumulate=2)
    known, held = infer_shardings(step), step.accumulators[0]
    flat = held.sharding.flat
    assert flat is not None
    assert known.of(held.input) == known.of(held.output) == (PER_MEMBER, flat[1])
    step = sharded("cnn_mom_fp16", "dp=2,shard=2", 2, accumulate=2)
    assert {infer_shardings(step).of(name) for name in step.loop_carried} == {(PER_MEMBER, PER_MEMBER)}


def test_a_mesh_of_one_rank_has_no_placements():
    step = sharded("mlp_sgd", "shard=1", 0)
    assert infer_shardings(step).axes == () and infer_shardings(step).known == {}


def test_a_call_is_looked_at_though_nothing_reads_its_result():
    """All members must make it."""
    step = among()
    plant(step, "AllReduce", "whole", "unread", domain=COMM, attributes={"group": "shard", "reduce": "sum"})
    step.training.metrics.pop()
    assert refused(step).startswith("AllReduce 'unread' reads 'whole', which is replicated")


def test_each_result_of_a_call_follows_its_own_operand():
    """One is equal along the other axis, one is each member's own there."""
    step = among()
    attributes = {"group": "shard", "reduce": "mean"}
    plant(step, "AllReduce", "x", "equal", domain=COMM, attributes=attributes)
    plant(step, "AllReduce", "x equal", "out", domain=COMM, attributes=attributes | {"group": "dp"})
    step.graph.nodes[-1].outputs.append("other")
    known = infer_shardings(step)
    assert known.of("out") == (REPLICATED, PER_MEMBER) and known.of("other") == (REPLICATED, REPLICATED)


def test_a_bucket_of_equal_and_own_values_is_each_members_own():
    """Along the other axis: one operand is equal there, one is not."""
    step = among()
    plant(step, "AllReduce", "x", "equal", domain=COMM, attributes={"group": "dp", "reduce": "mean"})
    for inputs, output in (("x equal", "out"), ("equal x", "other"), ("equal equal", "same")):
        attributes = {"group": "shard", "reduce": "mean", "cuts": [0, 2, 8]}
        plant(step, "ReduceScatter", inputs, output, domain=COMM, attributes=attributes)
    known = infer_shardings(step)
    assert known.of("out") == known.of("other") == (PER_MEMBER, S1)
    assert known.of("same") == (REPLICATED, S1)


def test_a_message_brings_what_its_node_says():
    step = among()
    plant(step, "Pull", "", "out", domain=COMM, sharding=ON_S1)
    assert infer_shardings(step).of("out") == (REPLICATED, S1)


@pytest.mark.parametrize("op_type", ["Select", "LocalConcat"])
def test_a_guard_or_a_join_reads_what_nodes_with_a_place_made(op_type):
    """All ranks have a result of a call, also those for which it says nothing."""
    step = among()
    attributes = {"group": "shard", "reduce": "mean", "root": 1}
    plant(step, "Reduce", "x", "root", domain=COMM, attributes=attributes)
    plant(step, op_type, "root", "out", domain=SPMD, attributes={"group": "shard", "reduce": "sum", "sizes": [8]})
    assert refused(step).startswith(f"{op_type} 'out' reads 'root', which is on member 1 alone along shard")


def refolded(sharding: Sharding, *, scalar: str = "one", gradient: str = "whole", weight: str = "whole") -> SpmdProgram:
    """A refolded optimizer that runs on ``sharding``, beside the values of ``among``."""
    step, given = among(), sharded("mlp_ort_adamw", "shard=2", 0)
    node = next(node for node in given.graph.nodes if isinstance(node.origin, RefoldedCall))
    assert isinstance(node.origin, RefoldedCall)
    member = replace(
        node.origin.members[0], sharding=sharding, inputs={"weight": weight, "gradient": gradient},
        outputs={"new_weight": "out"},
    )  # fmt: skip
    origin = replace(node.origin, scalars={"rate": scalar}, results={"updated_flag": "flag"}, members=(member,))
    sole = FlatShard((0, 0, 8), 0, 8)
    attributes = {"starts": [0], "sizes": [8]}
    step.graph.types.update(sole=TensorType("float32", (8,)), flag=TensorType("bool", ()))
    plant(
        step, "LocalSlice", "whole", "sole", domain=SPMD, sharding=Sharding.along("shard", sole), attributes=attributes
    )
    plant(step, node.op_type, f"{weight} {gradient} {scalar}", "out", domain=SPMD)
    step.graph.nodes[-1].outputs, step.graph.nodes[-1].origin = ["out", "flag"], origin
    return step


REFOLDED = [
    (ON_S1, {"weight": "s1", "gradient": "s1"}, S1), (ON_S1, {"weight": "s1"}, S1),
    (ON_S1, {"weight": "s1", "gradient": "s2"}, "s2"), (ON_S1, {"weight": "s2", "gradient": "s1"}, "s2"),
    (ON_S1, {"weight": "s1", "gradient": "own_one"}, "own_one"),
    (ON_S1, {"weight": "s1", "scalar": "own_one"}, "own_one"),
    (ON_S1, {"weight": "s1", "gradient": "alone"}, "alone"), (ON_S1, {"weight": "s1", "scalar": "s1"}, "s1"),
    (ON_1, {"weight": "alone"}, OnMember(1)), (ON_1, {"weight": "sole"}, OnMember(1)),
    (ON_1, {"weight": "alone", "gradient": "s1"}, "s1"), (ON_1, {"weight": "own_one"}, "own_one"),
    (Sharding.along("shard", OnMember(0)), {"weight": "alone"}, "alone"),
    (FULLY_REPLICATED, {}, REPLICATED), (FULLY_REPLICATED, {"gradient": "own_one"}, PER_MEMBER),
    (FULLY_REPLICATED, {"gradient": "s1"}, "s1"), (FULLY_REPLICATED, {"gradient": "alone"}, "alone"),
    (FULLY_REPLICATED, {"scalar": "alone"}, "alone"),
]  # fmt: skip


@pytest.mark.parametrize(("sharding", "values", "made"), REFOLDED)
def test_what_a_refolded_optimizer_takes(sharding, values, made):
    """The part of a bucket on which it runs, what its member has, or what all have; else that value is named."""
    step = refolded(sharding, **values)
    if isinstance(made, str):
        assert refused(step).startswith(f"Refold 'out' reads {made!r}, which is ")
    else:
        known = infer_shardings(step)
        assert known.of("out")[1] == made and known.of("flag")[1] == REPLICATED


def test_what_a_refolded_optimizer_makes_of_scalars_alone():
    """Its other results follow the scalars: a flag that each member sets for itself is its own."""
    assert infer_shardings(refolded(FULLY_REPLICATED, scalar="own_one")).of("flag") == (PER_MEMBER, PER_MEMBER)
