"""Values that are read from files: whole, or an error that names the file."""

from __future__ import annotations

import os

import numpy as np
import pytest

from gopt.errors import RunError
from gopt.ir.file_reads import fill, read_values
from gopt.ir.types import TensorType

VALUES = np.arange(24, dtype="f4").reshape(4, 6)


def test_values_are_read_from_their_place(tmp_path):
    path = tmp_path / "values"
    path.write_bytes(b"head" + VALUES.tobytes())
    found = read_values(str(path), 4, TensorType("float32", (4, 6)))
    np.testing.assert_array_equal(found, VALUES)
    found[0] = 1  # memory of its own
    assert read_values(str(path), 0, TensorType("float32", (0, 3))).shape == (0, 3)
    assert read_values(str(path), 4, TensorType("float32", ())).shape == ()


@pytest.mark.parametrize("size", [0, 3, 99])
def test_a_file_that_is_too_short_now_is_named_with_its_size(size, tmp_path):
    path = tmp_path / "val\nues"
    path.write_bytes(VALUES.tobytes() + b"    ")
    os.truncate(path, size)
    with pytest.raises(RunError) as caught:
        read_values(str(path), 4, TensorType("float32", (4, 6)))
    assert "val\\nues" in caught.value.message and f"it has {size} bytes, 100 are needed" in caught.value.message


def test_a_file_that_is_gone_is_named(tmp_path):
    with pytest.raises(RunError, match="values cannot be read any more: No such file"):
        read_values(str(tmp_path / "values"), 0, TensorType("float32", (2,)))


def test_reads_that_give_less_than_was_asked_for_go_on(tmp_path, monkeypatch):
    path, read = tmp_path / "values", os.preadv
    path.write_bytes(VALUES.tobytes())
    monkeypatch.setattr(os, "preadv", lambda number, into, place: read(number, [into[0][:7]], place))
    np.testing.assert_array_equal(read_values(str(path), 0, TensorType("float32", (4, 6))), VALUES)


def test_a_read_that_fails_is_an_error_with_the_name(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    path = tmp_path / "values"
    path.write_bytes(VALUES.tobytes())
    with path.open("rb") as file:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(RunError, match="values cannot be read: Input/output error"):
            fill(file.fileno(), str(path), 0, np.empty(4, np.uint8))
