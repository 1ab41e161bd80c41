"""Nodes of the source on ranks, unchanged and on the same operands.

From whole states, settings and the rank's own batch, such nodes make the source's values of that batch, whatever the
operators compute. Such a value, if it follows the batch, is a leaf of the proof: a claim proven for all values of the
leaf is proven for this one, and neither source nor ranks are read in front of the leaf. Further claims need a full
reading."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import repeat

from gopt.analysis.synchronised_values import SynchronisedValues
from gopt.analysis.training import Phase, StateKind
from gopt.artifact.manifest_entries import LocalState
from gopt.artifact.pieces import Piece
from gopt.ir.alike_files import shared_parts
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.node_kinds import draws
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType
from gopt.operators.kinds import CASTS
from gopt.verification.proof.relation import ProofRelation, RankRelation, SourcePart

_LEAST = 2
"""Of so many nodes of the source in front of the update, ranks must run one unchanged."""
Follows = dict[str, bool]
"""A value of a rank with the meaning of the source -> whether the value follows the batch."""


def without_unchanged_nodes(relation: ProofRelation) -> ProofRelation | None:
    """The relation with values of unchanged nodes as inputs of source (``leaves``) and ranks; None where few nodes are
    unchanged, or the source is read in another form."""
    own_form = relation.plan is not None or relation.synchronised != SynchronisedValues()
    if own_form or any(reduction.points for reduction in relation.reductions):
        return None
    source, ranks = _Source(relation), list[RankRelation]()
    for rank in relation.ranks:
        shorter = source.shortened(rank)
        if shorter is None:
            return None
        ranks.append(shorter)
    leaves = tuple(name for name in source.nodes if name in source.leaves)  # in the order of the source
    more = (name for node in source.nodes.values() for name in node.outputs[1:] if name in source.leaves)
    return None if source.hides_shown() else replace(relation, ranks=tuple(ranks), leaves=(*leaves, *more))


@dataclass(frozen=True, slots=True)
class _Front:
    """The nodes of a graph up to the last unchanged node.

    ``operands``: inputs and constants read by unchanged nodes. ``results``: of unchanged nodes. ``dropped``: the
    results without a node. ``rest``: the other nodes up to ``end``, with the operands ``read``."""

    graph: Graph
    operands: Follows
    results: Follows
    dropped: frozenset[str]
    rest: list[Node]
    read: frozenset[str]
    end: int

    def begins(self, graph: Graph, operands: Follows) -> bool:
        """Return whether a graph begins with the same nodes, on the same operands: results have the same types."""
        alike = all(operands.get(name) == follows for name, follows in self.operands.items())
        return alike and graph.nodes[: self.end] == self.graph.nodes[: self.end]  # the very same objects

    def needed(self, graph: Graph) -> frozenset[str]:
        """The results without a node that a graph reads further on."""
        behind = (node.reads for node in graph.nodes[self.end :])
        return self.dropped & self.read.union(graph.outputs, *behind)


class _Source:
    """The nodes of the source; ``leaves``: the values of unchanged nodes so far with other readers on ranks."""

    def __init__(self, relation: ProofRelation) -> None:
        self.relation, self.graph = relation, relation.training.graph
        before = [node for node in self.graph.nodes if node.phase is not Phase.UPDATE]
        self.nodes = {node.outputs[0]: node for node in before if _is_plain(node)}
        self.leaves: set[str] = set()
        self._least = len(before) // _LEAST
        self._statistics = {
            state.tensor for state in relation.training.states if state.kind is StateKind.STATISTIC
        } | relation.local  # fmt: skip
        self._fronts: list[_Front] = []
        self._part = cache(SourcePart)
        self._nodes: dict[Hashable, tuple[list[Node], frozenset[str]]] = {}
        """The remaining nodes of a graph, and the leaves read there."""
        self._wholes: dict[int, bool] = {}
        self._types: dict[tuple[int, int], bool] = {}
        self._equal: dict[tuple[int, int], bool] = {}

    def shortened(self, rank: RankRelation) -> RankRelation | None:
        """A rank whose graphs have leaves in place of unchanged nodes; None for too few such nodes."""
        graphs, leaves = dict(rank.graphs), set[str]()
        for phase, graph in rank.graphs.items():
            nodes, read = self._left(graph, self._operands(rank, graph, self.relation.schedule.get(phase, 1)))
            if read:
                inputs = graph.inputs | {name: self.graph.types[name] for name in sorted(read)}
                graphs[phase] = replace(graph, nodes=nodes, inputs=inputs)
                leaves |= read
        equal = (graph.inputs.keys() for graph in rank.graphs.values())
        if not leaves or not all(map(leaves.isdisjoint, equal)):
            return None  # what a phase leaves for another one is no leaf
        return replace(rank, graphs=graphs, inputs={**rank.inputs, **{name: self._part(name) for name in leaves}})

    def hides_shown(self) -> bool:
        """Return whether unchanged nodes make a shown value of the source besides the leaves."""
        names_of_fronts = (front.results.keys() for front in self._fronts if front.dropped)
        return any(not names.isdisjoint({*self.relation.training.shown} - self.leaves) for names in names_of_fronts)

    def _operands(self, rank: RankRelation, graph: Graph, times: int) -> Follows:
        """The inputs and constants of a rank with the values of the source, in each of ``times`` runs."""
        training = self.relation.training
        inputs = dict.fromkeys(training.hyper, False)
        inputs |= {name: name not in self.relation.alike for name in training.batch}
        parts = ((name, rank.inputs.get(name)) for name in inputs)
        equal = {name: inputs[name] for name, part in parts if part == SourcePart(name)}
        for state in rank.states:
            if self._whole(state) and not (times > 1 and state.output in graph.outputs):
                equal[state.input] = False
        inputs_of_rank = {*rank.inputs, *(state.input for state in rank.states), *graph.inputs, *self.graph.inputs}
        for name, tensor in graph.initializers.items():
            twin = self.graph.initializers.get(name)
            if twin is not None and name not in inputs_of_rank and self._alike(tensor, twin):
                equal[name] = False
        return {name: follows for name, follows in equal.items() if self._same_type(graph.types, name)}

    def _whole(self, state: LocalState) -> bool:
        """Return whether a rank has all of a state, equal for all members at the start of a step."""
        if id(state) not in self._wholes:
            name, type = state.input, self.graph.types.get(state.input)
            pieces = (Piece(name, 0, state.elements),) == state.pieces and name not in self._statistics
            whole = type is not None and type.static and type.elements == state.elements
            self._wholes[id(state)] = pieces and whole and not (state.copy or state.local)
        return self._wholes[id(state)]

    def _alike(self, tensor: Tensor, twin: Tensor) -> bool:
        """Return whether two constants have the same bytes."""
        key = id(tensor), id(twin)
        if key not in self._equal:
            self._equal[key] = tensor.type == twin.type and tensor.numpy().tobytes() == twin.numpy().tobytes()
        return self._equal[key]

    def _left(self, graph: Graph, operands: Follows) -> tuple[list[Node], frozenset[str]]:
        """The remaining nodes of a graph, and the leaves read there."""
        key = *shared_parts(graph), frozenset(operands.items()), tuple(graph.outputs)
        if key not in self._nodes:
            front = next((front for front in self._fronts if front.begins(graph, operands)), None)
            needed = frozenset[str]() if front is None else front.needed(graph)
            leaves = all(map(self._same_type, repeat(graph.types), needed))
            if front is None or not leaves or not all(map(front.results.__getitem__, needed)):
                front = self._front(graph, operands)
                self._fronts.append(front)
                needed = front.needed(graph)
            self.leaves |= needed
            self._nodes[key] = [*front.rest, *graph.nodes[front.end :]], needed
        return self._nodes[key]

    def _front(self, graph: Graph, operands: Follows) -> _Front:
        """The nodes of a graph up to the last unchanged node; no node for few unchanged nodes, and where the laws of
        casts look at a dropped reader."""
        operands_read, results = self._unchanged(graph, operands)
        rest, dropped, end = self._dropped(graph, results) if sum(results.values()) >= self._least else ([], [], 0)
        casts = {node.outputs[0] for node in rest if node.is_in(CASTS) and node.outputs[0] in results}
        casts -= {name for node in rest for name in (node.reads if node.domain != COMM else ())}
        if casts and any(not casts.isdisjoint(node.inputs) for node in dropped):
            rest, dropped, end = [], [], 0
        return _Front(
            graph, operands_read, results, frozenset(name for node in dropped for name in node.outputs if name), rest,
            frozenset(name for node in rest for name in node.reads), end,
        )  # fmt: skip

    def _unchanged(self, graph: Graph, operands: Follows) -> tuple[Follows, Follows]:
        """The operands of unchanged nodes among inputs and constants, and the results."""
        values, results, read = {"": False, **operands}, Follows(), set[str]()
        types, get, known = graph.types, self.nodes.get, values.get
        for node in graph.nodes:
            outputs, inputs = node.outputs, node.inputs
            twin = get(outputs[0]) if outputs else None
            if twin is None or node.encoded != twin.encoded or inputs != twin.inputs or outputs != twin.outputs:
                continue
            follows = [known(name) for name in inputs]
            if None not in follows and all(map(self._same_type, repeat(types), outputs)):
                read.update(inputs)
                for name in filter(None, outputs):
                    values[name] = results[name] = True in follows
        return {name: follows for name, follows in operands.items() if name in read}, results

    def _same_type(self, types: Mapping[str, TensorType], name: str) -> bool:
        """Return whether a value has one type, with a number of elements, on a rank and in the source."""
        type, source_type = types.get(name), self.graph.types.get(name)
        key = id(type), id(source_type)
        if key not in self._types:
            self._types[key] = not name or (type is not None and type.static and type == source_type)
        return self._types[key]

    def _dropped(self, graph: Graph, results: Follows) -> tuple[list[Node], list[Node], int]:
        """The remaining nodes, the dropped nodes, and the position behind the last dropped node: unchanged nodes
        behind the batch, and further unchanged nodes without other readers."""
        read, rest, dropped, end = {*graph.outputs}, list[Node](), list[Node](), 0
        for position in range(len(graph.nodes) - 1, -1, -1):
            node = graph.nodes[position]
            first = node.outputs[0] if node.outputs else ""
            if first in results and (results[first] or read.isdisjoint(node.outputs)):
                dropped.append(node)
                end = end or position + 1
            else:
                read.update(node.reads)
                if end:
                    rest.append(node)
        return rest[::-1], dropped, end


def _is_plain(node: Node) -> bool:
    """Return whether a node of the file computes the same of the same operands."""
    plain = node.encoded is not None and node.domain in ("", "ai.onnx") and not node.captures
    return plain and bool(node.outputs and node.outputs[0]) and not draws(node)
