"""What all ranks hold of running statistics: their mean, or those of the group's first rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import source

import gopt
from gopt.ir.load import load
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh
from gopt.verification.verify import Verifier

pytestmark = pytest.mark.usefixtures("unchecked")


def written(folder: Path, mesh: str, mode: str, micro_steps: int = 1, **shard: object) -> Path:
    pipeline = build_pipeline(defaults={"shard": shard, "statistics": {"statistics": mode}})
    out = folder / "out"
    gopt.shard(source("cnn_sgd"), Mesh.parse(mesh), accumulate=micro_steps, pipeline=pipeline).write(out)
    return out


@pytest.mark.parametrize(
    ("mesh", "micro_steps", "shard"),
    [
        ("dp=3", 1, {"stage": 0}),
        ("shard=2", 2, {"stage": 2}),
        ("dp=2,shard=2", 1, {"stage": 1, "partition": "whole", "style": "broadcast"}),
        ("dp=2,tp=2", 1, {"stage": 0}),
    ],
)
def test_ranks_take_the_statistics_of_the_first(mesh, micro_steps, shard, tmp_path):
    folder = written(tmp_path, mesh, "root", micro_steps, **shard)
    assert json.loads((folder / "manifest.json").read_text())["statistics"] == "root"
    assert Verifier(folder).run(steps=2).equal


def test_what_is_no_mean_is_found_to_be_none(tmp_path):
    """The manifest says what is asked for; the ranks are held against that."""
    folder = written(tmp_path, "dp=2", "root", stage=0)
    text = json.loads((folder / "manifest.json").read_text())
    del text["statistics"]
    (folder / "manifest.json").write_text(json.dumps(text))
    result = Verifier(folder).run(steps=1)
    assert not result.equal


def test_one_call_sends_them_to_the_others(tmp_path):
    folder = written(tmp_path, "dp=2", "root", stage=0)
    graphs = [load(folder / f"rank_000{rank}.onnx", own=True) for rank in range(2)]
    sent = [[node for node in graph.nodes if node.op_type == "Broadcast"] for graph in graphs]
    (first,), (second,) = sent
    assert first.inputs and not second.inputs and first.outputs == second.outputs
    assert first.attributes["root"] == second.attributes["root"] == 0
