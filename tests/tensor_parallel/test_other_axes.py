"""The axes along which a graph is split already."""

from __future__ import annotations

import numpy as np
import pytest
from members import graph_of

from gopt.errors import UnsupportedError
from gopt.ir.graph import Node
from gopt.records.placements import REPLICATED, Partial, Shard
from gopt.tensor_parallel.check import Checker
from gopt.tensor_parallel.other_axes import OtherAxes

VALUES = {name: np.zeros((4, 4), np.float32) for name in "xyz"}


def others(**placements) -> OtherAxes:
    graph = graph_of([], VALUES, 20)
    return OtherAxes(graph, (Checker(graph, "tp", frozenset({"tp", "cp"}), dict(placements)),))


def test_parts_must_fit_those_of_other_axes():
    axes = others(x=Shard(0, (2, 2)))
    assert axes.fit([("x", Shard(1, (2, 2))), ("x", REPLICATED), ("y", Shard(0, (2, 2)))])
    assert axes.fit([("x", Shard(0, (1, 1), runs=2))])
    assert not axes.fit([("x", Shard(0, (2, 2)))])
    assert not others(x=Shard(0, (3, 1))).fit([("x", Shard(0, (1, 1), runs=2))]), "uneven parts"


def test_nodes_that_other_axes_cannot_split_are_not_allowed_and_leave_nothing_behind():
    axes = others(x=Partial("sum"))
    assert axes.allow([Node("Neg", ["x"], ["y"])])
    assert not axes.allow([Node("Sqrt", ["x"], ["y"])])
    assert axes.of("y") == (REPLICATED,)


def test_what_new_nodes_make_is_placed():
    axes = others(x=Shard(0, (2, 2)))
    axes.follow([Node("Neg", ["x"], ["y"]), Node("Transpose", ["y"], ["z"])])
    assert axes.of("y") == (Shard(0, (2, 2)),) and axes.of("z") == (Shard(1, (2, 2)),)


def test_a_node_that_other_axes_cannot_split_is_refused_by_name():
    with pytest.raises(
        UnsupportedError, match=r"Sqrt .* cannot be split along tp and another axis at once: it reads 'x'"
    ):
        others(x=Partial("sum")).follow([Node("Sqrt", ["x"], ["y"])])
