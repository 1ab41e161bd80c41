"""The messages of a trainer's graph: pushes are sent without waiting, pulls are requested in advance."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gopt.artifact.table_parts import table_layout
from gopt.collectives.layout import parse_shapes
from gopt.errors import RunError
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.types import numpy_dtype
from gopt.runtime.bound_calls import CollectiveFuture
from gopt.runtime.memory import Pool, unpack_views
from gopt.runtime.messages.endpoint import Endpoint
from gopt.runtime.messages.failures import Awaited
from gopt.runtime.messages.message import Kind, Message
from gopt.runtime.parameter_server.job import ServerJob
from gopt.runtime.parameter_server.outbox import Outbox
from gopt.runtime.parameter_server.table_rows import TableRows, pulls_first
from gopt.runtime.session import Array


@dataclass(slots=True, eq=False)
class TrainerMessages:
    """Makes the messages of a trainer's graphs. The executor calls the object for each message node, in the order of
    the file.

    ``other``: called with messages that are no answer to a pull.
    """

    server_job: ServerJob
    endpoint: Endpoint
    other: Callable[[Message], None]
    position: Callable[[int], None]
    mark: Callable[[str, float, float], None]
    noted: Callable[[Any], None] = lambda note: None
    """Called with what a server says beside the values."""
    pushed_all: Callable[[int], None] = lambda round_number: None
    """Called with the round before a value behind its update is waited for: nothing is pushed to it any more."""
    bytes_pushed: int = 0
    bytes_pulled: int = 0
    waited: float = 0.0
    """Seconds in which it waited for messages."""
    _weighted: set[int] = field(default_factory=set)
    """Numbers of pushes that carry a weight, by the identity of their node."""
    _requested: set[tuple[int, int, int]] = field(default_factory=set)
    """Server, bucket and version that were asked for and have not come."""
    _came: dict[tuple[int, int, int], Message] = field(default_factory=dict)
    _outbox: Outbox = field(init=False)
    _pool: Pool = field(default_factory=Pool)
    rows: TableRows = field(init=False)
    """Pulls and pushes of tables."""

    def __post_init__(self) -> None:
        layouts = [table_layout(entry) for entry in self.server_job.plan.tables]
        self._outbox = Outbox(self.endpoint)
        self.rows = TableRows(layouts, self._outbox, self.server_job.server, self.receive, self.position)

    @property
    def usage(self) -> dict[str, float]:
        """Bytes pushed and pulled so far, including rows of tables and their ids, and seconds waited."""
        pushed, pulled = self.bytes_pushed + self.rows.bytes_pushed, self.bytes_pulled + self.rows.bytes_pulled
        return {"bytes_pushed": pushed, "bytes_pulled": pulled, "waited": self.waited}

    def prepare(self, graph: Graph) -> Graph:
        """The graph for the executor: without the absent operands of message nodes."""
        for node in graph.nodes:
            if node.domain == COMM and node.op_type in ("Push", "PushRows"):
                if node.inputs[1]:
                    self._weighted.add(id(node))
                node.inputs = [name for name in node.inputs if name]
        pulls_first(graph)
        return graph

    def ask(self, graph: Graph, round_number: int, version: str) -> None:
        """Request all pulls of a graph at a version, so that servers send one bucket while another is used."""
        for node in graph.nodes:
            if node.domain == COMM and node.op_type == "Pull" and node.attributes["version"] == version:
                self._ask(node, round_number)

    def __call__(
        self, index: int, node: Node, inputs: list[Array], buffer: Any = None
    ) -> list[Array] | CollectiveFuture:
        """Make the message of a node; returns the results, or a future."""
        self.position(index)
        round_number = int(inputs[0])
        if node.op_type == "Push":
            self._push(node, round_number, inputs[1:])
            return [np.asarray(inputs[0])]
        if node.op_type == "Pull":
            return self._pull(node, round_number)
        if node.op_type == "PullRows":
            return self.rows.pull(index, node, round_number, inputs[1])
        if node.op_type == "PushRows":
            weight = float(inputs[1]) if id(node) in self._weighted else None
            self.rows.push(node, round_number, weight, inputs[-2], inputs[-1])
            return [np.asarray(inputs[0])]
        raise RunError(f"trainers make no {node.op_type}")

    def flush(self) -> None:
        """Wait until all pushes are sent."""
        self._outbox.flush()

    # --- pushes -----------------------------------------------------------------------------------------------------

    def _push(self, node: Node, round_number: int, inputs: Sequence[Array]) -> None:
        note = None
        if id(node) in self._weighted:
            note, inputs = {"weight": float(inputs[0])}, inputs[1:]
        self._outbox.settle()
        flat = self._pool.take([sum(array.size for array in inputs)], inputs[0].dtype)
        np.concatenate([array.reshape(-1) for array in inputs], out=flat)
        self.bytes_pushed += flat.nbytes
        message = self.endpoint.message(Kind.PUSH, node.attributes["bucket"], round_number, (flat,), note)
        self._outbox.send(self.server_job.server(node.attributes["server"]), message)

    # --- pulls ------------------------------------------------------------------------------------------------------

    def _ask(self, node: Node, round_number: int) -> tuple[int, int, int]:
        """Request a bucket, unless requested already; returns the key of the answer. A version is the number of rounds
        whose updates a value has."""
        version = round_number + (node.attributes["version"] == "after")
        server = self.server_job.server(node.attributes["server"])
        key = server, node.attributes["bucket"], version
        if key not in self._requested:
            self._requested.add(key)
            note = {"dtype": node.attributes["dtype"]}
            self.endpoint.send(server, self.endpoint.message(Kind.PULL, key[1], version, note=note))
        return key

    def _pull(self, node: Node, round_number: int) -> list[Array]:
        key = self._ask(node, round_number)
        if key[2] > round_number:
            self.pushed_all(round_number)
        while key not in self._came:
            what = f"send bucket {key[1]} ({', '.join(node.attributes['keys'])}) of round {key[2]}"
            self.receive(lambda: Awaited((key[0],), what))  # noqa: B023 - used within this turn
        message = self._came.pop(key)
        self._requested.discard(key)
        self.bytes_pulled += sum(array.nbytes for array in message.arrays)
        return _pieces(message.arrays, parse_shapes(node.attributes["shapes"]), node.attributes["dtype"])

    def receive(self, awaited: Callable[[], Awaited]) -> None:
        """Receive one message."""
        begun = time.perf_counter()
        try:
            message = self.endpoint.receive(awaited=awaited)
        finally:
            self.waited += time.perf_counter() - begun
        if message.kind is Kind.VALUES:
            self._came[message.source, message.key, message.round] = message
            if message.note is not None:
                self.noted(message.note)
        elif message.kind is Kind.ROWS:
            self.rows.take(message)
            if "versions" in message.note:
                self.noted(message.note)
        elif message.kind is Kind.REFUSED:
            raise RunError(str(message.note))
        else:
            self.other(message)


def _pieces(arrays: Sequence[Array], shapes: Sequence[tuple[int, ...]], dtype: str) -> list[Array]:
    """The arrays of keys, split into pieces; raises RunError where sizes differ."""
    results: list[Array] = []
    rest = list(shapes)
    for array in arrays:
        fitting: list[tuple[int, ...]] = []
        size = 0
        while rest and (size < array.size or (not array.size and not fitting)):
            fitting.append(rest.pop(0))
            size += int(np.prod(fitting[-1], dtype=np.int64))
        if size != array.size or array.dtype != numpy_dtype(dtype):
            raise RunError(f"a server sent {array.size} elements of {array.dtype}, the graph takes {size} of {dtype}")
        results += unpack_views(array.reshape(-1), fitting)
    if rest:
        raise RunError(f"a server sent {len(arrays)} values, the graph takes more")
    return results
