"""Attention with fewer heads of keys and values than members: ranks that repeat the heads of others are proven."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import edit_file
from mesh_gen.make import Recipe
from onnx import ModelProto, load
from products import part
from stream_ranks import unproven, written

import gopt

MESHES = ("sp=4", "tp=4", "sp=2", "tp=2", "shard=2,tp=4", "dp=2,sp=4")
DRAWN = [(seed, MESHES[seed % len(MESHES)]) for seed in range(120)]
OTHER_LENGTH = 249
"""A rank that writes rows into a part of another length than the file says."""


def recipe_of(seed: int, mesh: str) -> Recipe:
    """A drawn step with grouped heads."""
    draw = random.Random(seed)
    heads = 4 if "4" in mesh else draw.choice([2, 4])
    recipe = Recipe.with_block("grouped", seed, draw)
    return replace(recipe, sizes=(*recipe.sizes[:1], 4, recipe.sizes[2], heads))


@pytest.mark.parametrize(("seed", "mesh"), part(DRAWN, 10))
def test_repeated_heads_in_parts_are_proven(seed: int, mesh: str, tmp_path: Path) -> None:
    recipe = recipe_of(seed, mesh)
    assert unproven(written(recipe, mesh, tmp_path)) == [], recipe.told()


def misplaced(model: ModelProto, other: ModelProto, draw: random.Random) -> None:
    """Let a rank read a part at the place of another rank's; IndexError without such a part."""
    theirs = {each.name: each for each in other.graph.initializer}
    pairs = [(each, theirs[each.name]) for each in model.graph.initializer if each.name in theirs]
    place, there = draw.choice(
        [pair for pair in pairs if pair[0].name.endswith((".start", ".stop")) and pair[0] != pair[1]]
    )
    stem = place.name.rpartition(".")[0]
    for each, there in pairs:
        if each.name in (f"{stem}.start", f"{stem}.stop"):
            each.CopyFrom(there)


@pytest.mark.parametrize(("seed", "mesh"), [*part(DRAWN, 6, 1), (OTHER_LENGTH, "tp=2")])
def test_places_of_another_member_are_proven_only_where_the_step_is_equal(seed: int, mesh: str, tmp_path: Path) -> None:
    recipe = recipe_of(seed, mesh)
    out, draw = written(recipe, mesh, tmp_path), random.Random(seed)
    files = sorted(out.glob("rank_*.onnx"))
    one, other = draw.sample(files, 2)
    try:
        edit_file(one, lambda model: misplaced(model, load(other, load_external_data=False), draw))
    except IndexError:
        pytest.skip("no rank has places of its own")
    proven = False
    with suppress(gopt.InputError):  # files that no longer fit are refused
        proven = gopt.prove(out).proven
    if proven:
        assert gopt.verify(out, steps=2, confirm=False).equal, recipe.told()
