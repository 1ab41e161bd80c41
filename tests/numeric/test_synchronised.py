"""``--statistics sync``: the ranks' step is that of one large batch, running statistics and all."""

from __future__ import annotations

import pytest
from coupled_steps import Coupled, build
from large_batch import worst_difference

KINDS = {
    "fused": Coupled(),
    "straight": Coupled(fused=False),
    "by sums": Coupled(sums=True),
    "two, momentum": Coupled(layers=2, momentum=True),
    "straight, two": Coupled(fused=False, layers=2),
    "halves": Coupled(half=True, momentum=True),
    "weighted": Coupled(loss="weighted", momentum=True),
    "weighted, no norm": Coupled(loss="weighted", normal=False),
    "root": Coupled(loss="root"),
    "root, no norm": Coupled(loss="root", normal=False),
    "balanced": Coupled(loss="balanced", fused=False),
}


def made(kind: Coupled):
    return lambda batch: build(kind, batch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh,stage", [("shard=3", 2), ("dp=2,shard=2", 3), ("dp=2", 0)])
def test_it_is_the_step_of_one_large_batch(kind, mesh, stage, tmp_path):
    worst = worst_difference(made(KINDS[kind]), 4, mesh, tmp_path, stage=stage, statistics="sync")
    assert worst < (3e-2 if KINDS[kind].half else 3e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_without_it_it_is_not(kind, tmp_path):
    assert worst_difference(made(KINDS[kind]), 4, "shard=3", tmp_path) > 1e-2
