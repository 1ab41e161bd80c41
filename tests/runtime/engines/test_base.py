"""Ranks that are threads: what one refuses before the first step ends all of them with its own error."""

from __future__ import annotations

import pytest

from gopt.errors import RunError, UnsupportedError
from gopt.records.mesh import Mesh
from gopt.runtime.engines.base import InProcessStore, raise_on_one_rank, run_threads

MESH = Mesh.parse("shard=3")


def test_all_ranks_get_what_they_made():
    assert run_threads(MESH, 60.0, lambda engine: raise_on_one_rank(engine, lambda: engine.rank * 2)) == [0, 2, 4]


def test_the_first_rank_that_refuses_says_why():
    def work(rank: int) -> int:
        if rank:
            raise UnsupportedError(f"rank {rank} cannot")
        return rank

    with pytest.raises(UnsupportedError, match="rank 1 cannot"):
        run_threads(MESH, 60.0, lambda engine: raise_on_one_rank(engine, lambda: work(engine.rank)))


def test_a_rank_that_does_not_come_is_named():
    store = InProcessStore(2, 0.05)
    with pytest.raises(RunError, match="rank 0 still waits for rank 1"):
        store.gather(0, None)
