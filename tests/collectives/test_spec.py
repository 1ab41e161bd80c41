"""What a record refuses whatever its rules say: groups, indices, members that differ, transfers without two ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gopt.collectives.table import COLLECTIVES
from gopt.errors import InputError, InvariantError

X = ("float32", (4, 3))


GROUP = {"group": "shard"}


def test_a_group_is_needed() -> None:
    with pytest.raises(InputError, match="'group'"):
        COLLECTIVES["AllReduce"].outputs({}, [X], 2, 0)


@pytest.mark.parametrize("size, index", [(0, 0), (2, 2), (2, -1)])
def test_index_outside_the_group(size: int, index: int) -> None:
    with pytest.raises(InvariantError):
        COLLECTIVES["AllReduce"].outputs(GROUP, [X], size, index)


def test_a_shape_that_is_not_static() -> None:
    shape: Any = ("batch", 3)
    assert COLLECTIVES["AllReduce"].infer(GROUP, [("float32", shape)]) == [("float32", shape)]
    with pytest.raises(InvariantError, match="not static"):
        COLLECTIVES["AllReduce"].outputs(GROUP, [("float32", shape)], 2, 0)


def test_members_that_differ_are_found() -> None:
    record = COLLECTIVES["AllReduce"]
    with pytest.raises(InvariantError, match="member 1"):
        record.execute(GROUP, [[np.zeros(2)], [np.zeros(3)]], "float64")
    with pytest.raises(InvariantError, match="float32"):
        record.execute(GROUP, [[np.zeros(2)], [np.zeros(2, np.float32)]], "float64")


def test_transfers_have_two_ends() -> None:
    send, x = GROUP | {"peer": 1, "tag": 0}, [np.zeros(2)]
    wrong: list[list[list[np.ndarray]]] = [[x], [x, x], [[], []], [x, [], []]]
    for given in wrong:
        with pytest.raises(InvariantError, match="one sender"):
            COLLECTIVES["Send"].execute(send, given, "float64")
    with pytest.raises(InvariantError, match="was sent"):
        COLLECTIVES["Recv"].execute(send | {"dtype": "float64", "shapes": ["3"]}, [x, []], "float64")
