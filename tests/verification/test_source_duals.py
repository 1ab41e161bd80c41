"""Sources that are the step of one member: taken with their duals, refused by name where one was lost."""

import member_steps
import pytest

import gopt
from gopt.api import on_mesh
from gopt.cli.main import main
from gopt.errors import UnsupportedError
from gopt.mesh import Mesh
from gopt.verification.source_duals import check_source_duals

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
