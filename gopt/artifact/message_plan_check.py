"""Compares the messages in files of trainers and servers with the keys and tables of the manifest.

Already checked: the manifest itself (``server_plan_check``), and that each message fits its operands (``graph_check``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

from gopt.artifact.server_entries import KeyEntry, KeyKind, ServerPlanEntry
from gopt.collectives.layout import parse_shapes
from gopt.collectives.messages import MESSAGES
from gopt.ir.graph import COMM, Graph, Node
from gopt.text.sanitize import show

_OF_SERVERS = ("Aggregate", "AggregateRows", "Pulled")
"""Messages in files of servers."""


def wrong_messages(
    plan: ServerPlanEntry, server: int | None, graphs: Mapping[str, Graph]
) -> tuple[str, str, str] | None:  # fmt: skip
    """Return the phase, the node and the fault of the first message missing in the plan; None if all are planned.

    ``graphs``: of a trainer, or of a server with this number, by phase. Linear in the graphs.
    """
    messages: Counter[tuple[str, int, int]] = Counter()
    phase = ""
    for phase, graph in graphs.items():
        text = graph.metadata.get("gopt.server", str(server))
        if server is not None and text != str(server):
            return phase, "metadata", f"it is the file of server {show(text)}, not of server {server}"
        check = _Check(plan, server, graph)
        for node in graph.nodes:
            if node.domain == COMM and node.op_type in MESSAGES:
                if what := check.wrong(node):
                    return phase, show(node.label), what
                messages[_slot(node)] += 1
    due = Counter(_due_of_server(plan, server) if server is not None else _due_of_trainer(plan))
    for op, at, number in sorted((due - messages).keys() | (messages - due).keys()):
        if op not in ("Pull", "PullRows"):  # trainers pull what they read, and before their first step once more
            what, where = "table" if op.endswith("Rows") else "bucket", f" to server {at}" if at >= 0 else ""
            count, wanted = messages[op, at, number], due[op, at, number]
            return phase, f"{op} of {what} {number}{where}", f"{count} of it, and the manifest has {wanted}"
    return None


def _slot(node: Node) -> tuple[str, int, int]:
    attributes = node.attributes
    return node.op_type, int(attributes.get("server", -1)), int(attributes.get("bucket", attributes.get("table", -1)))


def _due_of_server(plan: ServerPlanEntry, server: int) -> list[tuple[str, int, int]]:
    mine = [number for number, keys in plan.buckets.items() if _pushed(keys) and keys[0].server in (None, server)]
    tables = [number for number, table in enumerate(plan.tables) if server in table.servers]
    ops = ["Aggregate"] if plan.compensation is None else ["Aggregate", "Pulled"]
    return [*((op, -1, number) for op in ops for number in mine), *(("AggregateRows", -1, number) for number in tables)]


def _due_of_trainer(plan: ServerPlanEntry) -> list[tuple[str, int, int]]:
    due = [("PushRows", -1, number) for number, _ in enumerate(plan.tables)]
    for number, keys in plan.buckets.items():
        if _pushed(keys):
            servers = range(plan.servers) if keys[0].server is None else (keys[0].server,)
            due += [("Push", server, number) for server in servers]
    return due


def _pushed(keys: Sequence[KeyEntry]) -> list[KeyEntry]:
    return [key for key in keys if key.gradient]


class _Check:
    def __init__(self, plan: ServerPlanEntry, server: int | None, graph: Graph) -> None:
        self.plan, self.server, self.graph = plan, server, graph
        self.buckets = plan.buckets

    def wrong(self, node: Node) -> str:
        """Return the fault of a message; '' if correct."""
        if (node.op_type in _OF_SERVERS) != (self.server is not None):
            return f"a {'trainer' if self.server is None else 'server'} makes no {node.op_type}"
        return self._rows(node) if node.op_type.endswith("Rows") else self._bucket(node)

    def _bucket(self, node: Node) -> str:
        attributes = node.attributes
        keys = self.buckets.get(attributes["bucket"], [])
        if [key.name for key in keys] != list(attributes["keys"]):
            return f"the manifest has other keys in bucket {attributes['bucket']}"
        at = attributes.get("server", 0)
        server = at if self.server is None else self.server
        if not 0 <= at < self.plan.servers or keys[0].server not in (None, server):
            return f"the manifest has bucket {attributes['bucket']} on another server"
        if node.op_type == "Push":
            types = [self.graph.type_of(name) for name in node.inputs[2:]]
            static = all(type.static for type in types)
            return self._sizes([type.elements for type in types], _pushed(keys)) if static else ""
        shapes = parse_shapes(attributes["shapes"])
        sizes = [math.prod(shape) for shape in shapes]
        if node.op_type == "Pull":
            if attributes["dtype"] != keys[0].wire or keys[0].kind is KeyKind.VALUE:
                return f"the manifest sends keys of bucket {attributes['bucket']} as {keys[0].wire}"
            return self._sizes(sizes, keys)
        if node.op_type == "Pulled":
            return self._sizes(sizes, _pushed(keys))
        if list(node.outputs) != [key.gradient for key in _pushed(keys)]:
            return f"the manifest has other gradients in bucket {attributes['bucket']}"
        return self._sizes(sizes, _pushed(keys))

    def _sizes(self, sizes: Sequence[int], keys: Sequence[KeyEntry]) -> str:
        """Compare pieces in order with the keys."""
        ends, due = {0, *accumulate(sizes)}, [0, *accumulate(key.elements for key in keys)]
        if sum(sizes) != due[-1]:
            return f"it has {sum(sizes)} elements, its keys have {due[-1]}"
        key = next((key for key, end in zip(keys, due[1:]) if end not in ends), None)
        return f"its pieces do not end with key {show(key.name)}" if key is not None else ""

    def _rows(self, node: Node) -> str:
        attributes = node.attributes
        number = attributes["table"]
        if not 0 <= number < len(self.plan.tables) or self.plan.tables[number].parameter != attributes["parameter"]:
            return f"the manifest has no table {number} of {show(attributes['parameter'])}"
        table = self.plan.tables[number]
        if self.server is None:
            return ""
        if self.server not in table.servers:
            return f"the manifest has no part of table {number} on server {self.server}"
        at = table.servers.index(self.server)
        if list(node.outputs)[-1:] != [table.gradients[at]] or (table.ids and node.outputs[0] != table.ids[at]):
            return f"the manifest has other rows of table {number}"
        return ""
