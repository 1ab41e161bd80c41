"""One weight of an opaque call, compared with shard's remains of the call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gopt.ir.graph import SPMD, Node
from gopt.ir.opaque.operator_schema import Values
from gopt.ir.opaque.origin import SHARED, OpaqueCall
from gopt.ir.opaque.refold import CoveredRange, RefoldedWeight
from gopt.ir.types import TensorType
from gopt.records.placements import FULLY_REPLICATED, Sharding
from gopt.spmd.program import ShardedState


@dataclass(slots=True)
class Pieces:
    """The nodes written for one call, in the source and now, by weight and place in the body."""

    call: OpaqueCall
    source: dict[int, list[Node]] = field(default_factory=dict)
    now: dict[int, dict[int, list[Node]]] = field(default_factory=dict)
    dropped: list[Node] = field(default_factory=list)
    """Layout operators of the body that change nothing in the source, and would change a shard."""


class NoFoldError(Exception):
    """Raised when the nodes of a weight no longer match the operator; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class CurrentGraph:
    """The current graph: types of the source and of ranks, users and producers of each value, and the states of the
    ranks."""

    types: Mapping[str, TensorType]
    local: Mapping[str, TensorType]
    outputs: Mapping[str, TensorType]
    users: Mapping[str, list[Node]]
    producers: Mapping[str, Node]
    states: Mapping[str, ShardedState]


def slots(call: OpaqueCall, types: Mapping[str, TensorType]) -> tuple[Values, Values]:
    """The scalars read and made by a call; of a function of the model, the one-element operands beside larger
    operands."""
    if call.operator is not None:
        return dict(call.slot_values.scalars), dict(call.slot_values.results)
    return _single(call.slot_values.weights[0], types), _single(call.slot_values.updated[0], types)


def _single(table: Values, types: Mapping[str, TensorType]) -> Values:
    return {slot: name for slot, name in table.items() if name in types and types[name].elements == 1}


class Match:
    """One weight of a call, compared with its present nodes."""

    def __init__(self, now: CurrentGraph, pieces: Pieces, weight: int) -> None:
        self.graph, self.pieces, self.weight, self.call = now, pieces, weight, pieces.call
        scalars, results = slots(self.call, now.types)
        self.inputs = {s: n for s, n in self.call.slot_values.weights[weight].items() if s not in scalars}
        self.outputs = {s: n for s, n in self.call.slot_values.updated[weight].items() if s not in results}
        self.title = self.inputs.get("weight") or next(iter(self.inputs.values()), self.call.label)
        self.scalars, self.results = scalars, results
        self.running = self._running()

    def _running(self) -> list[Node]:
        """The source's nodes on a weight's own values; the others are constants and scalars of the node."""
        local = set(self.inputs.values())
        result = []
        for node in self.pieces.source.get(self.weight, []):
            if any(name in local for name in node.reads):
                local.update(node.outputs)
                result.append(node)
        return result

    def gone(self) -> bool:
        """Return whether the weight's update runs as a part of another weight's: no node is left."""
        now = self.pieces.now.get(self.weight, {})
        return not any(node.origin.place in now for node in self.running)

    def member(self) -> tuple[RefoldedWeight, list[Node]]:
        """The weight as a member of the kept operator, and the replaced nodes."""
        now = self.pieces.now.get(self.weight, {})
        renamed: dict[str, str] = {}
        local = set(self.inputs.values())
        result: list[Node] = []
        for node in self.running:
            members = now.get(node.origin.place, [])
            if len(members) != 1:
                raise NoFoldError(f"its {node.op_type} is taken over the shards of all ranks")
            self._follow(node, members[0], local, renamed)
            local.update(node.outputs)
            result.append(members[0])
        sharding = self._sharding(result)
        parts = any(self.graph.local.get(now) != self.graph.types.get(old) for old, now in renamed.items())
        if self.pieces.dropped and (parts or sharding.flat is not None):
            raise NoFoldError(f"its {self.pieces.dropped[0].op_type} works on whole tensors")
        self._check_scalars(result, sharding)
        self._check_inside(result, renamed)
        unread = self.inputs if sharding == FULLY_REPLICATED else {}
        inputs = {slot: renamed.get(name, name if slot in unread else "") for slot, name in self.inputs.items()}
        for slot, name in inputs.items():
            if not name:
                raise NoFoldError(f"its {slot} is not read by its body")
        outputs = {slot: renamed[name] for slot, name in self.outputs.items() if name in renamed}
        return RefoldedWeight(sharding, self.weight, inputs, outputs, self._covers(sharding, inputs)), result

    def _follow(self, source: Node, now: Node, local: set[str], renamed: dict[str, str]) -> None:
        """Compare a node with the source's, operand by operand, and learn the names of today."""
        if len(source.inputs) != len(now.inputs) or len(source.outputs) != len(now.outputs):
            raise NoFoldError(f"its {source.op_type} has other operands")
        for old, new in zip(source.inputs, now.inputs):
            if new != (renamed.setdefault(old, new) if old in local else old):
                raise NoFoldError(f"its {source.op_type} reads {new} in place of {renamed.get(old, old)}")
        renamed.update(zip(source.outputs, now.outputs))

    def _sharding(self, nodes: list[Node]) -> Sharding:
        shardings = list(dict.fromkeys(node.sharding for node in nodes))
        if len(shardings) != 1:
            raise NoFoldError("its body is in several places")
        return shardings[0]

    def _check_scalars(self, nodes: list[Node], sharding: Sharding) -> None:
        """Check that the operator's scalars exist wherever the operator runs, and equal the source's."""
        for constant in self.pieces.source.get(SHARED, []) + self._constants():
            now = self.pieces.now.get(constant.origin.weight, {}).get(constant.origin.place, [])
            if len(now) != 1 or now[0].inputs != constant.inputs or now[0].outputs != constant.outputs:
                read = any(name in node.inputs for node in nodes for name in constant.outputs)
                if read or now:
                    raise NoFoldError(f"its {constant.op_type} on scalars was changed")
        for name in self.scalars.values():
            producer = self.graph.producers.get(name)
            if producer is not None and producer.sharding not in (FULLY_REPLICATED, sharding):
                raise NoFoldError(f"{name} is known to one rank alone")

    def _constants(self) -> list[Node]:
        running = set(map(id, self.running))
        return [node for node in self.pieces.source.get(self.weight, []) if id(node) not in running]

    def _check_inside(self, nodes: list[Node], renamed: Mapping[str, str]) -> None:
        """Check that no other node reads an inner value of the body, and that no inner value is an output."""
        inside, shown = set(map(id, nodes)), {renamed.get(name, name) for name in self.outputs.values()}
        for node in nodes:
            for name in node.outputs:
                outside = [user for user in self.graph.users.get(name, ()) if id(user) not in inside]
                if name not in shown and (outside or name in self.graph.outputs):
                    raise NoFoldError(f"{name}, inside its body, is read elsewhere")

    def _covers(self, sharding: Sharding, inputs: Values) -> tuple[CoveredRange, ...]:
        """The source tensors updated by the member, with their elements in the bucket."""
        if sharding.flat is not None:
            for name in inputs.values():
                producer, state = self.graph.producers.get(name), self.graph.states.get(name)
                if producer is not None and producer.domain == SPMD and "sizes" in producer.attributes:
                    starts, sizes = producer.attributes["starts"], producer.attributes["sizes"]
                    return tuple(CoveredRange(t, a, a + n) for t, a, n in zip(producer.inputs, starts, sizes))
                if state is not None:
                    return tuple(CoveredRange(p.tensor, p.offset, p.offset + p.elements) for p in state.slices)
        return (CoveredRange(self.title, 0, 0),)
