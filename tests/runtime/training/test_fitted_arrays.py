"""Arrays of the user as an input takes them: widths are converted, kinds and shapes are not."""

from __future__ import annotations

import numpy as np
import pytest

from gopt.documents.draws import Distribution, Draw
from gopt.errors import InputError
from gopt.ir.types import TensorType
from gopt.runtime.training.draws import DrawnInputs
from gopt.runtime.training.fitted_arrays import fitted, sized


@pytest.mark.parametrize(
    ("held", "dtype", "fits"),
    [
        ("f8", "float32", True),
        ("u2", "int64", True),
        ("i8", "float32", False),
        ("?", "int64", False),
        ("f4", "bfloat16", True),
    ],
)
def test_the_width_of_numbers_alone_is_converted(held, dtype, fits):
    value, type = np.ones(3, held), TensorType(dtype, (3,))
    if fits:
        assert fitted("x", type, value).dtype.itemsize == type.nbytes // 3
        return
    with pytest.raises(InputError, match="the step takes"):
        fitted("x", type, value)


def test_open_dimensions_are_those_of_the_batch():
    types = {"x": TensorType("float32", ("batch", 6)), "y": TensorType("int64", ("batch",)),
             "draw": TensorType("float32", ("batch", 2)), "w": TensorType("float32", (3,))}  # fmt: skip
    batch = {"x": np.zeros((5, 6)), "y": [0] * 5, "w": np.zeros(3)}
    closed = sized(types, batch)
    assert [each.shape for each in closed.values()] == [(5, 6), (5,), (5, 2), (3,)]
    assert fitted("x", closed["x"], batch["x"]).dtype == np.float32
    with pytest.raises(InputError, match="the data's 'y' has 4 samples, and its 'x' 5"):
        sized(types, {**batch, "y": [0] * 4})
    for wrong in (np.zeros((5, 7)), np.zeros(5)):
        with pytest.raises(InputError, match="has shape"):
            fitted("x", sized(types, {"x": wrong})["x"], wrong)


def test_random_numbers_have_the_size_of_the_batch():
    types = {"x": TensorType("float32", ("batch", 6)), "draw_0": TensorType("float32", ("batch", 2))}
    drawn = DrawnInputs(types, {"draw_0": Draw(Distribution.UNIFORM)})
    for size in (1, 5):
        batch = drawn.completed({"x": np.zeros((size, 6), np.float32)}, types, 0, 0)
        assert batch["draw_0"].shape == (size, 2)
