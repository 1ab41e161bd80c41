"""MemberReductions over the members along axes of the mesh, and the values of single members."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from math import prod

from gopt.verification.proof.forms import (
    CHOICE,
    EXTREMES,
    FLAT,
    LINEAR,
    PRODUCT,
    REDUCED,
    TOTAL,
    VIEW,
    Coefficient,
    Shape,
)
from gopt.verification.proof.joined_terms import JoinedTerms
from gopt.verification.proof.numbering import NOWHERE
from gopt.verification.proof.ranges import applied


class MemberReductions(JoinedTerms):
    """Sums, means and extremes over members."""

    def __init__(self, extents: Mapping[str, int]) -> None:
        super().__init__(extents)
        self._reduced: dict[tuple[str, frozenset[str], int], int] = {}

    def size(self, axes: Iterable[str]) -> int:
        """The number of members along axes together."""
        return prod(self.extents[axis] for axis in axes)

    def reduced(self, number: int, axes: Iterable[str], how: str) -> int:
        """The reduction over the members along ``axes``: sum, mean, max or min."""
        axes = frozenset(axis for axis in axes if self.extents[axis] > 1)
        how = EXTREMES.get(how, how)
        key = how, axes, number
        result = self._reduced.get(key)
        if result is None and how == "mean":
            result = self.scaled(self.reduced(number, axes, "sum"), Fraction(1, self.size(axes)))
        elif result is None:
            result = self._reduction(number, axes, how)
        self._reduced[key] = result
        return result

    def _reduction(self, number: int, axes: frozenset[str], how: str) -> int:
        live = axes & self.varies[number]
        if how == "sum" and live != axes:
            return self.scaled(self.reduced(number, live, how), self.size(axes - live))
        if not live:
            return number
        op, attributes, operands, shape = self.all[number]
        if op == VIEW:
            return self.view(self.reduced(operands[0], live, how), shape)
        if op == FLAT:
            return self.flat((self.reduced(root, live, how), low, high) for root, low, high in self.pieces(number))
        if op == how:
            parts = self.extreme_parts(op, number)
            return self.extreme_of_pieces(op, ((self.reduced(root, live, how), low, high) for root, low, high in parts))
        if op == REDUCED and attributes[0] == how:  # type: ignore[index]
            return self._bound(how, live | attributes[1], operands[0])  # type: ignore[index]
        if how == "sum":
            if op == LINEAR:
                terms: dict[int, Coefficient] = {}
                for atom, factor in self.terms(number):
                    inner = self.reduced(atom, live, how)
                    terms[inner] = terms.get(inner, 0) + factor
                return self.linear(terms, shape)
            if op == TOTAL:
                root = self.reduced(operands[0], live, how)
                spans = attributes or ((0, self.elements(root)),)
                return self._total((root, start, stop) for start, stop in spans)  # type: ignore[attr-defined]
            if op == PRODUCT:
                return self._reduced_product(number, live)
            if op == CHOICE and not self.varies[operands[0]] & live:
                chosen = [operands[0], *(self.reduced(operand, live, "mean") for operand in operands[1:])]
                return self.scaled(applied(self, op, attributes, chosen), self.size(live))
        return self._bound(how, live, number)

    def _reduced_product(self, number: int, axes: frozenset[str]) -> int:
        """Factors that are equal on all members stand in front of the sum."""
        _, exponents, operands, shape = self.all[number]
        pairs = list(zip(operands, exponents))  # type: ignore[call-overload]
        varying = [(factor, power) for factor, power in pairs if self.varies[factor] & axes]
        if len(varying) == len(pairs):
            return self._nested_sum(pairs, axes) or self._bound("sum", axes, number)
        common = [(factor, power) for factor, power in pairs if not self.varies[factor] & axes]
        inner = self.reduced(self.product(*zip(*varying)), axes, "sum")
        whole = self.product([inner, *(factor for factor, _ in common)], [1, *(power for _, power in common)])
        return self.linear({whole: 1}, shape)

    def _nested_sum(self, pairs: Sequence[tuple[int, int]], axes: frozenset[str]) -> int | None:
        """A sum of factors times a sum over more members, along which the factors are alike: one sum of products."""
        sums = [(factor, power) for factor, power in pairs if self.all[factor].op == REDUCED and power == 1]
        over = [self.all[factor].attributes for factor, _ in sums]
        if len(sums) != 1 or over[0][0] != "sum":  # type: ignore[index]
            return None
        rest, more = [pair for pair in pairs if pair != sums[0]], over[0][1]  # type: ignore[index]
        if any(self.varies[factor] & more for factor, _ in rest):
            return None
        whole = self.product(*zip((self.all[sums[0][0]].operands[0], 1), *rest))
        return self.reduced(whole, axes | more, "sum")

    def sums(self, number: int, axes: Iterable[str]) -> dict[frozenset[str], int]:
        """A value, and the sums of the values of members along any of some axes."""
        result = {NOWHERE: number}
        for axis in axes:
            result |= {within | {axis}: self.reduced(total, [axis], "sum") for within, total in result.items()}
        return result

    def note_count(self, number: int, axes: Iterable[str]) -> None:
        """Note the sums of a count along any of some axes."""
        self.counts |= {self.bare(total): within for within, total in self.sums(number, axes).items()}

    def _bound(self, how: str, axes: frozenset[str], number: int) -> int:
        return self.over_members(REDUCED, (how, axes), number, axes, self.shape(number))

    def over_members(self, op: str, attributes: Hashable, number: int, axes: Iterable[str], shape: Shape) -> int:
        """An operator without laws on the values of all members along ``axes``, with a common result."""
        result = self._number(op, attributes, (number,), shape)
        self.varies[result] = self.varies[number].difference(axes)
        return result

    def on_member(self, number: int, coordinates: Mapping[str, int]) -> int:
        """The value of a member, for all members."""
        coordinates = {axis: index for axis, index in coordinates.items() if axis in self.varies[number]}
        if not coordinates:
            return number
        expression = self.all[number]
        if expression.op == FLAT:
            return self.flat((self.on_member(root, coordinates), low, high) for root, low, high in self.pieces(number))
        if expression.op == VIEW:
            return self.view(self.on_member(expression.operands[0], coordinates), expression.shape)
        return self.over_members("on member", tuple(sorted(coordinates.items())), number, coordinates, expression.shape)
