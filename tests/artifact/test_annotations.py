"""Sharding specs that gopt writes: read again they are the layout of the ranks."""

from __future__ import annotations

import onnx
import pytest
from gopt.cli.main import main
from helpers import FIXTURES, source

import gopt
from gopt.artifact.annotations import tensor_spec
from gopt.ir.device_specs import read_configurations
from gopt.ir.load import load
from gopt.records.mesh import Mesh
from gopt.records.placements import FlatShard, Shard, Sharding
from gopt.tensor_parallel.specs import WHY


def test_what_is_written_is_taken_on_the_same_mesh(tmp_path, capsys):
    """And left alone on any other; a second time it replaces the first."""
    folder, model, step = tmp_path / "out", str(tmp_path / "again.onnx"), str(FIXTURES / "gpt_adamw.onnx")
    assert main(["shard", step, "--mesh", "dp=2,tp=2", "--annotate", "-o", str(folder)]) == 0
    onnx.checker.check_model(folder / "source.onnx", full_check=True)
    assert main(["merge", str(folder), "-o", model]) == 0
    again = gopt.load(model)
    first = gopt.shard(source("gpt_adamw"), Mesh.parse("dp=2,tp=2"))
    second = gopt.shard(again, Mesh.parse("dp=2,tp=2"))
    assert second.program.parts == first.program.parts
    reasons = second.ran[0].record.facts["parameters"]
    assert reasons and all(each.startswith(WHY) for each in reasons.values())
    other = gopt.shard(again, Mesh.parse("tp=2"))
    assert "gopt:dp=2,tp=2 is of another mesh" in other.ran[0].record.note
    other.write(tmp_path / "other", annotate=True)
    found = read_configurations(load(tmp_path / "other/source.onnx", own=True))
    assert [(each.name, each.devices) for each in found] == [("gopt:tp=2", 2)]
    assert {each.tensor for each in found[0].specs} == set(other.program.parts)


def test_nothing_is_written_unless_asked_for(tmp_path):
    gopt.shard(source("mlp_sgd"), Mesh.parse("tp=2")).write(tmp_path / "out")
    assert not load(tmp_path / "out/source.onnx", own=True).header.configuration


@pytest.mark.parametrize(
    ("by_axis", "groups", "factors"),
    [
        ({"tp": Shard(1, (5, 4))}, ((0, 2), (1, 3)), ((1, ((9, 2),)),)),
        ({"tp": Shard(0, (2, 2), 3)}, ((0, 2), (1, 3)), ((0, ((3, 1), (4, 2))),)),
        ({"dp": Shard(1, (4, 4)), "tp": Shard(0, (2, 2))}, ((0,), (2,), (1,), (3,)), ((0, ((4, 2),)), (1, ((8, 2),)))),
    ],
)
def test_groups_and_dimensions(by_axis, groups, factors):
    spec = tensor_spec("w", Sharding(tuple(by_axis.items())), Mesh.parse("dp=2,tp=2"))
    assert spec.groups == groups
    assert tuple((dim.axis, dim.factors) for dim in spec.dims) == factors


@pytest.mark.parametrize(
    "sharding",
    [
        Sharding(),
        Sharding.along("dp", FlatShard((0, 4, 8), 0, 8)),
        Sharding((("dp", Shard(0, (4, 4))), ("tp", Shard(0, (4, 4))))),
    ],
)
def test_what_no_spec_can_say(sharding):
    assert tensor_spec("w", sharding, Mesh.parse("dp=2,tp=2")) is None


def layout(partition, place, **options):
    """Specs of ``source.onnx`` by tensor, and the notes of the report."""
    sharded = gopt.shard(source("mlp_adamw"), 2, partition=partition, **options)
    report = sharded.write(place / "out", annotate=True)
    (found,) = read_configurations(load(place / "out/source.onnx", own=True))
    assert (found.name, found.devices) == ("gopt:shard=2", 2)
    return sharded, {each.tensor: each for each in found.specs}, report.notes


def held_by(sharded, tensor):
    """Rank -> how many elements of a tensor it holds, from its own file's record."""
    return {
        rank.rank: sum(
            piece.stop - piece.start for state in rank.states for piece in state.pieces if piece.tensor == tensor
        )
        for rank in sharded.ranks
    }


@pytest.mark.parametrize("options", [{}, {"stage": 3}])
def test_whole_states_are_said_to_be_on_their_owner(tmp_path, options):
    sharded, specs, notes = layout("whole", tmp_path, **options)
    parameters = {state.tensor for state in sharded.program.source.parameters} if options else set()
    moments = {state.tensor for state in sharded.program.source.states if "exp_avg" in state.tensor}
    assert specs.keys() == moments | parameters
    for tensor, spec in specs.items():
        ((owner,),) = spec.groups
        assert spec.dims == () and {rank for rank, count in held_by(sharded, tensor).items() if count} == {owner}
    assert not any("--annotate" in note for note in notes)


def test_equal_rows_have_a_spec_and_other_slices_a_note(tmp_path):
    sharded, specs, notes = layout("rows", tmp_path)
    for tensor, spec in specs.items():
        counts = held_by(sharded, tensor)
        if spec.dims:
            assert spec.groups == ((0,), (1,)) and spec.dims[0].axis == 0 and counts[0] == counts[1]
        else:
            assert [rank for rank, count in counts.items() if count] == [spec.groups[0][0]]
    (note,) = [note for note in notes if "--annotate" in note]
    total = sum("exp_avg" in state.tensor for state in sharded.program.source.states)
    assert f"{total - len(specs)} of {total} sharded states have no sharding spec" in note
    assert specs, "some states are on one rank alone"


def slices(start, elements, dims, cuts):
    from gopt.artifact.annotations import slice_spec
    from gopt.spmd.program import BucketSlice

    sharding = Sharding.along("shard", FlatShard.whole(cuts))
    return slice_spec(BucketSlice("w", start, elements), dims, sharding, Mesh.parse("shard=2"))


def test_what_a_slice_of_a_bucket_is():
    assert slices(0, 8, (4, 2), (0, 4, 8)).dims[0].factors == ((4, 2),)
    assert slices(0, 8, (4, 2), (0, 3, 8)) is None, "no rows"
    assert slices(0, 8, (4, 2), (0, 2, 8)) is None, "not equal"
    assert slices(0, 4, (2, 2), (0, 4, 8)).groups == ((0,),)
    assert slices(4, 4, (2, 2), (0, 4, 8)).groups == ((1,),)
    assert slices(0, 4, (2, 2), (0, 1, 8)) is None


def test_specs_of_shards_do_not_hinder_another_mesh(tmp_path):
    """They are of a mesh that splits no computation: tensor parallelism leaves them out, with a note."""
    gopt.shard(source("mlp_adamw"), 2, partition="whole").write(tmp_path / "out", annotate=True)
    gopt.merge(tmp_path / "out", tmp_path / "again.onnx")
    again = gopt.shard(gopt.load(tmp_path / "again.onnx"), Mesh.parse("tp=2"))
    assert "gopt:shard=2 is of another mesh" in again.ran[0].record.note
    assert again.program.parts == gopt.shard(source("mlp_adamw"), Mesh.parse("tp=2")).program.parts


def test_inspect_shows_device_configurations(tmp_path, capsys):
    gopt.shard(source("mlp_adamw"), Mesh.parse("tp=2")).write(tmp_path / "out", annotate=True)
    gopt.merge(tmp_path / "out", tmp_path / "again.onnx")
    assert main(["inspect", str(tmp_path / "again.onnx")]) == 0
    assert "device configuration gopt:tp=2: 2 devices, " in capsys.readouterr().out
    (entry,) = gopt.inspect(tmp_path / "again.onnx").to_json()["configurations"]
    assert entry["specs"] > 0 and entry["stages"] == 0
