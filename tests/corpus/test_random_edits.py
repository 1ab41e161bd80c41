"""A law: what ``gopt prove`` says of rank files after a random edit, their numbers do not contradict."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from draws import Verdict
from edit_gen.folders import KINDS, Write
from edit_gen.judge import Folder, judged
from edit_gen.models import judged as of_models
from products import part

from corpus import plants
from corpus.plants import Recipe

RECIPES = (
    plants.COPIES, plants.SHARDS, plants.SHARDED, plants.GRID, plants.BUCKETS, plants.MICRO, plants.MICRO_SHARDS,
    plants.MICRO_SCATTERED, plants.CLIP, plants.CLIP_SHARDS, plants.CLIP_GRID, plants.SCALER, plants.TRUST,
    plants.STATISTICS, Recipe("mlp_muon", "shard=2"), Recipe("emb_adamw", "shard=2"), Recipe("mlp_adagrad", "shard=2"),
)  # fmt: skip
SERVED = (
    plants.SERVED, plants.SERVED_CLIP, plants.SERVED_MICRO,
    Recipe("cnn_sgd", "trainers=3,servers=2", {"minimum": 1}),
    Recipe("mlp_adamw_fp16_scaler", "trainers=2,servers=3"),
    Recipe("mlp_muon", "trainers=2,servers=2"),
    Recipe("sparse/dlrm_adam", "trainers=2,servers=2"),
    Recipe("gpt_adamw_clip_sched_fp16", "trainers=2,servers=1"),
)  # fmt: skip
SPLIT = (
    plants.SPLIT_MLP, plants.SPLIT_GRID, plants.SPLIT_CLIP, plants.SPLIT_GPT, plants.SEQUENCES, plants.SPLIT_EXPERTS,
    plants.EXPERT_SEQUENCES, plants.HEADS, Recipe("mlp_adamw", "tp=3"), Recipe("cnn_sgd", "tp=2"),
    Recipe("families/t5_adamw", "sp=2"), Recipe("real/mlp_adafactor", "tp=2"),
    Recipe("mlp_adamw_fp16_scaler", "shard=2,tp=2"), Recipe("optim/clip_global", "tp=2"),
    Recipe("real/bert_tiny", "tp=2"), Recipe("cases/losses/c18_aux", "ep=2"), Recipe("cases/losses/gan_out_d", "tp=3"),
    Recipe("cases/roles/centre_loss", "tp=3"), Recipe("gpt_adamw", "tp=2,cp=2"),
    Recipe("families/t5_adamw", "tp=2,sp=2"), Recipe("families/moe_adamw", "ep=2,cp=2"),
)  # fmt: skip
FAULTS = ("WRONG", "UNRUN", "CRASH")
EDITS = range(3)


@pytest.mark.parametrize("seed", part(range(400), 6))
def test_what_is_said_of_edited_ranks_is_so(seed: int, tmp_path: Path) -> None:
    check(random.Random(seed).choice(RECIPES).write, seed, tmp_path)


@pytest.mark.parametrize("seed", part(range(400), 6))
def test_what_is_said_of_an_edited_split_computation_is_so(seed: int, tmp_path: Path) -> None:
    check(random.Random(seed).choice(SPLIT).write, seed, tmp_path)


@pytest.mark.parametrize("seed", part(range(400), 6))
def test_what_is_said_of_edited_trainers_and_servers_is_so(seed: int, tmp_path: Path) -> None:
    check(random.Random(seed).choice(SERVED).write, seed, tmp_path)


@pytest.mark.rest
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", part(range(400), 2))
def test_what_is_said_of_edited_ranks_of_drawn_steps_is_so(seed: int, kind: str, tmp_path: Path) -> None:
    check(KINDS[kind](seed)[1], seed, tmp_path)


@pytest.mark.parametrize("seed", [47_015, 47_248, 47_344, *part(range(40_000, 43_000), 3)])
def test_what_is_said_of_edited_ranks_of_drawn_models_is_so(seed: int, tmp_path: Path) -> None:
    every = list(of_models(seed, 8, tmp_path))
    assert [(told, verdict) for told, verdict in every if verdict.outcome in (*FAULTS, "ALIKE")] == []


@pytest.mark.parametrize("seed", part(range(40_000, 43_000), 2))
def test_what_is_said_of_edited_ranks_of_models_that_leave_elements_behind_is_so(seed: int, tmp_path: Path) -> None:
    every = list(of_models(seed, 8, tmp_path, "left"))
    assert [(told, verdict) for told, verdict in every if verdict.outcome in (*FAULTS, "ALIKE")] == []


def check(write: Write, seed: int, home: Path) -> None:
    """Edit a folder several times, each time from the right one."""
    folder = Folder.of(write, home)
    if not isinstance(folder, Verdict):  # else the step is refused, or not proven
        every = [each for number in EDITS for each in judged(folder, seed, number)]
        assert [(told, verdict) for told, verdict in every if verdict.outcome in FAULTS] == []
