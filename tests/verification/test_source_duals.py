"""Sources that are the step of one member: taken with their duals, refused by name where one was lost."""

import member_steps
import numpy as np
import onnx
import pytest
from gopt.cli.main import main
from helpers import source

import gopt
from gopt import api
from gopt.api import on_mesh
from gopt.errors import UnsupportedError
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh
from gopt.verification.source_duals import check_source_duals
from gopt.verification.verify import Verifier

MESH = Mesh.parse("dp=2,tp=2")
MEGATRON = {"4": "tp"}


def adopted(model, folder, **given):
    return on_mesh(gopt.load(member_steps.saved(model, folder), **given), MESH)


@pytest.mark.parametrize("kind", ["gather", "scatter", "exchange"])
def test_a_step_of_one_member_is_taken_and_verified(kind, tmp_path):
    path = member_steps.saved(member_steps.through(kind), tmp_path)
    assert main(["shard", str(path), "--mesh", str(MESH), "-o", str(tmp_path / "out")]) == 0
    assert main(["verify", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize(
    ("kind", "lost", "call"),
    [
        ("gather", "slice", "AllGather"), ("gather", "axis", "AllGather"), ("scatter", "own", "ReduceScatter"),
        ("exchange", "reshape", "AllToAll"),
    ],
)  # fmt: skip
def test_a_lost_dual_is_refused_by_name(kind, lost, call, tmp_path, capsys):
    path = member_steps.saved(member_steps.through(kind, lost), tmp_path)
    assert main(["shard", str(path), "--mesh", str(MESH), "-o", str(tmp_path / "out")]) == 4
    said = capsys.readouterr().err
    assert f"error: {call} 'n" in said and "its dual was lost" in said and "'A'" in said, said
    assert not (tmp_path / "out").exists()


def test_python_refuses_it_in_shard_and_in_verify(tmp_path):
    taken = gopt.load(member_steps.saved(member_steps.through("exchange", "reshape"), tmp_path))
    lost = r"AllToAll 'n2' over tp .*: its dual was lost"
    with pytest.raises(UnsupportedError, match=lost):
        gopt.shard(taken, MESH)
    api.shard(taken, MESH).write(tmp_path / "out")  # without that check
    with pytest.raises(UnsupportedError, match=lost):
        gopt.verify(tmp_path / "out", steps=1)


def test_what_cannot_be_measured_is_noted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("gopt.verification.source_duals.ELEMENTS", 10)
    path = member_steps.saved(member_steps.through("gather", "slice"), tmp_path)
    assert main(["shard", str(path), "--mesh", str(MESH), "-o", str(tmp_path / "out")]) == 0
    assert "its dual was not found, and could not be measured" in " ".join(capsys.readouterr().out.split())


def test_a_step_that_is_right_without_a_dual_is_taken(tmp_path):
    model = member_steps.through("gather", "slice", alike=True)
    assert check_source_duals(adopted(model, tmp_path), MESH) == []


@pytest.mark.parametrize("megatron", [False, True])
def test_the_sum_of_what_a_region_reads(megatron, tmp_path):
    given = {"group_types": MEGATRON} if megatron else {}
    assert check_source_duals(adopted(member_steps.region(megatron=megatron), tmp_path, **given), MESH) == []
    training = adopted(member_steps.region(megatron=megatron, lost=True), tmp_path, **given)
    with pytest.raises(UnsupportedError, match="over tp") as refused:
        check_source_duals(training, MESH)
    assert "'T'" in refused.value.message and "AllReduce" in refused.value.hints[0]


def test_nothing_is_measured_on_a_mesh_without_the_members(tmp_path):
    source = gopt.load(member_steps.saved(member_steps.through("gather", "slice"), tmp_path))
    alone = Mesh.parse("dp=2,tp=1")
    assert check_source_duals(on_mesh(source, alone), alone) == []


def member(name, mesh, folder, **options):
    """The step of gopt's own rank 0, as another tool's."""
    pipeline = build_pipeline(defaults={"tensor-parallel": options, "shard": {"stage": 0}})
    gopt.shard(source(name), Mesh.parse(mesh), pipeline=pipeline, only_ranks=[0]).write(folder)
    return member_steps.of_rank(onnx.load(folder / "rank_0000.onnx"))


@pytest.mark.parametrize(
    ("name", "axis", "sequence"), [("mlp_adamw", "tp", False), ("gpt_adamw", "tp", True), ("gpt_adamw", "cp", False)]
)
def test_a_rank_of_gopt_is_the_step_of_a_member(name, axis, sequence, tmp_path):
    path = member_steps.saved(member(name, f"{axis}=2", tmp_path / "one", sequence=sequence), tmp_path)
    mesh = Mesh.parse(f"shard=2,{axis}=2")
    taken = gopt.load(path)
    assert check_source_duals(on_mesh(taken, mesh), mesh) == []
    gopt.shard(taken, mesh).write(tmp_path / "two")
    result = Verifier(tmp_path / "two").run(steps=1, confirm=False)
    assert result.equal and result.compared


def test_a_dual_lost_among_others_is_refused(tmp_path):
    model = member("gpt_adamw", "tp=2", tmp_path / "one", sequence=True)
    duals = [n for n in model.graph.node if n.op_type == "ReduceScatter"]
    lost = duals[len(duals) // 2 + 2]
    lost.op_type, lost.domain = "Slice", ""
    del lost.attribute[:]
    for name, value in (("from", 0), ("to", 4), ("along", 1)):
        lost.input.append(name)
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([value]), name))
    training = on_mesh(gopt.load(member_steps.saved(model, tmp_path)), MESH)
    with pytest.raises(UnsupportedError, match=r"AllGather '.*' over tp .*: its dual was lost"):
        check_source_duals(training, MESH)
