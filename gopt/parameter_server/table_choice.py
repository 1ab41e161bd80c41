"""Chooses the parameters that become tables with rows on servers, and the layouts; and says why others do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gopt.analysis.embeddings import EmbeddingTable, find_embeddings
from gopt.analysis.training import Phase, TrainingGraph
from gopt.analysis.updates import UpdateMode, Updates, UpdateSubgraph
from gopt.artifact.server_entries import Mode
from gopt.errors import OptionError
from gopt.ir.graph_index import GraphIndex
from gopt.ir.node_kinds import elementwise
from gopt.ir.types import FLOATS
from gopt.parameter_server.options import SplitOptions
from gopt.parameter_server.table_patterns import chosen, fits
from gopt.parameter_server.table_planner import plan_tables, row_traffic, table_size
from gopt.records.row_init import RowInit
from gopt.records.tables import Layout, Rows, TableLayout
from gopt.text.sanitize import show


@dataclass(frozen=True, slots=True)
class ServedTable:
    """A table, its layout, and the update. ``rows``: the rows on which an update runs; ``init``: tensor with the
    table's rows -> its initializer."""

    number: int
    table: EmbeddingTable
    layout: TableLayout
    subgraph: UpdateSubgraph
    rows: Rows = Rows.DENSE
    init: Mapping[str, RowInit] = field(default_factory=dict)

    def elements(self, server: int) -> int:
        """Return the table's elements on a server."""
        return self.layout.local_rows(server) * len(self.layout.columns(server))


@dataclass(frozen=True, slots=True)
class TableChoice:
    """The tables of a split. ``dense``: other parameters with lookups, each with the reason."""

    served: tuple[ServedTable, ...] = ()
    dense: tuple[tuple[str, str], ...] = ()

    @property
    def parameters(self) -> frozenset[str]:
        """Return the parameters that are tables."""
        return frozenset(table.table.parameter for table in self.served)

    def lookups(self, training: TrainingGraph) -> list[int]:
        """Return the number of ids a trainer's batch looks up in each table, with repeats, but at most the table's
        rows."""
        return [int(table_size(training, served.table, 1).lookups) for served in self.served]

    def row_traffic(self, training: TrainingGraph, options: SplitOptions) -> tuple[int, ...]:
        """Return ``row_traffic`` of these tables, in the types in which rows travel; empty without tables."""
        sizes = [table_size(training, served.table, 1) for served in self.served]
        wired = [replace(size, dtype=options.travels(size.dtype)) for size in sizes]
        layouts = [served.layout for served in self.served]
        return row_traffic(list(zip(wired, layouts)), options.servers) if self.served else ()

    @property
    def rows(self) -> frozenset[str]:
        """Return the results of lookups, which trainers pull."""
        return frozenset(lookup.rows for table in self.served for lookup in table.table.lookups)


def choose_tables(training: TrainingGraph, updates: Updates, options: SplitOptions) -> TableChoice:
    """Plan the tables of a step.

    Raises OptionError for an impossible layout requested by the user, and where servers lack memory.
    """
    if options.tables_off:
        if options.rows or options.init:
            raise OptionError(
                f"--{'rows' if options.rows else 'init'} cannot be combined with --no-tables", "leave one out"
            )
        return TableChoice()
    index = GraphIndex(training.graph)
    fit: list[EmbeddingTable] = []
    dense: list[tuple[str, str]] = []
    for table in find_embeddings(training):
        why = table.why_not or next(_unfit(training, index, updates, table, options), "")
        if why:
            dense.append((table.parameter, why))
        else:
            fit.append(table)
    sizes = [table_size(training, table, options.trainers) for table in fit]
    # A part of columns is a box of the tensor, which has as many dimensions.
    flat = {table.parameter for table in fit if len(training.graph.types[table.parameter].dims) <= 2}
    sizes = [replace(size, by_column=size.by_column and size.name in flat) for size in sizes]
    try:
        layouts = plan_tables(sizes, options.servers, memory=options.table_memory, given=options.tables)
    except OptionError as error:
        reasons = [f"{show(name)} stays dense: {why}" for name, why in dense[:4]]
        raise OptionError(error.message, *error.hints, *reasons) from None
    rows = _rows(options, [table.parameter for table, layout in zip(fit, layouts) if layout.layout is not Layout.DENSE])
    init = _inits(training, options, fit, layouts)
    served: list[ServedTable] = []
    for table, layout in zip(fit, layouts):
        if layout.layout is Layout.DENSE:
            dense.append((table.parameter, "nearly all of its rows are looked up in a step"))
        else:
            subgraph = updates.subgraphs[table.parameter]
            kind = rows.get(table.parameter, Rows.DENSE)
            _check_lazy(table, kind)
            inits = {name: init for name, init in init.items() if name in _tensors(table)}
            served.append(ServedTable(len(served), table, without_empty_parts(layout), subgraph, kind, inits))
    return TableChoice(tuple(served), tuple(dense))


def _rows(options: SplitOptions, names: Sequence[str]) -> dict[str, Rows]:
    """Return table -> the rows of its updates, if set by the user."""
    rows_by_text = {rows_kind.value: rows_kind for rows_kind in Rows}
    for pattern, text in options.rows.items():
        if text not in rows_by_text:
            raise OptionError(f"rows of table {show(pattern)} cannot be {show(text)}", "they are dense or lazy")
    if options.rows and not names:
        raise OptionError("--rows: no parameter of this step is a table", "leave --rows out")
    return {name: rows_by_text[text] for name, text in chosen(options.rows, names).items()}


def _check_lazy(table: EmbeddingTable, rows: Rows) -> None:
    """Refuse lazy updates of a table with an update needing all rows."""
    if rows is Rows.LAZY and table.update is not None and table.update.all_rows:
        raise OptionError(
            f"rows of table {show(table.parameter)} cannot be lazy: {table.update.all_rows}",
            f"give --rows {table.parameter}=dense",
        )


def _tensors(table: EmbeddingTable) -> tuple[str, ...]:
    """Return the tensors with a row for each row of the table, the table first."""
    return table.update.states if table.update is not None else (table.parameter,)


def _inits(
    training: TrainingGraph, options: SplitOptions, tables: Sequence[EmbeddingTable], layouts: Sequence[TableLayout]
) -> dict[str, RowInit]:
    """Return tensor -> its initializer, where the user gives one. An entry matching a table is for tables, any other
    for optimizer states with the rows of a table."""
    if not options.init:
        return {}
    served = [table for table, layout in zip(tables, layouts) if layout.layout is not Layout.DENSE]
    parameters = {table.parameter for table in served}
    # A pattern for tables must not reach their moments: a negative moment is wrong.
    of_tables = {pattern: text for pattern, text in options.init.items() if fits(pattern, parameters)}
    rest = {pattern: text for pattern, text in options.init.items() if pattern not in of_tables}
    texts = chosen(of_tables, parameters) if of_tables else {}
    if rest:
        states = {name for table in served for name in _tensors(table)}
        texts |= chosen(rest, states, "table, and no state with the rows of one")
    inits = {name: RowInit.parse(text) for name, text in texts.items()}
    for name in inits:
        dtype = training.graph.types[name].dtype
        if dtype not in FLOATS:
            raise OptionError(f"--init {show(name)}: rows of {dtype} cannot be drawn", "leave it out")
    return inits


def without_empty_parts(layout: TableLayout) -> TableLayout:
    """Return a layout whose parts all have elements: fewer servers, where a table has fewer rows or columns."""
    full = [
        index for index, server in enumerate(layout.servers) if layout.local_rows(server) and layout.columns(server)
    ]
    if len(full) == len(layout.servers):
        return layout
    servers = tuple(layout.servers[index] for index in full)
    cuts = (*(layout.cuts[index] for index in full), layout.cuts[-1]) if layout.cuts else ()
    return replace(layout, servers=servers, cuts=cuts)


def _unfit(
    training: TrainingGraph, index: GraphIndex, updates: Updates, table: EmbeddingTable, options: SplitOptions
) -> Iterator[str]:
    """Yield the reasons why a recognised table stays dense."""
    types, subgraph = training.graph.types, updates.subgraphs.get(table.parameter)
    if options.mode is Mode.GEO:
        yield "in mode geo trainers update the whole of it on their own"
    if options.compensation is not None:
        yield "delays of rows are not compensated"
    if not table.rows * table.width:
        yield "it has no elements"
    if options.accumulate > 1:
        yield "micro-steps sum whole gradients"
    if not table.prefetchable:
        yield "its row numbers depend on parameters"
    if subgraph is None or subgraph.mode is not UpdateMode.SPLIT:
        yield "its update mixes elements" if subgraph is None else subgraph.why
        return
    if not options.mode.rounds and subgraph.reductions:
        yield f"mode {options.mode}: its update reduces over all of it, and its parts are updated one by one"
    if table.update is not None and table.update.operands:
        yield f"its update reads {table.update.operands[0]}, which has a row for each of its own"
    if len(training.weights_of(table.gradient)) > 1:
        yield "another parameter has the same gradient"
    if any(node.phase is not Phase.UPDATE for node in index.users.get(table.gradient, ())):
        yield "forward or backward read its whole gradient"
    for lookup in table.lookups:
        if not types[lookup.rows].static or not types[lookup.ids].static:
            yield f"{lookup.rows} has an open shape"
    for term in table.terms:
        if not types[term.rows].static or not types[term.ids].static:
            yield f"{term.rows} has an open shape"
        for node in term.scaling:
            moved = [name for name in node.reads if not index.one_element(name)]
            if not elementwise(node) or len(moved) != 1 or len(node.outputs) != 1:
                yield f"its gradient is scaled by {node.op_type} {node.label}"
