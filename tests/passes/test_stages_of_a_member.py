"""Stages that share a member run in separate actions: no call of a micro-batch joins values of several of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import onnx
import pytest
from helpers import FIXTURES
from onnx import helper
from option_gen.make import Setting
from products import part

import gopt
from gopt.api import Sharded
from gopt.errors import InvariantError, UnsupportedError
from gopt.lower.stage_phases import _Divided
from gopt.verification.proof.result import ProofVerdict

WHOLE = {"shard": {"style": "broadcast", "partition": "whole"}}
CASES = [
    ("families/moe_adamw", "pp=2,ep=2", "interleaved:2", 0, {}), ("families/moe_adamw", "pp=2,ep=2", "zb-v", 0, {}),
    ("gpt_adamw", "pp=2,shard=2", "zb-v", 3, WHOLE), ("mlp_adamw_bf16", "pp=2,shard=2", "zb-v", 3, WHOLE),
    ("cnn_mom_fp16", "pp=2,shard=2", "interleaved:2", 3, WHOLE),
]  # fmt: skip


@pytest.mark.parametrize(("fixture", "mesh", "schedule", "stage", "passes"), part(CASES, 3))
def test_stages_of_a_member_train_as_the_source(fixture, mesh, schedule, stage, passes, tmp_path):
    """Each ended in a KeyError: a fused call stood in the action of one stage, before another had made its part."""
    options = {"accumulate": 4, "schedule": schedule, "stage": stage, "passes": passes}
    gopt.shard(FIXTURES / f"{fixture}.onnx", mesh, **options).write(tmp_path / "ranks")
    assert gopt.verify(tmp_path / "ranks", steps=2, confirm=False).equal


@pytest.fixture
def joined(monkeypatch):
    """Calls of several stages of a member are fused, as once."""

    def plant(item, **changes):
        return replace(item, **changes | ({"stage": 0} if "stage" in changes else {}))

    monkeypatch.setattr("gopt.passes.fuse_collectives.replace", plant)


def test_a_value_that_a_later_action_makes_is_no_operand(joined):
    with pytest.raises(InvariantError, match=r"action weight\.1 .* reads .* made later by action weight\.0"):
        sharded("zb-v", prove=False)


def test_a_proof_names_the_reader_of_a_value_that_a_later_file_makes(joined, monkeypatch, tmp_path):
    monkeypatch.setattr(_Divided, "_refuse_late", lambda *_: None)
    monkeypatch.setattr(_Divided, "_check_schedule", lambda *_: None)
    sharded("zb-v", prove=False).write(tmp_path / "ranks")
    (claim,) = gopt.prove(tmp_path / "ranks").claims
    assert claim.verdict is ProofVerdict.DIFFERENT
    assert claim.mismatch is not None and claim.mismatch.actual.endswith("which a later file makes")


def sharded(schedule: str, **options: Any) -> Sharded:
    step = FIXTURES / "gpt_adamw.onnx"
    return gopt.shard(step, "pp=2,shard=2", stage=3, accumulate=4, schedule=schedule, passes=WHOLE, **options)


def test_a_schedule_that_runs_a_reader_before_the_maker_is_refused(tmp_path):
    """Weights of the two stages of a member are in no order of their own; a bucket of both sets one."""
    sharded("zb-v").write(tmp_path / "ranks")
    rows: list[list[str]] = [[]]
    for line in (tmp_path / "ranks" / "schedule.txt").read_text().splitlines():
        rows[-1].append(line) if line.strip() else rows.append([])
    swapped = [[line for line in row if " weight " not in line] for row in rows]
    for row, kept in zip(rows, swapped):
        weights = [line for line in row if " weight " in line]
        kept += sorted(weights, key=lambda line: int(line.split()[2]))  # the earlier stage first
    file = tmp_path / "mine.txt"
    file.write_text("\n\n".join("\n".join(row) for row in swapped) + "\n")
    with pytest.raises(
        UnsupportedError, match=r"weight\.0 of micro-batch \d on member \d reads .* runs before weight\.1"
    ):
        sharded(str(file))


def test_an_update_on_another_stage_of_the_member_leaves_the_new_value(tmp_path):
    """The sum of three reads more of the gradient's stage than of the state's: both run on one member."""
    (tmp_path / "drawn").mkdir()
    path = Setting("stream 19909", "pp=3", 0, 4, "zb-v", {}).file(tmp_path / "drawn")
    model = onnx.load(path)
    added = next(node for node in model.graph.node if node.output[0] == "p3.m_new")
    twice = helper.make_node("Identity", [added.input[1]], ["twice"])
    model.graph.node.insert(list(model.graph.node).index(added), twice)
    added.op_type = "Sum"
    added.input.append("twice")
    onnx.save(model, path)
    gopt.shard(path, "pp=3", stage=0, accumulate=4, schedule="zb-v").write(tmp_path / "ranks")
    assert gopt.verify(tmp_path / "ranks", steps=2, confirm=False).equal
