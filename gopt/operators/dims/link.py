"""Dim factors: the indices of an operator, and the strategies for splitting an index."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from gopt.records.placements import REPLICATED, Partial, Placement, Shard

OLDEST = 7
"""Lowest operator set whose operators broadcast by these rules."""


class ValueType(Protocol):
    """The type of a value, as far as rules read it."""

    @property
    def dims(self) -> tuple[Any, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def static(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class OperatorUse:
    """A node for rules. ``operands``, ``results``: logical types, None if absent; ``constant``: the value of a constant
    operand; ``opset``: the version of the standard operators."""

    op_type: str
    attributes: Mapping[str, Any]
    operands: tuple[ValueType | None, ...]
    results: tuple[ValueType | None, ...]
    constant: Callable[[int], np.ndarray | None]
    opset: int = 20

    def has(self, index: int) -> bool:
        """Return whether an operand is there."""
        return index < len(self.operands) and self.operands[index] is not None

    def dims(self, index: int) -> tuple[int, ...]:
        """The shape of an operand; () if absent."""
        type = self.operands[index] if index < len(self.operands) else None
        return type.dims if type is not None else ()

    def made(self, place: int = 0) -> tuple[int, ...]:
        """The shape of a result; () if absent."""
        type = self.results[place]
        return type.dims if type is not None else ()

    def rank(self, index: int) -> int:
        """Dimensions of an operand; 0 if absent."""
        return len(self.dims(index))

    def size(self, index: int, dim: int) -> int:
        """Elements of an operand's dimension."""
        return self.dims(index)[dim]

    def axis(self, default: int, rank: int | None = None) -> int:
        """The attribute ``axis``, counted from the front; ``rank``: of the counted value, operand 0 if None."""
        rank = self.rank(0) if rank is None else rank
        return int(self.attributes.get("axis", default)) % max(rank, 1)


@dataclass(frozen=True, slots=True)
class Slot:
    """An operand or a result, by its place."""

    place: int
    result: bool = False


@dataclass(frozen=True, slots=True)
class Index:
    """Position of an operator's index in a value: dimension ``dim``, which contains the index ``runs`` times in
    sequence.

    Each step of the index has ``unit`` elements.
    """

    dim: int
    unit: int = 1
    runs: int = 1


Where: TypeAlias = int | Index | None
"""Dimension that is the index, or contains it (Index); None if the value does not have the index."""


@dataclass(frozen=True, slots=True)
class DimFactor:
    """An index of an operator: its position in each operand and result.

    ``reduce``: the reduction of members' results, if results lack the index. ``masked``: indices of another operand
    choose along it, so a member takes its own elements and zeros for the rest. ``filled``: every member must have some
    elements, because runtimes refuse empty operands.
    """

    operands: tuple[Where, ...]
    results: tuple[Where, ...]
    reduce: str = ""
    masked: bool = False
    filled: bool = False


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to split an operator along an axis: placements of operands and of results."""

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    masked: bool = False


Rule = Callable[[OperatorUse, Slot, Shard], Iterator[Strategy]]
DimFactors = Callable[[OperatorUse], Iterator[DimFactor]]


def linked(links: DimFactors) -> Rule:
    """The rule of an operator split along any of the dim factors."""

    def rule(operator: OperatorUse, slot: Slot, shard: Shard) -> Iterator[Strategy]:
        for link in links(operator):
            row = link.results if slot.result else link.operands
            steps = _steps(row[slot.place] if slot.place < len(row) else None, shard)
            if steps is None or (link.filled and 0 in shard.sizes) or (link.masked and shard.runs > 1):
                continue
            if link.reduce == "mean" and len(set(shard.sizes)) > 1:
                continue  # a mean of unequal parts' means is not the mean
            rest: Placement = Partial(link.reduce) if link.reduce else REPLICATED
            yield Strategy(
                tuple(_placed(steps, where, REPLICATED) for where in link.operands),
                tuple(_placed(steps, where, rest) for where in link.results),
                link.masked,
            )

    return rule


def _steps(where: Where, shard: Shard) -> Shard | None:
    """A shard of the index, from a shard of a value with the index; None unless a whole number of steps."""
    index = Index(where) if isinstance(where, int) else where
    if index is None or index.dim != shard.dim or shard.runs % index.runs:
        return None
    if any(size % index.unit for size in shard.sizes):
        return None
    return Shard(0, tuple(size // index.unit for size in shard.sizes), shard.runs // index.runs)


def _placed(steps: Shard, where: Where, elsewhere: Placement) -> Placement:
    index = Index(where) if isinstance(where, int) else where
    if index is None:
        return elsewhere
    return Shard(index.dim, tuple(size * index.unit for size in steps.sizes), steps.runs * index.runs)


# --- what families share ----------------------------------------------------------------------------------------------


def meets(dims: Sequence[int], whole: Sequence[int], dim: int) -> int | None:
    """The dimension of a value broadcasting into dimension ``dim`` of ``whole``; None if repeated."""
    aligned = dim - (len(whole) - len(dims))
    return aligned if aligned >= 0 and dims[aligned] == whole[dim] else None


def first_of(operator: OperatorUse, where: Where) -> tuple[Where, ...]:
    """The first operand has the index, the others are whole."""
    return (where, *[None] * (len(operator.operands) - 1))


def all_results(operator: OperatorUse, where: Where) -> tuple[Where, ...]:
    """Every result has the index at the same dimension."""
    return tuple(None if type is None else where for type in operator.results)


def given_of(operator: OperatorUse, *row: Where) -> tuple[Where, ...]:
    """An entry for each named operand; absent operands have no index."""
    return tuple(where if operator.has(index) else None for index, where in enumerate(row[: len(operator.operands)]))


def made_of(operator: OperatorUse, *row: Where) -> tuple[Where, ...]:
    """An entry for each named result; absent results have no index."""
    return tuple(where if type is not None else None for where, type in zip(row, operator.results))


def kept(operator: OperatorUse, dims: Sequence[int]) -> Iterator[DimFactor]:
    """Dimensions of the first operand, at the same place in all results."""
    for dim in dims:
        yield DimFactor(first_of(operator, dim), all_results(operator, dim))


def beside(default: int = -1) -> DimFactors:
    """All dimensions but the attribute ``axis``, along which the operator acts."""

    def links(operator: OperatorUse) -> Iterator[DimFactor]:
        axis = operator.axis(default)
        return kept(operator, [dim for dim in range(operator.rank(0)) if dim != axis])

    return links
