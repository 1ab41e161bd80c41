"""The constants of all graphs of a proof: a number for each value, in any file."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import Any, TypeAlias, cast
from weakref import WeakMethod

import numpy as np

from gopt.ir.graph import Graph, Node
from gopt.ir.tensor import Tensor
from gopt.ir.types import FLOATS, numpy_dtype
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.forms import FLAT, HIGHEST, LOWEST, TAKE, VIEW, Expression, elements
from gopt.verification.proof.masks import Masks
from gopt.verification.proof.selections import Selection, positions

SMALL = 1 << 12
"""Elements up to which a constant is stored to be read as a shape, as axes or as indices."""
PRECISION = {"float64": 53, "float32": 24}
"""Type whose numbers stand for a decimal or a fraction -> bits; a half is the number that it is."""
SHORT = 5
"""Digits of a decimal fraction that a constant is taken for."""


Arrays: TypeAlias = Sequence[Any]
"""The values of operands that are constants."""


class ConstantTable:
    """Numbers of constants, and the values behind expressions without operands or laws."""

    def __init__(self, expressions: Expressions) -> None:
        self.expressions, expressions.stored = expressions, WeakMethod(self.number)
        self.arrays = expressions.arrays
        """Whole numbers and flags of at most ``SMALL`` elements, by number."""
        self.values: dict[Expression, np.ndarray] = {}
        """All constants with more than a single number in their elements."""
        self.origins: dict[int, tuple[Graph, Node, int]] = {}
        """Operators without laws: a node that was read so, and the index of the result."""
        self.masks = Masks(expressions, self.arrays)
        self.halves: dict[tuple[int, str], set[int]] = {}
        """Results of operators of the source in half precision, with the type -> the operands."""
        self.rounded: dict[str, set[int]] = {}
        """Type -> gradients of all batches, and weights of batches, that ranks round to the type."""
        self.sent: dict[str, set[int]] = {}
        """Type -> gradients of a batch, and of some batches, that ranks round to the type in front of calls."""
        self.roundings: Counter[str] = Counter()
        """Node -> number of rounded values: of widened halves for a half of the source, and of gradients."""
        self._stored: dict[Hashable, tuple[int, Tensor]] = {}
        self._shapes: dict[tuple[str, bytes], tuple[int, ...]] = {}
        """Whole numbers or flags -> the shape in which they are a leaf."""

    def stored(self, tensor: Tensor) -> int:
        """The expression of a stored value, which is read once."""
        key: Hashable = (tensor.path, tensor.offset, tensor.type) if tensor.path else id(tensor)
        if not tensor.path and tensor.proto is not None and tensor.proto.raw_data:
            key = tensor.type, tensor.proto.raw_data  # ranks store the same again and again
        if key not in self._stored:
            self._stored[key] = self.number(np.asarray(tensor.numpy())), tensor
        return self._stored[key][0]

    def number(self, array: np.ndarray) -> int:
        """The expression of a value."""
        if array.dtype.name in FLOATS and not array.size:
            return self.expressions.linear({}, array.shape)
        if array.dtype.name in FLOATS:
            flat = array.reshape(-1)
            if flat[0] == flat[-1] and bool((flat == flat[0]).all()) and np.isfinite(np.float64(flat[0])):
                return self.expressions.constant(simplest(flat[0]), array.shape)
        if array.size == 1 and array.dtype.kind in "if" and (bound := _bound(array)):
            number = self.expressions.leaf(bound, array.dtype.name, array.shape)
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
        shape = self._shapes.setdefault(name, array.shape) if array.dtype.kind in "iub" else array.shape
        number = self.expressions.leaf("constant", name, shape)
        self.values.setdefault(self.expressions.all[number], array.reshape(shape))
        return self.expressions.view(number, array.shape)

    def is_constant(self, number: int) -> bool:
        """Return whether an expression is a stored value or a single number."""
        constant = self.expressions.uniform(number) is not None or number in self.arrays
        return constant or self.expressions.all[self.expressions.root(number)] in self.values

    def array(self, number: int) -> np.ndarray | None:
        """The value of a small constant, or of a part of a constant."""
        if number not in self.arrays:
            few = (self.expressions.elements(number) or 0) <= SMALL
            if not few or self.expressions.all[number].op not in (VIEW, FLAT, TAKE):
                return None
            root = self.expressions.root(number)
            pieces = self.expressions.pieces(number)
            selection = self.expressions.selection(root)
            if selection is not None and (whole := self.array(self.expressions.all[root].operands[0])) is not None:
                array = taken(whole, selection)
            elif self.expressions.all[root].op == FLAT and all(piece[0] in self.arrays for piece in pieces):
                array = np.concatenate([self.arrays[of].reshape(-1)[start:stop] for of, start, stop in pieces])
            elif root != number and root in self.arrays:
                array = self.arrays[root]
            else:
                return None
            self.arrays[number] = array.reshape(self._sizes(number))
        return self.arrays[number]

    def _sizes(self, number: int) -> tuple[int, ...]:
        return tuple(int(size or 0) for size in self.expressions.shape(number) or ())

    def setting(self, number: int) -> np.ndarray | None:
        """The value of a small constant, or of a number, for rules of dimensions."""
        value = self.expressions.uniform(number) if self.expressions.elements(number) == 1 else None
        return self.array(number) if value is None else np.full(self._sizes(number), float(value))

    def known(self, array: np.ndarray) -> int | None:
        """The expression of a value of the source."""
        number = self.number(array)
        return number if number < self.expressions.of_ranks else None

    def filled(self, value: np.ndarray, shape: tuple[int, ...]) -> int:
        """A single number in every element of a shape."""
        if value.dtype.name in FLOATS and np.isfinite(np.float64(value.reshape(-1)[0])):
            return self.expressions.constant(simplest(value.reshape(-1)[0]), shape)
        if (elements(shape) or 0) <= SMALL:
            return self.number(np.broadcast_to(value.reshape(()), shape))
        return self.expressions.leaf("filled", (value.dtype.name, value.tobytes()), shape)

    def meant(self, expression: Expression) -> np.ndarray | None:
        """The numbers that a stored value stands for, each element as if it was alone; large ones are as stored."""
        value = self.values.get(expression)
        if value is None or value.dtype.name not in PRECISION or value.size > SMALL or not np.isfinite(value).all():
            return value
        return np.array([float(simplest(element)) for element in value.flat]).reshape(value.shape)

    def single(self, number: int) -> Any:
        """The value of all elements of a constant; None for several, or for any other expression."""
        op, attributes, _, _ = expression = self.expressions.all[self.expressions.root(number)]
        value = self.values.get(expression, self.array(number))
        if op == "filled":
            name, data = cast(tuple[str, bytes], attributes)
            value = np.frombuffer(data, numpy_dtype(name))
        if value is None or not value.size:
            return None
        flat = value.reshape(-1)
        return flat[0] if bool((flat == flat[0]).all()) else None


def taken(array: np.ndarray, selection: Selection) -> np.ndarray:
    """The selected elements of a value."""
    for dim, runs in enumerate(selection):
        if runs is not None:
            array = np.take(array, positions(runs), dim)
    return array


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
