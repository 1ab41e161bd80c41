"""Drawn steps of every structure on stages of a pipeline, and with values that are computed again or kept on the host:
ranks hold what the source makes of the whole batch."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

import onnx
import pytest
from products import part
from whole_gen.judge import MESHES, SIZES, SPLIT, STAGED, Setting, Verdict, drawn_memory, is_due, judged
from whole_gen.kinds import of_seed
from whole_gen.steps import written
from whole_gen.writer import Writer

import gopt
from gopt.errors import UnsupportedError

LIMITS = "|".join([
    "too few parameters for", "cannot be cut", "a stage receives values of fixed sizes", "bytes alive",
    "reshard-after-forward=false", "^OptionError: tensor-parallel", "no parameter can be split",
    "no weights of experts", "no input of the batch has", "a parameter of one element is not sharded",
    "on the earlier stage", "may be the new value", "may replace any", "replace no input", "is not a state",
    "reads a local gradient", "neither is a proof", "cannot give the step of one large batch", "a value of one rank",
    "follows the batch without a gradient", "gathers whole rows",
])  # fmt: skip
"""What a setting, or a step without a word on its states, may be refused for."""


def check(seed: int, meshes: Sequence[str], kinds: bool, verify: bool = False) -> Verdict:
    make = of_seed if kinds else written
    samples = SIZES[seed % len(SIZES)]
    w = make(seed, samples, 1)
    found = judged(partial(make, seed), drawn_memory(seed, meshes, make(seed, 4, 1)), seed, samples, verify=verify)
    fine = found.kind in ("right", "noted", "unconfirmed")
    assert fine or (found.kind == "refused" and (is_due(w, found.text) or re.search(LIMITS, found.text))), found
    return found


@pytest.mark.parametrize("seed", part(range(9000, 9600), 24))
def test_a_step_of_a_structure_on_stages(seed):
    check(seed, STAGED, kinds=True)


@pytest.mark.parametrize("seed", part(range(9000, 9300), 12))
def test_a_written_step_on_stages(seed):
    check(seed, STAGED, kinds=False)


@pytest.mark.parametrize("meshes", [MESHES, SPLIT], ids=["data", "split"])
@pytest.mark.parametrize("kinds", [True, False], ids=["structure", "written"])
@pytest.mark.parametrize("seed", part(range(9000, 9200), 4))
def test_a_step_with_less_memory(seed, kinds, meshes):
    check(seed, meshes, kinds)


def step(kinds: bool, seed: int, how: Setting) -> Verdict:
    return judged(partial(of_seed if kinds else written, seed), how, seed, SIZES[seed % len(SIZES)], verify=True)


@pytest.mark.parametrize("seed", [18, 38, 280])
def test_a_view_that_lost_its_readers_is_made_again_for_a_later_one(seed):
    """A view without a reader on a stage was left out, and a node that moved there read the name: exit 70."""
    assert step(False, seed, Setting("pp=2", {"stage": 0, "accumulate": 2}, told=True)).kind == "right"


def test_a_view_of_what_the_update_sends_is_made_again_by_the_update():
    """It was called a node of the backward, which reads nothing of the update: exit 70."""
    marks = {"tensor-parallel": {"sizes": "floor-last", "regather": True}}
    how = Setting("tp=2,pp=3", {"stage": 2, "passes": marks | {"shard": {"owners": "in-order"}}})
    assert step(False, 71781, how).kind == "right"


@pytest.mark.parametrize("seed", [1086, 1318])
def test_a_metric_of_the_stage_between_is_shown_by_all(seed):
    """The middle stage sent the earlier one what the later one had received: exit 70."""
    assert step(True, seed, Setting("pp=3", {"stage": 1, "accumulate": 4})).kind == "right"


def test_a_parameter_that_its_update_reads_in_parts_may_be_split():
    """ "unknown operator gopt.spmd.MemberGather in the update" was said of a node of gopt's own."""
    marks = {"tensor-parallel": {"parameters": "w1:dim0@tp;s:dim0@tp"}}
    assert step(True, 7319, Setting("tp=2", {"stage": 2, "accumulate": 2, "passes": marks}, told=True)).kind == "right"


@pytest.mark.parametrize("name, seed, how", [
    ("structure", 3166, {"parameters": "gate:dim0@sp", "inputs": "x:dim1@sp", "sizes": "ceil"}),
    ("written", 4086, {"parameters": "w:dim0@cp;v:dim0@tp", "inputs": "y:dim1@cp"}),
])  # fmt: skip
def test_what_has_no_operand_is_computed_again(name, seed, how):
    """The operand of a node that draws, or of a constant, was asked for: IndexError."""
    passes = {"tensor-parallel": how, "recompute": {"policy": "selective"}}
    mesh = "sp=2" if name == "structure" else "cp=2,tp=2"
    found = step(name == "structure", seed, Setting(mesh, {"accumulate": 3, "passes": passes}, told=True))
    assert found.kind in ("right", "noted"), found


def test_a_batch_of_open_size_is_refused_on_stages_until_its_size_is_fixed(tmp_path):
    """A message has a known shape: what an open one crosses ended in an AssertionError."""
    w: Writer = of_seed(1032, 4, 1)
    path, fixed = tmp_path / "step.onnx", tmp_path / "fixed.onnx"
    onnx.save(w.model(), path)
    with pytest.raises(UnsupportedError, match="a stage receives values of fixed sizes") as refused:
        gopt.shard(path, "pp=2", accumulate=2)
    command = refused.value.hints[0].partition("python -m ")[2].split()
    command[-2:] = [str(path), str(fixed)]
    subprocess.run([sys.executable, "-m", *command], check=True)
    gopt.shard(fixed, "pp=2", accumulate=2).write(tmp_path / "ranks")
    assert gopt.verify(tmp_path / "ranks").equal
