"""Every fixture, on every stage and many ranks, is equal to its source; every gradient is a gradient."""

from __future__ import annotations

import functools

import pytest
from helpers import FIXTURES, NAMES

import gopt
from gopt.api import Source
from gopt.runtime.verify import Verifier

STAGES = (0, 1, 2)
RANKS = (1, 2, 3, 8)


@functools.cache
def source(name: str) -> Source:
    return gopt.load(FIXTURES / f"{name}.onnx")


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", NAMES)
def test_ranks_equal_the_source(name, stage, ranks, tmp_path):
    gopt.shard(source(name), ranks, stage=stage).write(tmp_path / "out")
    result = Verifier(tmp_path / "out").run(confirm=False)
    assert result.equal, {variant: each for variant, each in result.worst.items() if not each.error <= 1}
    assert result.compared > 0
    assert len(result.worst) >= (3 if ranks > 1 else 1), "clips are to be seen asleep and awake"


@pytest.mark.parametrize("name", NAMES)
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
