"""Products with integer exponents, and counts to divide by.

A weighted sum is zero where the sum of the weights is: such a count cancels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from gopt.verification.proof.forms import (
    COUNTED,
    EXP,
    INVERSE,
    LINEAR,
    ONE,
    PRODUCT,
    REDUCED,
    VIEW,
    WEIGHT,
    Coefficient,
    Shape,
    broadcast,
    elements,
)
from gopt.verification.proof.numbering import NOWHERE
from gopt.verification.proof.signs import ABOVE, sign
from gopt.verification.proof.stored_values import StoredValues


class Products(StoredValues):
    """Products of powers."""

    def __init__(self, extents: Mapping[str, int]) -> None:
        super().__init__(extents)
        self.counts: dict[int, frozenset[str]] = {}
        """Sums of a count that is never negative, as of samples or tokens -> the axes of the members in the sum: where
        the sum is zero, all terms are."""
        self._scales: dict[int, tuple[Coefficient, int]] = {}
        self._products: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        """Products so far: ranks make them again and again."""

    def factors(self, number: int) -> Iterator[tuple[int, int]]:
        """The factors of an expression as a product, with exponents."""
        expression = self.all[number]
        if expression.op == PRODUCT:
            return zip(expression.operands, expression.attributes)  # type: ignore[call-overload,no-any-return]
        return iter(((number, 1),))

    def product(self, operands: Sequence[int], exponents: Sequence[int]) -> int:
        """The product of powers of operands."""
        key = tuple(operands), tuple(exponents)
        result = self._products.get(key)
        if result is None:
            multiple = self._multiple(operands, exponents) if len(operands) == 2 and not self.counts else None
            result = self._products[key] = self._powers(operands, exponents) if multiple is None else multiple
        return result

    def _multiple(self, operands: Sequence[int], exponents: Sequence[int]) -> int | None:
        """The product of a value and a power of a number; None for other products, and for zero."""
        for number, by, power in zip(operands, reversed(operands), reversed(exponents)):
            value = self.uniform(by) if exponents[operands.index(number)] == 1 else None
            if value:
                scale = value**power if power > 0 else Fraction(1) / value**-power
                return self.linear({number: scale}, broadcast(map(self.shape, operands)))
        return None

    def _times_zero(self, operands: Sequence[int], exponents: Sequence[int], shape: Shape) -> int:
        """A product that is zero where all operands are numbers; of single numbers, whatever the shape."""
        values = [self.uniform(operand) for operand in operands]
        single = [
            self.constant(value, ()) if value is not None else self.view(operand, ())
            for operand, value in zip(operands, values) if value is not None or self.elements(operand) == 1
        ]  # fmt: skip
        if len(single) < len(operands) or elements(shape) is None:
            return self._number("times zero", tuple(exponents), tuple(operands), shape)
        return self.linear({self._number("times zero", tuple(exponents), tuple(single), ()): 1}, shape)

    def _powers(self, operands: Sequence[int], exponents: Sequence[int]) -> int:
        factors: dict[int, int] = {}
        coefficient: Coefficient = 1
        shape = broadcast(self.shape(operand) for operand in operands)
        numbers = all(self.finite[operand] and (power > 0 or self._never_zero(operand))
                      for operand, power in zip(operands, exponents))  # fmt: skip
        for operand, exponent in zip(operands, exponents):
            scale, atom = self._scale(operand)
            if not scale and (exponent < 0 or not numbers):
                return self._times_zero(operands, exponents, shape)
            if scale != 1:
                coefficient *= scale**exponent if exponent > 0 else Fraction(1) / scale**-exponent
            for factor, power in self.factors(atom) if atom != ONE else ():
                if exponent < 0 and not self.is_exponential(factor):
                    factor, power = self._number(INVERSE, None, (factor,), self.shape(factor)), -power
                factors[factor] = factors.get(factor, 0) + power * exponent
        self._cancel_counts(factors)
        gone = [factor for factor, power in factors.items() if not power and self.is_exponential(factor)]
        gone = [self.all[self.root(factor)].operands[0] for factor in gone if not self.finite[factor]]
        if not all(self._covered(exponent, factors) for exponent in gone):
            return self._times_zero(operands, exponents, shape)
        powers = sorted((factor, power) for factor, power in factors.items() if power)
        if not coefficient or not powers:
            return self.constant(coefficient, shape)
        if len(powers) == 1 and powers[0][1] == 1:
            return self.linear({powers[0][0]: coefficient}, shape)
        within = broadcast(self.shape(factor) for factor, _ in powers)
        number = self._number(
            PRODUCT, tuple(power for _, power in powers), tuple(factor for factor, _ in powers), within
        )
        return self.linear({number: coefficient}, shape)

    def is_exponential(self, number: int) -> bool:
        """Return whether an expression is an exponential, which is never zero."""
        return self.all[self.root(number)].op == EXP

    def _scale(self, number: int) -> tuple[Coefficient, int]:
        """An expression as a coefficient times an expression; the first coefficient of the latter is 1."""
        if number not in self._scales:
            self._scales[number] = self._scaled(number)
        return self._scales[number]

    def _scaled(self, number: int) -> tuple[Coefficient, int]:
        expression = self.all[number]
        if expression.op == VIEW:
            factor, atom = self._scale(expression.operands[0])
            whole = self._counts[atom] == self._counts[number] is not None
            return (factor, self.view(atom, expression.shape)) if whole else (1, number)
        if expression.op != LINEAR:
            return 1, number
        if not expression.operands:
            return 0, ONE
        leading = next((factor for _, factor in self.terms(number) if factor), 0)
        if not leading or (leading == 1 and len(expression.operands) > 1):
            return 1, number
        if len(expression.operands) == 1:
            factor, atom = self._scale(expression.operands[0])  # a repeated sum may have a coefficient
            return leading * factor, atom
        return leading, self.linear({number: Fraction(1) / leading}, expression.shape)

    def bare(self, number: int) -> int:
        """An expression without the coefficient, in the shape of the root."""
        inner = self._scale(self.root(number))[1]
        return inner if inner == number else self.bare(inner)

    # --- counts ---

    def _never_zero(self, number: int) -> bool:
        """Return whether an expression is a number, a multiple of a count that is kept from zero, or above zero."""
        return self._is_count(number) or sign(self, number) == ABOVE

    def _has_number(self, op: str, operand: int) -> bool:
        return self._never_zero(operand) if op == INVERSE else sign(self, operand) == ABOVE

    def _is_count(self, number: int) -> bool:
        return self.all[self.bare(number)].op in ("one", COUNTED)

    def _cancel_counts(self, factors: dict[int, int]) -> None:
        """Cancel a count with the count to divide by, beside a weighted sum: the sum is zero where the count is."""
        for divisor in [factor for factor in factors if self.all[factor].op == INVERSE]:
            counted = self.all[divisor].operands[0]
            if self.all[counted].op != COUNTED:
                continue
            count = self.all[counted].operands[0]
            axes = self.counts.get(self.bare(count), NOWHERE)
            for near in [factor for factor in factors if count == self._counting(factor)]:
                rest = (factor for factor in factors if factor != near)
                if any(self._weighted(factor, axes, every=near == count) for factor in rest):
                    common = min(factors[divisor], factors[near])
                    factors[divisor], factors[near] = factors[divisor] - common, factors[near] - common

    def _counting(self, number: int) -> int:
        """The count of a weight; any other expression itself, without the coefficient."""
        bare = self.bare(number)
        return self.all[bare].operands[0] if self.all[bare].op == WEIGHT else bare

    def _weighted(self, number: int, axes: frozenset[str], *, every: bool) -> bool:
        """Return whether an expression is a sum of multiples of a weight, of members along ``axes`` alone.

        ``every``: of a count as well."""
        op, attributes, operands, _ = self.all[self.root(number)]
        if op == REDUCED:
            return attributes[1] <= axes and self._weighted(operands[0], axes, every=every)  # type: ignore[index]
        weights = (factor for factor in operands if op == PRODUCT and (every or self.all[factor].op == WEIGHT))
        summed = [self.counts.get(self._counting(factor)) for factor in weights]
        return any(within is not None and within <= axes for within in summed)

    def undivided(self, number: int) -> int:
        """An expression without the coefficient, and without the counts that divide it."""
        bare = self.bare(number)
        divisors = [factor for factor, _ in self.factors(bare) if self.all[factor].op == INVERSE]
        counts = [factor for factor in divisors if self._is_count(self.all[factor].operands[0])]
        rest = [pair for pair in self.factors(bare) if pair[0] not in counts]
        return self.bare(self.product(*zip(*rest))) if counts and rest else bare
