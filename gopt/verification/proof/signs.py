"""Expressions above zero, or never below zero, as numbers: sums of exponentials, of squares, of roots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from gopt.operators.table import names
from gopt.verification.proof.forms import (
    EXP,
    FLAT,
    INVERSE,
    LINEAR,
    PERMUTED,
    PRODUCT,
    SUM,
    TAKE,
    TOTAL,
    VIEW,
    Coefficient,
    elements,
)
from gopt.verification.proof.numbering import Numbering

_SUMMED = frozenset({SUM, TOTAL})
_ROOTS = names(lambda record: record.power is not None and 0 < record.power < 1)
_AS_OPERANDS = _ROOTS | _SUMMED | {FLAT, INVERSE, LINEAR, PERMUTED, PRODUCT, TAKE, VIEW}
"""Forms with a sign by the signs of the operands."""


ABOVE, NEVER_BELOW, UNKNOWN = 2, 1, 0


def sign(expressions: Numbering, number: int) -> int:
    """``ABOVE`` where all elements of an expression are above zero, ``NEVER_BELOW`` where none is below zero, as far as
    laws say so."""
    if number not in expressions.signs:
        expressions.signs[number] = _sign(expressions, number)
    return expressions.signs[number]


def _sign(expressions: Numbering, number: int) -> int:
    op, attributes, operands, _ = expressions.all[number]
    if op in (EXP, "one"):
        return ABOVE
    if op not in _AS_OPERANDS or not operands:
        return UNKNOWN
    signs = [sign(expressions, operand) for operand in operands]
    powers = cast(Sequence[Coefficient], attributes)
    if op == LINEAR:
        known = min(signs) and all(factor >= 0 for factor in powers)
        return max([NEVER_BELOW, *(row for row, factor in zip(signs, powers) if factor)]) if known else UNKNOWN
    if op == PRODUCT:
        return min(row if power % 2 else max(row, NEVER_BELOW) for row, power in zip(signs, powers))
    empty = op in _SUMMED and not elements(expressions.shape(operands[0]))
    return min(*signs, NEVER_BELOW if empty else ABOVE)
