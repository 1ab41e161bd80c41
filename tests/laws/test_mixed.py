"""Drawn steps whose parameters have types of their own, on ranks and split between trainers and servers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from products import part
from split_gen.judge import Setting as SplitSetting
from whole_gen.judge import MESHES, SPLIT, drawn, judged
from whole_gen.mixed import written_mixed
from whole_gen.splits import drawn_split, judged_split

TOLERANCE = 1e-4


@pytest.mark.parametrize("seed", part(range(60), 3))
@pytest.mark.parametrize("meshes", [MESHES, SPLIT], ids=["data", "split"])
def test_ranks(seed, meshes):
    how = replace(drawn(seed, meshes, written_mixed(seed, 4)), told=True, named=False)
    found = judged(lambda *sizes: written_mixed(seed, *sizes), how, seed, tolerance=TOLERANCE)
    assert found.kind in ("right", "refused"), found


@pytest.mark.parametrize("seed", part(range(60), 3))
def test_trainers_and_servers(seed):
    found = judged_split(
        lambda *sizes: written_mixed(seed, *sizes), drawn_split(seed), seed, told=True, tolerance=TOLERANCE
    )
    assert found.kind in ("right", "refused"), found


@pytest.mark.parametrize("servers", [1, 3])
def test_a_joint_update_of_two_types(servers):
    """Its gradients are joined to one row, so that all servers update all of it; a message has one type."""
    how = SplitSetting(trainers=2, servers=servers, minimum=1)
    found = judged_split(lambda *sizes: written_mixed(35, *sizes), how, 35, told=True, tolerance=TOLERANCE)
    assert found.kind == "right", found
