"""Cut a tensor into pieces for servers: element ranges of the flattened tensor, in order. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from itertools import accumulate, pairwise

from gopt.analysis.partition import ceil_pieces
from gopt.errors import InvariantError, OptionError, UnsupportedError
from gopt.text.sanitize import show


class Slicing(str, Enum):
    """How a tensor is cut into pieces."""

    OFF = "off"
    """One piece."""
    CLASSIC = "classic"
    """Equal pieces, rounded up to whole rows; the last piece is what is left, and may be far below the minimum."""
    BALANCED = "balanced"
    """Pieces of whole rows whose sizes differ by one row at most."""


def static_shape(tensor: str, shape: Sequence[int | str | None] | None) -> tuple[int, ...]:
    """Return the shape of a tensor to cut; raises UnsupportedError where a dimension is not fixed."""
    if shape is None:
        raise UnsupportedError(f"cannot place {show(tensor)} on servers: its shape is not known", _FIX)
    open_ = next((size for size in shape if not isinstance(size, int) or size < 0), 0)
    if open_ != 0:
        raise UnsupportedError(f"cannot place {show(tensor)} on servers: its dimension {open_} is not fixed", _FIX)
    return tuple(size for size in shape if isinstance(size, int))


_FIX = "give its dimensions numbers in the model"


def pieces(shape: Sequence[int], slicing: Slicing, servers: int, minimum: int) -> tuple[tuple[int, int], ...]:
    """Return the pieces ``(start, stop)`` of a tensor, in elements: they tile it in order.

    A tensor of E elements gets at most k = max(1, min(servers, E // minimum)) pieces. So ``minimum`` bounds the number
    of pieces; rounding to rows may make a piece smaller. A tensor of two or more dimensions is cut between rows, which
    are slices of its first dimension. A scalar is one piece, a tensor without elements one empty piece. Raises
    OptionError where ``servers`` or ``minimum`` is below 1.
    """
    for what, count in (("number of servers", servers), ("smallest piece", minimum)):
        if count < 1:
            raise OptionError(f"the {what} cannot be {show(count)}", "it is at least 1")
    sizes = _sizes(tuple(shape), slicing, servers, minimum)
    return tuple(pairwise(accumulate(sizes, initial=0)))


def _sizes(shape: tuple[int, ...], slicing: Slicing, servers: int, minimum: int) -> Sequence[int]:
    elements = math.prod(shape)
    if slicing is Slicing.OFF or elements == 0:
        return [elements]
    if slicing is Slicing.CLASSIC:
        return ceil_pieces(shape, servers, minimum)
    row = _row(shape)
    rows = elements // row
    count = max(1, min(servers, elements // minimum, rows))
    least, longer = divmod(rows, count)
    return [(least + (index < longer)) * row for index in range(count)]


def _row(shape: Sequence[int]) -> int:
    """Return the elements a cut may not divide: a row, or one element of a vector."""
    return math.prod(shape[1:]) if len(shape) > 1 else 1


def piece_shape(shape: Sequence[int], start: int, stop: int) -> tuple[int, ...]:
    """Return the shape of elements ``start`` to ``stop`` of a tensor.

    That is the tensor's own shape for all of it, ``(rows, *rest)`` for whole rows, else one dimension.
    """
    elements = math.prod(shape)
    if not 0 <= start <= stop <= elements:
        raise InvariantError(f"a piece from {start} to {stop} of a tensor of {elements} elements")
    if (start, stop) == (0, elements):
        return tuple(shape)
    row = _row(shape)
    if len(shape) > 1 and start % row == stop % row == 0:
        return ((stop - start) // row, *shape[1:])
    return (stop - start,)
