"""Rules of calls: from the expressions of all members to the expressions of their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import prod
from typing import Any, TypeAlias

from gopt.collectives.node import parse_shapes
from gopt.verification.certificate.algebra import Stretches, WrongLine
from gopt.verification.certificate.nodes import NodeChecker
from gopt.verification.certificate.values import EXTREMES

Attributes: TypeAlias = Mapping[str, Any]
Member: TypeAlias = Mapping[str, int]
Numbers: TypeAlias = Sequence[Sequence[int]]
"""The expressions of all operands, or results, of each member."""


class CallChecker(NodeChecker):
    """The rules of calls."""

    def met(
        self, numbers: Sequence[int], coordinates: Sequence[Mapping[str, int]], axes: Sequence[str], how: str
    ) -> Stretches:
        """The sum or the mean of a value of each member."""

        def alike(axis: str) -> bool:
            rows: dict[Any, int] = {}
            return all(
                rows.setdefault(tuple(pair for pair in member.items() if pair[0] != axis), number) == number
                for number, member in zip(numbers, coordinates)
            )

        common = frozenset(axis for axis in axes if alike(axis))
        rest = [axis for axis in axes if axis not in common]
        rows = [
            [(length, self.on_member(self.over(terms, common), [(axis, member[axis]) for axis in rest]))
             for length, terms in self.stretches(number)]
            for number, member in zip(numbers, coordinates) if all(member[axis] == 0 for axis in common)
        ]  # fmt: skip
        share = Fraction(1, len(numbers) if how == "mean" else 1)
        return [(length, self.added((terms, share) for terms in row)) for length, row in self.aligned(rows)]

    def members(self, numbers: Sequence[int], coordinates: Sequence[Mapping[str, int]]) -> list[Stretches]:
        """A value of each member."""
        return [[(length, self.on_member(terms, member.items())) for length, terms in self.stretches(number)]
                for number, member in zip(numbers, coordinates)]  # fmt: skip

    def reduction(self, number: int, numbers: Sequence[int], coordinates: Any, axes: Sequence[str], how: str) -> None:
        """Raise WrongLine unless an expression is the reduction of a value of each member."""
        if how in ("sum", "mean"):
            return self.due(number, self.met(numbers, coordinates, axes, how), f"the {how} over {', '.join(axes)}")
        form = EXTREMES[how]
        alike = len(set(numbers)) == 1
        value = self.stretches(numbers[0])
        live = frozenset(axis for axis in axes if alike and any(axis in self.axes_of(terms) for _, terms in value))
        if prod(self.shape(number)) == 1 and (
            alike or not any(self.axes_of(terms) & set(axes) for of in numbers for _, terms in self.stretches(of))
        ):
            return self.extreme(number, [self.stretches(of) for of in dict.fromkeys(numbers)], form, live)
        if not alike:
            raise WrongLine("", "", "extremes of members")
        if not live:
            return self.due(number, value, "the value of all members")
        return self.applied(number, "reduced", lambda attributes: attributes == (form, live), [value])


def _all_reduce(
    checker: CallChecker, attributes: Attributes, axes: Sequence[str], coordinates: Sequence[Member], operands: Numbers,
    results: Numbers,
) -> None:  # fmt: skip
    for row, numbers in zip(zip(*operands), zip(*results)):
        for number in set(numbers):
            checker.reduction(number, row, coordinates, axes, attributes.get("reduce", "sum"))


def _reduce(
    checker: CallChecker, attributes: Attributes, axes: Sequence[str], coordinates: Sequence[Member], operands: Numbers,
    results: Numbers,
) -> None:  # fmt: skip
    for row, numbers in zip(zip(*operands), results[attributes["root"]]):
        checker.reduction(numbers, row, coordinates, axes, attributes.get("reduce", "sum"))


def _broadcast(
    checker: CallChecker, attributes: Attributes, axes: Sequence[str], coordinates: Sequence[Member], operands: Numbers,
    results: Numbers,
) -> None:  # fmt: skip
    root = attributes["root"]
    for index, number in enumerate(operands[root]):
        value = checker.members([number], [coordinates[root]])[0]
        for numbers in results:
            checker.due(numbers[index], value, f"the value of member {root}")


def _reduce_scatter(
    checker: CallChecker, attributes: Attributes, axes: Sequence[str], coordinates: Sequence[Member], operands: Numbers,
    results: Numbers,
) -> None:  # fmt: skip
    how = attributes.get("reduce", "sum")
    if how not in ("sum", "mean"):
        raise WrongLine("", "", "extremes of members")
    wholes = [checker.met(row, coordinates, axes, how) for row in zip(*operands)]
    if "axis" in attributes:
        shape, axis, start = checker.shape(operands[0][0]), attributes["axis"], 0
        for (number,), size in zip(results, attributes["sizes"]):
            loops = [(size if dim == axis else length, prod(shape[dim + 1 :])) for dim, length in enumerate(shape)]
            checker.due(
                number,
                checker.places(wholes[0], start * prod(shape[axis + 1 :]), tuple(loops)),
                f"the {how} of the part",
            )
            start += size
        return
    bucket = [part for whole in wholes for part in whole]
    for (number,), ends in zip(results, pairwise(attributes["cuts"])):
        checker.due(number, checker.row(bucket, *ends), f"the {how} of elements {ends[0]} to {ends[1]}")


def _all_gather(
    checker: CallChecker, attributes: Attributes, axes: Sequence[str], coordinates: Sequence[Member], operands: Numbers,
    results: Numbers,
) -> None:  # fmt: skip
    numbers = [row[0] for row in operands]
    values = checker.members(numbers, coordinates)
    if "axis" in attributes:
        for (number,) in results:
            form = checker.forms[number]
            if (
                form.op == "gathered"
                and set(numbers) == {form.operands[0]}
                and checker.varies[numbers[0]].issuperset(axes)
            ):
                if form.attributes != (tuple(axes), attributes["axis"]):
                    raise WrongLine(str(form), f"gathered along {axes}")
            else:
                checker.parts(number, values, attributes["sizes"], attributes["axis"])
        return
    bucket = [part for value in values for part in value]
    shapes = parse_shapes(attributes["shapes"])
    ends = [0, *accumulate(map(prod, shapes))]
    for index, (shape, bounds) in enumerate(zip(shapes, pairwise(ends))):
        for number in {row[index] for row in results}:
            if checker.shape(number) != tuple(shape):
                raise WrongLine(f"shape {checker.shape(number)}", f"shape {shape}")
            checker.due(number, checker.row(bucket, *bounds), "the gathered elements")


def _all_to_all(
    checker: CallChecker, attributes: Attributes, axes: Sequence[str], coordinates: Sequence[Member], operands: Numbers,
    results: Numbers,
) -> None:  # fmt: skip
    numbers = [row[0] for row in operands]
    axis, sizes, start = attributes["split_axis"], attributes["split_sizes"], 0
    for (number,), size in zip(results, sizes):
        values = []
        for of, member in zip(numbers, coordinates):
            selection = [((start, start + size),) if dim == axis else None for dim in range(len(checker.shape(of)))]
            values.append(
                [(length, checker.on_member(terms, member.items())) for length, terms in checker.taken(of, selection)]
            )
        lengths = [
            size if attributes["concat_axis"] == axis else checker.shape(of)[attributes["concat_axis"]]
            for of in numbers
        ]
        checker.parts(number, values, lengths, attributes["concat_axis"])
        start += size


CALLS = {
    "AllReduce": _all_reduce, "Reduce": _reduce, "Broadcast": _broadcast, "ReduceScatter": _reduce_scatter,
    "AllGather": _all_gather, "AllToAll": _all_to_all,
}  # fmt: skip
