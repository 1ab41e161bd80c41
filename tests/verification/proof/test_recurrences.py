"""Tokens that are read one after the other, and values that are repeated: drawn ranks of both are proven."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from mesh_gen.make import Recipe, make
from products import part

import gopt

MESHES = {
    "recurrent": ("tp=2", "sp=2", "shard=2,tp=2", "sp=4", "tp=4", "cp=2", "dp=2,sp=2"),
    "tiled": ("sp=2", "cp=2", "dp=2,sp=2"),
}
BESIDE = ("dense", "mlp", "norm", "positions", "attention")
DRAWN = [(block, seed, meshes[seed % len(meshes)]) for block, meshes in MESHES.items() for seed in range(60)]


def sharded(block: str, seed: int, mesh: str, folder: Path) -> str:
    """Write ranks of a drawn step with a block; what was drawn."""
    recipe, draw = Recipe.draw(seed), random.Random(seed)
    blocks = [draw.choice(BESIDE) for _ in range(draw.randint(0, 2))]
    blocks.insert(draw.randint(0, len(blocks)), block)
    recipe = replace(recipe, blocks=tuple(blocks), sizes=(draw.choice([2, 4]), 4, draw.choice([4, 8]), 4))
    if recipe.loss == "pooled":  # one number is the gradient of all elements: docs/proving.md
        recipe = replace(recipe, loss="weighted")
    (folder / "step.onnx").write_bytes(make(recipe).model.SerializeToString())
    try:
        gopt.shard(gopt.load(folder / "step.onnx"), mesh).write(folder / "out")
    except gopt.GoptError as error:
        pytest.skip(str(error))
    return recipe.told()


@pytest.mark.parametrize(("block", "seed", "mesh"), part(DRAWN, 8))
def test_tokens_in_order_and_tokens_of_repeated_heads_are_proven(
    block: str, seed: int, mesh: str, tmp_path: Path
) -> None:
    told = sharded(block, seed, mesh, tmp_path)
    assert [(claim.name, claim.mismatch) for claim in gopt.prove(tmp_path / "out").open()] == [], told
