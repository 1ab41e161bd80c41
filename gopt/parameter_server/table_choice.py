"""Which parameters of a step become tables whose rows lie on servers, and in which layout; and why others do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gopt.analysis.embeddings import EmbeddingTable, find_embeddings
from gopt.analysis.graph_walks import GraphIndex
from gopt.analysis.operators import elementwise
from gopt.analysis.training import Phase, TrainingGraph
from gopt.analysis.updates import Mode, Updates, UpdateSubgraph
from gopt.errors import OptionError
from gopt.parameter_server.options import SplitOptions
from gopt.parameter_server.table_planner import plan_tables, table_size
from gopt.parameter_server.tables import Layout, TableLayout
from gopt.sanitize import show


@dataclass(frozen=True, slots=True)
class ServedTable:
    """A table, how it is shared out, and its update."""

    number: int
    table: EmbeddingTable
    layout: TableLayout
    subgraph: UpdateSubgraph

    def elements(self, server: int) -> int:
        """Elements that a server has of it."""
        return self.layout.local_rows(server) * len(self.layout.columns(server))


@dataclass(frozen=True, slots=True)
class TableChoice:
    """The tables of a split, and why parameters of which rows are looked up stay dense."""

    served: tuple[ServedTable, ...] = ()
    dense: tuple[tuple[str, str], ...] = ()

    @property
    def parameters(self) -> frozenset[str]:
        """The parameters that are tables."""
        return frozenset(each.table.parameter for each in self.served)

    @property
    def rows(self) -> frozenset[str]:
        """What lookups make: trainers pull it."""
        return frozenset(lookup.rows for each in self.served for lookup in each.table.lookups)


def choose_tables(training: TrainingGraph, updates: Updates, options: SplitOptions) -> TableChoice:
    """Plan the tables of a step.

    Raises OptionError where the user wants one shared out that cannot be, or where servers lack memory for them.
    """
    if options.tables_off:
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
        known = [f"{show(name)} stays dense: {why}" for name, why in dense[:4]]
        raise OptionError(error.message, *error.hints, *known) from None
    served: list[ServedTable] = []
    for table, layout in zip(fit, layouts):
        if layout.layout is Layout.DENSE:
            dense.append((table.parameter, "nearly all of its rows are looked up in a step"))
        else:
            subgraph = updates.subgraphs[table.parameter]
            served.append(ServedTable(len(served), table, without_empty_parts(layout), subgraph))
    return TableChoice(tuple(served), tuple(dense))


def without_empty_parts(layout: TableLayout) -> TableLayout:
    """A layout in which each part has some elements: fewer servers, where a table has fewer rows or columns."""
    full = [
        place for place, server in enumerate(layout.servers) if layout.local_rows(server) and layout.columns(server)
    ]
    if len(full) == len(layout.servers):
        return layout
    servers = tuple(layout.servers[place] for place in full)
    cuts = (*(layout.cuts[place] for place in full), layout.cuts[-1]) if layout.cuts else ()
    return replace(layout, servers=servers, cuts=cuts)


def _unfit(
    training: TrainingGraph, index: GraphIndex, updates: Updates, table: EmbeddingTable, options: SplitOptions
) -> Iterator[str]:
    """Why a recognised table stays dense."""
    types, subgraph = training.graph.types, updates.subgraphs.get(table.parameter)
    if not options.mode.rounds:
        yield f"mode {options.mode} has no rounds in which rows are merged"
    if not table.rows * table.width:
        yield "it has no elements"
    if options.accumulate > 1:
        yield "micro-steps sum whole gradients"
    if not table.prefetchable:
        yield "its row numbers depend on parameters"
    if subgraph is None or subgraph.mode is not Mode.SPLIT:
        yield "its update mixes elements" if subgraph is None else subgraph.why
        return
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
