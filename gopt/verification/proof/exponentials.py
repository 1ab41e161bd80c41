"""Exponentials and logarithms: parts of a softmax on ranks, for any subtracted row value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gopt.verification.proof.forms import (
    EXP,
    FLAT,
    INVERSE,
    LARGEST,
    LOG,
    PARTED,
    PRODUCT,
    SUM,
    TAKE,
    TOTAL,
    VIEW,
    Coefficient,
)
from gopt.verification.proof.partial_sums import PartialSums

LARGEST_OF_ROW = "ReduceMax"


class Expressions(PartialSums):
    """The expressions of a proof, with all laws."""

    def exp(self, number: int) -> int:
        """The exponential of a sum: a product of exponentials."""
        return self.elementwise(self._exp, [number])

    def _exp(self, values: Sequence[int]) -> int:
        (number,) = values
        terms, shape = list(self.terms(number)), self.shape(number)
        if not terms or (len(terms) == 1 and self.shape(terms[0][0]) == shape and self._is_base(terms[0][1])):
            return self._number(EXP, (), (number,), shape)
        factors: dict[int, int] = {}
        for atom, factor in terms:
            whole = factor.denominator == 1
            base = self.exp(atom if whole else self.scaled(atom, max(factor, -factor)))
            power = int(factor) if whole else 1 if factor > 0 else -1
            factors[base] = factors.get(base, 0) + power
        return self.linear({self.product([*factors], [*factors.values()]): 1}, shape)

    @staticmethod
    def _is_base(factor: Coefficient) -> bool:
        """Return whether the exponential of a multiple is no power of another exponential."""
        return factor == 1 or (factor > 0 and factor.denominator != 1)

    def log(self, number: int) -> int:
        """The logarithm of a product with exponentials: a sum."""
        return self.elementwise(self._log, [number])

    def _log(self, values: Sequence[int]) -> int:
        op, _, _, shape = self.all[values[0]]
        pairs = list(self.factors(values[0])) if op == PRODUCT else []
        exponents = [(self._exponent(factor), power) for factor, power in pairs if self.is_exponential(factor)]
        if not exponents:
            return self._number(LOG, (), tuple(values), shape)
        rest = [(factor, power) for factor, power in pairs if not self.is_exponential(factor)]
        if rest:
            inner = self.product(*zip(*rest))
            exponents.append((self._number(LOG, (), (inner,), self.shape(inner)), 1))
        terms: dict[int, Coefficient] = {}
        for exponent, power in exponents:
            terms[exponent] = terms.get(exponent, 0) + power
        return self.linear(terms, shape)

    def _exponent(self, number: int) -> int:
        return self.view(self.all[self.root(number)].operands[0], self.shape(number))

    def _covered(self, atom: int, terms: Iterable[int]) -> bool:
        """Return whether a value is the largest of a row, beside the logarithm of, or a quotient by, a sum of the
        exponentials of the row: both are numbers, or neither is."""
        row = self._largest_of(atom)
        if row is None:
            return False
        factors = self._factors_behind(self.exp(row))
        for term in terms:
            if self.all[term].op in (LOG, INVERSE):
                inside = self._inside_sum(self.all[term].operands[0])
                if inside and inside <= factors and all(map(self.finite.__getitem__, factors - inside)):
                    return True
        return False

    def _inside_sum(self, number: int) -> set[int]:
        """The factors under a sum along dimensions; empty for any other value."""
        op, attributes, operands, _ = self.all[number]
        if op in (VIEW, TAKE, PARTED):
            return self._inside_sum(operands[0])
        if op not in (SUM, TOTAL) or (op == TOTAL and attributes):
            return set()
        return self._factors_behind(operands[0])

    def _factors_behind(self, number: int) -> set[int]:
        """The factors of the values that a value has elements of."""
        op, _, operands, _ = self.all[number]
        if op in (VIEW, FLAT, TAKE, PARTED, PRODUCT):
            return set[int]().union(*map(self._factors_behind, operands))
        return {number}

    def _largest_of(self, number: int) -> int | None:
        """The value whose largest elements a value has."""
        op, attributes, operands, _ = self.all[number]
        if op == LARGEST_OF_ROW:
            return next(iter(self.raw(operands[0])), operands[0])
        if op == LARGEST and attributes == ((),):
            return operands[0]
        if op in (VIEW, TAKE) or (op == LARGEST and attributes == "members"):
            rows = {self._largest_of(operand) for operand in operands}
            return rows.pop() if len(rows) == 1 else None
        return None
