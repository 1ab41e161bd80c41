"""Chooses each table's layout among servers, by its bytes and by how often its rows are looked up.

A table whose rows are nearly all looked up in every step is cheaper as a dense parameter. For the others, the planner
compares plans splitting the first k tables, the heaviest first, and putting each of the rest whole on the least loaded
server. Of the plans that fit the servers' memory, the planner takes the plan with the least load on the fullest server,
or a nearly equal plan with fewer split tables: a split table costs a message to each server in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gopt.analysis.embeddings import EmbeddingTable
from gopt.analysis.training import TrainingGraph
from gopt.errors import OptionError
from gopt.ir.types import nbytes
from gopt.parameter_server.table_patterns import chosen
from gopt.records.tables import Layout, TableLayout, even_cuts
from gopt.text.sanitize import show
from gopt.text.suggestions import nearest

ID_BYTES = 8
NEARLY = 1.1
"""Factor by which a plan with fewer split tables may load its fullest server more."""
PLANS = 32
"""Number of plans that are compared."""


@dataclass(frozen=True, slots=True)
class TableSize:
    """A table as the planner sees it: ``lookups``: expected number of ids all trainers together look up in a step;
    ``state_bytes``: of the optimizer, for one row; ``by_row``: its update may be split by rows."""

    name: str
    rows: int
    width: int
    dtype: str = "float32"
    state_bytes: int = 0
    lookups: float = 1.0
    by_row: bool = True
    by_column: bool = True
    """Whether its update may be split by columns too: each element is updated by itself."""

    @property
    def row_bytes(self) -> int:
        return nbytes(self.dtype, self.width)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all rows and of the optimizer's states for them."""
        return self.rows * (self.row_bytes + self.state_bytes)

    @property
    def dense_traffic(self) -> int:
        """Return the bytes of the whole table, pushed and pulled once."""
        return 2 * self.rows * self.row_bytes

    def traffic(self, parts: int = 1) -> float:
        """Return the bytes of a step in which rows are pulled and pushed, and ids go to ``parts`` servers."""
        return self.lookups * (2 * self.row_bytes + ID_BYTES * parts)


def table_size(training: TrainingGraph, table: EmbeddingTable, trainers: int) -> TableSize:
    """Return the size of a recognised table. A trainer is expected to look up every id of a batch once, and no row
    twice; states count as far as they have the table's rows."""
    types, update = training.graph.types, table.update
    ids = sum(types[lookup.ids].elements for lookup in table.lookups)
    states = [types[name].nbytes for name in update.states if name != table.parameter] if update else []
    by_row, by_element = (update.by_row, update.by_element) if update else (False, False)
    return TableSize(
        table.parameter, table.rows, table.width, table.dtype, sum(states) // max(table.rows, 1),
        float(trainers * min(ids, table.rows)), by_row, by_element,
    )  # fmt: skip


def row_traffic(tables: Sequence[tuple[TableSize, TableLayout]], servers: int) -> tuple[int, ...]:
    """Return an estimate of the bytes of rows and their numbers between one trainer and each server in one step, both
    ways.

    It assumes that a batch looks up no row twice and that lookups are spread evenly over the rows. A repeated row
    travels once, so less may travel; a server with popular rows has more. ``lookups`` of the sizes are one
    trainer's.
    """
    loads = [0.0] * servers
    for table, layout in tables:
        for server in layout.servers:
            # A number goes to the server with the pull, and again with the push.
            loads[server] += _moved(table, layout, server, 2 * ID_BYTES)
    return tuple(map(round, loads))


def _moved(table: TableSize, layout: TableLayout, server: int, numbers: int) -> float:
    """Return the bytes that lookups of a table move through a server; ``numbers``: bytes of a row's number."""
    touched = table.lookups * layout.local_rows(server) / max(table.rows, 1)
    return touched * (2 * table.row_bytes * len(layout.columns(server)) / max(table.width, 1) + numbers)


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """A server's load from tables, without dense tables: bytes in memory, and bytes moved in a step."""

    nbytes: int = 0
    traffic: float = 0.0


def plan_tables(
    tables: Sequence[TableSize], servers: int, *, memory: int | None = None, given: Mapping[str, str] | None = None
) -> tuple[TableLayout, ...]:
    """Return a layout for each table; equal arguments give equal results everywhere.

    ``memory``: bytes that a server has for tables and the states. ``given``: the user's choices, a name or a pattern
    with ``*``, ``?`` and ``[...]`` -> ``dense``, ``whole``, ``whole:SERVER``, ``modulo``, ``range`` or ``columns``; the
    first entry matching a table counts. Raises OptionError.
    """
    if servers < 1:
        raise OptionError(f"the number of servers cannot be {show(servers)}", "it is at least 1")
    overrides = _overrides(tables, servers, given or {})
    planner = _Planner(tables, servers, memory, overrides)
    if memory is not None and sum(planner.held(table) for table in tables) > memory * servers:
        raise OptionError(
            f"the tables need {sum(planner.held(table) for table in tables)} bytes, and {servers} servers of {memory} "
            f"bytes have {memory * servers}",
            "take more servers, or servers with more memory",
        )
    return planner.best()


@dataclass(frozen=True, slots=True)
class _Override:
    """The user's choice for a table; ``server``: of a whole table, or -1."""

    layout: Layout
    server: int = -1


def _overrides(tables: Sequence[TableSize], servers: int, texts_of: Mapping[str, str]) -> dict[str, _Override]:
    texts = chosen(texts_of, [table.name for table in tables])
    read = {text: _read(pattern, text, servers) for pattern, text in texts_of.items()}
    overrides = {name: read[text] for name, text in texts.items()}
    for table in tables:
        _refuse_split(table, overrides.get(table.name))
    return overrides


def _read(pattern: str, text: str, servers: int) -> _Override:
    word, _, number = text.partition(":")
    layouts = [layout.value for layout in Layout]
    if word not in layouts or (number and word != "whole"):
        close = nearest(word, layouts) if word not in layouts else None
        raise OptionError(
            f"table {show(pattern)} cannot be {show(text)}",
            f"did you mean {close}?" if close is not None else f"it is one of {', '.join(layouts)}, whole:SERVER",
        )
    if number and (not number.isascii() or not number.isdecimal() or int(number) >= servers):
        raise OptionError(
            f"table {show(pattern)} is to be on server {show(number)}", f"there are servers 0 to {servers - 1}"
        )
    return _Override(Layout(word), int(number) if number else -1)


def _refuse_split(table: TableSize, override: _Override | None) -> None:
    rows = override is not None and override.layout in (Layout.MODULO, Layout.RANGE) and not table.by_row
    if override is None or not (rows or (override.layout is Layout.COLUMNS and not table.by_column)):
        return
    raise OptionError(
        f"table {show(table.name)} cannot be {override.layout.value}: its update needs more than one "
        f"{'row' if rows else 'element'} at a time",
        "let it be whole or dense",
    )


class _Planner:
    """Makes plans, and compares them by the load of the fullest server: the sum of the shares of bytes and traffic."""

    def __init__(
        self, tables: Sequence[TableSize], servers: int, memory: int | None, overrides: Mapping[str, _Override]
    ) -> None:
        self.tables, self.servers, self.memory, self.overrides = tables, servers, memory, overrides
        sparse = [table for table in tables if not self._dense(table)]
        self.bytes_in_all = sum(table.nbytes for table in sparse) or 1
        self.traffic_in_all = sum(table.traffic() for table in sparse) or 1.0
        self.heaviest = sorted(sparse, key=lambda table: (-self._weight(table.nbytes, table.traffic()), table.name))

    def _weight(self, nbytes: int, traffic: float) -> float:
        return nbytes / self.bytes_in_all + traffic / self.traffic_in_all

    def _dense(self, table: TableSize) -> bool:
        override = self.overrides.get(table.name)
        return override.layout is Layout.DENSE if override else table.dense_traffic <= table.traffic()

    def held(self, table: TableSize) -> int:
        """Return the bytes of a table held by servers as rows."""
        return 0 if self._dense(table) else table.nbytes

    def best(self) -> tuple[TableLayout, ...]:
        """Return the plan whose fullest server has the least load, or one nearly as good splitting fewer tables."""
        splittable = [
            table for table in self.heaviest if table.name not in self.overrides and _split(table, self.servers)
        ]
        counts = sorted({*range(min(len(splittable), PLANS) + 1), len(splittable)}) if self.servers > 1 else [0]
        plans: list[tuple[float, dict[str, TableLayout]]] = []
        refused: OptionError | None = None
        for count in counts:
            try:
                plans.append(self._plan({table.name for table in splittable[:count]}))
            except OptionError as error:
                refused = error
        if not plans:
            assert refused is not None
            raise refused
        least = min(load for load, _ in plans)
        chosen = next(plan for load, plan in plans if load <= NEARLY * least)
        return tuple(chosen[table.name] for table in self.tables)

    def _plan(self, split: set[str]) -> tuple[float, dict[str, TableLayout]]:
        loads = [ServerLoad()] * self.servers
        plan = {t.name: TableLayout(t.name, t.rows, t.width, Layout.DENSE) for t in self.tables if self._dense(t)}
        fixed = [table for table in self.heaviest if table.name in split or table.name in self.overrides]
        for table in fixed:
            override = self.overrides.get(table.name)
            layout = override.layout if override else _split(table, self.servers)
            if layout is not None and layout is not Layout.WHOLE:
                self._take(plan, loads, table, _parts(table, layout, range(self.servers)))
            elif override is not None and override.server >= 0:
                self._take(plan, loads, table, _parts(table, Layout.WHOLE, [override.server]))
        for table in self.heaviest:
            if table.name not in plan:
                server = min(range(self.servers), key=lambda index: (self._full(loads[index], table), index))
                self._take(plan, loads, table, _parts(table, Layout.WHOLE, [server]))
        return max(self._weight(load.nbytes, load.traffic) for load in loads), plan

    def _full(self, load: ServerLoad, table: TableSize) -> tuple[bool, float]:
        over = self.memory is not None and load.nbytes + table.nbytes > self.memory
        return over, self._weight(load.nbytes, load.traffic)

    def _take(
        self, plan: dict[str, TableLayout], loads: list[ServerLoad], table: TableSize, layout: TableLayout
    ) -> None:
        plan[table.name] = layout
        for server in layout.servers:
            loads[server] = _with(loads[server], table, layout, server)
            if self.memory is not None and loads[server].nbytes > self.memory:
                raise OptionError(
                    f"table {show(table.name)} does not fit: server {server} would hold {loads[server].nbytes} bytes "
                    f"of {self.memory}",
                    "take more servers, servers with more memory, or a layout that splits the table",
                )


def _split(table: TableSize, servers: int) -> Layout | None:
    """Return the default split of a table: by remainders, which spread popular rows."""
    if table.by_row and table.rows >= servers:
        return Layout.MODULO
    return Layout.COLUMNS if table.by_column and table.width >= servers else None


def _parts(table: TableSize, layout: Layout, servers: Iterable[int]) -> TableLayout:
    base = TableLayout(table.name, table.rows, table.width, Layout.DENSE)
    owners = tuple(servers)
    length = {Layout.RANGE: table.rows, Layout.COLUMNS: table.width}.get(layout)
    return replace(base, layout=layout, servers=owners, cuts=() if length is None else even_cuts(length, len(owners)))


def _with(load: ServerLoad, table: TableSize, layout: TableLayout, server: int) -> ServerLoad:
    """Return a server's load with the part of a table; expected lookups are spread evenly over rows."""
    rows, columns = layout.local_rows(server), len(layout.columns(server))
    added = rows * (table.row_bytes + table.state_bytes) * columns // max(table.width, 1)
    return ServerLoad(load.nbytes + added, load.traffic + _moved(table, layout, server, ID_BYTES))
