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


@dataclass(frozen=True, slots=True)
class RemovedVarRow:
    """Values of one shape."""

    of: str | None
    shape: Shape | None
    nbytes: int = field(metadata=key("bytes"))
    names: tuple[str, ...]


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


# --- to groups ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Column:
    """The names of a row in the making, and what else differs between its columns."""

    names: list[str] = field(default_factory=list)
    kinds: list[Any] = field(default_factory=list)
    """(op_type, replaced_by) of an operator, replaced_by of a value."""


Key = tuple[Any, ...]
_Tables = dict[Key, dict[Any, _Column]]


def _add(tables: _Tables, head: Key, place: Any, name: str, kind: Any) -> None:
    """Put a name, and what may differ between columns, into the row ``place`` of the table ``head``."""
    rows = tables.get(head)
    if rows is None:
        rows = tables[head] = {}
    row = rows.get(place)
    if row is None:
        row = rows[place] = _Column()
    row.names.append(name)
    row.kinds.append(kind)


def group_removed_ops(facts: Iterable[OpFact]) -> tuple[OpGroup, ...]:
    """Operators in groups, in the order of their first members: the updates of parameters as rows of a table."""
    return _group_ops((fact.op_type if fact.of is None else None, fact) for fact in facts)


def group_added_ops(facts: Iterable[OpFact]) -> tuple[OpGroup, ...]:
    """Operators in groups, in the order of their first members: all of a group have one type."""
    return _group_ops((fact.op_type, fact) for fact in facts)


def _group_ops(facts: Iterable[tuple[str | None, OpFact]]) -> tuple[OpGroup, ...]:
    """Operators with the type that a whole group has; None: each column has its own."""
    tables: _Tables = {}
    for alone, fact in facts:
        _add(tables, (*fact[:4], alone), fact.of, fact.name, (fact.op_type, fact.replaced_by))
    made = []
    for (pass_name, reason, ranks, role, _), kinds, found in _alike(tables):
        held = tuple(Row(of, tuple(names)) for of, names in found)
        made.append(
            OpGroup(
                pass_name=pass_name, reason=reason, ranks=ranks, role=role, count=sum(len(row.names) for row in held),
                op_types=_joined([op_type for op_type, _ in kinds]), replaced_by=_shown([by for _, by in kinds]),
                rows=held,
            )
        )  # fmt: skip
    return tuple(made)


def group_removed_vars(facts: Iterable[RemovedVarFact]) -> tuple[RemovedVarGroup, ...]:
    """Values in groups, in the order of their first members."""
    tables: _Tables = {}
    for fact in facts:
        place = (fact.of, fact.shape, fact.nbytes)
        _add(tables, (*fact[:4], fact.dtype), place, fact.name, fact.replaced_by)
    made = []
    for (pass_name, reason, ranks, role, dtype), kinds, found in _alike(tables):
        values = tuple(RemovedVarRow(of, shape, size, tuple(names)) for (of, shape, size), names in found)
        made.append(
            RemovedVarGroup(
                pass_name=pass_name, reason=reason, ranks=ranks, role=role, dtype=dtype, replaced_by=_shown(kinds),
                count=sum(len(row.names) for row in values), rows=values,
            )
        )  # fmt: skip
    return tuple(made)


def group_added_vars(facts: Iterable[AddedVarFact]) -> tuple[AddedVarGroup, ...]:
    """Values in groups, in the order of their first members."""
    tables: dict[Key, dict[str | None, list[str]]] = {}
    for fact in facts:
        named = tables.setdefault((*fact[:3], fact.dtype, fact.per_rank), {})
        named.setdefault(fact.of, []).append(fact.name)
    return tuple(
        AddedVarGroup(
            pass_name=pass_name, reason=reason, role=role, dtype=dtype, per_rank=per_rank,
            count=sum(map(len, rows.values())), rows=tuple(Row(of, tuple(names)) for of, names in rows.items()),
        )
        for (pass_name, reason, role, dtype, per_rank), rows in tables.items()
    )  # fmt: skip


def _alike(tables: _Tables) -> Iterator[tuple[Key, Sequence[Any], list[tuple[Any, list[str]]]]]:
    """Tables whose rows have the same columns: key, columns, rows. A single column is that of all names of a row."""
    for head, rows in tables.items():
        found: dict[Key, list[tuple[Any, list[str]]]] = {}
        for place, row in rows.items():
            kinds = tuple(row.kinds)
            if kinds.count(kinds[0]) == len(kinds):
                kinds = kinds[:1]
            found.setdefault(kinds, []).append((place, row.names))
        for kinds, named in found.items():
            yield head, kinds, named


def _joined(items: Sequence[str]) -> tuple[str, ...]:
    return tuple(items[:1]) if len(set(items)) == 1 else tuple(items)


def _shown(items: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Return the replacements of each column; () if no column has one."""
    if not any(items):
        return ()
    return (items[0],) if len(set(items)) == 1 else tuple(items)


# --- and back -------------------------------------------------------------------------------------------------------


def expand_ops(groups: Iterable[OpGroup]) -> Iterator[OpFact]:
    """Operators one by one."""
    for each in groups:
        head = (each.pass_name, each.reason, each.ranks, each.role)
        for row in each.rows:
            kinds, by = _per_name(each.op_types, row.names), _per_name(each.replaced_by or ((),), row.names)
            for name, op_type, replaced_by in zip(row.names, kinds, by):
                yield OpFact(*head, row.of, name, op_type, replaced_by)


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
