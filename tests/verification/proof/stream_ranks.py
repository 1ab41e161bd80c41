"""Ranks of a drawn step on tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from mesh_gen.make import Recipe, make

import gopt


def written(recipe: Recipe, mesh: str, folder: Path) -> Path:
    """Write the ranks of a step; a refused one ends the test."""
    (folder / "step.onnx").write_bytes(make(recipe).model.SerializeToString())
    try:
        gopt.shard(gopt.load(folder / "step.onnx"), mesh).write(folder / "out")
    except gopt.GoptError as error:
        pytest.skip(str(error))
    return folder / "out"


def unproven(folder: Path) -> list[tuple[str, object]]:
    """The claims that are not proven, and what differs."""
    return [(claim.name, claim.mismatch) for claim in gopt.prove(folder).open()]
