"""Operators over places that are split: what members make together is what the operator makes of the whole."""

from __future__ import annotations

import numpy as np
import pytest
from test_expansions import agree, numbers

from gopt.records.placements import Shard

SIZES = ((4, 3), (3, 3, 1), (1, 2, 4))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("op_type", ["GlobalAveragePool", "GlobalMaxPool"])
def test_a_pool_of_all_places(op_type, sizes):
    kinds = agree(op_type, [numbers(2, 3, 7, 5)], Shard(2, sizes))
    assert kinds.isdisjoint({op_type, "AllGather"})


@pytest.mark.parametrize("dim", [0, 2, 3])
def test_a_batch_has_statistics_of_all_its_samples_and_places(dim):
    rows = [np.abs(numbers(4)) + 0.5 for _ in range(4)]
    kinds = agree(
        "BatchNormalization", [numbers(7, 4, 7, 7), *rows], Shard(dim, (5, 2)), 15, 3, 1e-4,
        training_mode=1, epsilon=1e-3, momentum=0.7,
    )  # fmt: skip
    assert kinds.isdisjoint({"BatchNormalization", "AllGather"})


def test_statistics_of_halves_are_made_in_float32():
    rows = [(np.abs(numbers(3)) + 0.5).astype(np.float16) for _ in range(2)]
    wide = [np.abs(numbers(3)) + 0.5 for _ in range(2)]
    large = numbers(4, 3, 8, dtype="float16", scale=100.0) + np.float16(2000)
    agree("BatchNormalization", [large, *rows, *wide], Shard(2, (5, 3)), 15, 3, 1e-2, training_mode=1)


def test_a_batch_split_by_channels_needs_nothing():
    rows = [np.abs(numbers(4)) + 0.5 for _ in range(4)]
    kinds = agree("BatchNormalization", [numbers(3, 4, 5), *rows], Shard(1, (3, 1)), 15, 3, training_mode=1)
    assert kinds == {"BatchNormalization", "DimSlice"}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("counted", [0, 1])
@pytest.mark.parametrize(
    "more", [{"strides": [1, 2]}, {"strides": [2, 1]}, {"dilations": [2, 1], "pads": [2, 0, 2, 0]}]
)
def test_means_count_what_is_there(sizes, counted, more):
    given = {"kernel_shape": [3, 2], "pads": [1, 1, 1, 0], "count_include_pad": counted, **more}
    kinds = agree("AveragePool", [numbers(2, 3, 7, 5)], Shard(2, sizes), **given)
    assert "HaloJoin" in kinds or sizes == (3, 3, 1), "there strips are more than all parts"


def test_means_that_reach_beyond_the_zeros_are_made_whole():
    kinds = agree("AveragePool", [numbers(2, 3, 12)], Shard(2, (6, 6)), kernel_shape=[4], strides=[3], ceil_mode=1)
    assert "HaloJoin" not in kinds


@pytest.mark.parametrize("sizes", SIZES)
def test_the_bias_of_a_transposed_convolution_by_places_is_added_once(sizes):
    inputs = [numbers(2, 3, 7, 4), numbers(3, 2, 3, 2), numbers(2)]
    kinds = agree("ConvTranspose", inputs, Shard(2, sizes), strides=[2, 1], pads=[1, 0, 0, 0], tolerance=1e-4)
    assert "HaloSum" in kinds


@pytest.mark.parametrize("sizes", SIZES[:2])
@pytest.mark.parametrize("opset", [18, 21])
def test_a_group_has_statistics_of_all_its_places(sizes, opset):
    rows = [np.abs(numbers(6 if opset == 21 else 3)) + 0.5 for _ in range(2)]
    given = {"num_groups": 3, "epsilon": 1e-2}
    kinds = agree("GroupNormalization", [numbers(2, 6, 7, 3), *rows], Shard(2, sizes), opset, 1, 1e-4, **given)
    assert kinds.isdisjoint({"GroupNormalization", "AllGather"})


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_instance_has_statistics_of_all_its_places(dtype):
    rows = [(np.abs(numbers(4)) + 0.5).astype(dtype) for _ in range(2)]
    value = numbers(2, 4, 7, 3, dtype=dtype)
    tolerance = 1e-4 if dtype == "float32" else 1e-2
    kinds = agree("InstanceNormalization", [value, *rows], Shard(3, (2, 1)), 20, 1, tolerance)
    assert kinds.isdisjoint({"InstanceNormalization", "AllGather"})
