"""Tokens that a step leaves behind, and that have no gradient: drawn ranks with parts of the tokens are proven."""

from __future__ import annotations

from pathlib import Path

import pytest
from mesh_gen.make import Recipe
from products import part
from stream_ranks import unproven, written

MESHES = ("sp=2", "sp=4", "cp=2", "sp=3", "dp=2,sp=2")
TWO_AXES = ("sp=2,tp=2", "dp=2,tp=2", "sp=2,cp=2")


@pytest.mark.parametrize("seed", part(range(400), 6))
def test_tokens_without_a_gradient_are_proven(seed: int, tmp_path: Path) -> None:
    recipe, mesh = Recipe.dropped(seed), MESHES[seed % len(MESHES)]
    assert unproven(written(recipe, mesh, tmp_path)) == [], recipe.told()


@pytest.mark.parametrize("seed", part(range(300), 2, 1))
def test_tokens_without_a_gradient_are_proven_on_two_axes(seed: int, tmp_path: Path) -> None:
    """A row with zeros and part of a sum was no part of the row with the sum."""
    recipe, mesh = Recipe.dropped(seed), TWO_AXES[seed % len(TWO_AXES)]
    assert unproven(written(recipe, mesh, tmp_path)) == [], recipe.told()
