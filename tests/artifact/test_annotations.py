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
from gopt.mesh import Mesh
from gopt.sharding.placements import FlatShard, Shard, Sharding
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
