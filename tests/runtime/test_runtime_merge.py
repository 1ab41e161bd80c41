"""The merge of what trainers pushed."""

from __future__ import annotations

import numpy as np
import pytest

from gopt.runtime.merge import Contribution, merge, merge_rows


def given(*values: list[float], weights: tuple[float, ...] = (), dtype: str = "float32") -> dict[int, Contribution]:
    every = weights or (1.0,) * len(values)
    return {n: Contribution(np.array(v, dtype), w) for n, (v, w) in enumerate(zip(values, every))}


def test_a_mean_is_over_those_that_are_there() -> None:
    found = given([0.2, 0.0], [0.0, 0.4])
    np.testing.assert_allclose(merge(found, "mean", "float32", [(2,)])[0], [0.1, 0.2])
    del found[0]
    np.testing.assert_allclose(merge(found, "mean", "float32", [(2,)])[0], [0.0, 0.4])


def test_weights_count_samples() -> None:
    assert merge(given([1.0], [5.0], weights=(3.0, 1.0)), "weighted", "float32", [(1,)])[0] == 2.0
    assert merge(given([1.0], [5.0]), "mean", "float32", [(1,)])[0] == 3.0


def test_what_weighs_nothing_adds_nothing() -> None:
    found = given([np.nan], [2.0], weights=(0.0, 2.0))
    assert merge(found, "weighted", "float32", [(1,)])[0] == 2.0
    assert merge(given([np.nan], weights=(0.0,)), "weighted", "float32", [(1,)])[0] == 0.0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_the_order_in_which_they_came_does_not_matter(order: tuple[int, ...]) -> None:
    values = [[1e8], [1.0], [-1e8]]
    found = {n: Contribution(np.array(values[n], "f4")) for n in order}
    assert merge(found, "sum", "float32", [(1,)])[0] == np.float32(np.float32(1e8) + 1) - np.float32(1e8)


def test_halves_are_summed_wide_and_rounded_once() -> None:
    found = given([2048.0], [1.0], [1.0], dtype="float16")
    assert merge(found, "sum", "float16", [(1,)])[0] == 2050.0
    assert merge(found, "sum", "float32", [(1,)])[0].dtype == np.float32


def test_contributions_are_not_written() -> None:
    found = given([1.0, 2.0], [3.0, 4.0])
    merge(found, "mean", "float32", [(1,), (1,)])
    assert found[0].values.tolist() == [1.0, 2.0]


def rows(ids: list[int], *values: list[float], weight: float = 1.0, dtype: str = "float32") -> Contribution:
    return Contribution(np.array(values, dtype).reshape(len(ids), 2), weight, np.array(ids, np.int64))


def test_rows_of_all_trainers_are_merged_as_whole_gradients_are() -> None:
    found = {1: rows([0, 5], [1, 2], [3, 4]), 0: rows([5, 7], [10, 20], [5, 6]), 2: rows([])}
    ids, values = merge_rows(found, "sum", "float32", 2)
    np.testing.assert_array_equal(ids, [0, 5, 7])
    np.testing.assert_array_equal(values, [[1, 2], [13, 24], [5, 6]])
    np.testing.assert_array_equal(merge_rows(found, "mean", "float32", 2)[1] * 3, values)


def test_weights_of_rows_count_samples() -> None:
    found = {0: rows([1], [4, 8], weight=3.0), 1: rows([], weight=1.0), 2: rows([2], [9, 9], weight=0.0)}
    ids, values = merge_rows(found, "weighted", "float32", 2)
    np.testing.assert_array_equal(ids, [1])
    np.testing.assert_array_equal(values, [[3, 6]])


def test_no_rows_are_a_merge_too() -> None:
    ids, values = merge_rows({0: rows([]), 1: rows([])}, "mean", "float32", 2)
    assert ids.dtype == np.int64 and ids.size == 0 and values.shape == (0, 2)
    assert merge_rows({0: rows([])}, "mean", "float32", 0)[1].shape == (0,)


def test_halves_of_rows_are_summed_in_float32() -> None:
    found = {n: rows([0], [2048.0 if not n else 1.0, 0], dtype="float16") for n in range(5)}
    assert merge_rows(found, "sum", "float16", 2)[1][0, 0] == 2052


def test_doubles_are_summed_as_doubles() -> None:
    """In float32 the small terms would vanish beside the large one."""
    found = given([1.0], [1e-12], [2e-12], dtype="float64")
    assert merge(found, "sum", "float64", [(1,)])[0][0] == 1.0 + 1e-12 + 2e-12
    rows = {n: Contribution(np.array([[v]], "f8"), ids=np.array([4])) for n, v in enumerate((1.0, 1e-12, 2e-12))}
    ids, values = merge_rows(rows, "sum", "float64", 1)
    assert ids.tolist() == [4] and values[0, 0] == 1.0 + 1e-12 + 2e-12
