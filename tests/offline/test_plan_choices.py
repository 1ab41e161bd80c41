"""Every choice of a plan is one that ``gopt shard`` takes, and its figures are those of the ranks that are written."""

from __future__ import annotations

import random

import pytest
from helpers import source
from option_gen.make import Setting
from option_gen.rows import LINK, as_shard, weighed_again
from products import part

import gopt
from gopt.offline.plan import PlanChoice

STEPS = (
    "mlp_adamw", "gpt_adamw", "cnn_sgd", "emb_adamw", "mlp_mom_clip_sched", "families/moe_adamw",
    "families/llama_adamw_clip", "families/t5_adamw", "families/vit_mom",
)  # fmt: skip


def weighed(choice: PlanChoice, name: str, device: str | None) -> PlanChoice:
    return weighed_again(choice, as_shard(choice, source(name), LINK, prove=False), device, LINK)


def drawn(choices: list[PlanChoice], count: int, seed: int) -> list[PlanChoice]:
    """The first choice, and others that differ in mesh or partition where there are such."""
    some = random.Random(seed).sample(choices[1:], len(choices) - 1)
    unlike = {
        (str(each.mesh), each.settings.partition, each.settings.recompute, each.settings.sequence): each
        for each in some
    }
    return [choices[0], *list(unlike.values())[: count - 1]]


@pytest.mark.parametrize(
    ("name", "ranks", "device", "memory"),
    part([
        *((name, ranks, None, None) for name in STEPS for ranks in (4, 6)),
        *((name, ranks, "h100", None) for name in STEPS for ranks in (4, 8)),
        *((name, 8, device, "1KB") for name in STEPS for device in (None, "h100")),
    ], 5),
)  # fmt: skip
def test_shard_takes_every_choice_and_writes_what_was_weighed(name, ranks, device, memory):
    plan = gopt.plan(source(name), ranks, device=device, link=LINK, memory=memory)
    for choice in drawn([row.choice for row in plan.choices], 4, ranks):
        assert weighed(choice, name, device) == choice


@pytest.mark.parametrize(
    ("name", "mesh", "device"),
    part([
        ("families/moe_adamw", "shard=2,ep=2", None), ("families/moe_adamw", "pp=2,shard=2,ep=2", "cpu"),
        ("families/moe_adamw", "ep=2,tp=2", "a100"), ("gpt_adamw", "shard=2,cp=2", None),
        ("gpt_adamw", "pp=2,shard=2,sp=2", "h100"), ("gpt_adamw", "shard=2,sp=2,tp=2", None),
        ("gpt_adamw", "pp=2,shard=2", "cpu"), ("families/llama_adamw_clip", "shard=2,cp=2", "h100"),
        ("cnn_sgd", "pp=2,shard=2", "h100"), ("families/t5_adamw", "dp=2,shard=2,cp=2", None),
        ("gpt_adamw", "shard=2,tp=2", None), ("gpt_adamw", "pp=2,tp=2", "h100"), ("cnn_sgd", "shard=2,h=2", None),
        ("families/llama_adamw_clip", "shard=2,tp=2", "a100"), ("cnn_sgd", "h=2,w=2", "h100"),
    ], 4),
)  # fmt: skip
def test_so_it_is_of_a_mesh_that_the_user_gives(name, mesh, device):
    plan = gopt.plan(source(name), mesh, device=device, link=LINK)
    for choice in drawn([row.choice for row in plan.choices], 4, len(mesh)):
        assert weighed(choice, name, device) == choice


def test_stages_send_parts_of_buckets(tmp_path):
    """The plan counted the whole bucket."""
    step = gopt.load(Setting("structure 210254", "", 0, 1, None, {}).file(tmp_path))
    plan = gopt.plan(step, "shard=2,pp=4", device="cpu", link=LINK, micro_batches=2)
    choice = plan.choices[0].choice
    assert weighed_again(choice, as_shard(choice, step, LINK, prove=False), "cpu", LINK) == choice
