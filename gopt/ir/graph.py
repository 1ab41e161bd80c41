"""The graph gopt works on: unchanged ONNX nodes, values by name, producers and users of each value.

A thin layer over protobuf: a source node keeps the bytes of the NodeProto and is written from these bytes, so nothing
from the user's exporter is lost. Bytes take a fifth of the memory of a parsed message.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
from onnx import NodeProto

from gopt.ir.attributes import attribute_value, make_attribute
from gopt.ir.phase import Phase
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType
from gopt.ir.wire_format import SHORT_END, behind_names, renamed
from gopt.records.placements import FULLY_REPLICATED, Sharding

COMM = "gopt.comm"
"""Domain of the collectives: in every rank file (contract section 5)."""
SPMD = "gopt.spmd"
"""Domain of the rank-independent layout operators that ``specialise`` resolves; never written."""
MADE_BY = "gopt.pass"
TRANSFER = "Transfer"
"""The layout operator between stages: from a stage to another, or to all (``target`` -1)."""
RECOMPUTE = "recompute"
"""The ``Node.made_by`` of nodes of the forward that run once more in the backward."""
EXPANDED = "expand"
"""The ``Node.made_by`` of the nodes that an opaque optimizer or a function of the model is written out as."""
COPIES = "gopt.copies"
"""Key of a loaded source's metadata: a line ``VALUE=GROUP`` for each value that a MegatronF copies to a region."""
ROLES = "gopt.roles"
"""The metadata entry that says which values are states, parameters and the batch."""
STEP_ROLES = "gopt.training_info"
"""The same of the step that ``training_info`` describes: the model itself is not a step."""
NO_ATTRIBUTES: dict[str, Any] = {}
"""The attributes of every node of a file that has none: never changed, and known without parsing the node."""


class Node:
    """An operator. ``inputs`` and ``outputs`` are value names; '' is an absent optional."""

    __slots__ = (
        "_attributes",
        "captures",
        "domain",
        "encoded",
        "inputs",
        "made_by",
        "name",
        "op_type",
        "origin",
        "outputs",
        "phase",
        "sharding",
        "source",
    )

    def __init__(
        self,
        op_type: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        domain: str = "",
        name: str = "",
        attributes: dict[str, Any] | None = None,
        made_by: str = "",
        encoded: bytes | None = None,
        sharding: Sharding = FULLY_REPLICATED,
    ) -> None:
        self.op_type = op_type
        self.domain = domain
        self.inputs = list(inputs)
        """Copies of a node share the list, and the list of outputs: to change a list is to assign another."""
        self.outputs = list(outputs)
        self.name = name
        self.made_by = made_by
        self.encoded = encoded
        """The NodeProto of the file, serialized; None for a node that gopt adds. Copies of a node share it."""
        self.sharding = sharding
        """The ranks that run the node, and the placements it runs on."""
        self.source: Node | None = None
        """In a graph that passes rewrite: the node of the source that this one is; None for one that a pass added."""
        self.captures: tuple[str, ...] = ()
        """Values of the outer graph that bodies of control flow read."""
        self.origin: Any = None
        """The opaque operator this node was written for (``gopt.ir.opaque.origin``), or None."""
        self.phase: Phase | None = None
        """Forward, backward or update, once the roles of the source are recovered."""
        self._attributes = attributes

    @property
    def proto(self) -> NodeProto | None:
        """The NodeProto of the file, parsed anew; None for a node added by gopt. Changes are lost unless assigned."""
        return None if self.encoded is None else NodeProto.FromString(self.encoded)

    @proto.setter
    def proto(self, proto: NodeProto | None) -> None:
        self.encoded = None if proto is None else proto.SerializeToString(deterministic=True)

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes as Python values, decoded on first use. Nodes ending alike share attributes: to change attributes,
        make another node."""
        if self._attributes is None:
            if self.encoded is None:
                self._attributes = {}
            else:
                end = behind_names(self.encoded)
                self._attributes = _short_attributes(end) if len(end) <= SHORT_END else _decoded_attributes(end)
        return self._attributes

    def attribute_bytes(self) -> tuple[bytes, ...]:
        """The attributes of a node of the file as serialized messages in a fixed order, for comparing."""
        if self._attributes is NO_ATTRIBUTES or self.encoded is None:
            return ()
        end = behind_names(self.encoded)
        return _short_attribute_bytes(end) if len(end) <= SHORT_END else _attribute_bytes(end)

    @property
    def added(self) -> bool:
        """Whether a pass made the node; nodes of a written-out operator belong to the source."""
        return self.made_by not in ("", EXPANDED)

    @property
    def reads(self) -> list[str]:
        """Every value read by the node, including captured values."""
        reads = [name for name in self.inputs if name] if "" in self.inputs else self.inputs
        return [*reads, *self.captures] if self.captures else reads

    @property
    def label(self) -> str:
        """Name of the node in reports: its own name, or the name of the first output."""
        return self.name or next((name for name in self.outputs if name), self.op_type)

    @property
    def first_output(self) -> str:
        """The first output, which identifies copies of a node; "" for a node that sends."""
        return next(filter(None, self.outputs), "")

    def is_a(self, *op_types: str) -> bool:
        """Return whether this is one of the named standard operators."""
        return self.op_type in op_types and self.domain in ("", "ai.onnx")

    def is_in(self, op_types: Container[str]) -> bool:
        """The same for operators in a table."""
        return self.op_type in op_types and self.domain in ("", "ai.onnx")

    def to_bytes(self) -> bytes:
        """The serialized NodeProto."""
        if self.encoded is not None:
            return renamed(self.encoded, self.inputs, self.outputs)
        data: bytes = self.to_proto().SerializeToString(deterministic=True)
        return data

    def to_proto(self) -> NodeProto:
        if self.encoded is None:
            proto = onnx.helper.make_node(self.op_type, self.inputs, self.outputs, name=self.name, domain=self.domain)
            for key in sorted(self.attributes):
                proto.attribute.append(make_attribute(key, self.attributes[key]))
            if self.made_by:
                entry = proto.metadata_props.add()
                entry.key, entry.value = MADE_BY, self.made_by
            return proto
        proto = NodeProto()
        proto.ParseFromString(self.to_bytes())
        return proto

    def __repr__(self) -> str:
        return f"{', '.join(self.outputs)} = {self.op_type}({', '.join(self.inputs)})"


@dataclass(slots=True)
class Graph:
    """A step as one flat, topologically ordered list of nodes.

    ``inputs`` and ``outputs`` keep their order; ``initializers`` hold constants and initial state values; ``types`` has
    every inferred type. ``header`` is the model without the graph body.
    """

    name: str
    nodes: list[Node]
    inputs: dict[str, TensorType]
    outputs: dict[str, TensorType]
    initializers: dict[str, Tensor]
    types: dict[str, TensorType]
    header: onnx.ModelProto
    metadata: dict[str, str] = field(default_factory=dict)
    file_nodes: list[Node] | None = None
    """The nodes as the file has them, where opaque ones were expanded or aliases dropped."""
    file_types: dict[str, TensorType] = field(default_factory=dict)
    """The types that values of ``file_nodes`` have there, where they differ."""

    def __repr__(self) -> str:
        return f"<Graph {self.name}: {len(self.nodes)} nodes, {len(self.inputs)} inputs, {len(self.outputs)} outputs>"

    def producers(self) -> dict[str, Node]:
        """Return value name -> the node making the value. Fresh on every call: analyses are never patched."""
        return {name: node for node in self.nodes for name in node.outputs if name}

    def users(self) -> dict[str, list[Node]]:
        """Return value name -> the nodes reading the value, in order."""
        result: dict[str, list[Node]] = {}
        get = result.get
        for node in self.nodes:
            for name in node.reads:
                users = get(name)
                if users is None:
                    result[name] = [node]
                elif users[-1] is not node:  # it may read a value twice
                    users.append(node)
        return result

    def used(self) -> set[str]:
        """Return the names read by nodes, also inside bodies, and the names of inputs and outputs."""
        return {name for node in self.nodes for name in node.reads}.union(self.inputs, self.outputs)

    def type_of(self, name: str) -> TensorType:
        """The type of a value; ``undefined[?]`` when nothing is known."""
        return self.types.get(name) or TensorType("undefined", None)

    def copy(self) -> Graph:
        """Return a graph with nodes that may be edited without touching this graph; the ``source`` of each is the node
        here."""
        graph = self.twin()
        for copy, node in zip(graph.nodes, self.nodes):
            copy.source = node
        return graph

    def twin(self) -> Graph:
        """Return a graph with nodes that may be edited without touching this graph; with the same ``source``."""
        return Graph(
            self.name, list(map(clone, self.nodes)), dict(self.inputs), dict(self.outputs),
            dict(self.initializers), dict(self.types), self.header, dict(self.metadata), self.file_nodes,
        )  # fmt: skip


def _attribute_bytes(node: bytes) -> tuple[bytes, ...]:
    """Return the attributes in a serialized node, or in the end of a node."""
    proto = NodeProto.FromString(node)
    return tuple(sorted(attribute.SerializeToString(deterministic=True) for attribute in proto.attribute))


def _decoded_attributes(node: bytes) -> dict[str, Any]:
    """Return the attributes in a serialized node, or in the end of a node, as Python values."""
    return {attribute.name: attribute_value(attribute) for attribute in NodeProto.FromString(node).attribute}


_short_attributes = functools.lru_cache(4096)(_decoded_attributes)
_short_attribute_bytes = functools.lru_cache(4096)(_attribute_bytes)
"""The same: few short ones differ in a long graph."""


def clone(node: Node) -> Node:
    copy = Node.__new__(Node)
    copy.op_type, copy.domain, copy.name, copy.made_by = node.op_type, node.domain, node.name, node.made_by
    copy.inputs, copy.outputs, copy.captures, copy.sharding = node.inputs, node.outputs, node.captures, node.sharding
    copy.encoded, copy._attributes, copy.phase = node.encoded, node._attributes, node.phase
    copy.origin, copy.source = node.origin, node.source
    return copy


def origin(node: Node) -> Node | None:
    """Return the source node of a node; None for a node added by a pass."""
    source = None
    while node.source is not None:
        source = node = node.source
    return source
