"""Drawn steps on drawn meshes: what is sharded is proven, and a planted error is never proven."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import edit_file
from plants import attribute, gradient_calls
from products import part
from steps_gen.__main__ import setting
from steps_gen.make import make
from steps_gen.plan import draw

import gopt
from gopt.records.mesh import Mesh
from gopt.verification.proof.result import ProofVerdict

DEGENERATE = {186}
"""A normalisation over one element, which is zero over what may be zero."""
UNDECIDED = ("If(", "rounded to")
"""An If that ranks run where the source's is read as a choice, and a cast back and forth: docs/proving.md."""


INVALID = {300}
"""Steps whose ranks on tp are no valid ONNX; gopt shard does not write them, because their proof fails."""


def sharded(seed: int, folder: Path, mesh: str = "") -> bool:
    """Write the ranks of a drawn step, on a drawn mesh by default; whether it can be sharded."""
    how, step = setting(seed), folder.with_suffix(".onnx")
    step.write_bytes(make(draw(seed)).model.SerializeToString())
    try:
        if mesh:
            ranks = gopt.shard(gopt.load(step), Mesh.parse(mesh))
        else:
            ranks = gopt.shard(
                gopt.load(step), Mesh.parse(how.mesh), stage=how.stage, partition=how.partition, accumulate=how.micro,
            )  # fmt: skip
    except gopt.GoptError:
        return False
    ranks.write(folder)
    return True


@pytest.mark.parametrize("seed", part(range(2000, 3000), 24))
def test_a_drawn_step_that_is_sharded_is_proven(seed, tmp_path):
    if not sharded(seed, tmp_path / "out"):
        pytest.skip("gopt shard refuses it")
    proof = gopt.prove(tmp_path / "out")
    for claim in proof.open():
        assert claim.verdict is ProofVerdict.UNPROVEN and claim.mismatch, claim
        assert any(word in claim.mismatch.actual for word in UNDECIDED), claim


@pytest.mark.parametrize("seed", part(range(800), 16))
def test_a_drawn_step_whose_computation_is_split_is_proven(seed, tmp_path):
    if not sharded(seed, tmp_path / "out", "tp=2"):
        pytest.skip("gopt shard refuses it")
    if seed in INVALID:
        pytest.xfail("gopt shard leaves an Expand to the whole shape in a function that ranks call on parts")
    for claim in gopt.prove(tmp_path / "out").open():
        assert claim.verdict is ProofVerdict.UNPROVEN, claim
        assert seed in DEGENERATE, claim


@pytest.mark.parametrize("seed", part(range(4000, 4200), 8))
def test_means_that_are_sums_are_not_proven(seed, tmp_path):
    if not sharded(seed, tmp_path / "out"):
        pytest.skip("gopt shard refuses it")
    planted = 0

    def edit(model):
        nonlocal planted
        for node in gradient_calls(model):
            attribute(node, "reduce").s = b"sum"
            planted += 1

    for path in sorted((tmp_path / "out").glob("rank_*.onnx")):
        edit_file(path, edit)
    if not planted:
        pytest.skip("nothing is averaged")
    assert not gopt.prove(tmp_path / "out").proven
