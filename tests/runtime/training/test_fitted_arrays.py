"""Arrays of the user as an input takes them: widths are converted, kinds and shapes are not."""

from __future__ import annotations

import numpy as np
import pytest

from gopt.errors import InputError
from gopt.ir.types import TensorType
from gopt.runtime.training.fitted_arrays import fitted


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
