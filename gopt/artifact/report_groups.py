"""Removed and added operators and values in the report, in groups with one reason.

A group is a table. Its columns are the operators of one update, in order; its rows are the parameters that have the
same update. So a reason, a set of ranks, an operator's type and its replacement are written once per group, a parameter
once per row, and an operator or value only by name. ``expand_*`` returns them one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gopt.documents.records import LINES, OPTIONAL, key

Shape = tuple[int | str | None, ...]


# --- one by one -----------------------------------------------------------------------------------------------------


class OpFact(NamedTuple):
    """An operator that is missing on some ranks, or that a pass added.

    ``of``: the parameter or the bucket that it serves, None if there is none; ``replaced_by``: values that replace its
    results.
    """

    pass_name: str
    reason: str
    ranks: str
    role: str
    of: str | None
    name: str
    op_type: str
    replaced_by: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    """Phases whose files have an added operator; () where a rank's step is one file."""


class RemovedVarFact(NamedTuple):
    """A value that is missing on some ranks; ``nbytes``: size of the source's value."""

    pass_name: str
    reason: str
    ranks: str
    role: str
    of: str | None
    name: str
    dtype: str
    shape: Shape | None
    nbytes: int
    replaced_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LocalShape:
    """Local shape of a value on some ranks."""

    ranks: str
    shape: Shape | None
    nbytes: int = field(metadata=key("bytes"))


class AddedVarFact(NamedTuple):
    """A value that a pass added, and what each rank has of it."""

    pass_name: str
    reason: str
    role: str
    of: str | None
    name: str
    dtype: str
    per_rank: tuple[LocalShape, ...]


# --- in groups ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """Names, in the order of the columns of their group, and the parameter or the bucket that they are for."""

    of: str | None
    names: tuple[str, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a call, which is read three times as fast as fields that are set one by one."""
        return Row, (self.of, self.names)


@dataclass(frozen=True, slots=True)
class RemovedVarRow:
    """Values of one shape."""

    of: str | None
    shape: Shape | None
    nbytes: int = field(metadata=key("bytes"))
    names: tuple[str, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """As of ``Row``."""
        return RemovedVarRow, (self.of, self.shape, self.nbytes, self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGroup:
    """Operators with one reason. A single item of ``op_types`` or ``replaced_by`` is that of all names of a row."""

    pass_name: str = field(metadata=key("pass"))
    reason: str
    ranks: str
    role: str
    count: int
    op_types: tuple[str, ...]
    replaced_by: tuple[tuple[str, ...], ...] = field(default=(), metadata=OPTIONAL)
    phases: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    rows: tuple[Row, ...] = field(metadata=LINES)

    def fault(self) -> str | None:
        """Return the reason why the group is inconsistent; None if it is consistent."""
        return _fault(self.count, self.rows, self.op_types, self.replaced_by)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedVarGroup:
    """Values with one reason and dtype; ``replaced_by`` as in ``OpGroup``."""

    pass_name: str = field(metadata=key("pass"))
    reason: str
    ranks: str
    role: str
    count: int
    dtype: str
    replaced_by: tuple[tuple[str, ...], ...] = field(default=(), metadata=OPTIONAL)
    rows: tuple[RemovedVarRow, ...] = field(metadata=LINES)

    def fault(self) -> str | None:
        """As of ``OpGroup``."""
        return _fault(self.count, self.rows, self.replaced_by)


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedVarGroup:
    """Values with one reason, dtype and size on every rank."""

    pass_name: str = field(metadata=key("pass"))
    reason: str
    role: str
    count: int
    dtype: str
    per_rank: tuple[LocalShape, ...]
    rows: tuple[Row, ...] = field(metadata=LINES)

    def fault(self) -> str | None:
        """As of ``OpGroup``."""
        return _fault(self.count, self.rows)


Group = OpGroup | RemovedVarGroup | AddedVarGroup


def _fault(count: int, rows: Sequence[Row | RemovedVarRow], *columns: Sequence[object]) -> str | None:
    lengths = {len(column) for column in columns if len(column) > 1}
    names = {len(row.names) for row in rows}
    if lengths and names != lengths:
        return f"rows have {', '.join(map(str, sorted(names)))} names, its columns are {max(lengths)}"
    held = sum(len(row.names) for row in rows)
    return None if held == count else f"count: {count} stands for {held} names"


def type_counts(group: OpGroup) -> Counter[str]:
    """How many operators of each type a group has."""
    if len(group.op_types) == 1:
        return Counter({group.op_types[0]: group.count})
    return Counter({each: count * len(group.rows) for each, count in Counter(group.op_types).items()})


def total(groups: Iterable[Group]) -> int:
    """Return the number of operators or values in groups."""
    return sum(group.count for group in groups)


# --- and back -------------------------------------------------------------------------------------------------------


def expand_ops(groups: Iterable[OpGroup]) -> Iterator[OpFact]:
    """Operators one by one."""
    for each in groups:
        head = (each.pass_name, each.reason, each.ranks, each.role)
        for row in each.rows:
            kinds, by = _per_name(each.op_types, row.names), _per_name(each.replaced_by or ((),), row.names)
            for name, op_type, replaced_by in zip(row.names, kinds, by):
                yield OpFact(*head, row.of, name, op_type, replaced_by, each.phases)


def expand_removed_vars(groups: Iterable[RemovedVarGroup]) -> Iterator[RemovedVarFact]:
    """Removed values one by one."""
    for each in groups:
        head = (each.pass_name, each.reason, each.ranks, each.role)
        for row in each.rows:
            for name, by in zip(row.names, _per_name(each.replaced_by or ((),), row.names)):
                yield RemovedVarFact(*head, row.of, name, each.dtype, row.shape, row.nbytes, by)


def expand_added_vars(groups: Iterable[AddedVarGroup]) -> Iterator[AddedVarFact]:
    """Added values one by one."""
    for each in groups:
        for row in each.rows:
            for name in row.names:
                yield AddedVarFact(each.pass_name, each.reason, each.role, row.of, name, each.dtype, each.per_rank)


def _per_name(column: tuple[Any, ...], names: Sequence[str]) -> tuple[Any, ...]:
    return column * len(names) if len(column) == 1 else column
