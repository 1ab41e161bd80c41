"""The table of operators: name -> record."""

from __future__ import annotations

from collections.abc import Callable

from gopt.operators import elementwise, executed, moves, products, reductions
from gopt.operators.operator import Operator

OPERATORS: dict[str, Operator] = {
    record.name: record
    for family in (elementwise, moves, reductions, products, executed)
    for record in family.OPERATORS
}  # fmt: skip
UNKNOWN = Operator("")
"""Stands for an operator without a record: nothing is known of it."""


def operator(name: str) -> Operator:
    """The record of a standard operator; ``UNKNOWN`` for others."""
    return OPERATORS.get(name, UNKNOWN)


def names(holds: Callable[[Operator], object]) -> frozenset[str]:
    """The operators with a fact."""
    return frozenset(name for name, record in OPERATORS.items() if holds(record))
