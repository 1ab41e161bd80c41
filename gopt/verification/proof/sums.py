"""Sums as linear combinations of expressions, and views: the elements of a value in another shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import cast

from gopt.verification.proof.forms import (
    LINEAR,
    ONE,
    VIEW,
    Coefficient,
    Shape,
    broadcast,
    elements,
    hashed_once,
)
from gopt.verification.proof.numbering import FEW, STORED, VANISHED, Numbering


class Sums(Numbering):
    """Sums with exact coefficients."""

    def __init__(self, extents: Mapping[str, int]) -> None:
        super().__init__(extents)
        self._constants: dict[tuple[Coefficient, Shape], int] = {}
        self._added: dict[tuple[tuple[int, ...], tuple[Coefficient, ...]], int] = {}
        """Sums so far: ranks make them again and again."""

    def constant(self, value: Coefficient, shape: Shape = ()) -> int:
        """The value in every element of a shape."""
        key = value, shape
        number = self._constants.get(key)
        if number is None:
            number = self._constants[key] = self.linear({ONE: value}, shape)
        return number

    def uniform(self, number: int) -> Coefficient | None:
        """The number in every element of a constant; None for any other expression."""
        expression = self.all[number]
        if number == ONE:
            return 1
        if expression.op != LINEAR:
            return None
        if not expression.operands:
            return 0
        return expression.attributes[0] if expression.operands == (ONE,) else None  # type: ignore[index]

    def terms(self, number: int) -> Iterator[tuple[int, Coefficient]]:
        """The terms of an expression as a linear combination."""
        expression = self.all[number]
        if expression.op == LINEAR:
            return zip(expression.operands, expression.attributes)  # type: ignore[call-overload,no-any-return]
        return iter(self._viewed_terms(number) if expression.op == VIEW else ((number, 1),))

    def _viewed_terms(self, number: int) -> Sequence[tuple[int, Coefficient]]:
        """The terms of a view: the views of the terms of a sum, where all terms have the size of the sum."""
        (root,), count, shape = self.all[number].operands, self._counts[number], self.shape(number)
        counts = {self._counts[atom] for atom in self.all[root].operands}
        if self.all[root].op != LINEAR or count is None or not counts <= {1, count}:
            return ((number, 1),)
        return [*self._views(self.terms(root), shape).items()]

    def _views(self, terms: Iterable[tuple[int, Coefficient]], shape: Shape) -> dict[int, Coefficient]:
        """Terms in another shape; single elements without a shape."""
        result: dict[int, Coefficient] = {}
        for atom, factor in terms:
            number = self.view(atom, shape if self._counts[atom] != 1 else ()) if atom != ONE else ONE
            result[number] = result.get(number, 0) + factor
        return result

    def linear(self, terms: Mapping[int, Coefficient], shape: Shape) -> int:
        """The sum of terms, each broadcast to ``shape``."""
        if len(terms) == 1 and (number := next(iter(terms))) and terms[number] == 1 and self.shape(number) == shape:
            return number
        extended = self._extended(terms, shape) if len(terms) > 1 else None
        if extended is not None:
            return extended
        total: dict[int, Coefficient] = {}
        joined = 0
        for term, factor in terms.items():
            if not factor and self.finite[term] and not self._traits[term] & STORED:
                continue
            joined |= self._traits[term] | (0 if factor else VANISHED)
            if factor == 1 and not total:
                total = dict(self.terms(term))
                continue
            for atom, coefficient in self.terms(term):
                change = factor if coefficient == 1 else coefficient if factor == 1 else coefficient * factor
                if atom in total:
                    change += total[atom]
                    joined |= 0 if change else VANISHED
                total[atom] = change
        if joined:
            total = self._joined(total, joined)
        atoms = sorted(total)
        vanished = joined and not all(total.values())
        if vanished:
            rest = [atom for atom in atoms if total[atom]]
            atoms = [atom for atom in atoms if total[atom] or not (self.finite[atom] or self._covered(atom, rest))]
        if len(atoms) == 1 and total[atoms[0]] == 1 and self.shape(atoms[0]) == shape:
            return atoms[0]
        if atoms and self._are_single(atoms):
            if any(self.all[atom].shape for atom in atoms):
                return self.linear(self._views(total.items(), ()), shape)
            if shape and elements(shape) == 1 and atoms != [ONE]:
                return self.view(self.linear(total, ()), shape)
        factors = tuple([hashed_once(total[atom]) for atom in atoms])
        number = self._number(LINEAR, factors, tuple(atoms), shape)
        self._traits[number] |= VANISHED if vanished else 0
        return number

    def _extended(self, terms: Mapping[int, Coefficient], shape: Shape) -> int | None:
        """A long sum and new terms behind it, as a residual stream has; None for other sums."""
        longest = max(terms, key=lambda term: len(self.all[term].operands))
        op, factors, operands, _ = self.all[longest]
        if op != LINEAR or len(operands) <= FEW or terms[longest] != 1 or self.joinable(terms):
            return None
        pairs = [(term, factor) for term, factor in terms.items() if term != longest]
        rest = sorted((atom, factor * change) for term, factor in pairs for atom, change in self.terms(term))
        atoms, changes = [atom for atom, _ in rest], [change for _, change in rest]
        if not all(changes) or any(atom >= behind for atom, behind in pairwise([operands[-1], *atoms])):
            return None
        coefficients = (*cast(tuple[Coefficient, ...], factors), *changes)
        return self._number(LINEAR, coefficients, (*operands, *atoms), shape, (longest, *atoms))

    def _joined(self, terms: dict[int, Coefficient], traits: int) -> dict[int, Coefficient]:
        """Terms joined by the laws of their traits."""
        raise NotImplementedError

    def _covered(self, atom: int, terms: Iterable[int]) -> bool:
        """Return whether a value is a number wherever all terms are."""
        raise NotImplementedError

    def added(self, operands: Sequence[int], factors: Sequence[Coefficient] | None = None) -> int:
        """The sum of operands, each times one of ``factors``."""
        key = tuple(operands), tuple(factors or ())
        result = self._added.get(key)
        if result is None:
            terms: dict[int, Coefficient] = {}
            for operand, factor in zip(operands, factors or [1] * len(operands)):
                terms[operand] = terms.get(operand, 0) + factor
            result = self._added[key] = self.linear(terms, broadcast(map(self.shape, operands)))
        return result

    # --- views ---

    def view(self, number: int, shape: Shape) -> int:
        """The same elements in another shape."""
        expression = self.all[number]
        if expression.shape == shape:
            return number
        if expression.op == VIEW:
            return self.view(expression.operands[0], shape)
        if not self._ranged[number] and self._counts[number] != 1:
            return self.linear(dict(self.terms(number)), shape)
        value = self.uniform(number)
        if value is not None:
            return self.linear({ONE: value}, shape)
        return self._number(VIEW, None, (number,), shape)

    def spread(self, number: int, shape: Shape) -> int:
        """The same elements in another shape, a single one in all elements."""
        more = self._counts[number] == 1 != elements(shape)
        return self.linear({number: 1}, shape) if more else self.view(number, shape)

    def root(self, number: int) -> int:
        """The expression under a view."""
        expression = self.all[number]
        return expression.operands[0] if expression.op == VIEW else number

    def narrow(self, number: int) -> int:
        """A scalar for a value with a single element, or with an equal number in all elements."""
        if self._counts[number] != 1:
            return self.linear(self._views(self.terms(number), ()), ())
        value = self.uniform(number)
        return self.view(number, ()) if value is None else self.constant(value)
