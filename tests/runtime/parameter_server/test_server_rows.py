"""A server's part of a table: rows by its own numbers, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from gopt.artifact.server_entries import TableEntry
from gopt.errors import RunError
from gopt.ir.graph import COMM, Node
from gopt.runtime.merge import Contribution
from gopt.runtime.messages.message import Kind, Message
from gopt.runtime.parameter_server.server_rows import merged_rows, part_of, rows_answer, table_parts

ENTRY = TableEntry("t", "modulo", 5, 2, "float32", (2, 0), (), ("a", "b"), ("a_out", "b_out"), ("g", "h"))
NODE = Node(
    "AggregateRows", ["gopt.round"], ["i", "r"], domain=COMM,
    attributes={"table": 0, "parameter": "t", "dtype": "float32", "width": 2, "reduce": "sum"},
)  # fmt: skip


def asked(*ids: int, dtype: str = "float32") -> Message:
    return Message(Kind.PULL_ROWS, 1, 0, 3, (np.array(ids, np.int64),), {"dtype": dtype, "pull": 7})


def test_parts_are_those_of_a_server() -> None:
    first, second = (table_parts([ENTRY], server)[0] for server in (2, 0))
    assert (first.input, first.rows, second.input, second.rows) == ("a", 3, "b", 2)
    assert not table_parts([ENTRY], 1)


def test_rows_are_answered_in_the_type_of_the_pull() -> None:
    part = table_parts([ENTRY], 2)[0]
    found = rows_answer(part, np.arange(6, dtype="f4").reshape(3, 2).__getitem__, asked(2, 0, dtype="float16"))
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, [[4, 5], [0, 1]])


def test_rows_that_are_not_there_are_refused() -> None:
    part = table_parts([ENTRY], 0)[0]
    with pytest.raises(RunError, match="trainer 1 names row 2 of this part of table t, which has 2 rows"):
        rows_answer(part, np.zeros((2, 2), "f4").__getitem__, asked(0, 2))
    with pytest.raises(RunError, match="this server has no part of the table"):
        part_of({}, 0, 1)
    for ids, what in (([0, 2], "row 2"), ([1, 0], "unsorted rows"), ([1, 1], "unsorted rows")):
        with pytest.raises(RunError, match=what):
            merged_rows(part, NODE, {1: Contribution(np.zeros((2, 2), "f4"), 1.0, np.array(ids))})
