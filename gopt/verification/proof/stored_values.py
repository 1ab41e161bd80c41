"""Stored values as leaves, by their bytes; the decimal, or the fraction, that a number in every element stands for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from gopt.ir.types import FLOATS
from gopt.verification.proof.forms import HIGHEST, LOWEST, Expression
from gopt.verification.proof.sums import Sums

SMALL = 1 << 12
"""Elements up to which a constant is stored to be read as a shape, as axes or as indices."""
PRECISION = {"float64": 53, "float32": 24}
"""Type whose numbers stand for a decimal or a fraction -> bits; a half is the number that it is."""
SHORT = 5
"""Digits of a decimal fraction that a constant is taken for."""


class StoredValues(Sums):
    """Expressions of the values that files store."""

    def __init__(self, extents: Mapping[str, int]) -> None:
        super().__init__(extents)
        self.arrays: dict[int, np.ndarray] = {}
        """Whole numbers and flags of at most ``SMALL`` elements, by number."""
        self.values: dict[Expression, np.ndarray] = {}
        """All constants with more than a single number in their elements."""
        self._leaf_shapes: dict[tuple[str, bytes], tuple[int, ...]] = {}
        """Whole numbers or flags -> the shape in which they are a leaf."""

    def from_array(self, array: np.ndarray) -> int:
        """The expression of a value."""
        if array.dtype.name in FLOATS and not array.size:
            return self.linear({}, array.shape)
        if array.dtype.name in FLOATS:
            flat = array.reshape(-1)
            if flat[0] == flat[-1] and bool((flat == flat[0]).all()) and np.isfinite(np.float64(flat[0])):
                return self.constant(simplest(flat[0]), array.shape)
        if array.size == 1 and array.dtype.kind in "if" and (bound := _bound(array)):
            number = self.leaf(bound, array.dtype.name, array.shape)
            if array.dtype.kind == "i":
                self.arrays[number] = array
            return number
        data = array.tobytes() if array.dtype != object else repr(array.tolist()).encode()
        name = array.dtype.name, data if len(data) <= 64 else hashlib.sha256(data).digest()
        number = self._leaf(name, array)
        if array.size <= SMALL and array.dtype.kind in "iub":
            self.arrays[number] = array
        return number

    def _leaf(self, name: tuple[str, bytes], array: np.ndarray) -> int:
        """The expression of stored values; of whole numbers and flags seen in another shape, a view."""
        shape = self._leaf_shapes.setdefault(name, array.shape) if array.dtype.kind in "iub" else array.shape
        number = self.leaf("constant", name, shape)
        if self.all[number] not in self.values:
            self.values[self.all[number]] = array.reshape(shape)
            self.finite[number] = array.dtype != object and bool(np.isfinite(array).all())
        return self.view(number, array.shape)


def _bound(array: np.ndarray) -> str:
    """The leaf for a bound of a type; '' for all others."""
    low, high = (-np.inf, np.inf) if array.dtype.kind == "f" else (np.iinfo(array.dtype).min, np.iinfo(array.dtype).max)
    value = array.reshape(-1)[0]
    return LOWEST if value == low else HIGHEST if value == high else ""


def simplest(value: Any) -> Fraction:
    """The short decimal, or the fraction of the smallest denominator, that rounds to a floating value: the meaning of a
    constant of a step.

    0.1 in float32 is 1/10, so that 1 - 0.9 and 0.1 have the same number."""
    number = np.asarray(value)
    exact = Fraction(float(value))
    if number.dtype.name not in PRECISION:
        return exact
    decimal = Fraction(str(value))
    if exact.denominator == 1 or len(str(decimal.numerator)) + len(str(decimal.denominator).rstrip("0")) <= SHORT:
        return decimal
    _, exponent = np.frexp(float(value))
    half = Fraction(2) ** (int(exponent) - PRECISION[number.dtype.name] - 1)
    nearest = _between(abs(exact) - half, abs(exact) + half)
    return nearest if exact > 0 else -nearest


def _between(low: Fraction, high: Fraction) -> Fraction:
    """The fraction of the smallest denominator in a range above zero, by continued fractions."""
    whole = low.numerator // low.denominator
    if whole == low:
        return Fraction(whole)
    if whole + 1 <= high:
        return Fraction(whole + 1)
    return whole + 1 / _between(1 / (high - whole), 1 / (low - whole))
