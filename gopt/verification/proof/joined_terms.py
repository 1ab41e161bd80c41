"""Terms of a sum that laws join: sums over ranges of elements, parts of a sum, changes of micro-steps, and stored whole
numbers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple, cast

import numpy as np

from gopt.verification.proof.forms import (
    CONCAT,
    FLAT,
    INITIAL,
    ITERATED,
    PARTED,
    STATE,
    TAKE,
    TOTAL,
    Coefficient,
    Factors,
    Part,
    Piece,
    Shape,
)
from gopt.verification.proof.numbering import MOVED, ROW_OF_TERMS, SOME_ELEMENTS, SOME_TERMS, STORED
from gopt.verification.proof.selections import Runs, Selection
from gopt.verification.proof.totals import Totals


class _Summed(NamedTuple):
    """A sum with parts among the terms: the expression with all parts, and the sum in the expression; the elements, as
    ranges of a row or of dimensions, and the shape; factors beside, and the shape of the product."""

    number: int
    core: int
    spans: Runs | Selection
    by_dimension: bool
    shape: Shape
    beside: Factors
    after: Shape


class _Coefficients(defaultdict[int, Coefficient]):
    """The coefficient of each position, as the changes from a position to the next."""

    def __init__(self) -> None:
        super().__init__(int)

    def add(self, runs: Runs, factor: Coefficient) -> None:
        for start, stop in runs:
            self[start] += factor
            self[stop] -= factor

    def runs(self) -> dict[Coefficient, Runs]:
        """The positions of each coefficient but 0."""
        groups: dict[Coefficient, list[tuple[int, int]]] = {}
        coefficient: Coefficient = 0
        for start, stop in pairwise(sorted(bound for bound, change in self.items() if change)):
            coefficient += self[start]
            if coefficient:
                groups.setdefault(coefficient, []).append((start, stop))
        return {factor: tuple(runs) for factor, runs in groups.items()}


class JoinedTerms(Totals):
    """Sums in which terms are joined."""

    def _joined(self, terms: dict[int, Coefficient], traits: int) -> dict[int, Coefficient]:
        if traits & SOME_ELEMENTS:
            before, terms = terms, self._joined_totals(self._single_elements(terms))
            traits |= 0 if terms is before else SOME_TERMS
        if traits & SOME_TERMS:
            terms = self._joined_parts(terms)
        if traits & ROW_OF_TERMS:
            terms = self._joined_rows(terms)
        if traits & MOVED:
            terms = self._moved_starts(terms)
        if traits & STORED:
            terms = self._joined_wholes(terms)
        return terms

    def _single_elements(self, terms: dict[int, Coefficient]) -> dict[int, Coefficient]:
        """Terms in which several elements of an expression are sums over ranges of the expression."""
        rows: dict[int, list[Piece]] = {}
        for atom in terms:
            if self.elements(atom) == 1 and self.all[self.root(atom)].op == FLAT:
                rows.setdefault(self.pieces(atom)[0][0], []).append((atom, *self.pieces(atom)[0][1:]))
        if not rows:
            return terms
        result = dict(terms)
        # Value -> the number of sums over ranges, and of single elements.
        summed = Counter(self.all[atom].operands[0] for atom in terms if self.all[atom].op == TOTAL)
        parts = {root: [self.root(atom) for atom, _ in self.summands(root)] for root in rows}
        for root, row in rows.items():
            summed.update(parts[root] * len(row))
        for root, row in rows.items():
            for atom, start, stop in row if any(summed[part] > 1 for part in parts[root]) else ():
                factor = result.pop(atom)
                for part, change in self._total_terms(root, start, stop):
                    result[part] = result.get(part, 0) + factor * change
        return result

    def _joined_totals(self, terms: dict[int, Coefficient]) -> dict[int, Coefficient]:
        """Sums over elements of an expression, joined by the coefficient of each element."""
        totals = [row for row in map(self.all.__getitem__, terms) if row.op == TOTAL]
        some = all(row.attributes and row.attributes[-1][1] - row.attributes[0][0] > 1 for row in totals)  # type: ignore[index]
        if some and len({row.operands for row in totals}) == len(totals):
            return terms
        signs: dict[tuple[int, ...], list[bool]] = {}
        for atom, factor in terms.items():
            if self.all[atom].op == TOTAL:
                signs.setdefault(self.all[atom].operands, []).append(factor > 0)
        result: dict[int, Coefficient] = {}
        sums: dict[int, _Coefficients] = {}
        for atom, factor in terms.items():
            op, spans, operands, _ = self.all[atom]
            joins = op == TOTAL and factor and (len(signs[operands]) > 1 or not spans)
            if not joins or (len({*signs[operands]}) > 1 and not self.finite[operands[0]]):
                result[atom] = factor
                continue
            whole = ((0, cast(int, self.elements(operands[0]))),)
            sums.setdefault(operands[0], _Coefficients()).add(cast(Runs, spans) or whole, factor)
        for root, coefficients in sums.items():
            for factor, runs in coefficients.runs().items():
                if runs != ((0, self.elements(root)),):
                    result[self._number(TOTAL, runs, (root,), ())] = factor
                    continue
                for part, change in self._total_terms(root, *runs[0]):
                    result[part] = result.get(part, 0) + factor * change
        for atom in [atom for atom in result if self.all[atom].op == TOTAL]:
            runs, (root,) = cast(Runs, self.all[atom].attributes), self.all[atom].operands
            if len(runs) == 1 and runs[0][1] - runs[0][0] == 1:
                single = self._element(root, runs[0][0])
                result[single] = result.pop(atom) + result.get(single, 0)
        return result

    def _joined_parts(self, terms: Mapping[int, Coefficient]) -> dict[int, Coefficient]:
        """Parts of the terms of a sum, also elements and beside factors, joined by the coefficient of each position."""
        result = dict(terms)
        for summed, atoms in self._parts_of_sums(terms).items():
            if len(atoms) == 1 and all(terms[atom] for atom in atoms.values()):
                continue
            rows = {parts: result.pop(atom) for parts, atom in atoms.items()}
            finite = self.finite[summed.number] and all(self.finite[factor] for factor, _ in summed.beside)
            if len({factor > 0 for factor in rows.values()}) == 1 or finite:
                for label in {label for parts in rows for label, _, _ in parts}:
                    rows = _joined_along(label, rows)
            for parts, factor in rows.items():
                whole = self._of_parts(summed, parts)
                for atom, change in self.terms(whole):
                    result[atom] = result.get(atom, 0) + factor * change
        return result

    def _parts_of_sums(self, terms: Iterable[int]) -> dict[_Summed, dict[tuple[Part, ...], int]]:
        """Sums, and the terms that are parts of a sum, by the parts."""
        sums: dict[_Summed, dict[tuple[Part, ...], int]] = {}
        for atom in terms:
            part, beside = self._part_of_sum(self.root(atom))
            within, spans, by_dimension = self._spans(part)
            op, attributes, operands, _ = self.all[within]
            if op == PARTED:
                core, indices = cast(tuple[int, tuple[Part, ...]], attributes)
                shape = self.shape(part if beside else atom)
                summed = _Summed(operands[0], core, spans, by_dimension, shape, beside, self.shape(atom))
                sums.setdefault(summed, {})[indices] = atom
        return sums

    def _of_parts(self, summed: _Summed, parts: tuple[Part, ...]) -> int:
        """The term with some parts of a sum; with the whole sum for no parts."""
        number, core, spans, by_dimension, shape, beside, after = summed
        op, _, operands, _ = self.all[number]
        inner = self.total(operands[0]) if op == TOTAL and not parts else number
        for part in parts:
            inner = self.parted(inner, core, *part)
        if by_dimension:
            inner = self.take(inner, cast(Selection, spans))
        elif spans:
            inner = self.flat((inner, *span) for span in cast(Runs, spans))
        inner = self.view(inner, shape)
        return self.view(self.product(*zip((inner, 1), *beside)), after) if beside else inner

    def parted(self, number: int, core: int, label: object, size: int, runs: Runs) -> int:
        """An expression with only some of the terms of the sum ``core``: positions ``runs`` of ``size``."""
        raise NotImplementedError

    def _joined_rows(self, terms: Mapping[int, Coefficient]) -> dict[int, Coefficient]:
        """Terms in which rows along an axis are one, with parts of sums: a sum of rows is the row of the sums."""
        groups: dict[tuple[Hashable, tuple[Shape, ...], Shape], list[int]] = {}
        for atom in terms:
            op, axis, operands, _ = self.all[self.root(atom)]
            if op == CONCAT:
                groups.setdefault((axis, tuple(map(self.shape, operands)), self.shape(atom)), []).append(atom)
        result = dict(terms)
        for (axis, _, shape), atoms in groups.items():
            if len(atoms) == 1:
                continue
            factors = [result.pop(atom) for atom in atoms]
            columns = zip(*(self.all[self.root(atom)].operands for atom in atoms))
            row = self.concatenated([self.added(column, factors) for column in columns], cast(int, axis))
            for part, change in self.terms(self.view(row, shape)):
                result[part] = result.get(part, 0) + change
        return result

    def concatenated(self, numbers: Sequence[int], axis: int) -> int:
        """Values in a row along an axis."""
        raise NotImplementedError

    def _spans(self, number: int) -> tuple[int, Runs | Selection, bool]:
        """The only value in a flat value, and the ranges; the value behind a part, and the ranges of dimensions; any
        other value under a view, without ranges."""
        root = self.root(number)
        op, attributes, operands, _ = self.all[root]
        if op == TAKE:
            return operands[0], cast(Selection, attributes), True
        return (operands[0], self.ranges(root), False) if op == FLAT and len(operands) == 1 else (root, (), False)

    def take(self, number: int, selection: Selection) -> int:
        """Ranges of the dimensions of a value."""
        raise NotImplementedError

    def _part_of_sum(self, number: int) -> tuple[int, Factors]:
        """The only factor with some of the terms of a sum, and the other factors; else the value alone."""
        pairs = tuple(self.factors(number)) if self._traits[number] & SOME_TERMS else ()
        parts = [factor for factor, power in pairs if power == 1 and self.all[self._spans(factor)[0]].op == PARTED]
        return (parts[0], tuple(pair for pair in pairs if pair[0] != parts[0])) if len(parts) == 1 else (number, ())

    # --- micro-steps ---

    def iterated(self, number: int, start: int, axis: str, initial: int) -> int:
        """The value after all micro-steps from ``initial``, where a micro-step takes ``start`` to ``number``."""
        result = self.apply(ITERATED, axis, (number, start, initial), self.shape(number))
        self.varies[result] = (self.varies[number] | self.varies[initial]) - {axis}
        return result

    def _moved_starts(self, terms: Mapping[int, Coefficient]) -> dict[int, Coefficient]:
        """Terms in which a state plus the sum of all changes is the state after all micro-steps.

        s + x, where x begins at 0 and each micro-step takes x to a x + b s + r, begins at s and goes to a x + r where
        b = a - 1, if r depends neither on x nor on s."""
        result = dict(terms)
        for atom in [atom for atom in terms if self.all[atom].op == ITERATED and terms[atom] == 1]:
            _, axis, (number, start, initial), shape = self.all[atom]
            step = dict(self.terms(number))
            if self.uniform(initial) != 0 or start not in step:
                continue
            rate = step.pop(start)
            states = (term for term, change in step.items() if change == rate - 1 and result.get(term) == 1)
            state = next((term for term in states if self.all[term].op == INITIAL and self.shape(term) == shape), None)
            moving = None if state is None else self._numbers.get(self.all[state]._replace(op=STATE))
            if state is None or moving is None:
                continue
            del step[state]
            if self.depend(step, {start, state, moving}):
                continue
            del result[atom], result[state]
            whole = self.linear(step | {moving: rate}, shape)
            result[self.iterated(whole, moving, str(axis), state)] = 1
        return result

    # --- stored whole numbers ---

    def _joined_wholes(self, terms: dict[int, Coefficient]) -> dict[int, Coefficient]:
        """Terms in which single stored whole numbers are one, absent beside others where zero."""
        stored = {atom: self.arrays[atom] for atom in terms if self._counts[atom] == 1 and atom in self.arrays}
        wholes = {atom: array for atom, array in stored.items() if array.dtype.kind == "i"}
        types = {array.dtype for array in wholes.values()}
        if len(types) != 1 or (len(terms) == 1 and 1 in terms.values()):
            return terms
        rest = {atom: factor for atom, factor in terms.items() if atom not in wholes}
        total, type = Fraction(sum(int(wholes[atom].item()) * terms[atom] for atom in wholes)), types.pop()
        if total.denominator != 1 or abs(total) >= int(np.iinfo(type).max):
            return terms
        if total or not rest:
            shape = max((array.shape for array in wholes.values()), key=len)
            rest[self.from_array(np.full(shape, int(total), type))] = 1
        return rest


def _joined_along(label: Hashable, rows: Mapping[tuple[Part, ...], Coefficient]) -> dict[tuple[Part, ...], Coefficient]:
    """Parts of a sum that differ along one index alone, joined by the coefficient of each position."""
    result: dict[tuple[Part, ...], Coefficient] = {}
    sums: dict[tuple[tuple[Part, ...], int], _Coefficients] = {}
    for parts, factor in rows.items():
        matched = [part for part in parts if part[0] == label]
        if not matched:
            result[parts] = result.get(parts, 0) + factor
            continue
        ((_, size, runs),) = matched
        rest = tuple(part for part in parts if part[0] != label)
        sums.setdefault((rest, size), _Coefficients()).add(runs, factor)
    for (rest, size), coefficients in sums.items():
        for factor, runs in coefficients.runs().items():
            parts = rest if runs == ((0, size),) else tuple(sorted((*rest, (label, size, runs)), key=repr))
            result[parts] = result.get(parts, 0) + factor
    return result
