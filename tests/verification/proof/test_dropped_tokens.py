"""Tokens that a step leaves behind, and that have no gradient: drawn ranks with parts of the tokens are proven."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from mesh_gen.make import Recipe
from products import part
from stream_ranks import unproven, written

MESHES = ("sp=2", "sp=4", "cp=2", "sp=3", "dp=2,sp=2")
BESIDE = (
    "dense", "mlp", "attention", "norm", "fold", "merge", "class", "drop", "mixer", "soft", "turned", "gram", "same",
    "batch-norm", "shared", "positions",
)  # fmt: skip
"""Blocks that tokens are left behind after. A roll, and a mean of all elements, are unproven: docs/proving.md."""


def recipe_of(seed: int) -> Recipe:
    """A drawn step with fewer tokens behind a block."""
    draw = random.Random(seed)
    blocks = [draw.choice(BESIDE) for _ in range(draw.randint(1, 3))]
    blocks.insert(draw.randint(1, len(blocks)), "drop")
    recipe = Recipe.draw(seed)
    loss = "weighted" if recipe.loss == "pooled" else recipe.loss
    sizes = draw.choice([2, 3, 4]), draw.choice([4, 5, 6, 8]), draw.choice([2, 3, 4, 8]), draw.choice([2, 4])
    return replace(recipe, loss=loss, blocks=tuple(blocks), sizes=sizes)


@pytest.mark.parametrize("seed", part(range(400), 6))
def test_tokens_without_a_gradient_are_proven(seed: int, tmp_path: Path) -> None:
    recipe, mesh = recipe_of(seed), MESHES[seed % len(MESHES)]
    assert unproven(written(recipe, mesh, tmp_path)) == [], recipe.told()
