"""The merge of what trainers pushed."""

from __future__ import annotations

import numpy as np
import pytest

from gopt.runtime.merge import Contribution, merge


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
