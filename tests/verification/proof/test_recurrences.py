"""Tokens that are read one after the other, and values that are repeated: drawn ranks of both are proven."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from mesh_gen.make import Recipe
from products import part
from stream_ranks import unproven, written

MESHES = {
    "recurrent": ("tp=2", "sp=2", "shard=2,tp=2", "sp=4", "tp=4", "cp=2", "dp=2,sp=2"),
    "tiled": ("sp=2", "cp=2", "dp=2,sp=2"),
}
DRAWN = [(block, seed, meshes[seed % len(meshes)]) for block, meshes in MESHES.items() for seed in range(60)]


def recipe_of(block: str, seed: int) -> Recipe:
    """A drawn step with a block, of sizes that divide."""
    draw = random.Random(seed)
    recipe = Recipe.with_block(block, seed, draw)
    # "pooled": one number is the gradient of all elements (docs/proving.md)
    loss = "weighted" if recipe.loss == "pooled" else recipe.loss
    return replace(recipe, loss=loss, sizes=(draw.choice([2, 4]), 4, draw.choice([4, 8]), 4))


@pytest.mark.parametrize(("block", "seed", "mesh"), part(DRAWN, 8))
def test_tokens_in_order_and_tokens_of_repeated_heads_are_proven(
    block: str, seed: int, mesh: str, tmp_path: Path
) -> None:
    recipe = recipe_of(block, seed)
    assert unproven(written(recipe, mesh, tmp_path)) == [], recipe.told()
