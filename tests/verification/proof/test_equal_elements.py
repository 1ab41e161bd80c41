"""Values with equal elements along a dimension, and merged dimensions, in parts on ranks: drawn steps that were
unproven."""

from __future__ import annotations

from pathlib import Path

import pytest
from mesh_gen.make import Recipe
from stream_ranks import unproven, written

UNPROVEN = {
    "a product of equal rows and of others": (430015, "tp=2"),
    "equal rows behind a norm": (430102, "tp=2"),
    "a row of parts of two positions and of one": (420070, "sp=3"),
    "the same on another axis": (420070, "cp=3"),
    "a clip's sum of equal squares": (420108, "tp=2"),
    "the same in a row": (420108, "sp=3"),
    "merged tokens, transposed": (420135, "sp=2"),
    "features of merged tokens": (430007, "tp=2"),
    "a clip behind merged tokens": (431005, "sp=2"),
    "sums so far of merged tokens": (431014, "dp=2,cp=2"),
    "chosen tokens, merged": (431020, "cp=2,tp=2"),
    "a sum of terms of several shapes": (431118, "sp=2"),
    "a sum of ranges in a row": (431056, "sp=2"),
    "a choice of two zeros": (430016, "tp=2"),
    "a choice of two zeros of one token": (430101, "tp=2"),
}


@pytest.mark.parametrize(("seed", "mesh"), UNPROVEN.values(), ids=UNPROVEN)
def test_equal_elements_and_merged_dimensions_are_proven(seed: int, mesh: str, tmp_path: Path) -> None:
    recipe = Recipe.draw(seed)
    assert unproven(written(recipe, mesh, tmp_path)) == [], recipe.told()
