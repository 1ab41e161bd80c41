"""Tensors read on demand."""

import os

import numpy as np
import pytest
from onnx import numpy_helper

from gopt.errors import RunError
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType


def test_a_tensor_of_parts_or_of_a_cast_is_put_together():
    rows = [Tensor(TensorType("float32", (2,)), array=np.array(pair, np.float32)) for pair in ([1, 2], [3, 4])]
    whole = Tensor(TensorType("float32", (2, 2)), parts=tuple(rows))
    np.testing.assert_array_equal(whole.numpy(), [[1, 2], [3, 4]])
    half = Tensor(TensorType("float16", (2,)), cast_of=rows[0])
    assert half.numpy().dtype == np.float16


def test_a_tensor_of_an_archive_is_read_once():
    calls = []
    tensor = Tensor(TensorType("float32", (1,)), reader=lambda: calls.append(0) or np.ones(1, np.float32))
    assert tensor.numpy() is tensor.numpy()
    assert calls == [0]


def test_a_tensor_of_the_file_is_its_message():
    proto = numpy_helper.from_array(np.arange(3), "w")
    np.testing.assert_array_equal(Tensor(TensorType("int64", (3,)), proto=proto).numpy(), [0, 1, 2])


def test_a_tensor_of_a_file_is_read_where_it_starts(tmp_path):
    np.arange(6, dtype=np.float32).tofile(tmp_path / "data")
    tensor = Tensor(TensorType("float32", (2, 2)), path=str(tmp_path / "data"), offset=8)
    np.testing.assert_array_equal(tensor.numpy(), [[2, 3], [4, 5]])
    np.testing.assert_array_equal(tensor.flat_slice(1, 3).numpy(), [3, 4])
    np.testing.assert_array_equal(tensor.flat()(1, 3), [3, 4])
    joined = Tensor(
        TensorType("float32", (5,)), parts=(tensor, Tensor(TensorType("float32", (1,)), array=np.ones(1, "f4")))
    )
    np.testing.assert_array_equal(joined.numpy(), [2, 3, 4, 5, 1])
    np.testing.assert_array_equal(joined.flat()(3, 5), [5, 1])


def test_a_file_that_was_truncated_is_named(tmp_path):
    """Nothing is mapped: what was read stays, and the rest is refused."""
    np.arange(6, dtype=np.float32).tofile(tmp_path / "data")
    tensor = Tensor(TensorType("float32", (6,)), path=str(tmp_path / "data"))
    held = tensor.numpy()
    os.truncate(tmp_path / "data", 8)
    assert held.sum() == 15
    with pytest.raises(RunError, match="data was truncated while it is read: it has 8 bytes, 24 are needed"):
        tensor.numpy()


def test_what_a_reader_gives_is_not_kept_by_read():
    tensor = Tensor(TensorType("float32", (1,)), reader=lambda: np.ones(1, np.float32))
    assert tensor.read() is not tensor.read()
