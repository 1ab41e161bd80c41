"""Region mappings that a source has, paired with their duals by data flow."""

import member_steps
import pytest

import gopt
from gopt.analysis.region_mappings import find_region_mappings, without_dual
from gopt.offline.inspect import inspect_model
from gopt.records.mesh import Mesh


def found(model, folder, **given):
    return find_region_mappings(gopt.load(member_steps.saved(model, folder), **given).training)


@pytest.mark.parametrize(
    ("kind", "mapping", "dual"),
    [
        ("gather", "all-gather from region", "ReduceScatter"), ("scatter", "reduce-scatter to region", "AllGather"),
        ("exchange", "transpose", "AllToAll"),
    ],
)  # fmt: skip
def test_a_call_and_its_dual(kind, mapping, dual, tmp_path):
    made = found(member_steps.through(kind), tmp_path)
    first = made[0]
    assert (first.mapping, first.dual, first.parameters) == (mapping, dual, ("A",)) and first.gradient
    assert not any(each.mapping == "copy to region" for each in made), "sums of gradients of weights are none"
    assert without_dual(made) == []


@pytest.mark.parametrize(
    ("kind", "lost", "dual", "doubtful"),
    [
        ("gather", "slice", "", False), ("gather", "axis", "ReduceScatter", True), ("scatter", "own", "", False),
        ("exchange", "reshape", "", False),
    ],
)  # fmt: skip
def test_a_call_without_its_dual(kind, lost, dual, doubtful, tmp_path):
    first = found(member_steps.through(kind, lost), tmp_path)[0]
    assert (first.dual, first.doubtful) == (dual, doubtful)


@pytest.mark.parametrize("megatron", [False, True])
def test_a_region_is_copied_to_and_reduced_from(megatron, tmp_path):
    given = {"group_types": {"4": "tp"}} if megatron else {}
    made = found(member_steps.region(megatron=megatron), tmp_path, **given)
    assert sorted((each.mapping, each.dual) for each in made) == [
        ("copy to region", "AllReduce"), ("reduce from region", "identity"),
    ]  # fmt: skip
    copy = next(each for each in made if each.mapping == "copy to region")
    assert bool(copy.value) == megatron, "only a MegatronF marks what is copied"
    assert without_dual(made) == []
    lost = found(member_steps.region(megatron=megatron, lost=True), tmp_path, **given)
    assert {each.mapping for each in without_dual(lost)} == (
        {"copy to region", "reduce from region"} if megatron else {"reduce from region"}
    )


def test_inspect_and_the_report_list_them(tmp_path):
    source = gopt.load(member_steps.saved(member_steps.through("gather"), tmp_path))
    (shown,) = inspect_model(source).to_json()["mappings"]
    made = gopt.shard(source, Mesh.parse("dp=2,tp=2"))
    facts = next(run.result.figures for run in made.ran if run.record.name == "tensor-parallel")
    assert facts["source_mappings"] == [shown]
    assert (shown["call"], shown["dual"], shown["group"]) == ("AllGather", "ReduceScatter", "tp")
    assert made.report().text()


def test_a_step_without_calls_has_none():
    from helpers import source

    assert find_region_mappings(source("mlp_sgd").training) == ()
