"""Every fixture, on every stage and many ranks, is equal to its source; every gradient is a gradient."""

from __future__ import annotations

import onnx
import pytest
from helpers import FIXTURES, NAMES, source
from products import fewer, part, spread

import gopt
from gopt.analysis.training import StateKind
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh
from gopt.verification.verify import Verifier

STAGES = (0, 1, 2, 3)
RANKS = (1, 2, 3, 8)
WAYS = {
    "rows at stage 3 of a hybrid mesh": ("dp=2,shard=2", 1, {"stage": 3, "partition": "rows", "bucket_mb": 0}),
    "whole tensors, some cut": ("shard=3", 1, {"stage": 2, "partition": "whole", "override": "*weight:flat"}),
    "broadcast over three axes": ("dp=2,shard=2,tp=2", 1, {"stage": 3, "partition": "whole", "style": "broadcast"}),
    "the servers' slices": ("shard=4", 1, {"stage": 2, "partition": "rows", "rule": "ceil", "min_piece": 16}),
    "two micro-steps at stage 1": ("shard=2", 2, {"stage": 1}),
    "three micro-steps at stage 3": ("dp=2,shard=2", 3, {"stage": 3, "bucket_mb": 0, "persist": 20}),
    "micro-steps on one rank": ("shard=1", 2, {"stage": 2}),
    "micro-steps without shards": ("dp=3", 2, {"stage": 0}),
}


@pytest.mark.parametrize(("name", "stage", "ranks"), fewer(spread(NAMES, STAGES, RANKS), 20))
def test_ranks_equal_the_source(name, stage, ranks, tmp_path):
    gopt.shard(source(name), ranks, stage=stage).write(tmp_path / "out")
    result = Verifier(tmp_path / "out").run(confirm=False)
    assert result.equal, {variant: each for variant, each in result.worst.items() if not each.error_over_tolerance <= 1}
    assert result.compared > 0
    assert len(result.worst) >= (3 if ranks > 1 else 1), "clips must be seen inactive and active"


@pytest.mark.parametrize(("name", "way"), fewer(spread(NAMES, WAYS), 9))
def test_every_way_equals_the_source(name, way, tmp_path):
    mesh, micro_steps, options = WAYS[way]
    held = source(name).training.states
    if any(state.kind is StateKind.ACCUMULATOR for state in held) and micro_steps > 1:
        pytest.skip("it accumulates itself")
    given = {key.replace("_", "-"): value for key, value in options.items()}
    if not any(state.tensor.endswith("weight") for state in held if state.kind is StateKind.PARAMETER):
        given.pop("override", None)
    pipeline = build_pipeline(defaults={"shard": given}, verify_each=True)
    gopt.shard(source(name), Mesh.parse(mesh), accumulate=micro_steps, pipeline=pipeline).write(tmp_path / "out")
    result = Verifier(tmp_path / "out").run(steps=2, confirm=False)
    assert result.equal, {variant: each for variant, each in result.worst.items() if not each.error_over_tolerance <= 1}


@pytest.mark.parametrize("name", part(NAMES, 9))
def test_gradients_are_gradients(name, tmp_path):
    sharded = gopt.shard(source(name), 2)
    sharded.write(tmp_path / "out")
    result = Verifier(tmp_path / "out").run(steps=1, variants=[], confirm=True)
    assert {each.parameter for each in result.gradients} == set(sharded.source.training.gradients)
    assert all(each.holds for each in result.gradients), [each for each in result.gradients if not each.holds]


def test_the_scaler_is_tried_with_an_infinite_gradient(tmp_path):
    gopt.shard(source("mlp_adamw_fp16_scaler"), 2).write(tmp_path / "out")
    result = Verifier(tmp_path / "out").run(confirm=False)
    assert any("infinite" in variant for variant in result.worst)


def test_the_given_model_may_replace_the_kept_one(tmp_path):
    gopt.shard(source("mlp_adamw"), 2).write(tmp_path / "out")
    assert Verifier(tmp_path / "out", FIXTURES / "mlp_adamw.onnx").run(confirm=False).equal


def test_a_step_of_the_newest_file_version_runs(tmp_path):
    """onnx writes versions that ONNX Runtime does not read yet."""
    model = onnx.load(FIXTURES / "mlp_sgd.onnx")
    model.ir_version = onnx.IR_VERSION
    onnx.save(model, tmp_path / "step.onnx")
    gopt.shard(tmp_path / "step.onnx", 2).write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run().equal
