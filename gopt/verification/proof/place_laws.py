"""Laws of places of maxima: a pool counts places through the whole operand, a rank through a part.

A place is ``outer * step + rest``. Ranks take both digits apart and put both together with another step. Updates added
at a rank's places are some of the terms of all updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, cast

import numpy as np

from gopt.ir.graph import Node
from gopt.ir.types import TensorType
from gopt.operators.dims.link import OperatorUse
from gopt.operators.dims.windows import Sliding, sliding
from gopt.verification.proof.constants import Arrays
from gopt.verification.proof.forms import DIGITS, Shape, elements
from gopt.verification.proof.masks import LARGEST_DIMENSION
from gopt.verification.proof.selections import Runs, Selection, joined, positions

if TYPE_CHECKING:
    from gopt.verification.proof.operators import NodeReader

POOL = "MaxPool"
SCATTER = "ScatterElements"
DIFFERENCE = "Sub"


@dataclass(frozen=True, slots=True)
class Digits:
    """outer * a + rest * b + c of numbers ``of``; ``rest`` is below ``step``, from ``low`` to ``high``."""

    of: int
    step: int
    a: int
    b: int
    c: int
    low: int
    high: int

    def least(self) -> int:
        """A lower bound; ``a`` and ``b`` are not negative."""
        return self.b * self.low + self.c


def _digits(reader: NodeReader, number: int, like: Digits | None = None) -> Digits | None:
    """A number as digits; ``like``: digits of the same numbers."""
    op, attributes, operands, _ = reader.expressions.all[number]
    if op == DIGITS:
        return Digits(operands[0], *cast(tuple[int, int, int, int, int, int], attributes))
    if like is not None and number == like.of:
        return replace(like, a=like.step, b=1, c=0)
    return None


def numbered(reader: NodeReader, digits: Digits) -> int:
    """The expression of digits."""
    of, step, a, b, c, low, high = (getattr(digits, name) for name in Digits.__slots__)
    if (a, b, c) == (step, 1, 0):
        return int(of)
    return reader.expressions.apply(DIGITS, (step, a, b, c, low, high), [of], reader.expressions.shape(of))


def _pair(
    reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays
) -> tuple[Digits | None, Digits | None, int | None]:
    """Two whole numbers as digits, and the second as a constant."""
    if len(operands) != 2 or reader.graph.type_of(node.inputs[0]).dtype not in ("int64", "int32"):
        return None, None, None
    lead = next((row for row in (_digits(reader, number) for number in operands) if row is not None), None)
    digits, right = (_digits(reader, number, lead) for number in operands)
    constant = None if arrays[1] is None or arrays[1].size != 1 else int(arrays[1].reshape(-1)[0])
    return digits, right, constant


def _result(reader: NodeReader, digits: Digits | None, shape: Shape) -> int | None:
    fits = digits is not None and reader.expressions.shape(digits.of) == shape
    return numbered(reader, digits) if digits is not None and fits else None


def added(
    reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape, sign: int = 1
) -> int | None:
    """A sum of digits of the same numbers, or with a constant."""
    digits, right, constant = _pair(reader, node, operands, arrays)
    if digits is None:
        return None
    if constant is not None:
        return _result(reader, replace(digits, c=digits.c + sign * constant), shape)
    if right is None or (right.of, right.step) != (digits.of, digits.step):
        return None
    a, b, c = digits.a + sign * right.a, digits.b + sign * right.b, digits.c + sign * right.c
    low, high = max(digits.low, right.low), min(digits.high, right.high)
    return _result(reader, Digits(digits.of, digits.step, a, b, c, low, high), shape)


def subtracted(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    return added(reader, node, operands, arrays, shape, -1)


def multiplied(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    """A multiple of digits."""
    digits, _, constant = _pair(reader, node, operands, arrays)
    if digits is None or constant is None:
        return None
    return _result(reader, replace(digits, a=digits.a * constant, b=digits.b * constant, c=digits.c * constant), shape)


def divided(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    """The outer digits."""
    digits, _, constant = _pair(reader, node, operands, arrays)
    positive = constant is not None and constant > 0
    return _result(reader, _divided(reader, operands[0], digits, constant or 1), shape) if positive else None


def below(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    """No flag is set for digits above a bound."""
    digits, _, constant = _pair(reader, node, operands, arrays)
    if digits is None or constant is None or shape is None or min(digits.a, digits.b) < 0 or digits.least() < constant:
        return None
    return reader.table.filled(np.zeros(1, bool), tuple(map(int, shape)))  # type: ignore[arg-type]


def _divided(reader: NodeReader, number: int, digits: Digits | None, by: int) -> Digits | None:
    """The outer digits alone."""
    if digits is None:
        spots = _places(reader, number)
        return None if spots is None else Digits(number, by, 1, 0, 0, 0, by)
    inside = digits.b >= 0 and digits.least() >= 0 and digits.b * (digits.high - 1) + digits.c < by
    return replace(digits, a=digits.a // by, b=0, c=0) if inside and digits.a >= 0 and digits.a % by == 0 else None


def of_part(
    reader: NodeReader, number: int, slides: Sequence[Sliding | None], dim: int, run: tuple[int, int],
    result: tuple[int, int],
) -> int | None:  # fmt: skip
    """Places of maxima of the whole operand, counted through a range of a dimension; ``made``: of the results."""
    if any(slide is None or not (slide.inside or slide.seeing) for slide in slides[2:]):
        return None
    slide = cast(Sliding, slides[dim])
    inner = prod(cast(Sliding, slide).length for slide in slides[dim + 1 :])
    low, high = slide.read(*result)
    low, high = max(low, 0), min(high, slide.length)
    digits = Digits(
        number, slide.length * inner, (run[1] - run[0]) * inner, 1, -run[0] * inner, low * inner, high * inner
    )
    return numbered(reader, digits)


# --- updates added at spots ---


@dataclass(frozen=True)
class Places:
    """The possible places in a plane for each position of a pool's result; ``slides``: of each dimension."""

    slides: tuple[Sliding, ...]

    @cached_property
    def table(self) -> tuple[np.ndarray, np.ndarray]:
        """For each position the places, and flags for places inside the plane."""
        spots, inside = np.zeros((1, 1), np.int64), np.ones((1, 1), np.bool_)
        for slide in self.slides:
            read = np.arange(slide.made)[:, None] * slide.stride - slide.pad + np.arange(slide.kernel) * slide.dilation
            within = (read >= 0) & (read < slide.length)
            spots = spots[:, None, :, None] * slide.length + np.where(within, read, 0)[None, :, None, :]
            inside = inside[:, None, :, None] & within[None, :, None, :]
            spots = spots.reshape(len(spots) * len(read), -1)
            inside = inside.reshape(len(spots), -1)
        return spots, inside

    @property
    def elements(self) -> int:
        """Elements of a plane."""
        return prod(slide.length for slide in self.slides)

    @property
    def few(self) -> bool:
        """Return whether all places are few enough to be listed."""
        return max(self.elements, prod(slide.made * slide.kernel for slide in self.slides)) <= LARGEST_DIMENSION

    def __call__(self, label: object, selection: Selection) -> Runs | None:
        """The positions of updates that reach selected places."""
        if label != (None, None, 2):
            return None
        spots, inside = self.table
        chosen = np.zeros(self.elements, bool)
        runs = selection[2]
        chosen[positions(((0, self.elements),) if runs is None else runs)] = True
        return joined((at, at + 1) for at in np.flatnonzero((chosen[spots] & inside).any(1)).tolist())


def _places(reader: NodeReader, number: int) -> Places | None:
    """Places in a plane: a pool's places, less the place of the first element of each plane."""
    expressions = reader.expressions
    box = expressions.box(number)
    difference = expressions.all[expressions.root(number if box is None else box[0])]
    if difference.op != DIFFERENCE or len(difference.operands) != 2:
        return None
    pooled, digits = difference.operands
    pool, base = (expressions.all[expressions.root(of)] for of in (pooled, digits))
    single = expressions.selection(expressions.root(digits))
    one = expressions.all[base.operands[0]] if single is not None else base
    slides = _slides(reader, expressions.root(pooled))
    unit = _slides(reader, base.operands[0]) if single is not None else None
    if slides is None or unit is None or single is None or pool.operands != one.operands:
        return None
    if any((slide.kernel, slide.stride, slide.pad) != (1, 1, 0) for slide in unit):
        return None
    shape = expressions.shape(base.operands[0]) or ()
    if any(size != 1 and runs != ((0, 1),) for size, runs in zip(shape[2:], single[2:])) or any(single[:2]):
        return None
    spots = Places(slides)
    return spots if spots.few else None


def _slides(reader: NodeReader, number: int) -> tuple[Sliding, ...] | None:
    """The sliding of a pool, from an expression of the places."""
    op, attributes, operands, shape = reader.expressions.all[number]
    origin = reader.table.origins.get(number)
    before = reader.expressions.shape(operands[0]) if operands else None
    if op != POOL or attributes[1] != 1 or origin is None or elements(before) is None:  # type: ignore[index]
        return None
    node, types = origin[1], [TensorType("float32", sizes) for sizes in (before, shape)]
    use = OperatorUse(op, node.attributes, (types[0],), (types[1], types[1]), lambda _: None)
    slides = [sliding(use, dim) for dim in range(2, len(before or ()))]
    if node.attributes.get("storage_order", 0):
        return None
    seeing = tuple(slide for slide in slides if slide is not None and (slide.inside or slide.seeing))
    return seeing if len(seeing) == len(slides) else None


def _adds(node: Node, rank: int) -> bool:
    """Return whether updates are added along the third dimension."""
    return node.attributes.get("reduction") == "add" and node.attributes.get("axis", 0) % max(rank, 1) == 2


def scattered(reader: NodeReader, node: Node, operands: Sequence[int], shapes: Sequence[Shape]) -> list[int] | None:
    """Updates added to zeros at a rank's places: some of the terms of all updates."""
    expressions, (data, position, updates), shape = reader.expressions, operands, shapes[0] or ()
    digits = _digits(reader, position)
    if (
        digits is None
        or not _adds(node, len(shape))
        or len(shape) != 3
        or expressions.uniform(data) != 0
        or digits.b != 1
    ):
        return None
    spots, boxes = _places(reader, digits.of), [expressions.box(number) for number in (digits.of, updates)]
    if spots is None or None in boxes:
        return None
    (whole, selection), (added, chosen) = cast(list[tuple[int, Selection]], boxes)
    pooled = expressions.shape(expressions.root(whole)) or ()
    rows = (*pooled[:2], len(spots.table[0]))
    if expressions.shape(whole) != rows or expressions.shape(added) != rows:
        return None
    runs, low = selection[2], -digits.c
    planes, rest = divmod(spots.elements, digits.step)
    if selection != chosen or any(selection[:2]) or runs is None or rest or shape[2] != planes * digits.a:
        return None
    numbers, inside = (table[positions(runs)] for table in spots.table)
    rests = numbers[inside] % digits.step
    if low < 0 or low + digits.a > digits.step or not ((rests >= low) & (rests < low + digits.a)).all():
        return None
    sizes = (int(shape[0] or 0), int(shape[1] or 0), spots.elements)
    origins = [reader.table.origins.get(of) for of in expressions.readers(node.op_type, whole)]
    alike = next((origin[1] for origin in origins if origin and _adds(origin[1], len(shape))), node)
    node = Node(node.op_type, node.inputs, node.outputs, attributes=alike.attributes)
    (number,) = reader.results(node, [expressions.constant(0, sizes), whole, added], [sizes])
    core = reader.core(number)
    expressions.reaches[core] = spots
    try:
        part = expressions.parted(number, core, (None, None, 2), len(spots.table[0]), runs)
    except ValueError:
        return None
    part = expressions.view(part, (*sizes[:2], planes, digits.step))
    return [expressions.view(expressions.take(part, (None, None, None, ((low, low + digits.a),))), shape)]
