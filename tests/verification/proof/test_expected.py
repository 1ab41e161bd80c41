"""Sources that are the step of one member: calls of their own are the source's on all members, whatever ranks do."""

from __future__ import annotations

from pathlib import Path

import member_steps
import pytest
from helpers import calls, edit_ranks, source
from onnx import ModelProto, helper, load
from plants import attribute, replace

import gopt
from gopt.errors import InputError
from gopt.passes.pipeline import build_pipeline

MESH = "dp=3,tp=2"
MADE = {kind: member_steps.through(kind) for kind in ("gather", "scatter", "exchange")}
MADE |= {"region": member_steps.region(), "slice": member_steps.through("gather", "slice")}
OF_GOPT = [("mlp_adamw", "tp", False), ("gpt_adamw", "tp", True), ("gpt_adamw", "cp", False)]


def ranks(model: ModelProto, folder: Path, mesh: str = MESH) -> Path:
    taken = gopt.api.shard(gopt.load(member_steps.saved(model, folder)), mesh)
    taken.write(folder / "out")
    return folder / "out"


@pytest.mark.parametrize("kind", MADE)
def test_ranks_of_a_member_are_proven(kind: str, tmp_path: Path) -> None:
    assert gopt.prove(ranks(MADE[kind], tmp_path)).proven


@pytest.mark.parametrize(("name", "axis", "sequence"), OF_GOPT)
def test_ranks_of_a_rank_of_gopt_are_proven(name: str, axis: str, sequence: bool, tmp_path: Path) -> None:
    pipeline = build_pipeline(defaults={"tensor-parallel": {"sequence": sequence}, "shard": {"stage": 0}})
    gopt.shard(source(name), f"{axis}=2", pipeline=pipeline, only_ranks=[0]).write(tmp_path / "one")
    model = member_steps.of_rank(load(tmp_path / "one" / "rank_0000.onnx"))
    assert gopt.prove(ranks(model, tmp_path, f"shard=2,{axis}=2")).proven


def _every(model: ModelProto) -> list:  # type: ignore[type-arg]
    return [node for node in calls(model) if attribute(node, "group").s == b"tp"]


def other_group(model: ModelProto) -> None:
    for node in _every(model):
        attribute(node, "group").s = b"dp"


def other_group_of_one(model: ModelProto) -> None:
    attribute(_every(model)[-1], "group").s = b"dp"


def other_parts(model: ModelProto) -> None:
    """Members take the elements in another order."""
    node = _every(model)[0]
    made, value = f"{node.input[0]}.turned", node.input[0]
    reversed_rows = [
        helper.make_node("Constant", [], [f"{made}.{name}"], value_ints=[number])
        for name, number in (("from", -1), ("to", -1 << 31), ("along", 0), ("step", -1))
    ]
    operands = [value, *(f"{made}.{name}" for name in ("from", "to", "along", "step"))]
    node.input[0] = made
    replace(model, node, [*reversed_rows, helper.make_node("Slice", operands, [made]), node])


def missing_sum(model: ModelProto) -> None:
    node = next(node for node in reversed(_every(model)) if node.op_type == "AllReduce")
    replace(model, node, [helper.make_node("Identity", [old], [new]) for old, new in zip(node.input, node.output)])


PLANTS = [other_group, other_group_of_one, other_parts, missing_sum]


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_error_is_not_proven(plant, kind: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = ranks(MADE[kind], tmp_path)
    edit_ranks(folder, plant)
    try:
        assert not gopt.prove(folder).proven
    except InputError as refused:  # parts of two for a group of three
        assert plant is other_group and "members" in refused.message
