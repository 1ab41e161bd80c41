"""Expressions in words of the source, and the parts in which two expressions differ."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, cast

from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.expressions import (
    COUNTED,
    FLAT,
    INITIAL,
    INVERSE,
    LARGEST,
    LINEAR,
    ONE,
    PARTED,
    PRODUCT,
    REDUCED,
    SMALLEST,
    STATE,
    TAKE,
    TOTAL,
    VIEW,
    Part,
)
from gopt.verification.proof.selections import Selection

DEPTH = 3
"""Operators inside one another that a text names."""
TERMS = 3
"""Operands that a text names."""
_FORMS = frozenset({LINEAR, PRODUCT, REDUCED, TOTAL, FLAT, LARGEST, SMALLEST})
_LEAVES = frozenset({STATE, INITIAL, "batch", "input"})


class Words:
    """Texts of expressions; ``names``: number -> the value of the source, in words."""

    def __init__(self, expressions: Expressions, names: Mapping[int, str]) -> None:
        self.expressions, self.names = expressions, names

    def text(self, number: int, depth: int = DEPTH, *, top: bool = False) -> str:
        """An expression by values of the source; ``top``: the outermost form is written out."""
        number = self.expressions.root(number)
        op, attributes, operands, _ = self.expressions.all[number]
        if number in self.names and not (top and op in _FORMS):
            return self.names[number]
        if op in _LEAVES:
            return repr(attributes)
        if number == ONE:
            return "1"
        if op == LINEAR:
            return self._sum(number, depth)
        if op in ("constant", "draw"):
            return {"constant": "a constant", "draw": f"what {attributes!r} draws"}[op]
        if not operands:
            return f"{op}"
        if not depth:
            return "…"
        inner = [self.text(operand, depth - 1) for operand in operands[:TERMS]]
        more = ", …" if len(operands) > TERMS else ""
        if op == PRODUCT:
            inner = [f"({text})" if " + " in text else text for text in inner]
            factors = [text if power == 1 else f"{text}^{power}" for text, power in zip(inner, attributes)]  # type: ignore[call-overload]
            return " · ".join(factors) + more
        if op == REDUCED:
            how, axes = cast(tuple[str, frozenset[str]], attributes)
            return f"the {how} over {self._axes(axes)} of {inner[0]}"
        if op == "on member":
            return f"{inner[0]} of member {', '.join(f'{index} of {axis}' for axis, index in attributes)}"  # type: ignore[attr-defined]
        if op == TAKE:
            selection = enumerate(cast(Selection, attributes))
            ranges = [f"{start} to {stop} of dimension {dim}" for dim, runs in selection for start, stop in runs or ()]
            return f"{' and '.join(ranges[:TERMS])} of {inner[0]}"
        if op == PARTED:
            _, indices = cast(tuple[int, tuple[Part, ...]], attributes)
            ranges = [f"{start} to {stop} of {size}" for _, size, runs in indices for start, stop in runs]
            return f"terms {' and '.join(ranges[:TERMS])} of the sum in {inner[0]}"
        if op in (TOTAL, LARGEST, SMALLEST, FLAT) and attributes != "members":
            spans = attributes if op != TOTAL else (attributes,)
            parts = [self._span(span, text) for span, text in zip(spans, inner)]  # type: ignore[call-overload]
            word = {TOTAL: "the sum of ", FLAT: "", LARGEST: "the largest of ", SMALLEST: "the smallest of "}[op]
            return word + ", ".join(parts) + more
        if op == "round":
            return f"{inner[0]} rounded to {attributes}"
        if op == INVERSE:
            return f"({inner[0]})^-1" if " " in inner[0] else f"{inner[0]}^-1"
        if op == COUNTED:
            return f"{inner[0]} or 1"
        return f"{op}({', '.join(inner)}{more})"

    def _axes(self, axes: frozenset[str]) -> str:
        return "+".join(axis for axis in self.expressions.extents if axis in axes)

    @staticmethod
    def _span(span: object, text: str) -> str:
        if not span:
            return text
        pairs = cast(tuple[Any, ...], span)
        spans = [pairs] if isinstance(pairs[0], int) else list(pairs)
        ranges = " and ".join(f"{start} to {stop}" for start, stop in spans[:TERMS])
        return f"elements {ranges} of {text}"

    def _sum(self, number: int, depth: int) -> str:
        terms = list(self.expressions.terms(number))
        if not terms:
            return "0"
        texts = []
        for atom, factor in terms[:TERMS]:
            text = self.text(atom, max(depth - 1, 0))
            text = f"({text})" if " + " in text and factor != 1 else text
            texts.append(str(factor) if atom == ONE else text if factor == 1 else f"{_number(factor)} × {text}")
        return " + ".join(texts) + (" + …" if len(terms) > TERMS else "")

    def parting(self, actual: int, expected: int) -> tuple[int, int]:
        """The innermost parts in which two expressions differ; of several the earliest in the source."""
        visited: set[tuple[int, int]] = set()
        stack, apart = [(actual, expected)], []
        while stack:
            pair = stack.pop()
            if pair[0] == pair[1] or pair in visited:
                continue
            visited.add(pair)
            inner = self._inside(*pair)
            stack += inner
            apart += [] if inner else [pair]
        return min(apart, key=lambda pair: pair[1], default=(actual, expected))

    def _inside(self, actual: int, expected: int) -> list[tuple[int, int]]:
        """Pairs of operands behind the difference; [] for a difference of the expressions themselves."""
        a, b = self.expressions.all[actual], self.expressions.all[expected]
        if VIEW in (a.op, b.op):
            return [(self.expressions.root(actual), self.expressions.root(expected))]
        if a.op == FLAT == b.op:
            pairs = zip(self.expressions.pieces(actual), self.expressions.pieces(expected))
            return [(x[0], y[0]) for x, y in pairs if x[1:] == y[1:]]
        if LINEAR in (a.op, b.op) or a.op == PRODUCT == b.op:
            return self._of_terms(actual, expected, a.op if a.op == b.op else LINEAR)
        if a.op != b.op or a.attributes != b.attributes or len(a.operands) != len(b.operands):
            return []
        return list(zip(a.operands, b.operands))

    def _of_terms(self, actual: int, expected: int, op: str) -> list[tuple[int, int]]:
        """Pairs of different terms, or of different factors."""
        before, right = (self._terms(number, op) for number in (actual, expected))
        only = [atom for atom in before if before[atom] != right.get(atom)]
        instead = [atom for atom in right if right[atom] != before.get(atom)]
        if len(only) != len(instead) or (len(before) == len(right) == len(only) == 1 and op == LINEAR):
            return []
        pairs = []
        for x, y in zip(only, instead):
            ratio = Fraction(right[y]) / before[x]
            if op == LINEAR:
                y = self.expressions.linear({y: ratio}, self.expressions.shape(y))
            elif ratio != 1:
                return []
            pairs.append((x, y))
        return pairs

    def _terms(self, number: int, op: str) -> dict[int, int | Fraction]:
        if op == LINEAR:
            return dict(self.expressions.terms(number))
        expression = self.expressions.all[number]
        return dict(zip(expression.operands, expression.attributes))  # type: ignore[call-overload]


def _number(factor: int | Fraction) -> str:
    """A coefficient, as a short fraction or a decimal."""
    return str(factor) if factor.denominator < 10**4 else f"{float(factor):.4g}"
