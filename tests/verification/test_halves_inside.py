"""Updates that compute in halves: their rounding hides what ranks make of them, so one step is compared without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import edit_ranks
from onnx import ModelProto
from plants import attribute
from steps_gen.make import make
from steps_gen.plan import Plan

import gopt
from gopt.verification.result import Outcome

NOISY = (1, 3, 7)
"""Seeds whose gradients have directions that are nothing, which the update makes as long as the others."""
WIDE = "halves in float32"


def ranks(seed: int, folder: Path) -> Path:
    step = folder / "step.onnx"
    plan = Plan(seed=seed, widths=(6, 8, 5), batch=2, rules=("muon-half",))
    step.write_bytes(make(plan).model.SerializeToString())
    gopt.shard(step, "tp=2", prove=False).write(folder / "out")
    return folder / "out"


@pytest.mark.parametrize("seed", NOISY)
def test_ranks_that_round_elsewhere_are_equal_without_halves(seed: int, tmp_path: Path) -> None:
    result = gopt.verify(ranks(seed, tmp_path))
    assert result.equal and any("float32 too" in note for note in result.notes), result


@pytest.mark.parametrize("seed", NOISY)
def test_an_error_below_the_rounding_of_halves_is_found_without_them(seed: int, tmp_path: Path) -> None:
    folder = ranks(seed, tmp_path)

    def edit(model: ModelProto) -> None:
        last = [node for node in model.graph.node if node.op_type == "Gemm"][-1]
        attribute(last, "beta").f *= 1.01

    edit_ranks(folder, edit)
    result = gopt.verify(folder)
    assert result.outcome is Outcome.DIFFERENT
    assert {failure.worst.variant for failure in result.failing()} == {WIDE}
