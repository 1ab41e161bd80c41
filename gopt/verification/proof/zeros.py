"""Elements of expressions with the value zero for all leaves: borders of a Pad, in products, sums and movements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from gopt.verification.proof.forms import CONCAT, LINEAR, PARTED, PERMUTED, PRODUCT, SUM, TAKE, VIEW
from gopt.verification.proof.movements import PADDED, Movements
from gopt.verification.proof.selections import Runs, Selection, Sizes, inside, joined, replaced, through

MATRICES = "MatMul"
DEPTH = 64
"""Operators behind one another up to which zeros are followed."""


def are_zero(expressions: Movements, number: int, selection: Selection, depth: int = DEPTH) -> bool:
    """Return whether the selected elements of an expression are zero, as far as laws say so."""
    key = number, selection
    if key not in expressions.zeros:
        expressions.zeros[key] = _are_zero(expressions, number, selection, depth)
    return expressions.zeros[key]


def _are_zero(expressions: Movements, number: int, selection: Selection, depth: int) -> bool:
    op, _, operands, shape = expressions.all[number]
    if expressions.uniform(number) == 0:
        return True
    if not depth or not operands or not isinstance(shape, tuple) or all(runs is None for runs in selection):
        return False
    if op == PADDED:
        ends = expressions.borders(number, 0)
        between = tuple(_between(runs, *row) for runs, row in zip(selection, ends))
        return bool(ends) and (() in between or are_zero(expressions, operands[0], between, depth - 1))
    rows = _behind(expressions, number, selection)
    if op in _FACTORS:  # zeros and numbers
        open = [operand for operand in operands if not expressions.finite[operand]]
        rows = ((operand, chosen) for operand, chosen in rows if open in ([], [operand]))
    inner = (are_zero(expressions, operand, chosen, depth - 1) for operand, chosen in rows)
    return any(inner) if op in _FACTORS else op in _MOVED and all(inner)


_FACTORS = frozenset({PRODUCT, MATRICES})
_MOVED = frozenset({CONCAT, LINEAR, PARTED, PERMUTED, SUM, TAKE, VIEW})


def are_matrices(expressions: Movements, operands: Sequence[int]) -> bool:
    """Return whether no operand of a product is a vector, for which the product has a dimension less."""
    return all(len(expressions.shape(operand) or ()) > 1 for operand in operands)


def _between(runs: Runs | None, start: int, stop: int) -> Runs | None:
    """The positions of the padded value among selected positions of a dimension."""
    return runs and joined((max(low, start) - start, min(high, stop) - start) for low, high in runs
                           if low < stop and high > start)  # fmt: skip


def _behind(expressions: Movements, number: int, selection: Selection) -> Iterator[tuple[int, Selection]]:
    """The operands of an expression, and the elements behind the selected elements."""
    op, attributes, operands, shape = expressions.all[number]
    if op == CONCAT:
        axis = cast(int, attributes)
        for operand, start, stop in expressions.members(number):
            runs = _between(selection[axis], start, stop)
            if runs != ():
                yield operand, replaced(selection, axis, runs)
        return
    for slot, operand in enumerate(operands):
        sizes, chosen = cast(Sizes, expressions.shape(operand)), None
        if op in (LINEAR, PRODUCT):
            last = selection[len(selection) - len(sizes) :]
            chosen = tuple(None if size == 1 else runs for size, runs in zip(sizes, last))
        elif op == MATRICES and are_matrices(expressions, operands):
            chosen = replaced(selection[len(selection) - len(sizes) :], len(sizes) - 1 - slot)
            chosen = tuple(None if size == 1 else runs for size, runs in zip(sizes, chosen))
        elif op == VIEW:
            chosen = through(cast(Sizes, shape), selection, sizes)
        elif op == TAKE:
            chosen = tuple(map(inside, cast(Selection, attributes), selection))
        elif op == PERMUTED:
            perm = cast(tuple[int, ...], attributes)
            chosen = tuple(selection[perm.index(dim)] for dim in range(len(perm)))
        elif op in (SUM, PARTED):
            chosen = selection
            for axis in cast(tuple[int, ...], attributes) if op == SUM else ():
                chosen = replaced(chosen, axis % len(chosen))
        if chosen is not None:
            yield operand, chosen
        else:
            yield operand, (None,) * len(sizes)
