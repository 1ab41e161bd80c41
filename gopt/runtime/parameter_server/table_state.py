"""An asynchronous server's part of a table: rows pushed and pulled by trainers, and counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gopt.errors import RunError
from gopt.ir.types import TensorType, numpy_dtype
from gopt.parameter_server.blocks import Block, TablePart
from gopt.runtime.device import Host
from gopt.runtime.messages.message import Message
from gopt.runtime.parameter_server.key_state import BlockState, Part
from gopt.runtime.parameter_server.server_rows import StoredRows as Rows
from gopt.runtime.parameter_server.server_rows import check_rows, rows_answer
from gopt.runtime.parameter_server.server_tables import ServerTables
from gopt.runtime.session import Array, SessionCache
from gopt.runtime.training.hyper_parameters import HyperParameter


class TableState(BlockState):
    """A server's part of a table, ``rows``, and the part's block."""

    def __init__(
        self, block: Block, rows: Rows, tables: ServerTables, states: dict[str, Array], rule: str,
        hyper: Sequence[HyperParameter], device: Host, cache: SessionCache,
    ) -> None:  # fmt: skip
        super().__init__(block, states, rule, hyper, device, cache)
        assert isinstance(block.entry, TablePart)
        self.rows, self._entry = rows, block.entry
        self._types = {name: block.update.inputs[name] for name in (block.entry.ids, block.entry.gradient)}
        graph, results = block.update, dict(block.states)
        if block.key in tables.lazy:
            graph = tables.take_out(block.key, graph, states, merges=False)
        self._touched = tables.touched.get(block.key)
        self._states: dict[str, Array] = {}
        if self._touched is None:
            self._states = {name: states[name] for name in block.states}
        else:
            results = {state.updated: state.updated for state in self._touched.states}
        self._update = Part(graph, results, device, cache)

    @property
    def root(self) -> str:
        return f"gopt.async.table{self.block.key}"

    @property
    def states(self) -> Mapping[str, Array]:
        """All states, flattened. Untouched rows are created."""
        return self._states if self._touched is None else self._touched.arrays()

    def push(self, message: Message, trainers: int) -> int:
        """Apply a trainer's pushed rows; returns by how many updates the push is late. Raises RunError for rows outside
        the part, or out of ascending order."""
        ids, rows = message.arrays
        check_rows(self.rows, ids, message.source)
        if not ids.size:  # a trainer that looks up no row here pulls none
            self.pulled[message.source] = self.version
        if ids.size and (np.diff(ids) <= 0).any():
            raise RunError(f"trainer {message.source} pushed unsorted rows of table {self.rows.name}")
        fed = self._fed() | {
            self._entry.ids: ids,
            self._entry.gradient: _as(self._types[self._entry.gradient], rows.reshape(ids.size, self.rows.columns)),
        }
        if self._touched is None:
            self._states = self._update(fed, self._states, self.counters)
        else:
            self._touched.put(ids, self._update(fed, self._touched.take(ids), self.counters))
        return self._count(message.source, trainers, fed)

    def pull(self, message: Message) -> Array:
        """The rows requested by a trainer, with the current version, recorded for the trainer. Raises RunError for rows
        outside the part."""
        self.pulled[message.source] = self.version
        if self._touched is not None:
            return rows_answer(self.rows, self._touched.stores[self.rows.input].take, message)
        whole = self._states[self.rows.input].reshape(self.rows.rows, self.rows.columns)
        return rows_answer(self.rows, whole.__getitem__, message)


def _as(type: TensorType, rows: Array) -> Array:
    return rows.astype(numpy_dtype(type.dtype), copy=False)
