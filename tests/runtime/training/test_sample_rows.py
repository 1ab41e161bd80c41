"""Rows of a file of samples: those of memory, in every order; and files that are cut, replaced or deleted meanwhile."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from gopt.artifact.safetensors_file import safetensors_chunks
from gopt.errors import RunError
from gopt.ir.types import TensorType
from gopt.runtime.host_value import array_dtype
from gopt.runtime.training.array_source import ArraySource, MicroStep, SampleOrder
from gopt.runtime.training.data import open_data
from gopt.runtime.training.sample_rows import FileRows

TYPES = {"x": TensorType("float32", (4, 3)), "y": TensorType("int64", (4,)), "mask": TensorType("float32", (2, 2))}


def arrays(count: int, seed: int = 0, x: str = "f4") -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "x": random.standard_normal((count, 3)).astype(x), "y": random.integers(0, 99, count),
        "mask": np.ones((2, 2), "f4"),
    }  # fmt: skip


def save_file(given: dict[str, np.ndarray], path: Path) -> None:
    types = {name: TensorType(array_dtype(array), array.shape) for name, array in given.items()}
    path.write_bytes(b"".join(safetensors_chunks(types, given.values())))


def both(tmp_path: Path, given: dict[str, np.ndarray], shuffle: int | None, types=TYPES):
    """The samples of a file, and the same in memory."""
    path = tmp_path / "d.safetensors"
    save_file(given, path)
    return path, open_data(str(path), types, SampleOrder(shuffle)), ArraySource(types, given, SampleOrder(shuffle))


@pytest.mark.parametrize("shuffle", [None, 3])
@pytest.mark.parametrize("count", [5, 16, 18])
def test_rows_of_a_file_are_those_of_memory(count, shuffle, tmp_path):
    _, source, held = both(tmp_path, arrays(count), shuffle)
    assert isinstance(source.arrays["x"], FileRows) and source.batches == held.batches
    for turn in (MicroStep(number, part, 2) for number in range(7) for part in range(2)):
        batch, wanted = source.batch(turn), held.batch(turn)
        for name, value in wanted.items():
            np.testing.assert_array_equal(batch[name], value)
            assert batch[name].dtype == value.dtype and batch[name].flags.c_contiguous


@pytest.mark.parametrize("x", ["f8", "f2", ml_dtypes.bfloat16])
def test_rows_are_converted_to_the_width_of_the_step(x, tmp_path):
    given = arrays(16, x=x)
    types = {"x": TYPES["x"]}
    if x is ml_dtypes.bfloat16:
        given, types = arrays(16), {"x": TensorType("bfloat16", (4, 3))}
    _, source, _ = both(tmp_path, given, None, types)
    found = source.batch(MicroStep(1, 0, 1))["x"]
    np.testing.assert_array_equal(found, given["x"][4:8].astype(found.dtype))
    assert found.dtype.name == types["x"].dtype


@pytest.mark.parametrize("shuffle", [None, 3])
def test_a_file_that_is_truncated_meanwhile_is_named(shuffle, tmp_path):
    path, source, _ = both(tmp_path, arrays(64), shuffle)
    source.batch(MicroStep(0, 0, 1))
    os.truncate(path, 200)
    with pytest.raises(RunError, match=r"d\.safetensors was truncated while it is read: it has 200 bytes"):
        for number in range(16):
            source.batch(MicroStep(number, 0, 1))


def test_a_file_that_is_replaced_or_deleted_is_read_on(tmp_path):
    path, source, held = both(tmp_path, arrays(16), None)
    save_file(arrays(16, seed=1), tmp_path / "other")
    os.replace(tmp_path / "other", path)
    np.testing.assert_array_equal(source.batch(MicroStep(3, 0, 1))["x"], held.batch(MicroStep(3, 0, 1))["x"])
    path.unlink()
    np.testing.assert_array_equal(source.batch(MicroStep(2, 0, 1))["x"], held.batch(MicroStep(2, 0, 1))["x"])


def test_the_file_is_closed_with_its_last_array(tmp_path):
    _, source, _ = both(tmp_path, arrays(16), None)
    number = source.arrays["x"].file.number
    assert os.fstat(number)
    del source
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(number)
