"""One round of trainers and servers in memory, for ``verify``: every push is merged, every pull answered.

The round shares only the merge of contributions with the trainers and servers of ``gopt run``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx.helper import make_attribute

from gopt.artifact.manifest import Manifest
from gopt.artifact.server_entries import ServerPlanEntry
from gopt.collectives.layout import parse_shapes
from gopt.collectives.messages import WITHOUT_ABSENT
from gopt.collectives.table import COLLECTIVES
from gopt.errors import RunError, UnsupportedError
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.types import numpy_dtype
from gopt.records.mesh import Mesh
from gopt.runtime.engines.threads import DEADLINE
from gopt.runtime.host_value import array_dtype
from gopt.runtime.memory import unpack_views
from gopt.runtime.merge import Contribution, merge
from gopt.verification.compare import Values
from gopt.verification.table_rounds import PushedRows, merge_pushes, read_rows


def without_absent_operands(graph: Graph) -> Graph:
    """A graph of messages without absent operands: a weighted push is marked by an attribute.

    Changes the graph, which was loaded for a run."""
    for node in graph.nodes:
        if node.domain == COMM and node.op_type in ("Push", "PushRows"):
            proto = node.to_proto()
            proto.attribute.append(make_attribute(WITHOUT_ABSENT, int(bool(node.inputs[1]))))
            proto.input[:] = [name for name in node.inputs if name]
            node.proto, node.inputs, node._attributes = proto, list(proto.input), None
    return graph


class MessageRounds:
    """Runs the programs of all trainers, and of all servers behind them, each in a thread, for one round.

    Raises UnsupportedError for a split without rounds."""

    def __init__(self, manifest: Manifest, deadline: float | None) -> None:
        plan = manifest.parameter_server
        assert plan is not None
        check_rounds(plan)
        self._plan, self._trainers = plan, manifest.mesh.ranks
        self._deadline = deadline or DEADLINE

    def __call__(self, programs: Sequence[Any], feeds: Sequence[Values], mesh: Mesh) -> list[Values]:
        """Run each program with feeds and return the results; without servers, trainers run a micro-step."""
        members = _Round(self._trainers, self._plan, feeds, self._deadline)
        results: list[Values] = [{} for _ in programs]

        def live(number: int) -> None:
            try:
                results[number] = programs[number].run(feeds[number], lambda *call: members.call(number, *call))
                members.finish(number, results[number])
            except BaseException as error:
                members.fail(error)

        threads = [threading.Thread(target=live, args=(n,), daemon=True) for n in range(len(programs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if members.failure is not None:
            raise members.failure
        return results


def check_rounds(plan: ServerPlanEntry) -> None:
    """Raise UnsupportedError for a split without rounds: a trainer's values depend on the order of messages."""
    if not plan.mode.rounds:
        raise UnsupportedError(
            f"mode {plan.mode}: what trainers and servers compute depends on the order of messages",
            "split again with --mode sync, and verify that",
            "record a run, gopt run DIR --record FILE, and replay it: gopt verify DIR --replay FILE",
        )


class _Round:
    """The messages of a round. All waits are on ``_changed``."""

    def __init__(self, trainers: int, plan: ServerPlanEntry, feeds: Sequence[Values], deadline: float) -> None:
        self.trainers, self.servers, self.buckets, self.feeds = trainers, plan.servers, plan.buckets, feeds
        self._tables = plan.tables
        self.failure: BaseException | None = None
        self._deadline = deadline
        self._changed = threading.Condition()
        self._pushed: dict[tuple[int, int], dict[int, Contribution]] = {}
        """Server and bucket -> what trainers pushed."""
        self._rows: dict[int, dict[int, PushedRows]] = {}
        """Table -> what trainers pushed."""
        self._made: dict[int, Values] = {}
        """Server -> its outputs, once it is done."""
        self._parts: dict[int, dict[int, list[np.ndarray]]] = {}
        """Number of a call among servers -> the part of each."""
        self._calls: dict[int, int] = {}
        """Server -> the number of its last call."""

    def call(self, member: int, index: int, node: Node, inputs: list[np.ndarray], buffer: Any = None) -> list[Any]:
        """Make a message, or a call among servers."""
        server = member - self.trainers
        if node.op_type == "Push":
            return self._push(member, node, inputs)
        if node.op_type == "Pull":
            return self._pull(node)
        if node.op_type == "Aggregate":
            return self._aggregate(server, node)
        if node.op_type == "PushRows":
            return self._push_rows(member, node, inputs)
        if node.op_type == "PullRows":
            entry = self._tables[node.attributes["table"]]
            rows = read_rows(entry, self.feeds[self.trainers :], np.asarray(inputs[1]), node.attributes["dtype"])
            return [rows if node.attributes["width"] else rows.reshape(-1)]
        if node.op_type == "AggregateRows":
            return self._aggregate_rows(server, node)
        return self._all_reduce(server, node, inputs)

    def finish(self, member: int, outputs: Values) -> None:
        """A member is done."""
        with self._changed:
            if member >= self.trainers:
                self._made[member - self.trainers] = outputs
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        """Held: until something is there."""
        over = self._changed.wait_for(lambda: self.failure is not None or ready(), self._deadline)
        if self.failure is not None:
            raise RunError(f"stopped while it waited for {what}") from self.failure
        if not over:
            raise RunError(f"after {self._deadline:g} s, {what} has not arrived; raise --deadline if it is only slow")

    def _push(self, trainer: int, node: Node, inputs: list[np.ndarray]) -> list[Any]:
        rest = inputs[2:] if node.attributes[WITHOUT_ABSENT] else inputs[1:]
        weight = float(inputs[1]) if node.attributes[WITHOUT_ABSENT] else 1.0
        flat = np.concatenate([array.reshape(-1) for array in rest])
        key = int(node.attributes["server"]), int(node.attributes["bucket"])
        with self._changed:
            self._pushed.setdefault(key, {})[trainer] = Contribution(flat, weight)
            self._changed.notify_all()
        return [np.asarray(inputs[0])]

    def _pull(self, node: Node) -> list[Any]:
        server, after = int(node.attributes["server"]), node.attributes["version"] == "after"
        keys = self.buckets[node.attributes["bucket"]]
        if after:
            with self._changed:
                self._wait(lambda: server in self._made, f"the update of server {server}")
            values = [self._made[server][key.outputs[0]] for key in keys]
        else:
            values = [self.feeds[self.trainers + server][key.inputs[0]] for key in keys]
        dtype = numpy_dtype(node.attributes["dtype"])
        with np.errstate(over="ignore"):
            flat = np.concatenate([np.asarray(value).reshape(-1).astype(dtype) for value in values])
        return unpack_views(flat, parse_shapes(node.attributes["shapes"]))

    def _aggregate(self, server: int, node: Node) -> list[Any]:
        key = server, int(node.attributes["bucket"])
        with self._changed:
            self._wait(lambda: len(self._pushed.get(key, {})) == self.trainers, f"bucket {key[1]} of server {server}")
            pushes = self._pushed[key]
        attributes = node.attributes
        return merge(pushes, attributes["reduce"], attributes["dtype"], parse_shapes(attributes["shapes"]))

    def _push_rows(self, trainer: int, node: Node, inputs: list[np.ndarray]) -> list[Any]:
        weight = float(inputs[1]) if node.attributes[WITHOUT_ABSENT] else 1.0
        ids, rows = (np.array(array) for array in inputs[-2:])
        with self._changed:
            self._rows.setdefault(int(node.attributes["table"]), {})[trainer] = PushedRows(ids, rows, weight)
            self._changed.notify_all()
        return [np.asarray(inputs[0])]

    def _aggregate_rows(self, server: int, node: Node) -> list[Any]:
        table, attributes = int(node.attributes["table"]), node.attributes
        with self._changed:
            self._wait(lambda: len(self._rows.get(table, {})) == self.trainers, f"rows of table {table}")
            pushes = self._rows[table]
        return merge_pushes(self._tables[table], server, pushes, attributes["reduce"], attributes["dtype"])

    def _all_reduce(self, server: int, node: Node, inputs: list[np.ndarray]) -> list[Any]:
        with self._changed:
            index = self._calls[server] = self._calls.get(server, -1) + 1
            parts = self._parts.setdefault(index, {})
            parts[server] = [np.array(array) for array in inputs]
            self._changed.notify_all()
            self._wait(lambda: len(parts) == self.servers, f"call {index} of all servers")
            contributions = [parts[number] for number in range(self.servers)]
        return COLLECTIVES["AllReduce"].execute(node.attributes, contributions, array_dtype(inputs[0]))[server] or []
