"""Flags behind counts: a count is above zero where any flag is set."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any, cast

from gopt.verification.proof.forms import FLAT, LARGEST, LINEAR, REDUCED, TAKE, VIEW, Piece
from gopt.verification.proof.partial_sums import PartialSums
from gopt.verification.proof.selections import Selection

_FLAG = Fraction(1, 1 << 20)
"""The least coefficient of a flag in a count: a smaller one may round to zero."""


def any_set(expressions: PartialSums, number: int) -> int | None:
    """Return whether a count of flags is above zero, as a flag; None for other numbers."""
    flags = _flags(expressions, number)
    return expressions.extreme_of_pieces(LARGEST, flags) if flags else None


def _flags(expressions: PartialSums, number: int) -> list[Piece] | None:
    """The flags behind a count, or behind the largest of flags; None for other numbers."""
    op, attributes, operands, _ = cast(tuple[str, Any, tuple[int, ...], object], expressions.all[number])
    if op == "constant" and not any(attributes[1]):
        return []
    if op == "cast" and attributes[0] == "bool":
        return [(operands[0], 0, expressions.elements(operands[0]) or 0)]
    if op == TAKE:
        return _selected_flags(expressions, operands[0], attributes)
    if op in (LARGEST, FLAT):
        pieces = expressions.pieces(number) if op == FLAT else expressions.extreme_parts(op, number)
        return _flags_of_pieces(expressions, pieces)
    counts = op in (VIEW, "on member") or (op == REDUCED and attributes[0] in ("sum", LARGEST))
    if not counts and (op != LINEAR or any(factor <= _FLAG for _, factor in expressions.terms(number))):
        return None
    result: list[Piece] = []
    for operand in operands:
        flags = _flags(expressions, operand)
        if flags is None:
            return None
        result += [(_on_members(expressions, number, flag), start, stop) for flag, start, stop in flags]
    return result


def _on_members(expressions: PartialSums, number: int, flag: int) -> int:
    """The flag of the members that a reduction, or the value of a member, is of."""
    op, attributes, _, _ = cast(tuple[str, Any, tuple[int, ...], object], expressions.all[number])
    if op == REDUCED:
        return expressions.reduced(flag, attributes[1], "max")
    return expressions.on_member(flag, dict(attributes)) if op == "on member" else flag


def _selected_flags(expressions: PartialSums, whole: int, selection: Selection) -> list[Piece] | None:
    """The flags behind a part of a value with a flag for each element."""
    flags, count = _flags(expressions, whole), expressions.elements(whole)
    if flags is None or [(expressions.elements(flag), *ends) for flag, *ends in flags] != [(count, 0, count)]:
        return None
    part = expressions.take(expressions.view(flags[0][0], expressions.shape(whole)), selection)
    return [(part, 0, expressions.elements(part) or 0)]


def _flags_of_pieces(expressions: PartialSums, pieces: Iterable[Piece]) -> list[Piece] | None:
    result: list[Piece] = []
    for root, start, stop in pieces:
        flags = _flags(expressions, root)
        if flags is None or (len(flags) != 1 and (start, stop) != (0, expressions.elements(root))):
            return None
        result += [(flags[0][0], start, stop)] if expressions.elements(root) == flags[0][2] else flags
    return result
