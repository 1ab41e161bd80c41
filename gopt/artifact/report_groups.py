"""Removed and added operators and values in the report, in groups with one reason.

A group is a table: columns are the operators of an update, in order; rows are parameters with the same update. So a
reason, a set of ranks, an operator's type and replacement are written once per group, a parameter once per row, and an
operator or value only by name. ``expand_*`` returns single items.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from gopt.documents.records import LINES, OPTIONAL, Bounds, Count, key

Shape = tuple[Count | str | None, ...]


# --- one by one -----------------------------------------------------------------------------------------------------


class OpFact(NamedTuple):
    """An operator missing on some ranks, or added by a pass.

    ``of``: the parameter or bucket served, or None; ``replaced_by``: values replacing its results.
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
    """A value missing on some ranks; ``nbytes``: size of the source's value."""

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
    """The ranks that have values of this shape are these, as ranges such as 0-3,6."""
    shape: Shape | None
    """The shape is the list of the lengths of the dimensions, in elements; null means that it is unknown. An integer is
    the length of the dimension, a string is the name of a length that the source leaves open, and null is an unknown
    length or one that differs between ranks."""
    nbytes: Count = field(metadata=key("bytes"))
    """Each of the values has this many bytes on each of these ranks; 0 also stands for a size that is unknown."""


class AddedVarFact(NamedTuple):
    """A value added by a pass, and each rank's part."""

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
    """Names, in the order of the group's columns, and the parameter or the bucket served."""

    of: str | None
    """The names in the row belong to this parameter (removed_ops), or to this bucket, such as b0 (added_ops and
    added_vars); null means that they belong to none."""
    names: tuple[str, ...]
    """The list has the names, in the order of the columns of the group. Each item is the name of one operator or value;
    an operator without a name has the name of its first output."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a call, which is read three times as fast as fields that are set one by one."""
        return Row, (self.of, self.names)


@dataclass(frozen=True, slots=True)
class RemovedVarRow:
    """Values of one shape."""

    of: str | None
    """The names in the row belong to this parameter; null means that they belong to none."""
    shape: Shape | None
    """The shape is the list of the lengths of the dimensions, in elements; null means that it is unknown, or that the
    values are sequences of tensors. An integer is the length of the dimension, a string is the name of a length that
    the source leaves open, and null is an unknown length or one that differs between ranks."""
    nbytes: Count = field(metadata=key("bytes"))
    """Each of the values has this many bytes in the source, a sequence the bytes of its tensors; 0 stands for an
    unknown size."""
    names: tuple[str, ...]
    """The list has the names, in the order of the columns of the group. Each item is the name of one value."""

    def __reduce__(self) -> tuple[Any, ...]:
        """As of ``Row``."""
        return RemovedVarRow, (self.of, self.shape, self.nbytes, self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGroup:
    """Operators with the same reason. A single item of ``op_types`` or ``replaced_by`` holds for all names of a row."""

    pass_name: str = field(metadata=key("pass"))
    """The pass of this name removed or added them; load means that they were looked through when the source was read,
    or that a simpler operator of the same name stands there."""
    reason: str
    """The text says why."""
    ranks: str
    """The ranks that lack them (removed_ops) or have them (added_ops) are these, as ranges such as 0-3,6."""
    role: str
    """The role is the phase of removed operators (forward, backward, update, or unread where no output depends on
    them), and for added ones communication, or the phase in which they run."""
    count: Count
    """The group has this many operators."""
    op_types: Annotated[tuple[str, ...], Bounds(min_items=1)]
    """The list has, for each column, the type of the operator, with its domain in front of it where it has one in
    added_ops; a list of one item is for all columns. The operators of the column have this type."""
    replaced_by: tuple[tuple[str, ...], ...] = field(default=(), metadata=OPTIONAL)
    """The list has, for each column, the values that stand now for what was removed; a list of one item is for all
    columns, and the key is absent when nothing stands for any of them. Each item is the list of the values that stand
    for one column; it is empty when nothing does. A value of the ranks' graphs has this name."""
    phases: Annotated[tuple[str, ...], Bounds(min_items=1)] = field(default=(), metadata=OPTIONAL)
    """The files of these phases have the operators; the key is absent where the step of a rank is one file, and in
    removed_ops. The manifest has a phase of this name."""
    rows: tuple[Row, ...] = field(metadata=LINES)
    """The list has the names of the operators. Each item is one parameter or bucket."""

    def fault(self) -> str | None:
        """Return the reason why the group is inconsistent; None if it is consistent."""
        return _fault(self.count, self.rows, self.op_types, self.replaced_by)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedVarGroup:
    """Values with the same reason and dtype; ``replaced_by`` as in ``OpGroup``."""

    pass_name: str = field(metadata=key("pass"))
    """The pass of this name removed them; load means that they were looked through when the source was read."""
    reason: str
    """The text says why."""
    ranks: str
    """The ranks that lack them are these, as ranges such as 0-3,6."""
    role: str
    """The role is gradient or the kind of a state (parameter, optimizer_state, statistic, accumulator, scalar) where
    the values are one, constant where they are initializers that are no states, and else the phase of the operator that
    makes them: forward, backward, update or unread."""
    count: Count
    """The group has this many values."""
    dtype: str
    """The elements of the values have this type; undefined means that it is unknown."""
    replaced_by: tuple[tuple[str, ...], ...] = field(default=(), metadata=OPTIONAL)
    """The list has, for each column, the values that stand now for what was removed; a list of one item is for all
    columns, and the key is absent when nothing stands for any of them. Each item is the list of the values that stand
    for one column; it is empty when nothing does. A value of the ranks' graphs has this name."""
    rows: tuple[RemovedVarRow, ...] = field(metadata=LINES)
    """The list has the names of the values. Each item is one parameter, or one shape of values that belong to none."""

    def fault(self) -> str | None:
        """As of ``OpGroup``."""
        return _fault(self.count, self.rows, self.replaced_by)


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedVarGroup:
    """Values with the same reason, dtype and size on every rank."""

    pass_name: str = field(metadata=key("pass"))
    """The pass of this name added them."""
    reason: str
    """The text says why."""
    role: str
    """The role is communication, state or accumulator, or the phase of the operator that makes them: forward, backward
    or update."""
    count: Count
    """The group has this many values."""
    dtype: str
    """The elements of the values have this type; undefined means that it is unknown."""
    per_rank: tuple[LocalShape, ...]
    """The list has what each rank that has the values has of them. Each item is for the ranks that have the same."""
    rows: tuple[Row, ...] = field(metadata=LINES)
    """The list has the names of the values."""

    def fault(self) -> str | None:
        """As of ``OpGroup``."""
        return _fault(self.count, self.rows)


Group = OpGroup | RemovedVarGroup | AddedVarGroup


def _fault(count: int, rows: Sequence[Row | RemovedVarRow], *columns: Sequence[object]) -> str | None:
    lengths = {len(column) for column in columns if len(column) > 1}
    names = {len(row.names) for row in rows}
    if lengths and names != lengths:
        return f"rows have {', '.join(map(str, sorted(names)))} names, its columns are {max(lengths)}"
    names_held = sum(len(row.names) for row in rows)
    return None if names_held == count else f"count: {count} stands for {names_held} names"


def type_counts(group: OpGroup) -> Counter[str]:
    """How many operators of each type a group has."""
    if len(group.op_types) == 1:
        return Counter({group.op_types[0]: group.count})
    return Counter({name: count * len(group.rows) for name, count in Counter(group.op_types).items()})


def total(groups: Iterable[Group]) -> int:
    """Return the number of operators or values in groups."""
    return sum(group.count for group in groups)


# --- and back -------------------------------------------------------------------------------------------------------


def expand_ops(groups: Iterable[OpGroup]) -> Iterator[OpFact]:
    """Operators one by one."""
    for group in groups:
        head = (group.pass_name, group.reason, group.ranks, group.role)
        for row in group.rows:
            kinds, by = _per_name(group.op_types, row.names), _per_name(group.replaced_by or ((),), row.names)
            for name, op_type, replaced_by in zip(row.names, kinds, by):
                yield OpFact(*head, row.of, name, op_type, replaced_by, group.phases)


def expand_removed_vars(groups: Iterable[RemovedVarGroup]) -> Iterator[RemovedVarFact]:
    """Removed values one by one."""
    for group in groups:
        head = (group.pass_name, group.reason, group.ranks, group.role)
        for row in group.rows:
            for name, by in zip(row.names, _per_name(group.replaced_by or ((),), row.names)):
                yield RemovedVarFact(*head, row.of, name, group.dtype, row.shape, row.nbytes, by)


def expand_added_vars(groups: Iterable[AddedVarGroup]) -> Iterator[AddedVarFact]:
    """Added values one by one."""
    for group in groups:
        for row in group.rows:
            for name in row.names:
                yield AddedVarFact(group.pass_name, group.reason, group.role, row.of, name, group.dtype, group.per_rank)


def _per_name(column: tuple[Any, ...], names: Sequence[str]) -> tuple[Any, ...]:
    return column * len(names) if len(column) == 1 else column
