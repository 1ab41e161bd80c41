"""Tokens that a step leaves behind, and that have no gradient: drawn ranks with parts of the tokens are proven."""

from __future__ import annotations

from pathlib import Path

import pytest
from mesh_gen.make import Recipe
from products import part
from stream_ranks import unproven, written

MESHES = ("sp=2", "sp=4", "cp=2", "sp=3", "dp=2,sp=2")


@pytest.mark.parametrize("seed", part(range(400), 6))
def test_tokens_without_a_gradient_are_proven(seed: int, tmp_path: Path) -> None:
    recipe, mesh = Recipe.dropped(seed), MESHES[seed % len(MESHES)]
    assert unproven(written(recipe, mesh, tmp_path)) == [], recipe.told()
