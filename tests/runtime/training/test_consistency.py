"""What ranks agree on before the first step: calls, and shared memory by the numbers of calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper
from runtime_graphs import comm, make

from gopt.errors import RunError
from gopt.ir.graph import Graph
from gopt.records.mesh import Mesh
from gopt.runtime.engines.base import run_threads
from gopt.runtime.execution_plan import plan_execution
from gopt.runtime.shared_memory import SharedMemory, SharedSend
from gopt.runtime.training.consistency import check_calls, share_memory

MESH = Mesh.parse("dp=2,shard=2")
ROW = ("float32", [8])
op = helper.make_node


def summed(folder: Path, *groups: str) -> Graph:
    """A reduction over each group, in order, of what one node makes and for another to read."""
    folder.mkdir()
    nodes, values = [], {}
    for number, group in enumerate(groups):
        sent, got = f"n{number}", f"y{number}"
        nodes += [op("Neg", ["x"], [sent]), comm("AllReduce", [sent], [got], group), op("Neg", [got], [f"z{number}"])]
        values |= {sent: ROW, got: ROW}
    return make(folder, nodes, {"x": ROW}, {f"z{number}": ROW for number in range(len(groups))}, values=values)


class Granting:
    """An engine that grants every reduction but one."""

    rank = 0

    def __init__(self, refused: Any = None) -> None:
        self.asked: list[Any] = []
        self.refused = refused

    def share(self, sends: Any, gathers: Any) -> SharedMemory:
        self.asked = sorted(sends)
        granted = {key: each for key, each in sends.items() if key != self.refused}
        return SharedMemory({key: SharedSend(np.zeros(each.count, each.dtype), []) for key, each in granted.items()})


def test_calls_are_numbered_by_group_over_all_phases(tmp_path):
    graphs = [summed(tmp_path / "one", "dp", "shard", "dp"), summed(tmp_path / "two", "shard", "dp")]
    engine: Any = Granting(refused=("dp", 2))
    found = share_memory(engine, [plan_execution(graph, {}) for graph in graphs])
    assert engine.asked == [("dp", 0), ("dp", 1), ("dp", 2), ("shard", 0), ("shard", 1)]
    assert [sorted(each.sends) for each in found] == [[0, 1, 2], [0]], "back by the numbers of each file"


def test_the_first_call_that_differs_is_named(tmp_path):
    same, other = summed(tmp_path / "same", "dp", "shard"), summed(tmp_path / "other", "dp", "dp")
    run_threads(MESH, 60.0, lambda engine: check_calls(engine, MESH, {"step": same}))
    with pytest.raises(RunError, match="ranks 0 and 2 differ at call 1 over dp: no more calls; step: AllReduce"):
        run_threads(MESH, 60.0, lambda engine: check_calls(engine, MESH, {"step": other if engine.rank == 2 else same}))


def test_members_of_a_call_may_have_unequal_shares(tmp_path):
    def exchanged(rank: int) -> Graph:
        """Columns for rows, of which the first member has more."""
        rows, columns = [3, 1], [4, 2]
        shape = [sum(rows), columns[rank]]
        sizes = {"split_axis": 0, "split_sizes": rows, "concat_axis": 1, "concat_sizes": columns}
        call = comm("AllToAll", ["x"], ["y"], "shard", **sizes)
        (home := tmp_path / str(rank)).mkdir()
        return make(home, [call], {"x": ("float32", shape)}, {"y": ("float32", [rows[rank], 6])})

    graphs = [exchanged(0), exchanged(1)]
    run_threads(MESH, 60.0, lambda engine: check_calls(engine, MESH, {"step": graphs[engine.rank % 2]}))


def test_different_meshes_are_named(tmp_path):
    graph, other = summed(tmp_path / "same", "dp"), Mesh.parse("dp=4")
    with pytest.raises(RunError, match="ranks run different meshes: dp=2,shard=2 and dp=4"):
        run_threads(MESH, 60.0, lambda engine: check_calls(engine, other if engine.rank else MESH, {"step": graph}))
