"""How far two values are apart."""

from __future__ import annotations

import numpy as np
import pytest

import gopt.offline.diff.values as values
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType
from gopt.offline.diff.values import Tolerance, distance


def tensor(*elements: float) -> Tensor:
    return Tensor(TensorType("float32", (len(elements),)), array=np.array(elements, "f4"))


@pytest.mark.parametrize("block", [1, 2, 100])
def test_a_distance(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "BLOCK", block)
    found = distance(tensor(3, 4, 0), tensor(3, 4, 1))
    assert found is not None and (found.most, found.outside) == (1.0, 1)
    assert found.relative == pytest.approx(1 / np.sqrt(26))


def test_what_is_inside_of_a_tolerance() -> None:
    one, other = tensor(100, 1), tensor(101, 1)
    outside = [
        found.outside for each in (Tolerance(), Tolerance(rtol=0.01), Tolerance(atol=0.9), Tolerance(atol=1))
        if (found := distance(one, other, each))
    ]  # fmt: skip
    assert outside == [1, 0, 1, 0]


def test_no_numbers_are_equal_to_one_another_and_to_nothing_else() -> None:
    nan = float("nan")
    same, other = distance(tensor(nan, 1), tensor(nan, 1)), distance(tensor(nan, 1), tensor(1, 1), Tolerance(1, 1))
    assert same is not None and (same.most, same.relative, same.outside) == (0, 0, 0)
    assert other is not None and (other.most, other.outside) == (float("inf"), 1)


def test_against_zero_and_of_another_shape() -> None:
    assert str(distance(tensor(1), tensor(0))) == "max |delta| 1, relative inf"
    assert distance(tensor(1, 2), tensor(1)) is None
