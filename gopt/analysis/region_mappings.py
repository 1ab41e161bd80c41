"""Finds the region mappings of a source, and the dual of each in the backward.

A source with calls along axes whose ranks see the same samples is the step of one member. Data flow pairs a call of the
forward with the dual: of the inverse kind over the same group, from the result's shape back to the operand's, with a
result that reaches gradients of parameters above the call, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gopt.analysis.look_through import data_axes, look_through, spans_data_axes
from gopt.analysis.training import TrainingGraph
from gopt.ir.graph import COMM, COPIES, Graph, Node
from gopt.ir.graph_index import GraphIndex, ancestors, parts_of
from gopt.ir.types import FLOATS

_FORWARD = {
    "AllReduce": "reduce from region", "AllGather": "gather from region", "ReduceScatter": "reduce-scatter to region",
    "AllToAll": "transpose",
}  # fmt: skip
_INVERSE = {
    "AllReduce": "AllReduce", "AllGather": "ReduceScatter", "ReduceScatter": "AllGather", "AllToAll": "AllToAll",
}  # fmt: skip
COPY = "copy to region"


@dataclass(frozen=True, slots=True)
class RegionMapping:
    """A mapping of the source.

    ``call``: the forward's operator, '' where the forward only hands the value on; ``value``: the call's result;
    ``dual``: the backward's operator, ``identity`` where the gradient is handed on, '' without a dual; ``gradient``:
    the dual's result, the gradient of the call's operand. ``parameters``: parameters with gradients above the call."""

    mapping: str
    group: str
    call: str
    value: str
    dual: str
    gradient: str
    parameters: tuple[str, ...] = ()
    label: str = ""
    doubtful: bool = False
    """Whether what was found may not be the dual: it goes along another axis, or in other sizes."""
    open: bool = False
    """Whether another call of the backward may do what the dual would."""

    def to_json(self) -> dict[str, Any]:
        """The mapping for the report and ``gopt inspect``."""
        return {
            "mapping": self.mapping, "group": self.group, "call": self.call, "value": self.value, "dual": self.dual,
            "gradient": self.gradient,
        }  # fmt: skip


def find_region_mappings(training: TrainingGraph) -> tuple[RegionMapping, ...]:
    """The mappings of a source in the order of their values, with duals as far as the data flow shows.

    A call of the backward without a call in the forward is the dual of a pass-through: an all-reduce is the dual of a
    copy. A call of the forward repeated for the backward is no dual."""
    graph = training.graph
    if not copied(graph) and not training.calls:
        return ()
    return training.once("region mappings", lambda: _Finder(training).mappings())


def copied(graph: Graph) -> dict[str, str]:
    """Value -> group to whose region a MegatronF of the file copies the value."""
    lines = filter(None, graph.metadata.get(COPIES, "").split("\n"))
    return {value: group for value, _, group in (line.rpartition("=") for line in lines)}


@dataclass(frozen=True, slots=True)
class _Call:
    """One tensor of a call: a packed call gives several."""

    node: Node
    operand: str
    result: str

    @property
    def group(self) -> str:
        return str(self.node.attributes["group"])


class _Finder:
    """Pairs calls with duals. Phases do not help here: a packed call may contain the loss and gradients."""

    def __init__(self, training: TrainingGraph) -> None:
        self.training, self.graph = training, training.graph
        view = look_through(training.graph)  # in which a packed call is one for each of its tensors
        self.index = GraphIndex(training.graph if view is None else view.graph)
        data = data_axes(training.graph)
        calls = [
            _Call(node, operand, result)
            for node in self.graph.nodes
            if node.domain == COMM and node.op_type in _FORWARD and not spans_data_axes(node, data)
            for operand, result in zip(node.inputs, node.outputs)
            if self.graph.type_of(operand).dtype in FLOATS
        ]
        to_loss = ancestors(self.index, training.losses)[1]
        self.forward = [call for call in calls if call.result in to_loss]
        backward = [call for call in calls if call.result not in to_loss]
        self._made_of, reaches = self._parameters(), self._gradients()
        below = {call.result: self._named(reaches.get(call.result, 0)) for call in backward}
        self.backward = [call for call in backward if below[call.result]]
        self.below, self.used = below, set[str]()

    def mappings(self) -> tuple[RegionMapping, ...]:
        mappings = [self._copy(value, group) for value, group in copied(self.graph).items()]
        mappings += [self._of_forward(call) for call in reversed(self.forward)]
        for call in self.backward:
            if call.node.op_type == "AllReduce" and call.result not in self.used and self._passes_on(call):
                mappings.append(RegionMapping(COPY, call.group, "", "", "AllReduce", call.result, (), call.node.label))
        return tuple(sorted(mappings, key=lambda mapping: self.index.defined_at(mapping.value or mapping.gradient)))

    def _above(self, value: str) -> frozenset[str]:
        """Parameters with gradients, upstream of a value."""
        return self._named(self._made_of.get(value, 0))

    def _named(self, bits: int) -> frozenset[str]:
        return frozenset(name for position, name in enumerate(self.training.gradients) if bits >> position & 1)

    def _parameters(self) -> dict[str, int]:
        """Value -> parameters upstream of the value, a bit for each; one sweep."""
        masks = {name: 1 << position for position, name in enumerate(self.training.gradients)}
        for node in self.index.graph.nodes:
            bits = 0
            for name in node.reads:
                bits |= masks.get(name, 0)
            if bits:
                masks.update((name, bits) for name in node.outputs)
        return masks

    def _gradients(self) -> dict[str, int]:
        """Return value -> bit set of the parameters whose gradients depend on the value; one backward sweep."""
        gradients: dict[str, int] = {}
        for position, gradient in enumerate(self.training.gradients.values()):
            gradients[gradient] = gradients.get(gradient, 0) | 1 << position
        return parts_of(self.index.graph.nodes, gradients)

    def _passes_on(self, call: _Call) -> bool:
        """Return whether a call carries the gradient of an activation: a sum of a parameter's gradient serves that
        parameter alone."""
        weights, types = self.below[call.result], self.graph.types
        return len(weights) > 1 or not any(types[name].elements == types[call.result].elements for name in weights)

    def _of_forward(self, call: _Call) -> RegionMapping:
        above, node = self._above(call.result), call.node
        name, dual = _FORWARD[node.op_type], None
        if node.op_type == "AllReduce":
            reduce = str(node.attributes.get("reduce", "sum"))
            summed = reduce in ("sum", "mean")
            return self._mapping(name if summed else f"{reduce} over region", call, above, "identity" if summed else "")
        near = [back for back in self.backward if self._may_be(call, back, above)]
        duals = [back for back in near if back.node.op_type == _INVERSE[node.op_type] and self._as_large(call, back)]
        inverse = (back for back in duals if self._shaped(call, back) and _inverse(node, back.node))
        # If dimensions are reordered, layout operators precede the call.
        moved = (back for back in duals if self._turned(call, back))
        dual = next(inverse, None) or next(moved, None) or next(iter(duals), None)
        if dual is None:
            return replace(self._mapping(name, call, above, ""), open=bool(near))
        self.used.add(dual.result)
        if node.op_type == "AllGather" and dual.node.attributes.get("reduce", "sum") == "sum":
            name = "all-gather from region"
        doubtful = not (self._turned(call, dual) or (self._shaped(call, dual) and _inverse(node, dual.node)))
        return replace(self._mapping(name, call, above, dual.node.op_type, dual.result), doubtful=doubtful)

    def _may_be(self, call: _Call, dual: _Call, above: frozenset[str]) -> bool:
        """Return whether a call of the backward may be the dual of ``call``.

        The dual must exchange parts over the same group, and only parameters above the call may depend on the
        result."""
        moves = dual.node.op_type == "AllToAll" or dual.node.op_type == _INVERSE[call.node.op_type]
        return moves and dual.result not in self.used and call.group == dual.group and self.below[dual.result] <= above

    def _as_large(self, call: _Call, dual: _Call) -> bool:
        elements = [self.graph.type_of(n).elements for n in (call.operand, dual.result, call.result, dual.operand)]
        return elements[0] == elements[1] and elements[2] == elements[3]

    def _shaped(self, call: _Call, dual: _Call) -> bool:
        pairs = ((call.operand, dual.result), (call.result, dual.operand))
        return all(self._shape(one) == self._shape(two) for one, two in pairs)

    def _turned(self, call: _Call, dual: _Call) -> bool:
        """Return whether shapes are the same but for the order of dimensions, and ones among them."""
        pairs = ((call.operand, dual.result), (call.result, dual.operand))
        return not self._shaped(call, dual) and all(self._lengths(one) == self._lengths(two) for one, two in pairs)

    def _lengths(self, name: str) -> list[int]:
        return sorted(size for size in self.graph.type_of(name).dims if size != 1)

    def _shape(self, name: str) -> tuple[int | str | None, ...] | None:
        return self.graph.type_of(name).shape

    def _copy(self, value: str, group: str) -> RegionMapping:
        above = self._above(value)
        for call in self.backward:
            fits = call.node.op_type == "AllReduce" and call.group == group and call.result not in self.used
            if fits and self.below[call.result] <= above and self._shape(value) == self._shape(call.result):
                self.used.add(call.result)
                return RegionMapping(COPY, group, "", value, "AllReduce", call.result, tuple(sorted(above)), value)
        return RegionMapping(COPY, group, "", value, "", "", tuple(sorted(above)), value)

    @staticmethod
    def _mapping(name: str, call: _Call, above: frozenset[str], dual: str, gradient: str = "") -> RegionMapping:
        return RegionMapping(
            name, call.group, call.node.op_type, call.result, dual, gradient, tuple(sorted(above)), call.node.label
        )


def _inverse(node: Node, dual: Node) -> bool:
    """Return whether a call undoes another call: along the same axis in the same sizes."""
    attributes, back = node.attributes, dual.attributes
    pairs = [("axis", "axis"), ("sizes", "sizes")]
    if node.op_type == "AllToAll":
        pairs = [("split_axis", "concat_axis"), ("concat_axis", "split_axis"), ("split_sizes", "concat_sizes"),
                 ("concat_sizes", "split_sizes")]  # fmt: skip
    return all(one in attributes and two in back and attributes[one] == back[two] for one, two in pairs)


def without_dual(mappings: Sequence[RegionMapping]) -> list[RegionMapping]:
    """Mappings whose gradient must be moved, without a call for that in the data flow; the fewest parameters above
    first.

    An all-reduce hands the gradient on. The operand of the region is copied in, though, and the copy's gradient is
    summed, unless nothing is learnt above: such a mapping counts where the backward has no call at all."""
    broken = [
        entry for entry in mappings
        if entry.parameters and entry.call != "AllReduce" and (entry.doubtful or not (entry.dual or entry.open))
    ]  # fmt: skip
    moved = {mapping.group for mapping in mappings if mapping.gradient}
    broken += [
        mapping for mapping in mappings
        if mapping.call == "AllReduce" and mapping.dual and mapping.parameters and mapping.group not in moved
    ]  # fmt: skip
    return sorted(broken, key=lambda mapping: len(mapping.parameters))
