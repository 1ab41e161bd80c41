"""Nodes that change nothing, put into drawn steps: the same numbers, or a refusal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from products import part
from whole_gen.idle import idle_step
from whole_gen.judge import MESHES, SPLIT, drawn, judged
from whole_gen.splits import drawn_split, judged_split
from whole_gen.steps import written
from whole_gen.writer import Writer


def idle(seed: int, share: float = 0.05):
    def make(samples: int, scale: int) -> Writer:
        w = written(seed, samples, scale)
        return idle_step(w, seed, share) if (samples, scale) == (4, 1) else w

    return make


@pytest.mark.parametrize("seed", part(range(1000, 1120), 5))
@pytest.mark.parametrize("meshes", [MESHES, SPLIT], ids=["data", "split"])
def test_ranks_of_a_drawn_step(seed, meshes):
    found = judged(idle(seed), drawn(seed, meshes, written(seed, 4, 1)), seed)
    assert found.kind in ("right", "refused"), found


@pytest.mark.parametrize("seed", part(range(140, 240), 5))
def test_trainers_and_servers_of_a_drawn_step(seed):
    found = judged_split(idle(seed), drawn_split(seed), seed, told=True)
    assert found.kind in ("right", "refused"), found


@pytest.mark.parametrize("seed", [124, 126])
def test_an_optional_in_an_update(seed):
    """It has no type of a tensor: the update is not cut there."""
    found = judged_split(idle(seed), drawn_split(seed), seed, told=seed % 2 == 0)
    assert found.kind in ("right", "refused"), found


def test_a_constant_before_a_product():
    """It has no operand whose unit could be asked for."""
    how = replace(drawn(5081, SPLIT, written(5081, 4, 1)), mesh="cp=2,tp=2")
    assert judged(idle(5081), how, 5081).kind in ("right", "refused")
