"""Puts removed and added operators and values into the groups of the report, one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gopt.artifact.report_groups import (
    AddedVarFact,
    AddedVarGroup,
    OpFact,
    OpGroup,
    RemovedVarFact,
    RemovedVarGroup,
    RemovedVarRow,
    Row,
    Shape,
)


@dataclass(slots=True)
class _Column:
    """The names of a row in the making, and the other differences between columns."""

    names: list[str] = field(default_factory=list)
    kinds: list[Any] = field(default_factory=list)
    """(op_type, replaced_by) of an operator, replaced_by of a value."""


Key = tuple[Any, ...]
Head = tuple[str, str, str, str]
"""Pass, reason, ranks and role of a group."""


class Sized(Protocol):
    """Dtype, shape and bytes of a value."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Shape | None: ...
    @property
    def nbytes(self) -> int: ...


class _Tables:
    """Rows by the key of the group and the place inside. Items of a row mostly follow one another."""

    def __init__(self) -> None:
        self.found: dict[Key, dict[Any, _Column]] = {}

    def row(self, key: Key, key_of_row: Any) -> _Column:
        """The row of a group at a place, made if missing."""
        rows = self.found.get(key)
        if rows is None:
            rows = self.found[key] = {}
        row = rows.get(key_of_row)
        if row is None:
            row = rows[key_of_row] = _Column()
        return row

    def alike(self) -> Iterator[tuple[Key, Sequence[Any], list[tuple[Any, list[str]]]]]:
        """Return tables with rows of the same columns: key, columns, rows. A single column holds for all names of a
        row."""
        for key, rows in self.found.items():
            rows_by_kinds: dict[Key, list[tuple[Any, list[str]]]] = {}
            for key_of_row, row in rows.items():
                kinds = tuple(row.kinds)
                if kinds.count(kinds[0]) == len(kinds):
                    kinds = kinds[:1]
                rows_by_kinds.setdefault(kinds, []).append((key_of_row, row.names))
            for kinds, named in rows_by_kinds.items():
                yield key, kinds, named


class OpTables:
    """Operators grouped in the order of the groups' first members. ``by_type``: all of a group have the same type; else
    the updates of parameters are rows of a table."""

    def __init__(self, *, by_type: bool = False) -> None:
        self._by_type = by_type
        self._tables = _Tables()
        self._last: tuple[Head | None, str | None] = None, None
        self._row = _Column()

    def add(
        self, head: Head, of: str | None, name: str, op_type: str, replaced_by: tuple[str, ...],
        phases: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """Add an operator."""
        single = self._by_type or of is None
        if single or head is not self._last[0] or of is not self._last[1]:
            self._last = (None if single else head), of
            self._row = self._tables.row((*head, phases, op_type if single else None), of)
        self._row.names.append(name)
        self._row.kinds.append((op_type, replaced_by))

    def groups(self) -> tuple[OpGroup, ...]:
        """The groups of all that was added."""
        groups = []
        for (pass_name, reason, ranks, role, phases, _), kinds, parts in self._tables.alike():
            entries = tuple(Row(of, tuple(names)) for of, names in parts)
            groups.append(
                OpGroup(
                    pass_name=pass_name, reason=reason, ranks=ranks, role=role,
                    count=sum(len(row.names) for row in entries),
                    op_types=_joined([op_type for op_type, _ in kinds]), replaced_by=_shown([by for _, by in kinds]),
                    phases=phases, rows=entries,
                )
            )  # fmt: skip
        return tuple(groups)


class RemovedVarTables:
    """Values grouped in the order of the groups' first members."""

    def __init__(self) -> None:
        self._tables = _Tables()
        self._last: tuple[Head | None, str | None, object] = None, None, None
        self._row = _Column()

    def add(self, head: Head, of: str | None, name: str, type: Sized, replaced_by: tuple[str, ...]) -> None:
        """Add a value. ``type``: in the source."""
        last = self._last
        if head is not last[0] or of is not last[1] or type is not last[2]:
            self._last = head, of, type
            self._row = self._tables.row((*head, type.dtype), (of, type.shape, type.nbytes))
        self._row.names.append(name)
        self._row.kinds.append(replaced_by)

    def groups(self) -> tuple[RemovedVarGroup, ...]:
        """The groups of all that was added."""
        groups = []
        for (pass_name, reason, ranks, role, dtype), kinds, parts in self._tables.alike():
            values = tuple(RemovedVarRow(of, shape, size, tuple(names)) for (of, shape, size), names in parts)
            groups.append(
                RemovedVarGroup(
                    pass_name=pass_name, reason=reason, ranks=ranks, role=role, dtype=dtype, replaced_by=_shown(kinds),
                    count=sum(len(row.names) for row in values), rows=values,
                )
            )  # fmt: skip
        return tuple(groups)


def group_removed_ops(facts: Iterable[OpFact]) -> tuple[OpGroup, ...]:
    """Operators in groups, in the order of their first members: the updates of parameters as rows of a table."""
    return _group_ops(facts, OpTables())


def group_added_ops(facts: Iterable[OpFact]) -> tuple[OpGroup, ...]:
    """Operators in groups, in the order of their first members: all of a group have one type."""
    return _group_ops(facts, OpTables(by_type=True))


def _group_ops(facts: Iterable[OpFact], tables: OpTables) -> tuple[OpGroup, ...]:
    for fact in facts:
        tables.add(fact[:4], fact.of, fact.name, fact.op_type, fact.replaced_by, fact.phases)
    return tables.groups()


def group_removed_vars(facts: Iterable[RemovedVarFact]) -> tuple[RemovedVarGroup, ...]:
    """Values in groups, in the order of their first members."""
    tables = RemovedVarTables()
    for fact in facts:
        tables.add(fact[:4], fact.of, fact.name, fact, fact.replaced_by)
    return tables.groups()


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


def _joined(items: Sequence[str]) -> tuple[str, ...]:
    return tuple(items[:1]) if len(set(items)) == 1 else tuple(items)


def _shown(items: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Return the replacements of each column; () if no column has one."""
    if not any(items):
        return ()
    return (items[0],) if len(set(items)) == 1 else tuple(items)
