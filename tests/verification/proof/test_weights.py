"""A micro-batch of weight zero adds nothing to a weighted mean, whatever its gradient is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from gopt.cli.main import main
from helpers import edit_ranks
from onnx import ModelProto, helper
from rank_simulator import World
from split_gen.simulator import Simulation

import gopt

STEP = """<ir_version: 8, opset_import: ["" : 20]>
    step (float[4,3] x, float[4,1] mask, float[3,1] w, float lr) => (float loss, float[3,1] w_new) <float two = {2}> {
        p = MatMul(x, w)  s = Mul(p, p)  m = Mul(s, mask)  total = ReduceSum<keepdims=0>(m)
        count = ReduceSum<keepdims=0>(mask)  loss = Div(total, count)
        share = Div(mask, count)  q = Mul(p, two)  gp = Mul(q, share)  xt = Transpose<perm=[1,0]>(x)  g = MatMul(xt, gp)
        u = Mul(g, lr)  w_new = Sub(w, u)
    }"""
"""Its gradient is 0 / 0 where nothing is counted."""
WEIGHTED = "weighted:count"


@pytest.fixture
def step(tmp_path: Path) -> Path:
    onnx.save(onnx.parser.parse_model(STEP), tmp_path / "step.onnx")
    return tmp_path / "step.onnx"


def batches(*counts: float) -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(3)
    return [
        {"x": generator.standard_normal((4, 3), np.float32), "mask": np.full((4, 1), count, np.float32)}
        for count in counts
    ]


STATES, SETTINGS = {"w": np.full((3, 1), 0.5, np.float32)}, {"lr": np.float32(0.1)}


def test_trainers_with_micro_batches(step: Path) -> None:
    ranks = step.parent / "ranks"
    words = ["--trainers", "2", "--servers", "1", "--accumulate", "2", "--loss-reduction", WEIGHTED]
    assert main(["split", str(step), *words, "-o", str(ranks), "--quiet"]) == 0
    assert gopt.prove(ranks).proven
    new = []
    for count in (0, 1):
        simulation = Simulation(ranks, STATES, stored=False)
        simulation.round([batches(1, 0), batches(1, count)], SETTINGS)
        new += [value for value in simulation.server[0].values() if value.size == 3]
    assert np.isfinite(new).all() and (new[0] != new[1]).any(), new


def without(model: ModelProto) -> None:
    """The products alone."""
    for node in model.graph.node:
        if node.op_type == "Where" and node.output[0].endswith("_weighed"):
            node.CopyFrom(helper.make_node("Identity", node.input[2:], node.output))


def test_ranks_that_add_what_is_no_number_are_not_proven(step: Path) -> None:
    ranks = step.parent / "ranks"
    gopt.shard(step, "dp=2", loss_reduction=WEIGHTED).write(ranks)
    right = after(ranks)
    edit_ranks(ranks, without)
    assert np.isfinite(right).all() and not np.isfinite(after(ranks)).any()
    assert not gopt.prove(ranks).proven


def after(ranks: Path) -> np.ndarray:
    """The parameter behind a step with a rank of weight zero."""
    world = World(ranks)
    held = [world.feeds(rank, STATES) for rank in world.ranks]
    world.step(held, [[batch | SETTINGS for batch in batches(1, 0)]])
    return held[0]["w"]
