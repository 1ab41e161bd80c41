"""Drawn steps of every structure on drawn meshes: ranks are proven, and the checker follows the certificate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from helpers import edit_ranks
from plants import attribute
from products import part
from whole_gen.judge import MESHES, SIZES, SPLIT, STAGED, drawn_memory
from whole_gen.kinds import of_seed
from whole_gen.steps import written
from whole_gen.writer import Writer

import gopt
from gopt.errors import GoptError
from gopt.verification.certificate.check import check

FOUND = [
    # A sum of shares of a softmax: ranks have some of the terms, beside a factor that is made of the sum.
    (20163, SPLIT), (20139, SPLIT), (20164, SPLIT),
    # Losses in a row, each by an element of a parameter that ranks have in parts.
    (20669, SPLIT),
    # A statistic that stays where a gradient is not finite: the mean of what all ranks choose alike.
    (20688, SPLIT), (30049, STAGED),
    # Flags in one number: ranks without elements add a stored zero.
    (1379, MESHES),
    # A single sample of a rank, of which all ranks of another axis have some terms.
    (20856, SPLIT),
    # An update in blocks, which takes the very parts that ranks have: the forward reads the whole.
    (21701, SPLIT), (21031, SPLIT),
]  # fmt: skip
RINGS = [(1359, MESHES), (1081, MESHES), (1296, MESHES), (20876, SPLIT), (30418, STAGED)]
"""Rows of all ranks in a ring, behind a pointer: statistics that ranks reduce on the way have no certificate."""


WRITTEN = [
    # Gradients of the numbers of labels are a single number for all rows.
    (50001, SPLIT),
    (50142, SPLIT),
    # A multiple of a sum along a dimension, transposed.
    (50178, SPLIT), (50198, SPLIT), (50215, SPLIT),
]  # fmt: skip


def sharded(seed: int, meshes: Sequence[str], folder: Path, make: Callable[..., Writer] = of_seed) -> Path:
    """The ranks of a step on a mesh, both drawn."""
    w = make(seed, SIZES[seed % len(SIZES)], 1)
    how = replace(drawn_memory(seed, meshes, w), told=True)
    onnx.save(w.model(), folder / "step.onnx")
    source = gopt.load(folder / "step.onnx", roles=how.roles_of(w))
    gopt.shard(source, how.mesh, **how.options_of(w)).write(folder / "ranks")
    return folder / "ranks"


@pytest.mark.parametrize("seed, meshes", part(RINGS, 1))
def test_rows_in_a_ring_are_proven(seed, meshes, tmp_path):
    assert gopt.prove(sharded(seed, meshes, tmp_path)).proven


@pytest.mark.parametrize("seed, meshes", part(WRITTEN, 1))
def test_a_written_step_that_was_unproven_is_proven(seed, meshes, tmp_path):
    assert gopt.prove(sharded(seed, meshes, tmp_path, written)).proven


@pytest.mark.parametrize("seed, meshes", part(FOUND, 3))
def test_what_was_unproven_is_proven_and_the_checker_follows(seed, meshes, tmp_path):
    ranks = sharded(seed, meshes, tmp_path)
    assert gopt.prove(ranks, certificate=tmp_path / "certificate").proven
    found = check(ranks, (tmp_path / "certificate").read_text())
    assert found.fault is None and found.lemmas.keys() <= {"what may be no number"}, found


@pytest.mark.parametrize("seed, meshes", part([row for row in FOUND if row[1] is SPLIT], 1))
def test_sums_of_ranks_that_are_means_are_not_proven(seed, meshes, tmp_path):
    ranks = sharded(seed, meshes, tmp_path)

    def edit(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            if node.op_type == "AllReduce" and attribute(node, "reduce").s == b"sum":
                attribute(node, "reduce").s = b"mean"

    edit_ranks(ranks, edit)
    assert not gopt.prove(ranks).proven


@pytest.mark.parametrize("meshes", [MESHES, SPLIT, STAGED], ids=["data", "split", "stages"])
@pytest.mark.parametrize("seed", part(range(50_000, 50_400), 1))
def test_a_drawn_structure_is_proven(seed, meshes, tmp_path):
    try:
        ranks = sharded(seed, meshes, tmp_path)
    except GoptError as error:
        pytest.skip(f"gopt shard refuses it: {error}")
    proof = gopt.prove(ranks)
    assert proof.proven, proof.open()
