"""A trainer's rows of tables: pulled rows, and rows with pushed gradients.

A pull asks each server once for the distinct rows of the server; a server without such rows gets no message. A push
goes to every server with a part, also without rows, so that servers know that nothing else follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gopt.collectives.layout import HALVES
from gopt.errors import InputError, RunError
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.graph_index import walk
from gopt.ir.types import numpy_dtype
from gopt.records.tables import Ids, Layout, TableLayout, TableRequest
from gopt.runtime.host_value import array_dtype
from gopt.runtime.messages.failures import Awaited
from gopt.runtime.messages.message import Kind, Message
from gopt.runtime.parameter_server.outbox import Outbox
from gopt.runtime.session import Array


def coalesce(ids: Ids, rows: Array) -> tuple[Ids, Array]:
    """Each id once, in ascending order, and the sum of the id's rows, added in the order of the list. float16 and
    bfloat16 are summed in float32 and rounded once."""
    order = np.argsort(ids, kind="stable")
    ids, listed = ids[order], rows[order]
    starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1))
    if starts.size == ids.size:
        return ids, listed
    wide = listed.astype(np.float32) if array_dtype(rows) in HALVES else listed
    with np.errstate(all="ignore"):
        return ids[starts], np.add.reduceat(wide, starts, axis=0).astype(rows.dtype, copy=False)


def pulls_first(graph: Graph) -> None:
    """Put pulls of rows, and the nodes that compute the ids, before all other nodes, so that the requests of all tables
    leave before the first wait for an answer. Changes the order of the graph's nodes and nothing else."""
    producers = {name: node for node in graph.nodes for name in node.outputs}
    pulls = (node for node in graph.nodes if node.domain == COMM and node.op_type == "PullRows")
    early = set(walk(pulls, lambda node: [producers[name] for name in node.reads if name in producers]))
    if early:
        graph.nodes = sorted(graph.nodes, key=lambda node: node not in early)


@dataclass(slots=True, eq=False)
class PendingRows:
    """Requested rows. ``places``: the index of each wanted row among the distinct rows."""

    client: TableRows
    number: int
    layout: TableLayout
    parts: tuple[TableRequest, ...]
    places: Ids
    count: int
    """Distinct rows."""
    dtype: str
    shape: tuple[int, ...]
    what: str
    index: int

    def result(self) -> list[Array]:
        """Wait for the answers, and return the rows in the requested order. Raises RunError where a server sends
        something else."""
        self.client.position(self.index)
        result = np.empty((self.count, self.layout.width), numpy_dtype(self.dtype))
        for part in self.parts:
            server = self.client.server(part.server)
            columns = self.layout.columns(part.server)
            rows = self.client.wait(server, self.number, self.what)
            if rows.shape != (part.local.size, len(columns)) or rows.dtype != result.dtype:
                sent = f"server {part.server} sent {array_dtype(rows)}{list(rows.shape)}"
                raise RunError(f"{sent} as {part.local.size} x {len(columns)} {self.dtype} of {self.what}")
            if self.layout.layout is Layout.COLUMNS:
                result[:, columns.start : columns.stop] = rows
            else:
                result[part.positions] = rows
        return [result[self.places].reshape(self.shape)]


@dataclass(slots=True, eq=False)
class TableRows:
    """All tables of a trainer. ``server``: a server's number -> the endpoint. ``receive``: receives one message."""

    layouts: Sequence[TableLayout]
    outbox: Outbox
    server: Callable[[int], int]
    receive: Callable[[Callable[[], Awaited]], None]
    position: Callable[[int], None]
    bytes_pushed: int = 0
    bytes_pulled: int = 0
    """Bytes of numbers and rows, both ways: a pull sends numbers."""
    _requests: int = 0
    _came: dict[tuple[int, int], Array] = field(default_factory=dict)
    """Server's endpoint and number of a pull -> its rows."""

    def pull(self, index: int, node: Node, round_number: int, ids: Array) -> PendingRows:
        """Request rows as of before the update of a round. Raises InputError for an index outside the table."""
        attributes = node.attributes
        layout = self.layouts[attributes["table"]]
        unique, indices = np.unique(layout.known(ids), return_inverse=True)
        number, self._requests = self._requests, self._requests + 1
        parts = tuple(part for part in layout.partition(unique) if part.local.size)
        note = {"dtype": attributes["dtype"], "pull": number}
        for part in parts:
            self._send(part.server, Kind.PULL_ROWS, attributes["table"], round_number, (part.local,), note)
            self.bytes_pulled += part.local.nbytes
        shape = (ids.size, attributes["width"]) if attributes["width"] else (ids.size,)
        what = f"rows of table {layout.name} of round {round_number}"
        return PendingRows(
            self, number, layout, parts, indices.reshape(-1), unique.size, attributes["dtype"], shape, what, index
        )

    def push(self, node: Node, round_number: int, weight: float | None, ids: Array, rows: Array) -> None:
        """Send gradients of rows, each row once, to all servers with a part. Raises InputError for an index outside the
        table, or another number of rows."""
        layout = self.layouts[node.attributes["table"]]
        row_ids = layout.known(ids)
        if rows.size != row_ids.size * layout.width:
            raise InputError(f"{row_ids.size} rows of table {layout.name} are pushed with {list(rows.shape)} values")
        unique, sums = coalesce(row_ids, rows.reshape(row_ids.size, layout.width))
        note = None if weight is None else {"weight": weight}
        for part in layout.partition(unique):
            columns = layout.columns(part.server)
            share = sums[part.positions, columns.start : columns.stop]
            self._send(part.server, Kind.PUSH_ROWS, node.attributes["table"], round_number, (part.local, share), note)
            self.bytes_pushed += part.local.nbytes + share.nbytes

    def take(self, message: Message) -> None:
        """Accept an answer to a pull."""
        self._came[message.source, int(message.note["pull"])] = message.arrays[0]
        self.bytes_pulled += message.arrays[0].nbytes

    def wait(self, server: int, number: int, what: str) -> Array:
        """The rows in an endpoint's answer to a pull."""
        while (server, number) not in self._came:
            self.receive(lambda: Awaited((server,), f"send {what}"))
        return self._came.pop((server, number))

    def _send(self, server: int, *message: Any) -> None:
        self.outbox.send(self.server(server), self.outbox.endpoint.message(*message))
