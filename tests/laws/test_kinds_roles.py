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
from gopt.analysis.role_map import RoleMap

_OF = ("roles", "statistics", "counts", "rows", "weights", "taken")
MODULES = [f"whole_gen.kinds_{each}" for each in _OF]
NAMES = sorted(name for name, step in kinds.load_all().items() if step.__module__ in MODULES)
REFUSED = ("may be the new value", "may divide by their number", "a rate, or one over their number", "may replace any")
"""What a step may be refused for: all else is a defect."""


@pytest.mark.parametrize("seed", part(range(len(NAMES), 8 * len(NAMES)), 6))
def test_every_state_is_that_of_the_whole_batch(seed):
    name = NAMES[seed % len(NAMES)]

    def make(samples: int, scale: int) -> Writer:
        w = Writer(seed, samples, scale)
        kinds.KINDS[name](w)
        return w

    w = make(4, 1)
    found = judged(make, drawn(seed, w=w), seed)
    due = [*REFUSED, w.refusal] if w.refusal else REFUSED
    fine = found.kind == "right" or (found.kind == "noted" and "statistics" in w.options)  # one rule for all, as told
    assert fine or (found.kind == "refused" and any(re.search(why, found.text) for why in due)), found


@pytest.mark.parametrize("seed", [12, 13, 26, 28, 33, 35])
def test_what_weighs_losses_is_trained(seed, tmp_path):
    """A softmax over weights of losses stands behind the value that is cut: it lacks what a derivative reads, and is a
    gradient all the same."""
    w = Writer(seed, 4, 1)
    kinds.KINDS["learned_weights"](w)
    onnx.save(w.model(), str(tmp_path / "step.onnx"))
    training = gopt.load(tmp_path / "step.onnx", roles=RoleMap(states=dict(w.states))).training
    assert set(training.gradients) == set(w.gradients)


@pytest.mark.parametrize("name", ["running_unread", "running_read", "kept_statistic"])
def test_statistics_of_values_that_the_mesh_splits(name):
    """Their new values are gathered along tp once more, of what ranks reduce."""
    kinds_found = []
    for seed in range(8):

        def make(samples: int, scale: int, seed: int = seed) -> Writer:
            return kinds.of_seed(seed, samples, scale, only=name)

        found = judged(make, Setting("shard=2,tp=2", {"stage": 1, "accumulate": 1 + seed % 2}, told=True), seed)
        assert found.kind in ("right", "noted") or "along tp" in found.text or "--statistics" in found.text, found
        kinds_found.append(found.kind)
    assert kinds_found.count("right") >= 3, "a check that compares nothing confirms nothing"
