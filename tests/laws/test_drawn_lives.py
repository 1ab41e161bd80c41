"""Ranks of drawn options train and go on as other ranks: what a checkpoint held, the new ranks hold, and they run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from option_gen.life import Life, judge
from option_gen.make import STREAM, Setting, outcomes
from products import part

GOOD = ("right", "refused")
FOUND = [
    # Members of a call between unequal shares seemed to make other calls.
    Life(Setting(f"{STREAM}30006", "sp=3", 1, 3, None, {}), (("--mesh", "shard=2,sp=2", "--stage", "3"),)),
    # A member knew the type of what it sends, and the other, which has nothing to send, did not.
    Life(
        Setting("mlp_ort_adamw", "pp=2,dp=2", 3, 6, "interleaved:2", {}),
        (("--mesh", "shard=2", "--stage", "1", "-O", "shard.partition=whole", "-O", "shard.owners=round-robin"),),
    ),
    # A parameter in one piece was looked for in the file of a trainer, which pulls it.
    Life(Setting("optim/clip_each", "dp=2", 0, 1, None, {}), (("--trainers", "3", "--servers", "2", "--pull", "end"),)),
    # A rank of several stages let a batch go that the gradients of weights of the first stage needed.
    Life(
        Setting("sparse/towers_adam", "dp=4", 0, 1, None, {}),
        (("--mesh", "dp=2,pp=2", "--micro-batches", "3", "--schedule", "zb-v"),),
    ),
    # A schedule that begins with another micro-batch than the first passed over batches.
    Life(Setting("mlp_adamw", "pp=2", 0, 2, "drawn 21 2 2", {}), (("--mesh", "shard=2"),)),
]


@pytest.mark.parametrize("life", FOUND, ids=Life.told)
def test_what_was_found_stays_right(life, tmp_path):
    assert judge(life, tmp_path).outcome == "right"


@pytest.mark.parametrize("seed", part(range(120), 5))
def test_ranks_go_on_as_other_ranks(seed, tmp_path):
    life = replace(Life.draw(seed), engine="threads")
    verdict = judge(life, tmp_path)
    assert verdict.outcome in outcomes(life.before.step, *GOOD), verdict.why


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 220))
def test_processes_go_on_as_others(seed, tmp_path):
    pytest.importorskip("mpi4py")
    life = replace(Life.draw(seed), engine="mpi")
    verdict = judge(life, tmp_path)
    assert verdict.outcome in outcomes(life.before.step, *GOOD), verdict.why
