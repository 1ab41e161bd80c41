"""The sum of all elements, and the largest or the smallest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gopt.verification.proof.forms import (
    FLAT,
    HIGHEST,
    LARGEST,
    LINEAR,
    LOWEST,
    SMALLEST,
    TOTAL,
    Coefficient,
    Piece,
    Shape,
)
from gopt.verification.proof.ranges import Ranges
from gopt.verification.proof.selections import merged

_IDENTITY = {LARGEST: LOWEST, SMALLEST: HIGHEST}


class Totals(Ranges):
    """Sums and extremes of elements."""

    def total(self, number: int, shape: Shape = ()) -> int:
        """The sum of all elements."""
        return self.view(self._total(self.apart(number)), shape)

    def _total(self, pieces: Iterable[Piece]) -> int:
        terms: dict[int, Coefficient] = {}
        for piece in pieces:
            if piece[1] == piece[2]:
                continue
            single = self._element(*piece[:2]) if piece[2] - piece[1] == 1 else None
            for atom, factor in self._total_terms(*piece) if single is None else ((single, 1),):
                terms[atom] = terms.get(atom, 0) + factor
        return self.linear(terms, ())

    def _element(self, root: int, at: int) -> int:
        """An element of a value."""
        return self.view(self.flat([(root, at, at + 1)]), ())

    def _total_terms(self, root: int, start: int, stop: int) -> Iterator[tuple[int, Coefficient]]:
        count, size = stop - start, self.elements(root)
        if size == 1:
            yield self.view(root, ()), count
            return
        ranges = () if (start, stop) == (0, size) else ((start, stop),)
        for atom, factor in self.summands(root):
            if self.elements(atom) == 1:
                yield self.view(atom, ()), factor * count
            elif self.all[self.root(atom)].op == FLAT:
                for piece in self.cut(atom, start, stop):
                    yield from ((part, factor * times) for part, times in self._total_terms(*piece))
            elif ranges:
                yield self._number(TOTAL, ranges, (self.root(atom),), ()), factor
            else:
                yield from ((part, factor * times) for part, times in self.terms(self.whole_total(atom)))

    def whole_total(self, atom: int) -> int:
        """The sum of all elements of a term: how often terms are repeated in a sum, and exponentials of a single
        element, stand in front of the sum."""
        root, size = self.root(atom), self.elements(atom)
        lengths = {part: self.elements(part) for part, _ in self.terms(root) if self.all[root].op == LINEAR}
        if size and lengths and all(lengths.values()):
            times = [factor * (size // (lengths[part] or 1)) for part, factor in self.terms(root)]
            return self.added(list(map(self.total, lengths)), times)
        pairs = [*self.factors(root)]
        front = [pair for pair in pairs if self.elements(pair[0]) == 1 and self.is_exponential(pair[0])]
        if not front:
            return self._number(TOTAL, (), (self.root(atom),), ())
        inner = self.product(*zip(*(pair for pair in pairs if pair not in front)))
        return self.product([self.total(inner), *(factor for factor, _ in front)], [1, *(power for _, power in front)])

    def summands(self, root: int) -> Sequence[tuple[int, Coefficient]]:
        """The terms of a value to be summed: values of a single element, and of as many elements as the value."""
        parts, size = [*self.terms(root)], self.elements(root)
        fit = size is not None and all(self.elements(atom) in (1, size) for atom, _ in parts)
        return parts if fit or all(self.shape(atom) in ((), self.shape(root)) for atom, _ in parts) else [(root, 1)]

    # --- extremes ---

    def extreme(self, op: str, numbers: Iterable[int], shape: Shape = ()) -> int:
        """The largest or the smallest of all elements; of flags, whether any is set or all are."""
        return self.extreme_of_pieces(op, (piece for number in numbers for piece in self.pieces(number)), shape)

    def extreme_of_pieces(self, op: str, pieces: Iterable[Piece], shape: Shape = ()) -> int:
        """The largest or the smallest of all elements of ranges."""
        ranges: dict[int, list[tuple[int, int]]] = {}
        identity = -1
        for root, start, stop in pieces:
            nested = self.all[self.root(root)].op == op
            for within, low, high in self.extreme_parts(op, root) if nested else ((root, start, stop),):
                if self.all[within].op == _IDENTITY[op]:
                    identity = within
                elif low < high:
                    ranges.setdefault(within, []).append((low, high))
        if not ranges and identity >= 0 and self.elements(identity) == 1:
            return self.view(identity, shape)
        parts = []
        for root, spans in sorted(ranges.items()):
            runs = merged(spans)
            parts.append((root, () if runs == ((0, self.elements(root)),) else runs))
        if len(parts) == 1 and self.elements(parts[0][0]) == 1:
            return self.view(parts[0][0], shape)
        number = self._number(op, tuple(spans for _, spans in parts), tuple(root for root, _ in parts), ())
        return self.view(number, shape)

    def extreme_parts(self, op: str, number: int) -> list[Piece]:
        """The ranges behind an extreme; [] for any other value."""
        expression = self.all[self.root(number)]
        if expression.op != op:
            return []
        return [
            (root, *part)
            for root, spans in zip(expression.operands, expression.attributes)  # type: ignore[call-overload]
            for part in spans or ((0, self.elements(root)),)
        ]
