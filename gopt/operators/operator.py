"""The record of an operator: facts holding wherever the operator stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

import numpy as np

from gopt.operators.dims.link import DimFactors

Array = np.ndarray
Attributes = Mapping[str, Any]
Kernel = Callable[[Attributes, Sequence[Any]], Any]
"""Attributes and operands (absent ones behind the last are left out) -> the first result, by NumPy.

An integer stays an integer; the caller casts where a result has another type than NumPy gives it.
"""
TorchCall = str | Callable[..., Any]
"""PyTorch's function of the operands by its name in ``torch``; or PyTorch, ``NodeSettings`` and operands (without the
absent ones behind the last) -> the first result, or a tuple of results."""
Shape = tuple[int, ...]
Work = Callable[[Attributes, Sequence[Shape], Shape], int]
"""Attributes, shapes of the operands and of the first result -> multiplications."""


class Slope(IntEnum):
    """The relation of the first result to an operand while the others are fixed, the simplest first."""

    NONE = 0
    """Not at all; or one of the two is no number, but a size, an index, a flag."""
    STEP = 1
    """The derivative is zero wherever there is one."""
    LINEAR = 2
    """In proportion."""
    AFFINE = 3
    """In proportion, but for a constant term."""
    BENT = 4
    """Piecewise affine: the derivative follows comparisons of the operand."""
    CURVED = 5
    """The derivative follows the operand."""


class Indices(Enum):
    """The elements of the data named by an index."""

    SLICE = "slice"
    """All at a place of the attribute ``axis``."""
    ELEMENT = "element"
    """A single element, at a place of ``axis`` and the index's own places in the other dimensions."""
    TUPLE = "tuple"
    """All at the places held by the last dimension for the leading dimensions."""


@dataclass(frozen=True, slots=True)
class Operator:
    """The facts of a standard operator, true of all its versions.

    ``slopes``: one for each operand; the last stands for all operands behind. ``elementwise``: an element of the result
    depends on the operands' elements at its place alone, after broadcasting. ``zero``: the result is zero where the
    first operand is; for a bound or an exponent, with those that steps have (bounds around zero, exponents above it).
    ``total``: there is a result for every value of operands whose types and shapes fit (of whole numbers, Div has
    none). ``finite``: a curved operator has a number, in real arithmetic, wherever the operands are numbers;
    ``finite_above_zero``: wherever these are numbers above zero.
    ``order``: the attribute naming the dimension of the operand for each dimension of the result. ``shape``: the
    operand that is the shape of the result; ``lengths``: those that hold other lengths or places of dimensions.
    ``by_type``: operands read for a type or a shape, and no element. ``choosers``: operands read as indices or
    conditions alone; ``indices``: the elements named by an index in operand 1. ``aside``: floating operands that are no
    weights, such as the state in which a recurrent layer begins, masks, tables of angles. ``pieces``: how the results
    of a full reduction of pieces make the result of the whole ('l2': the root of the sum of squares; '': they do not).
    ``power``: beside the slopes, the power of c that multiplies the result where a positive c multiplies all floating
    operands. ``signs``: the result is the sum of the operands with these signs, the last for all operands behind.
    ``exponents``: the result is the product of the operands with these exponents; ``factors``: a sum of these products,
    and of operands with a 0; ``scale``: an attribute multiplying the products; ``raised_to``: the exponent of the first
    operand. ``relation``: the sign of a comparison. ``joins``: the result is the operands one behind the other along
    the attribute ``axis``. ``running``: operands that are running statistics. ``switch``: the operand to switch draws
    on. ``settings``: further operands that set an operation up, such as axes. ``dims``: along which dimensions it is
    split; None: members compute it whole. ``kernel``: computes it; ``torch``: computes it by PyTorch. ``work``: counts
    multiplications of a product.
    """

    name: str
    slopes: tuple[Slope, ...] = ()
    elementwise: bool = False
    zero: bool = False
    total: bool = False
    finite: bool = False
    finite_above_zero: bool = False
    order: str = ""
    shape: int | None = None
    lengths: tuple[int, ...] = ()
    by_type: tuple[int, ...] = ()
    choosers: tuple[int, ...] = ()
    indices: Indices | None = None
    aside: tuple[int, ...] = ()
    pieces: str | None = None
    power: float | None = None
    signs: tuple[int, ...] = ()
    exponents: tuple[int, ...] = ()
    factors: tuple[int, ...] = ()
    scale: str = ""
    raised_to: int | None = None
    relation: str = ""
    joins: bool = False
    running: tuple[int, ...] = ()
    switch: int | None = None
    settings: tuple[int, ...] = ()
    dims: DimFactors | None = None
    kernel: Kernel | None = None
    torch: TorchCall | None = None
    work: Work | None = None

    def slope(self, operand: int) -> Slope:
        """How the result follows an operand, by the number."""
        return self.slopes[min(operand, len(self.slopes) - 1)] if self.slopes else Slope.NONE

    @property
    def adds(self) -> bool:
        """Whether the result is the sum of the operands."""
        return {*self.signs} == {1}

    @property
    def multiplies(self) -> bool:
        """Whether the result is the product of the operands."""
        return {*self.exponents} == {1}

    @property
    def sums(self) -> bool:
        """Whether the result is the sum of the operand's elements along axes."""
        return self.pieces == "sum" and self.linear_in_first

    @property
    def constants(self) -> frozenset[int]:
        """The operands that PyTorch reads as numbers before a run: shapes, lengths, axes, switches; an exponent where
        it is a constant."""
        decided = {self.shape, *self.lengths, self.switch, *self.settings, self.raised_to}
        return frozenset(decided - {None})  # type: ignore[arg-type]

    def exponent(self, operand: int) -> int:
        """The power of an operand in the products of the result; 0 unless the operand is a factor."""
        exponents = self.exponents or self.factors
        return exponents[min(operand, len(exponents) - 1)] if exponents else 0

    def sign(self, operand: int) -> int:
        """The sign of an operand in a sum; 1 of others."""
        return self.signs[min(operand, len(self.signs) - 1)] if self.signs else 1

    @property
    def linear_in_first(self) -> bool:
        """Whether the result is in proportion to the first operand, and the others are no numbers; a cast is, where
        its result is a float."""
        return self.slope(0) is Slope.LINEAR and not any(
            self.slope(behind) for behind in range(1, len(self.slopes) + 1)
        )


def of_operands(function: Callable[..., Any]) -> Kernel:
    """The kernel of an operator without attributes."""
    return lambda attributes, operands: function(*operands)
