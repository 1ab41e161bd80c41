"""What the reference computes, by example: rounding, order, roots, transfers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from gopt.collectives.table import COLLECTIVES

GROUP = {"group": "shard"}


def one(values: list[Any], dtype: Any) -> list[list[np.ndarray]]:
    return [[np.array(value, dtype)] for value in values]


def all_reduced(values: list[Any], dtype: str, how: str = "sum") -> np.ndarray:
    numpy = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    result = COLLECTIVES["AllReduce"].execute(GROUP | {"reduce": how}, one(values, numpy), dtype)[0]
    assert result is not None and result[0].dtype == numpy
    return result[0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_summed_wide_and_rounded_once(dtype: str) -> None:
    assert all_reduced([2048, 1, -2048], dtype) == 1  # rounded at each step it would be 0
    assert all_reduced([[2048.0], [1.0], [-2048.0], [0.0]], dtype, "mean") == 0.25


def test_float32_is_summed_in_float32_in_group_order() -> None:
    assert all_reduced([2.0**25, 1, -(2.0**25)], "float32") == 0
    assert all_reduced([2.0**25, -(2.0**25), 1], "float32") == 1
    assert all_reduced([2.0**25, 1, -(2.0**25)], "float64") == 1


def test_overflow_and_nan_arrive_without_a_warning() -> None:
    # A loss scale that is too large shows as infinity: the finite check must see it, not the log.
    assert all_reduced([60000, 60000], "float16") == np.inf
    assert all_reduced([60000, 60000], "float16", "mean") == 60000
    assert np.isnan(all_reduced([np.inf, -np.inf], "float32"))
    assert np.isnan(all_reduced([np.nan, 1], "float32", "max")) and np.isnan(all_reduced([1, np.nan], "float32", "min"))


def test_integers_and_flags() -> None:
    assert all_reduced([3, -5, 9], "int64") == 7
    assert all_reduced([3, -5, 9], "int64", "min") == -5
    assert all_reduced([200, 100], "uint8") == 44
    assert all_reduced([False, True], "bool", "max")


def test_reduce_is_defined_on_the_root_alone() -> None:
    results = COLLECTIVES["Reduce"].execute(GROUP | {"root": 1}, one([1, 2, 4], np.float32), "float32")
    assert results == [None, [7], None]


def test_broadcast_takes_the_roots() -> None:
    given = [[], [np.arange(6.0).reshape(2, 3), np.array(4.0)]]
    attributes = GROUP | {"root": 1, "dtype": "float64", "shapes": ["2,3", ""]}
    for result in COLLECTIVES["Broadcast"].execute(attributes, given, "float64"):
        assert_array_equal((result or [])[0], given[1][0])
        assert (result or [])[1] == 4


def test_buckets_are_cut_across_tensors() -> None:
    given = [[np.arange(4.0).reshape(2, 2), np.array([10.0])]] * 3
    results = COLLECTIVES["ReduceScatter"].execute(GROUP | {"cuts": [0, 3, 3, 5]}, given, "float64")
    assert [(result or [])[0].tolist() for result in results] == [[0, 3, 6], [], [9, 30]]


def test_order_in_memory_does_not_matter() -> None:
    given = [[np.asfortranarray(np.arange(6.0).reshape(2, 3))]]
    result = COLLECTIVES["ReduceScatter"].execute(GROUP | {"cuts": [0, 6]}, given, "float64")[0]
    assert_array_equal((result or [])[0], np.arange(6.0))


@pytest.mark.parametrize("sender", [0, 1])
def test_either_end_gives_the_whole_transfer(sender: int) -> None:
    given: list[list[np.ndarray]] = [[], []]
    given[sender] = [np.arange(3, dtype=np.int8), np.array(True).astype(np.int8)]
    ends = GROUP | {"peer": 0, "tag": 0}
    recv = ends | {"dtype": "int8", "shapes": ["3", ""]}
    for op, attributes in (("Send", ends), ("Recv", recv)):
        results = COLLECTIVES[op].execute(attributes, given, "int8")
        assert results[sender] == []
        assert_array_equal((results[1 - sender] or [])[0], given[sender][0])


def test_narrow_types_travel_unchanged() -> None:
    shards = [[np.array([1, 2], ml_dtypes.float8_e4m3fn)], [np.array([3], ml_dtypes.float8_e4m3fn)]]
    attributes = GROUP | {"cuts": [0, 2, 3], "shapes": ["3"]}
    result = COLLECTIVES["AllGather"].execute(attributes, shards, "float8e4m3fn")[1]
    assert (result or [])[0].astype(int).tolist() == [1, 2, 3]
