"""The constants of all graphs of a proof: a number for each value, in any file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias, cast

import numpy as np

from gopt.ir.graph import Graph, Node
from gopt.ir.tensor import Tensor
from gopt.ir.types import FLOATS, numpy_dtype
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.forms import FLAT, TAKE, VIEW, Expression, elements
from gopt.verification.proof.masks import Masks
from gopt.verification.proof.selections import Selection, positions
from gopt.verification.proof.stored_values import PRECISION, SMALL, simplest

Arrays: TypeAlias = Sequence[Any]
"""The values of operands that are constants."""


class ConstantTable:
    """Numbers of constants, and the values behind expressions without operands or laws."""

    def __init__(self, expressions: Expressions) -> None:
        self.expressions = expressions
        self.origins: dict[int, tuple[Graph, Node, int]] = {}
        """Operators without laws: a node that was read so, and the index of the result."""
        self.masks = Masks(expressions)
        self.halves: dict[tuple[int, str], set[int]] = {}
        """Results of operators of the source in half precision, with the type -> the operands."""
        self.rounded: dict[str, set[int]] = {}
        """Type -> gradients of all batches, and weights of batches, that ranks round to the type."""
        self.sent: dict[str, set[int]] = {}
        """Type -> gradients of a batch, and of some batches, that ranks round to the type in front of calls."""
        self.roundings: Counter[str] = Counter()
        """Node -> number of rounded values: of widened halves for a half of the source, and of gradients."""
        self.widened = False
        """Whether a node is read on values around parts now: the parts may be around these values."""
        self._stored: dict[Hashable, tuple[int, Tensor]] = {}

    def stored(self, tensor: Tensor) -> int:
        """The expression of a stored value, which is read once."""
        key: Hashable = (tensor.path, tensor.offset, tensor.type) if tensor.path else id(tensor)
        if not tensor.path and tensor.proto is not None and tensor.proto.raw_data:
            key = tensor.type, tensor.proto.raw_data  # ranks store the same again and again
        if key not in self._stored:
            self._stored[key] = self.expressions.from_array(np.asarray(tensor.numpy())), tensor
        return self._stored[key][0]

    def is_constant(self, number: int) -> bool:
        """Return whether an expression is a stored value or a single number."""
        constant = self.expressions.uniform(number) is not None or number in self.expressions.arrays
        return constant or self.expressions.all[self.expressions.root(number)] in self.expressions.values

    def array(self, number: int) -> np.ndarray | None:
        """The value of a small constant, or of a part of a constant."""
        expressions, arrays = self.expressions, self.expressions.arrays
        if number not in arrays:
            few = (expressions.elements(number) or 0) <= SMALL
            if not few or expressions.all[number].op not in (VIEW, FLAT, TAKE):
                return None
            root = expressions.root(number)
            pieces = expressions.pieces(number)
            selection = expressions.selection(root)
            if selection is not None and (whole := self.array(expressions.all[root].operands[0])) is not None:
                array = taken(whole, selection)
            elif expressions.all[root].op == FLAT and all(piece[0] in arrays for piece in pieces):
                array = np.concatenate([arrays[of].reshape(-1)[start:stop] for of, start, stop in pieces])
            elif root != number and root in arrays:
                array = arrays[root]
            else:
                return None
            arrays[number] = array.reshape(self._sizes(number))
        return arrays[number]

    def _sizes(self, number: int) -> tuple[int, ...]:
        return tuple(int(size or 0) for size in self.expressions.shape(number) or ())

    def setting(self, number: int) -> np.ndarray | None:
        """The value of a small constant, or of a number, for rules of dimensions."""
        value = self.expressions.uniform(number) if self.expressions.elements(number) == 1 else None
        return self.array(number) if value is None else np.full(self._sizes(number), float(value))

    def filled(self, value: np.ndarray, shape: tuple[int, ...]) -> int:
        """A single number in every element of a shape."""
        if value.dtype.name in FLOATS and np.isfinite(np.float64(value.reshape(-1)[0])):
            return self.expressions.constant(simplest(value.reshape(-1)[0]), shape)
        if (elements(shape) or 0) <= SMALL:
            return self.expressions.from_array(np.broadcast_to(value.reshape(()), shape))
        return self.expressions.leaf("filled", (value.dtype.name, value.tobytes()), shape)

    def meant(self, expression: Expression) -> np.ndarray | None:
        """The numbers that a stored value stands for, each element as if it was alone; large ones are as stored."""
        value = self.expressions.values.get(expression)
        if value is None or value.dtype.name not in PRECISION or value.size > SMALL or not np.isfinite(value).all():
            return value
        return np.array([float(simplest(element)) for element in value.flat]).reshape(value.shape)

    def single(self, number: int) -> Any:
        """The value of all elements of a constant; None for several, or for any other expression."""
        op, attributes, _, _ = expression = self.expressions.all[self.expressions.root(number)]
        value = self.expressions.values.get(expression, self.array(number))
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
