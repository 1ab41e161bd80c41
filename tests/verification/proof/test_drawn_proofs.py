"""Drawn steps on drawn meshes: what is sharded is proven, and a planted error is never proven."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import edit_file, edit_ranks, stage_on
from plants import attribute, gradient_calls
from plants import replace as instead
from products import part
from steps_gen.__main__ import setting
from steps_gen.make import make
from steps_gen.plan import Plan, draw

import gopt
from gopt.collectives import schemas
from gopt.errors import InputError
from gopt.records.mesh import Mesh
from gopt.verification.proof.result import ProofVerdict
from gopt.verification.verify import Verifier

DEGENERATE = {186}
"""A normalisation over one element, which is zero over what may be zero."""
UNDECIDED = ("If(", "rounded to")
"""An If that ranks run where the source's is read as a choice, and a cast back and forth: docs/proving.md."""

WHOLE_IN_FUNCTION = 300
"""A step whose function of an update expands to the shape that the value has, which ranks call on parts."""


def sharded(seed: int, folder: Path, mesh: str = "", plan: Plan | None = None) -> bool:
    """Write the ranks of a drawn step, on a drawn mesh by default; whether it can be sharded."""
    how, step = setting(seed), folder.with_suffix(".onnx")
    step.write_bytes(make(plan or draw(seed)).model.SerializeToString())
    try:
        if mesh:
            ranks = gopt.shard(gopt.load(step), Mesh.parse(mesh))
        else:
            ranks = gopt.shard(
                gopt.load(step), Mesh.parse(how.mesh), stage=stage_on(how.mesh, how.stage), partition=how.partition,
                accumulate=how.micro,
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
    for claim in gopt.prove(tmp_path / "out").open():
        assert claim.verdict is ProofVerdict.UNPROVEN, claim
        assert seed in DEGENERATE, claim


@pytest.mark.parametrize("seed", part(range(5000, 5200), 12))
def test_an_update_made_orthogonal_in_halves_is_proven(seed, tmp_path):
    """Norms of halves travel with norms of clips, in one call."""
    plan = replace(draw(seed), rules=("muon-half", "trust"), precision="single", network="mlp")
    if not sharded(seed, tmp_path / "out", "tp=2", plan):
        pytest.skip("gopt shard refuses it")
    proof = gopt.prove(tmp_path / "out")
    assert proof.proven, proof.open()


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "dp=2,tp=2"])
def test_a_function_that_expands_to_a_whole_shape_is_no_function_of_a_part(mesh, tmp_path):
    assert sharded(WHOLE_IN_FUNCTION, tmp_path / "out", mesh)
    assert gopt.prove(tmp_path / "out").proven
    assert Verifier(tmp_path / "out").run(steps=2, confirm=False).equal


def expanded(folder: Path) -> None:
    """Plant an Expand of a part to the whole shape; whoever reads the types alone takes the result for the part."""

    def edit(model):
        node = next(node for node in model.graph.node if node.output[0] == "p1_new")
        whole = onnx.numpy_helper.from_array(np.array([4]), "planted.shape")
        model.graph.initializer.append(whole)
        expand = onnx.helper.make_node("Expand", [node.input[0], "planted.shape"], ["planted.whole"])
        node.input[0] = "planted.whole"
        instead(model, node, [expand, node])

    assert sharded(WHOLE_IN_FUNCTION, folder, "tp=2")
    edit_ranks(folder, edit)


def test_a_part_that_is_expanded_to_a_whole_shape_is_not_proven(tmp_path):
    """In a process of its own, where onnx knows no collectives before the folder is read."""
    expanded(tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "gopt.cli", "prove", str(tmp_path / "out")], capture_output=True, text=True
    )
    assert (done.returncode, "Incompatible dimensions" in done.stderr) == (3, True), done.stderr


def test_where_onnx_knows_collectives_the_checker_refuses_it(tmp_path):
    expanded(tmp_path / "out")
    schemas.register()
    with pytest.raises(InputError, match="Incompatible dimensions"):
        gopt.prove(tmp_path / "out")


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
