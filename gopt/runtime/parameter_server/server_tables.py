"""A server's parts of tables: the source of first rows, and the update of rows in rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gopt.artifact.manifest_entries import LocalState
from gopt.artifact.server_entries import TableEntry
from gopt.artifact.table_parts import table_layout
from gopt.ir.graph import COMM, Graph
from gopt.ir.types import numpy_dtype
from gopt.records.row_init import RowInit
from gopt.records.tables import Rows
from gopt.runtime.parameter_server.job import ServerJob
from gopt.runtime.parameter_server.touched_rows import RowSource, RowStore, TouchedTable, take_out
from gopt.runtime.session import Array


class ServerTables:
    """The tables with parts on a server. ``entries``: number -> the table's entry in the manifest."""

    def __init__(self, server_job: ServerJob, endpoint: int) -> None:
        self.server = endpoint - server_job.trainers
        self._job, self._endpoint = server_job, endpoint
        self._states: Sequence[LocalState] = server_job.entry(endpoint).state
        tables = server_job.plan.tables
        self.entries = {number: table for number, table in enumerate(tables) if self.server in table.servers}
        dtypes = {state.tensor: numpy_dtype(state.dtype) for state in server_job.manifest.states}
        self.sources: dict[str, RowSource] = {}
        """State -> what makes its rows, where no file has them."""
        for entry in self.entries.values():
            self.sources |= self._sources(entry, dtypes)
        self.touched: dict[int, TouchedTable] = {}
        """Table whose updates run on touched rows -> its part."""

    def _sources(self, entry: TableEntry, dtypes: Mapping[str, np.dtype]) -> dict[str, RowSource]:
        layout = table_layout(entry)
        rows, columns = layout.row_ids(self.server), layout.columns(self.server)
        inits = {init.tensor: RowInit.parse(init.rows) for init in entry.init}
        tensors = {state.input: state.pieces[0].tensor for state in self._states if state.pieces}
        return {
            name: RowSource(
                inits[tensors[name]], tensors[name], len(rows), rows.start, rows.step, layout.width,
                slice(columns.start, columns.stop), dtypes[tensors[name]],
            )
            for name in self._inputs(entry) if tensors[name] in inits
        }  # fmt: skip

    def _inputs(self, entry: TableEntry) -> tuple[str, ...]:
        index = entry.servers.index(self.server)
        return entry.states[index].inputs if entry.states else entry.inputs[index : index + 1]

    def initial(self, graphs: Mapping[str, Graph]) -> dict[str, Array]:
        """The server's states at the first step, as ``ServerJob.initial_states``, without rows created at the first
        touch."""
        stored = [state for state in self._states if state.input not in self.sources]
        states = self._job.initial_states(self._endpoint, stored, graphs)
        for entry in self.entries.values():
            if entry.update != Rows.LAZY.value:
                names = [name for name in self._inputs(entry) if name in self.sources]
                states |= {name: RowStore.drawn(self.sources[name]).whole() for name in names}
        return states

    @property
    def lazy(self) -> list[int]:
        """Tables with updates on touched rows."""
        return [number for number, entry in self.entries.items() if entry.update == Rows.LAZY.value]

    def take_out(self, number: int, graph: Graph, values: dict[str, Array], *, merges: bool) -> Graph:
        """Return the graph without the part of a table with updates on touched rows, and remove this part from
        ``values``.

        ``merges``: whether the graph is a round's, with rows from messages; else rows are inputs."""
        entry = self.entries[number]
        states = entry.states[entry.servers.index(self.server)]
        graph, touched = take_out(graph, dict(zip(states.inputs, states.outputs)))
        stores = {state.input: self._store(state.input, entry, values) for state in touched}
        self.touched[number] = TouchedTable(tuple(touched), stores)
        rows = [state.rows for state in touched]
        if not merges:
            graph.inputs.update((name, graph.types[name]) for name in rows)
        for node in graph.nodes if merges else ():
            if node.domain == COMM and node.op_type == "AggregateRows" and node.attributes["table"] == number:
                node.outputs = [*node.outputs, *rows]
        return graph

    def _store(self, name: str, entry: TableEntry, values: dict[str, Array]) -> RowStore:
        array = values.pop(name, None)
        if array is None:
            return RowStore.drawn(self.sources[name])
        layout = table_layout(entry)
        return RowStore(array.reshape(layout.local_rows(self.server), len(layout.columns(self.server))))

    @property
    def updated(self) -> frozenset[str]:
        """The graph's names of updated rows."""
        return frozenset(state.updated for table in self.touched.values() for state in table.states)

    def arrays(self) -> dict[str, Array]:
        """All states of parts with updates on touched rows."""
        return {name: array for table in self.touched.values() for name, array in table.arrays().items()}
