"""Drawn steps whose states follow the batch without a gradient, against the source on the whole batch."""

from __future__ import annotations

import re

import onnx
import pytest
from products import part
from whole_gen import kinds
from whole_gen.judge import Setting, drawn, judged
from whole_gen.writer import Writer

import gopt
from gopt.analysis.coupling import find_couplings
from gopt.analysis.role_map import RoleMap

_OF = ("roles", "statistics", "counts", "rows", "weights", "taken", "open")
MODULES = [f"whole_gen.kinds_{each}" for each in _OF]
NAMES = sorted(name for name, step in kinds.load_all().items() if step.__module__ in MODULES)
REFUSED = ("may be the new value", "may divide by their number", "a rate, or one over their number", "may replace any")
"""What a step may be refused for: all else is a defect."""


@pytest.mark.parametrize("seed", part(range(len(NAMES), 8 * len(NAMES)), 6))
def test_every_state_is_that_of_the_whole_batch(seed):
    check(seed, NAMES[seed % len(NAMES)])


def check(seed: int, name: str) -> None:
    def make(samples: int, scale: int) -> Writer:
        w = Writer(seed, samples, scale)
        kinds.KINDS[name](w)
        return w

    w = make(4, 1)
    found = judged(make, drawn(seed, w=w), seed)
    due = [*REFUSED, w.refusal] if w.refusal else REFUSED
    # One rule for all, as told; or a constant may be a share of the samples, which a note says.
    doubted = "statistics" in w.options or (w.refusal and re.search(w.refusal, found.text))
    fine = found.kind == "right" or (found.kind == "noted" and doubted)
    assert fine or (found.kind == "refused" and any(re.search(why, found.text) for why in due)), found


def test_a_constant_that_may_be_a_share_of_the_samples_is_noted():
    check(102, "counted_otherwise")


@pytest.mark.parametrize("seed", [12, 13, 26, 28, 33, 35])
def test_what_weighs_losses_is_trained(seed, tmp_path):
    """A softmax over weights of losses stands behind the value that is cut: it lacks what a derivative reads, and is a
    gradient all the same."""
    w = Writer(seed, 4, 1)
    kinds.KINDS["learned_weights"](w)
    onnx.save(w.model(), str(tmp_path / "step.onnx"))
    training = gopt.load(tmp_path / "step.onnx", roles=RoleMap(states=dict(w.states))).training
    assert set(training.gradients) == set(w.gradients)


OPEN = sorted(name for name in NAMES if kinds.KINDS[name].__module__ == "whole_gen.kinds_open")


@pytest.mark.parametrize("seed", part(range(24 * len(OPEN)), 4))
def test_means_over_open_batches_are_read_as_means(seed, tmp_path):
    w = Writer(seed, 4, 1)
    kinds.KINDS[OPEN[seed % len(OPEN)]](w)
    if not w.refusal:
        onnx.save(w.model(), str(tmp_path / "step.onnx"))
        assert not find_couplings(gopt.load(tmp_path / "step.onnx", roles=RoleMap(states=dict(w.states))).training)


SPLIT = {"running_unread": ("shard=2,tp=2", ""), "running_read": ("shard=2,tp=2", ""),
         "kept_statistic": ("shard=2,tp=2", ""), "counted_otherwise": ("sp=2", "x:dim1@sp")}  # fmt: skip
"""Kind -> a mesh that splits what its statistics are made of, and inputs to split."""


@pytest.mark.parametrize("name", SPLIT)
def test_statistics_of_values_that_the_mesh_splits(name):
    """New values are gathered along tp once more, of what ranks reduce; shapes are those of whole values."""
    seen = []
    mesh, inputs = SPLIT[name]
    for seed in range(8):

        def make(samples: int, scale: int, seed: int = seed) -> Writer:
            return kinds.of_seed(seed, samples, scale, only=name)

        options = {"stage": seed % 2 if "shard" in mesh else 0, "passes": {"tensor-parallel": {"inputs": inputs}}}
        found = judged(make, Setting(mesh, {"accumulate": 1 + seed % 2, **options}, told=True), seed)
        assert found.kind in ("right", "noted") or "along tp" in found.text or "--statistics" in found.text, found
        seen.append(found.kind)
    assert seen.count("right") >= 3, "a check that compares nothing confirms nothing"
