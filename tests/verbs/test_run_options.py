"""Options of a run: those of a split alone, those of ranks alone, and those that need another."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import source

import gopt
from gopt.errors import OptionError
from gopt.verbs.run_options import RunOptions

BATCH = {"x": np.ones((16, 32), np.float32), "y": np.arange(16) % 4}


@pytest.mark.parametrize("given", [{"every": 1}, {"resume": True}])
def test_checkpoints_need_a_folder(given):
    with pytest.raises(OptionError, match="needs checkpoint"):
        RunOptions(**given)


@pytest.mark.parametrize(
    "given",
    [{"trainers": 2}, {"roles": "trainer:0;server:1"}, {"staleness": 1}, {"stop": "all"}, {"nan": "skip"},
     {"on_trainer_loss": "continue"}],
)  # fmt: skip
def test_options_of_a_split_mean_nothing_for_ranks(given):
    with pytest.raises(OptionError, match="is for trainers and servers"):
        gopt.run(gopt.shard(source("mlp_sgd"), 2), BATCH, 1, settings={"lr": 0.1}, **given)


@pytest.mark.parametrize("given", [{"sync_init": "all"}, {"trace": "trace.json"}])
def test_options_of_ranks_mean_nothing_for_a_split(given):
    split = gopt.split(source("mlp_sgd"), gopt.SplitOptions(trainers=2, servers=1))
    with pytest.raises(OptionError, match="trainers"):
        gopt.run(split, BATCH, 1, settings={"lr": 0.1}, **given)


def test_what_the_command_has_python_has(tmp_path):
    """Start values of the first rank, a trace, and no tuning; the losses are the same."""
    sharded = gopt.shard(source("mlp_sgd"), 2)
    usual = gopt.run(sharded, BATCH, 2, settings={"lr": 0.1})
    asked = RunOptions(settings={"lr": 0.1}, tuning=False, sync_init="all", trace=tmp_path / "trace.json")
    plain = gopt.run(sharded, BATCH, 2, asked)
    assert plain.losses == usual.losses and (tmp_path / "trace.json").is_file()


def test_fewer_trainers_than_a_split_was_made_for():
    split = gopt.split(source("mlp_sgd"), gopt.SplitOptions(trainers=2, servers=1))
    assert gopt.run(split, BATCH, 1, settings={"lr": 0.1}, trainers=1).ranks == 2
