"""Describes one file of a trainer or a server: messages, states, and operators."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gopt.collectives.messages import MESSAGES
from gopt.documents.records import to_document
from gopt.errors import GoptError, InputError
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.load import load
from gopt.offline.text import operators
from gopt.text.notebook import HtmlTable
from gopt.text.sanitize import show

ROLE = "gopt.role"
_SERVER = "gopt.server"


@dataclass(frozen=True, slots=True)
class MessageInspection:
    """A message operator. ``server``: the other end; of a server's file, itself. ``nbytes``: of the values."""

    op: str
    server: int | None
    bucket: int | None
    keys: tuple[str, ...]
    values: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RoleInspection(HtmlTable):
    """A file of a split. ``number``: of a server, None for the file of all trainers. ``states``: input -> bytes."""

    file: str
    role: str
    number: int | None
    nodes: int
    operators: Mapping[str, int]
    messages: tuple[MessageInspection, ...]
    collectives: Mapping[str, int]
    states: Mapping[str, int]
    batch: tuple[str, ...]
    outputs: tuple[str, ...]

    def __repr__(self) -> str:
        number = "" if self.number is None else f" {self.number}"
        return f"<RoleInspection of {self.role}{number}: {self.nodes} nodes, {len(self.messages)} messages>"

    def to_json(self) -> dict[str, Any]:
        return {"format": "gopt-inspection/1", "what": self.role} | to_document(self)


def inspect_role(path: str | os.PathLike[str]) -> RoleInspection | None:
    """Describe a file of a split; None for any other model. Raises InputError for a damaged file.

    A server's file has states as inputs with an initial value; so does a trainer's for local states."""
    graph = load(path, own=True)
    role = graph.metadata.get(ROLE)
    if role is None:
        return None
    if role not in ("trainer", "server"):
        raise InputError(
            f"{path}: its metadata say that it is of a {show(role)}; there are trainers and servers",
            "write the folder again with gopt split",
        )
    stated = graph.metadata.get(_SERVER, "")
    number = int(stated) if stated.isdecimal() and len(stated) < 9 else None
    messages = [node for node in graph.nodes if node.domain == COMM and node.op_type in MESSAGES]
    calls = Counter(node.op_type for node in graph.nodes if node.domain == COMM and node.op_type not in MESSAGES)
    computed = {name for node in graph.nodes for name in node.outputs}
    states = [name for name in graph.inputs if name in graph.initializers]
    return RoleInspection(
        file=Path(path).name,
        role=role,
        number=number,
        nodes=len(graph.nodes),
        operators=operators(graph),
        messages=tuple(_message(path, graph, node, number) for node in messages),
        collectives=dict(calls),
        states={name: graph.inputs[name].nbytes for name in states},
        batch=tuple(name for name in graph.inputs if name not in states and not name.startswith("gopt.")),
        outputs=tuple(name for name in graph.outputs if name in computed and not name.startswith("gopt.")),
    )


def _message(path: str | os.PathLike[str], graph: Graph, node: Node, number: int | None) -> MessageInspection:
    operator = MESSAGES[node.op_type]
    try:
        attributes = operator.resolve(node.attributes)
    except GoptError as error:
        raise InputError(
            f"{path}: {show(node.label)}: {error.message}", "write the folder again with gopt split"
        ) from None
    values = list(node.inputs[2 if operator.weighed else 1 :]) if operator.token else list(node.outputs)
    types = [graph.types[name] for name in values if name in graph.types]
    nbytes = sum(type.nbytes for type in types)
    return MessageInspection(
        node.op_type, attributes.get("server", number), attributes.get("bucket", attributes.get("table")),
        attributes.get("keys", ()), len(values), nbytes,
    )  # fmt: skip
