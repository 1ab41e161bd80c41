"""Batches out of arrays: inputs stay beside each other, in the order of the file and in any other."""

from __future__ import annotations

import numpy as np
import pytest

from gopt.errors import InputError, OptionError
from gopt.ir.types import TensorType
from gopt.runtime.training.array_source import MicroStep, SampleOrder
from gopt.runtime.training.data import IterableSource, batch_function, open_data

TYPES = {"x": TensorType("float32", (4, 3)), "y": TensorType("float32", (4,)), "mask": TensorType("float32", (2, 2))}


def arrays(x: int, y: int, mask: tuple[int, ...] = ()) -> dict[str, np.ndarray]:
    """``x`` and ``y`` hold the number of their sample."""
    return {
        "x": np.repeat(np.arange(x, dtype="f4"), 3).reshape(x, 3), "y": np.arange(y, dtype="f4"),
        "mask": np.zeros((*mask, 2, 2), "f4"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "shuffle", "said"),
    [
        (arrays(64, 10), None, "'x' has 64 rows, 4 a batch, 'y' has 10 rows, 4 a batch"),
        (arrays(64, 65), 1, "'y' has 65 rows"),
        (arrays(64, 64, (10,)), None, "'mask' has 10 rows, 1 a batch"),
        (arrays(64, 64, (16,)), 1, "one shuffle cannot order both"),
    ],
)
def test_inputs_that_would_drift_apart_are_refused(given, shuffle, said, tmp_path):
    np.savez(tmp_path / "d.npz", **given)
    with pytest.raises(InputError) as caught:
        open_data(str(tmp_path / "d.npz"), TYPES, SampleOrder(shuffle))
    assert said in caught.value.message and caught.value.exit_code == 3


@pytest.mark.parametrize("shuffle", [None, 0, 7])
@pytest.mark.parametrize("count", [16, 18])
def test_inputs_are_dealt_out_alike(count, shuffle, tmp_path):
    np.savez(tmp_path / "d.npz", **arrays(count, count))
    source = open_data(str(tmp_path / "d.npz"), TYPES, SampleOrder(shuffle))
    seen = []
    for turn in (MicroStep(number, part, 2) for number in range(9) for part in range(2)):
        batch = source.batch(turn)
        np.testing.assert_array_equal(batch["x"][:, 0], batch["y"])
        seen += batch["y"].tolist()
    assert all(sorted(seen[start : start + count]) == list(range(count)) for start in range(0, 72 - count, count))
    assert (seen[:count] == list(range(count))) == (shuffle is None)


def test_whole_batches_lie_beside_samples(tmp_path):
    given = arrays(16, 16, (4,))
    given["mask"] += np.arange(4, dtype="f4").reshape(4, 1, 1)
    np.savez(tmp_path / "d.npz", **given)
    source = open_data(str(tmp_path / "d.npz"), TYPES)
    for number in range(9):
        batch = source.batch(MicroStep(number, 0, 1))
        assert batch["mask"].tolist() == [[number % 4] * 2] * 2 and batch["y"][0] == number % 4 * 4


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (3, "the function of --data returns int, and no batches"),
        ([{"x": np.zeros((4, 3), "f4")}, 3], "batch 1 of the data is of type int"),
        ([{}], "the data has no 'x'"),
        ([{"x": np.zeros(3, "f4")}], "the data's 'x' has shape [3], the step takes float32[4,3]"),
        ([{"x": np.zeros((4, 3), int)}], "x is int64, the step takes float32[4,3]"),
    ],
)
def test_what_a_function_yields_amiss_is_named_with_what_to_yield(made, said):
    source = IterableSource(lambda part, parts: made, {"x": TYPES["x"]})
    with pytest.raises(InputError) as caught:
        for number in range(2):
            source.batch(MicroStep(number, 0, 1))
    assert caught.value.message == said and caught.value.hints


def test_a_file_of_python_names_a_function_as_for_export(tmp_path):
    (tmp_path / "rows_of_this_test.py").write_text("def batches(part, parts): yield part, parts\n")
    assert list(batch_function(f"{tmp_path}/rows_of_this_test.py:batches")(1, 2)) == [(1, 2)]
    with pytest.raises(OptionError, match="has no attribute 'rows'"):
        batch_function(f"{tmp_path}/rows_of_this_test.py:rows")


def test_a_function_that_takes_no_part_is_refused_before_it_is_called(tmp_path, monkeypatch):
    """It raised a TypeError in the first step of a rank."""
    (tmp_path / "plainly.py").write_text(
        "def batches():\n    raise AssertionError\ndef more(part, parts, at=0): yield 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OptionError, match=r"cannot be called as function\(part, parts\)") as caught:
        open_data("plainly:batches", TYPES)
    assert "number of its part" in caught.value.hints[0]
    assert isinstance(open_data("plainly:more", TYPES), IterableSource)
