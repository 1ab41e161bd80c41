"""What all ranks hold of running statistics: their mean, or those of the group's first rank."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import Builder, perceptron, sgd, source

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


def test_batches_of_open_and_unequal_sizes_are_counted(tmp_path):
    b = Builder()
    sgd(b, perceptron(b, (3, 5, 2)))
    rows = b.op("Squeeze", b.op("Shape", "x", start=0, end=1))
    b.output("seen_out", b.op("Add", b.state("seen", np.int64(3)), rows), (), "int64")
    model = b.model()
    for info in model.graph.input:
        if info.name in "xy":
            info.type.tensor_type.shape.dim[0].dim_param = "n"
    onnx.save(model, tmp_path / "step.onnx")
    gopt.shard(gopt.load(tmp_path / "step.onnx"), 2).write(tmp_path / "ranks")
    assert gopt.prove(tmp_path / "ranks").proven
    batches = [{"x": np.ones((n, 3), "f4"), "y": np.ones((n, 2), "f4")} for n in (4, 7)]
    assert gopt.run(tmp_path / "ranks", batches, 1).states["seen"] == 3 + 4 + 7
